# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def intra_pair_variance(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    pos_eps: float = 0.01,
    neg_eps: float = 0.01,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute squared hinges of similarities around the mean of all positives, and of all negatives.

    With μ⁺, μ⁻ the means of s_ij = z_i·z_j over the positive and over the negative pairs of all ranks,

        loss = mean_{i, p∈P(i)} max(0, (1 − ε⁺) μ⁺ − s_ip)²  +  mean_{i, n∈N(i)} max(0, s_in − (1 + ε⁻) μ⁻)²

    over ordered pairs; an empty mean is 0. The means have gradients, too. They come from sums over classes, without a
    further pass over the pairs. Equal to pytorch-metric-learning's IntraPairVarianceLoss. It regularises another loss.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        pos_eps: ε⁺.
        neg_eps: ε⁻.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"`` for sums over the pairs of the local anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an ε that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> intra_pair_variance(z, torch.tensor([0, 0, 0, 1]), pos_eps=0.0, neg_eps=0.0)   # (⅓)²·⅔ and (⅓)²·⅔
        tensor(0.1481)

    Source: Yu & Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

class IntraPairVariance(Loss):
    """Compute squared hinges of similarities around the mean of all positives, and of all negatives.

    With μ⁺, μ⁻ the means of s_ij = z_i·z_j over the positive and over the negative pairs of all ranks,

        loss = mean_{i, p∈P(i)} max(0, (1 − ε⁺) μ⁺ − s_ip)²  +  mean_{i, n∈N(i)} max(0, s_in − (1 + ε⁻) μ⁻)²

    over ordered pairs; an empty mean is 0. The means have gradients, too. They come from sums over classes, without a
    further pass over the pairs. Equal to pytorch-metric-learning's IntraPairVarianceLoss. It regularises another loss.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        pos_eps: ε⁺.
        neg_eps: ε⁻.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"`` for sums over the pairs of the local anchors, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an ε that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> IntraPairVariance(pos_eps=0.0, neg_eps=0.0)(z, torch.tensor([0, 0, 0, 1]))   # (⅓)²·⅔ and (⅓)²·⅔
        tensor(0.1481)

    Source: Yu & Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

    pos_eps: float
    neg_eps: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        pos_eps: float = 0.01,
        neg_eps: float = 0.01,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
