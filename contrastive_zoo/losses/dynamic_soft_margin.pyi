# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.world import ALONE, World

def dynamic_soft_margin(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    *,
    histogram: Float[Tensor, " bins"],
    momentum: float = 0.01,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the difference of distances in each hardest triplet times the share of triplets that are easier.

    With a, p the unit rows of all ranks, the distance D, and h the moving histogram of past differences,

        δ_i    = D(a_i, p_i) − min( min_{j≠i} D(a_i, p_j), min_{j≠i} D(a_j, p_i) )
        h'     = (1 − m) h + m · histogram of this batch's δ over [−2, 2], shared linearly between the two nearest nodes
        loss_i = F(δ_i) δ_i,   F the cumulative distribution of h', linear between its nodes

    F(δ_i) has no gradient. Without a past (h = 0), h' is the batch's histogram. A single pair has no loss.
    The authors' code and pytorch-metric-learning's take F at the node below δ_i, a step function: rounding then decides the
    weight of a δ that is 0 because rows repeat, so that no two splits of a batch agree.

    Args:
        anchors: a, [n, d]; n may differ between ranks.
        positives: p, [n, d], row i belongs to row i of anchors.
        histogram: h at equal steps from −2 to 2; the buffer of :class:`DynamicSoftMargin`.
        momentum: m, the share of this batch, 0 … 1.
        reduction: ``"mean"`` over all ranks' pairs, ``"sum"``, or ``"none"`` for the local pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a histogram of fewer than two nodes, a momentum outside 0 … 1, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> dynamic_soft_margin(eye, eye.flip(0), histogram=torch.zeros(3))   # (0.2929² + 0.7071) √2
        tensor(1.1213)

    Source: Zhang & Rusinkiewicz 2019, §3, https://doi.org/10.1109/ICCV.2019.00306
    """

class DynamicSoftMargin(ConstructingLoss):
    """Compute the difference of distances in each hardest triplet times the share of triplets that are easier.

    With a, p the unit rows of all ranks, the distance D, and h the moving histogram of past differences,

        δ_i    = D(a_i, p_i) − min( min_{j≠i} D(a_i, p_j), min_{j≠i} D(a_j, p_i) )
        h'     = (1 − m) h + m · histogram of this batch's δ over [−2, 2], shared linearly between the two nearest nodes
        loss_i = F(δ_i) δ_i,   F the cumulative distribution of h', linear between its nodes

    F(δ_i) has no gradient. Without a past (h = 0), h' is the batch's histogram. A single pair has no loss.
    The authors' code and pytorch-metric-learning's take F at the node below δ_i, a step function: rounding then decides the
    weight of a δ that is 0 because rows repeat, so that no two splits of a batch agree.

    The histogram is the buffer ``histogram``, which starts at 0. In training mode each call stores h' in it: it is equal
    on every rank, and equal to that of one process.

    Called as ``loss(anchors, positives)``:

    - anchors: a, [n, d]; n may differ between ranks.
    - positives: p, [n, d], row i belongs to row i of anchors.

    Args:
        num_bins: number of steps from −2 to 2; a few hundred, since F is linear within a step.
        momentum: m, the share of this batch, 0 … 1.
        reduction: ``"mean"`` over all ranks' pairs, ``"sum"``, or ``"none"`` for the local pairs, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: num_bins below 1.
        ValueError: a histogram of fewer than two nodes, a momentum outside 0 … 1, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, loss = torch.eye(2), DynamicSoftMargin(2)
        >>> loss(eye, eye.flip(0)), loss.histogram
        (tensor(1.1213), tensor([0.0000, 0.2929, 0.7071]))

    Source: Zhang & Rusinkiewicz 2019, §3, https://doi.org/10.1109/ICCV.2019.00306
    """

    num_bins: int
    momentum: float
    reduction: Reduction
    check_finite: bool
    histogram: Tensor

    def __init__(
        self, num_bins: int, *, momentum: float = 0.01, reduction: Reduction = "mean", check_finite: bool = True
    ) -> None: ...
    def __call__(
        self, anchors: Float[Tensor, "n d"], positives: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
    @property
    def num_bins(self) -> int:
        """Return the number of steps."""
