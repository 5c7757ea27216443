"""Pairs against the hardest other embedding of the batch, within margins."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.masked import masked_max, masked_min
from contrastive_zoo.engine.pairwise import distances, dot_products
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import of_size
from contrastive_zoo.loss_base.settings import Bins, Momentum, Number, Reduction, field
from contrastive_zoo.ranks.row_checks import described, views_problem


class MegaBatchMargin(Loss):
    r"""Compute hinges on each query's own key and on the most similar other key of all ranks.

    Called as ``loss(queries, keys)``, [n, d] each.
    With s_ij = q_i·k_j of unit rows,

        loss_i = max(0, m⁺ − s_ii)  +  max(0, max_{j≠i} s_ij − m⁻)

    A single pair has no second term. Equal maxima share the gradient.

    Args:
        positive_margin: m⁺, the similarity from which on a pair has no loss.
        negative_margin: m⁻, the similarity up to which a negative has no loss.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        >>> MegaBatchMargin()(q, k)   # 0.8 − 0.6 and 0.8 − 0.3, twice
        tensor(0.7000)

    Source: Wieting & Gimpel 2018, https://arxiv.org/abs/1711.05732
    """

    positive_margin: Number = 0.8
    negative_margin: Number = 0.3
    normalize: bool = True
    reduction: Reduction = "mean"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": queries, "view 1": keys}, views_problem((queries, keys)))

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.prepared(x, normalize=self.normalize) for x in batch.rows.values())
        pairs, settings = batch.indices(), batch.settings
        loss = BlockLoss(
            _margin_hinges, positive_margin=settings.positive_margin, negative_margin=settings.negative_margin
        )
        return reduce_rows(batch, loss, q, pairs, candidates=k, candidate_ids=pairs, reduction=self.reduction)


def _margin_hinges(block: AnchorBlock, positive_margin: float, negative_margin: float) -> tuple[Tensor, Tensor]:
    similarity = dot_products(block.anchors, block.candidates)
    of_positive = similarity.where(block.positive, 0).sum(1)
    hardest = masked_max(similarity, block.negative)  # −inf without a negative
    return (positive_margin - of_positive).relu() + (hardest - negative_margin).relu(), block.positive.any(1)


class DynamicSoftMargin(Loss):
    r"""Compute the difference of distances in each hardest triplet times the share of triplets that are easier.

    Called as ``loss(anchors, positives)``, a and p, [n, d] each.
    With a, p the unit rows of all ranks, the distance D, and h the moving histogram of past differences,

        δ_i    = D(a_i, p_i) − min( min_{j≠i} D(a_i, p_j), min_{j≠i} D(a_j, p_i) )
        h'     = (1 − m) h + m · histogram of this batch's δ over [−2, 2], shared linearly between the two nearest nodes
        loss_i = F(δ_i) δ_i,   F the cumulative distribution of h', linear between its nodes

    F(δ_i) has no gradient. Without a past (h = 0), h' is the batch's histogram. A single pair has no loss.
    The authors' code and pytorch-metric-learning's take F at the node below δ_i, a step function: rounding then decides the
    weight of a δ that is 0 because rows repeat, so that no two splits of a batch agree.

    h is the buffer ``histogram``, at equal steps from −2 to 2, which starts at 0. In training mode each call stores h' in
    it: it is equal on every rank, and equal to that of one process.

    Args:
        num_bins: number of steps from −2 to 2; a few hundred, since F is linear within a step.
        momentum: m, the share of this batch, 0 … 1.

    Raises:
        ValueError: a histogram of another size.

    Examples:
        >>> eye, loss = torch.eye(2), DynamicSoftMargin(2)
        >>> loss(eye, eye.flip(0)), loss.histogram   # (0.2929² + 0.7071) √2
        (tensor(1.1213), tensor([0.0000, 0.2929, 0.7071]))

    Source: Zhang & Rusinkiewicz 2019, §3, https://doi.org/10.1109/ICCV.2019.00306
    """

    num_bins: Bins = field(kw_only=False)
    momentum: Momentum = 0.01
    reduction: Reduction = "mean"

    histogram: Tensor

    def __post_init__(self) -> None:
        self.num_bins = int(self.num_bins)
        zeros = of_size("DynamicSoftMargin", lambda: torch.zeros(self.num_bins + 1), num_bins=self.num_bins)
        self.histogram = nn.Buffer(zeros)

    def inputs(self, anchors: Float[Tensor, "n d"], positives: Float[Tensor, "n d"]) -> Inputs:
        nodes, problem = self.num_bins + 1, views_problem((anchors, positives))
        if problem is None and self.histogram.shape != (nodes,):
            problem = f"the histogram has num_bins + 1 nodes, [{nodes}], got {described(self.histogram)}."
        return Inputs({"view 0": anchors, "view 1": positives}, problem)

    def compute(self, batch: Batch) -> Tensor:
        difference = _differences(batch)
        valid = torch.full_like(difference, batch.total > 1)
        lower, share = _nodes(difference.detach(), len(self.histogram))
        histogram = _moved(batch, self.histogram.to(difference), lower, share, valid)
        below = histogram.cumsum(0)
        weights = (1 - share) * below[lower] + share * below[lower + 1]
        loss = batch.reduce(weights * difference, valid, reduction=self.reduction)
        if self.training:
            with torch.no_grad():
                self.histogram.copy_(histogram)
        return loss


def _differences(batch: Batch) -> Tensor:
    """Return δ of the local pairs; a gradient is shared by equal minima, and 0 where a distance is 0."""
    a, p = (batch.prepared(x, normalize=True) for x in batch.rows.values())
    squares = (a - p).square().sum(1)
    distances = squares.where(squares > 0, 1).sqrt().where(squares > 0, 0)
    pairs = batch.indices()
    of_anchor, of_positive = (
        reduce_rows(batch, BlockLoss(_nearest), x, pairs, candidates=y, candidate_ids=pairs, reduction="none")
        for x, y in ((a, p), (p, a))
    )
    # of repeated rows the two differ by rounding only
    equal = (of_anchor.square() - of_positive.square()).abs() <= _ROUNDING_UNITS * torch.finfo(a.dtype).eps
    return distances - ((of_anchor + of_positive) / 2).where(equal, torch.minimum(of_anchor, of_positive))


def _nearest(block: AnchorBlock) -> tuple[Tensor, Tensor]:
    return masked_min(distances(block.anchors, block.candidates), block.negative), block.negative.any(1)


def _nodes(difference: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the node below each difference, and the share of the next one."""
    position = (difference + 2) * ((nodes - 1) / 4)
    lower = position.long().clamp(0, nodes - 2)
    return lower, (position - lower).clamp(0, 1)


def _moved(batch: Batch, histogram: Tensor, lower: Tensor, share: Tensor, valid: Tensor) -> Tensor:
    """Return the histogram after a step towards that of all ranks' differences; it stays as it is without any."""
    result = torch.zeros_like(histogram).index_add_(0, lower, (1 - share) * valid)
    result = batch.sum(result.index_add_(0, lower + 1, share * valid), gradient="complete")
    count, has_past = result.sum(), histogram.sum() > 0
    step = torch.where(has_past, batch.settings.momentum, 1.0).where(count > 0, 0).to(result)
    return histogram + step * (result / count.where(count > 0, 1) - histogram)


_ROUNDING_UNITS = 64
"""Distance of squares, in units of the precision of numbers near 1, below which they count as equal."""
