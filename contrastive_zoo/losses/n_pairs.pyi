# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def n_pairs(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    l2: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the multi-class N-pair loss: classify, for each class's first row, its second row among those of all classes.

    With x_c, y_c the first two rows, in rank order, of the C classes that have two,

        loss = mean_c [ log Σ_b exp(x_c·y_b / t)  −  x_c·y_c / t  +  λ (‖x_c‖² + ‖y_c‖²) ]

    Dense: ``cross_entropy(x @ y.T / t, arange(C))``. With ``normalize=True`` equal to pytorch-metric-learning's
    NPairsLoss, which selects the same rows. Its ``embedding_regularizer`` is a mean over all rows; the paper's and this
    one are means over pairs. For views, where every sample is a pair, use ``InfoNCE(temperature=1.0, normalize=False)``.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, in units of dot products; a tensor is learnable. The paper has none.
        l2: λ ≥ 0, the weight of the squared norms.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair, 0 without any), ``"sum"``, or ``"none"`` for the local
            rows.
        world: the ranks that share the batch.

    Raises:
        ValueError: a negative l2, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> n_pairs(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Sohn 2016, §3.2, https://papers.nips.cc/paper/6200-improved-deep-metric-learning-with-multi-class-n-pair-loss-objective
    """

class NPairs(Loss):
    """Compute the multi-class N-pair loss: classify, for each class's first row, its second row among those of all classes.

    With x_c, y_c the first two rows, in rank order, of the C classes that have two,

        loss = mean_c [ log Σ_b exp(x_c·y_b / t)  −  x_c·y_c / t  +  λ (‖x_c‖² + ‖y_c‖²) ]

    Dense: ``cross_entropy(x @ y.T / t, arange(C))``. With ``normalize=True`` equal to pytorch-metric-learning's
    NPairsLoss, which selects the same rows. Its ``embedding_regularizer`` is a mean over all rows; the paper's and this
    one are means over pairs. For views, where every sample is a pair, use ``InfoNCE(temperature=1.0, normalize=False)``.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, in units of dot products; a tensor is learnable. The paper has none.
        l2: λ ≥ 0, the weight of the squared norms.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair, 0 without any), ``"sum"``, or ``"none"`` for the local
            rows.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a negative l2, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> NPairs()(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Sohn 2016, §3.2, https://papers.nips.cc/paper/6200-improved-deep-metric-learning-with-multi-class-n-pair-loss-objective
    """

    temperature: float | Tensor | nn.Module
    l2: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 1.0,
        l2: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
