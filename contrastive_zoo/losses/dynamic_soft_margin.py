"""Dynamic soft margin: hardest triplets weighted by how hard they are among those of recent batches."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.engine.masked import masked_min
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import bins_problem, number_problem
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.loss_base.distances import distances
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.preparation import begin_views, sample_indices
from contrastive_zoo.sizes import of_size
from contrastive_zoo.world import ALONE, Shards, World


@checked
def dynamic_soft_margin(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    *,
    histogram: Float[Tensor, " bins"],
    momentum: float = 0.01,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the difference of distances in each hardest triplet times the share of triplets that are easier.

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
    return _evaluate(anchors, positives, histogram, momentum, reduction, world)[0]


def _settings_problem(momentum: float) -> str | None:
    return number_problem(low=0, high=1, momentum=momentum)


class DynamicSoftMargin(ConstructingLoss, function=dynamic_soft_margin, check=_settings_problem):
    """The histogram is the buffer ``histogram``, which starts at 0. In training mode each call stores h' in it: it is equal
    on every rank, and equal to that of one process.

    Args:
        num_bins: number of steps from −2 to 2; a few hundred, since F is linear within a step.

    Raises:
        ValueError: num_bins below 1.

    Examples:
        >>> eye, loss = torch.eye(2), DynamicSoftMargin(2)
        >>> loss(eye, eye.flip(0)), loss.histogram
        (tensor(1.1213), tensor([0.0000, 0.2929, 0.7071]))
    """

    made = ("histogram",)
    histogram: Tensor

    def __init__(self, num_bins: int, **settings: Any) -> None:
        if problem := bins_problem(num_bins):
            raise ValueError(f"DynamicSoftMargin: {problem}")
        num_bins = int(num_bins)
        zeros = of_size("DynamicSoftMargin", lambda: torch.zeros(num_bins + 1), num_bins=num_bins)
        super().__init__(histogram=nn.Buffer(zeros), **settings)

    @property
    def num_bins(self) -> int:
        """Return the number of steps."""
        return len(self.histogram) - 1

    @traced_as(GraphModule.traced_forward)
    def forward(self, anchors: Tensor, positives: Tensor, *, world: World | None = None) -> Tensor:  # type: ignore[override]  # rows by name
        """Return the loss, and move the histogram by one step.

        Args:
            anchors: as in the function.
            positives: as in the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
        """
        world = self.local() if world is None else world
        self.refuse_other_than_tensors((anchors, positives), {}, world)
        loss, histogram = _evaluate(anchors, positives, **self.settings(), world=world)
        if self.training:
            with torch.no_grad():
                self.histogram.copy_(histogram)
        return loss


def _evaluate(
    anchors: Tensor, positives: Tensor, histogram: Tensor, momentum: float, reduction: Reduction, world: World
) -> tuple[Tensor, Tensor]:
    """Return the loss and the next histogram."""
    problem = _settings_problem(momentum)
    if problem is None and (histogram.ndim != 1 or len(histogram) < 2):
        problem = f"the histogram has two or more nodes, [nodes], got {kind(histogram)}."
    (a, p), shards = begin_views(
        "DynamicSoftMargin", (anchors, positives), problem=problem, momentum=momentum, nodes=histogram.numel(),
        reduction=reduction, world=world,
    )  # fmt: skip
    difference = _differences(a, p, shards, world)
    valid = torch.full_like(difference, shards.total > 1)
    nodes = _nodes(difference.detach(), len(histogram))
    histogram = _moved(histogram.to(difference), *nodes, valid, momentum, world)
    lower, share = nodes
    below = histogram.cumsum(0)
    weights = (1 - share) * below[lower] + share * below[lower + 1]
    return reduce_anchors(weights * difference, valid, reduction=reduction, world=world), histogram


def _differences(a: Tensor, p: Tensor, shards: Shards, world: World) -> Tensor:
    """Return δ of the local pairs; a gradient is shared by equal minima, and 0 where a distance is 0."""
    squares = (a - p).square().sum(1)
    own = squares.where(squares > 0, 1).sqrt().where(squares > 0, 0)
    pairs = sample_indices(shards, a)
    of_anchor, of_positive = (
        sum_over_anchors(
            BlockLoss(_nearest), x, pairs, candidates=y, candidate_ids=pairs, shards=shards, reduction="none",
            world=world,
        )
        for x, y in ((a, p), (p, a))
    )  # fmt: skip
    # of repeated rows the two differ by rounding only
    equal = (of_anchor.square() - of_positive.square()).abs() <= _ROUNDING_UNITS * torch.finfo(a.dtype).eps
    return own - ((of_anchor + of_positive) / 2).where(equal, torch.minimum(of_anchor, of_positive))


def _nearest(block: AnchorBlock) -> tuple[Tensor, Tensor]:
    return masked_min(distances(block.anchors, block.candidates), block.negative), block.negative.any(1)


def _nodes(difference: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the node below each difference, and the share of the next one."""
    position = (difference + 2) * ((nodes - 1) / 4)
    lower = position.long().clamp(0, nodes - 2)
    return lower, (position - lower).clamp(0, 1)


def _moved(histogram: Tensor, lower: Tensor, share: Tensor, valid: Tensor, momentum: float, world: World) -> Tensor:
    """Return the histogram after a step towards that of all ranks' differences; it stays as it is without any."""
    batch = torch.zeros_like(histogram).index_add_(0, lower, (1 - share) * valid)
    batch = sum_over_ranks(batch.index_add_(0, lower + 1, share * valid), gradient="complete", world=world)
    count, has_past = batch.sum(), histogram.sum() > 0
    step = torch.where(has_past, momentum, 1.0).where(count > 0, 0).to(batch)
    return histogram + step * (batch / count.where(count > 0, 1) - histogram)


_ROUNDING_UNITS = 64
"""Distance of squares, in units of the precision of numbers near 1, below which they count as equal."""
