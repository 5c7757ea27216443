# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def lifted_structure(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute a squared hinge on positive pairs, with a soft minimum of both rows' distances to negatives as margin.

    With D_ij the distance of unit rows, over all ordered positive pairs (i, p) of the rows of all ranks,

        loss = mean_{i, p∈P(i)} ½ max(0, D_ip − pos_margin + log Σ_{k∈{i,p}} Σ_{n∈N(k)} exp(neg_margin − D_kn))²

    Two sweeps: the first computes a log-sum-exp over negatives for each row, which the second gathers with the row.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        pos_margin: distance.
        neg_margin: distance; the paper's margin, with pos_margin 0.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over positive pairs (0 without any), ``"sum"``, or ``"none"`` for the local rows' sums, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> lifted_structure(z, torch.tensor([0, 0, 1]), neg_margin=3.0)   # (log(e + e))² / 2
        tensor(1.4334)

    Source: Song et al. 2016, eq. 4, https://arxiv.org/abs/1511.06452
    """

class LiftedStructure(Loss):
    """Compute a squared hinge on positive pairs, with a soft minimum of both rows' distances to negatives as margin.

    With D_ij the distance of unit rows, over all ordered positive pairs (i, p) of the rows of all ranks,

        loss = mean_{i, p∈P(i)} ½ max(0, D_ip − pos_margin + log Σ_{k∈{i,p}} Σ_{n∈N(k)} exp(neg_margin − D_kn))²

    Two sweeps: the first computes a log-sum-exp over negatives for each row, which the second gathers with the row.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        pos_margin: distance.
        neg_margin: distance; the paper's margin, with pos_margin 0.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over positive pairs (0 without any), ``"sum"``, or ``"none"`` for the local rows' sums, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> LiftedStructure(neg_margin=3.0)(z, torch.tensor([0, 0, 1]))   # (log(e + e))² / 2
        tensor(1.4334)

    Source: Song et al. 2016, eq. 4, https://arxiv.org/abs/1511.06452
    """

    pos_margin: float
    neg_margin: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        pos_margin: float = 0.0,
        neg_margin: float = 1.0,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
