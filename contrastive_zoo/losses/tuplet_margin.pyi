# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.block_loss import Average, LabelledLoss
from contrastive_zoo.world import ALONE, World

def tuplet_margin(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1 / 64,
    margin: float = 5.73,
    average: Average = "pairs",
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute a softmax loss over tuples of a positive and all negatives, on angles.

    With θ_ij the angle between rows i and j of all ranks, P(i) the other rows with i's label, N(i) those with another,

        loss = mean_{i, p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((cos θ_in − cos(θ_ip − β)) / t) )

    Equal to pytorch-metric-learning's TupletMarginLoss with ``scale=1/t``, also where θ_ip = 0, where its gradient
    is infinite and this one zero.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless, the paper's 1/s; a tensor is learnable.
        margin: β in degrees, 0 to 180.
        average: ``"pairs"``, equal weights of pairs (i, p), or ``"anchors"``.
        reduction: ``"mean"`` over all ranks' pairs or anchors (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a margin out of range, an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # log(1 + exp(0 − cos 60°))
        >>> tuplet_margin(z, torch.tensor([0, 0, 1]), temperature=1.0, margin=60.0)
        tensor(0.4741)

    Source: Yu and Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

class TupletMargin(LabelledLoss):
    """Compute a softmax loss over tuples of a positive and all negatives, on angles.

    With θ_ij the angle between rows i and j of all ranks, P(i) the other rows with i's label, N(i) those with another,

        loss = mean_{i, p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((cos θ_in − cos(θ_ip − β)) / t) )

    Equal to pytorch-metric-learning's TupletMarginLoss with ``scale=1/t``, also where θ_ip = 0, where its gradient
    is infinite and this one zero.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless, the paper's 1/s; a tensor is learnable.
        margin: β in degrees, 0 to 180.
        average: ``"pairs"``, equal weights of pairs (i, p), or ``"anchors"``.
        reduction: ``"mean"`` over all ranks' pairs or anchors (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a margin out of range, an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # log(1 + exp(0 − cos 60°))
        >>> TupletMargin(temperature=1.0, margin=60.0)(z, torch.tensor([0, 0, 1]))
        tensor(0.4741)

    Source: Yu and Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

    temperature: float | Tensor | nn.Module
    margin: float
    average: Average
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 1 / 64,
        margin: float = 5.73,
        average: Average = "pairs",
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
