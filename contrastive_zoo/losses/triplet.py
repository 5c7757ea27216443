"""Margins over triplets: all of them, their angles, and those with the hardest other embedding of the batch."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry, Summed
from contrastive_zoo.engine.hinges import hinge_sums, soft_sums, sum_over_positives
from contrastive_zoo.engine.masked import log1p_sum_exp, masked_max, masked_min
from contrastive_zoo.engine.pairwise import distances, dot_products
from contrastive_zoo.engine.rowwise import BlockLoss, reduce_rows
from contrastive_zoo.engine.statistics import nearest_nodes
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.row_loss import CountedTerms, DissimilarityLoss, RowLoss
from contrastive_zoo.loss_base.settings import Bins, Bounds, Momentum, Number, Reduction, field
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.ranks.row_checks import described

Mining = Literal["all", "hard", "semi-hard"]


class Triplet(DissimilarityLoss):
    r"""Compute a hinge, or its soft form, on the distance to a positive minus the distance to a negative.

    With D_ij the distance of unit embeddings and the triplets (i, p, n) of the embeddings of all ranks,

        loss = mean_{(i,p,n)} max(0, D_ip − D_in + margin)        soft: log(1 + exp(D_ip − D_in + margin))

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        margin: in units of the metric; negative or 0 are allowed.
        mining: ``"all"``; ``"hard"``, an anchor's farthest positive with its nearest negative; ``"semi-hard"``, all with
            D_ip < D_in < D_ip + margin.
        soft: the soft form; with margin 0 that of Hermans et al.
        metric: ``"distance"``, ``"squared distance"`` (FaceNet) or ``"similarity"``, of which D is the negative.
        average: over the triplets with a loss (``"nonzero"``, pytorch-metric-learning's default) or over all mined ones
            (``"all"``, its MeanReducer).
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.

    Raises:
        ValueError: semi-hard mining with a margin that is not positive.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> Triplet(margin=0.5)(z, torch.tensor([0, 0, 1]))   # √0.4 − √0.8 + 0.5; √0.4 − √2 + 0.5 is below 0
        tensor(0.2380)

    Source: Schroff et al. 2015, eq. 3, https://arxiv.org/abs/1503.03832; hard, all and soft: Hermans et al. 2017,
    eq. 5 and 6, https://arxiv.org/abs/1703.07737
    """

    margin: Number = 0.05
    mining: Mining = "all"
    soft: bool = False
    average: CountedTerms = "nonzero"

    def settings_problem(self) -> str | None:
        if (problem := super().settings_problem()) or self.mining != "semi-hard" or isinstance(self.margin, nn.Module):
            return problem
        return Bounds("semi-hard negatives lie within a positive margin", above=0).problem("margin", self.margin)

    def lists_positives(self) -> bool:
        return self.soft and self.mining != "hard"

    def rows(
        self, similarity: Tensor, positive: Tensor, negative: Tensor, max_positives: int | None = None
    ) -> tuple[Tensor, Tensor]:
        distance, margin, semi_hard = similarity, self.margin, self.mining == "semi-hard"
        if self.mining == "hard":
            violation = self.hardest(distance, positive, negative)
            both = violation != -torch.inf
            losses = self.penalty(violation.masked_fill(~both, 0))
            return losses, both & (losses > 0) if self.average == "nonzero" else both
        if not self.soft or semi_hard:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.soft):
                losses, active = hinge_sums(distance, positive, negative, margin, semi_hard=semi_hard)
        mined = active if semi_hard else positive.sum(1) * negative.sum(1)
        if self.soft:  # no triplet's loss is zero
            of_positive = soft_sums(self.penalty, distance, negative, margin, semi_hard=semi_hard)
            return sum_over_positives(of_positive, positive, max_positives), mined
        return losses, active if self.average == "nonzero" else mined

    def hardest(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return D_ip − D_in of the farthest positive and the nearest negative; equally hard ones share the gradient."""
        return masked_max(distance, positive) - masked_min(distance, negative)

    def penalty(self, violation: Tensor) -> Tensor:
        """Return the loss of triplets whose distances differ so much."""
        return F.softplus(violation + self.margin, threshold=40) if self.soft else (violation + self.margin).relu()


class Angular(RowLoss):
    r"""Compute a soft maximum, over the negatives of a positive pair, of the excess of their angle over α.

    With unit embeddings z, over all ordered positive pairs (i, p) whose class has a negative,

        loss = mean_{i, p∈P(i)} log(1 + Σ_{n∈N(i)} exp(4 tan²α (z_i + z_p)·z_n − 2 (1 + tan²α) z_i·z_p))

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        alpha: α in degrees, between 0 and 90; the paper tries 36 … 45.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Angular(alpha=45)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(0 − 4)); row 2 has no positive
        tensor(0.0181)

    Source: Wang et al. 2017, https://arxiv.org/abs/1708.01682
    """

    alpha: Annotated[
        float, Bounds("alpha is an angle in degrees, between 0 and 90", above=0, below=90, constant=True)
    ] = 40.0

    def lists_positives(self) -> bool:
        return True

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        tan2 = math.tan(math.radians(self.alpha)) ** 2
        anchors, candidates = block.anchors, block.candidates

        def pair_losses(p: Tensor) -> Tensor:
            partners = candidates[p[:, 0]]
            angles = 4 * tan2 * (anchors + partners) @ candidates.T
            similarity = 2 * (1 + tan2) * (anchors * partners).sum(1, keepdim=True)
            return log1p_sum_exp(angles - similarity, mask=block.negative)

        counts = block.positive.sum(1).where(block.negative.any(1), 0)
        positive = block.positive & block.negative.any(1, keepdim=True)
        return sum_over_positives(pair_losses, positive, block.max_positives()), counts


class MegaBatchMargin(Loss, engine="rows"):
    r"""Compute hinges on each query's own key and on the most similar other key of all ranks.

    Called as ``loss(queries, keys)``, [n, d] each.
    With s_ij = q_i·k_j of unit embeddings,

        loss_i = max(0, m⁺ − s_ii)  +  max(0, max_{j≠i} s_ij − m⁻)

    A single pair has no second term. Equal maxima share the gradient.

    Args:
        positive_margin: m⁺, the similarity from which on a pair has no loss.
        negative_margin: m⁻, the similarity up to which a negative has no loss.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.

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
        return Inputs({"view 0": queries, "view 1": keys})

    def entries(self, stated: CallInputs) -> list[Entry]:
        learnt = stated.learnt("positive_margin", "negative_margin")
        return [Blocks(["view 0"], ["view 1"], parameters=learnt, reduction=self.reduction)]

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.candidates(name, normalize=self.normalize) for name in batch.rows)
        pairs, settings = batch.indices(), batch.settings
        loss = BlockLoss(_margin_hinges, least=settings.positive_margin, most=settings.negative_margin)
        return reduce_rows(batch, loss, q, pairs, candidates=k, candidate_ids=pairs, reduction=self.reduction)


def _margin_hinges(block: AnchorBlock, least: float, most: float) -> tuple[Tensor, Tensor]:
    similarity = block.with_equal_columns(dot_products(block.anchors, block.candidates))
    of_positive = similarity.where(block.positive, 0).sum(1)
    hardest = masked_max(similarity, block.negative)  # −inf without a negative
    return (least - of_positive).relu() + (hardest - most).relu(), block.positive.any(1)


class DynamicSoftMargin(Loss, Stateful, engine="rows"):
    r"""Compute the difference of distances in each hardest triplet times the share of triplets that are easier.

    Called as ``loss(anchors, positives)``, a and p, [n, d] each.
    With a, p the unit embeddings of all ranks, the distance D, and h the moving histogram of past differences,

        δ_i    = D(a_i, p_i) − min( min_{j≠i} D(a_i, p_j), min_{j≠i} D(a_j, p_i) )
        h'     = (1 − m) h + m · histogram of this batch's δ over [−2, 2], shared linearly between the two nearest nodes
        loss_i = F(δ_i) δ_i,   F the cumulative distribution of h', linear between its nodes

    F(δ_i) has no gradient. Without a past (h = 0), h' is the batch's histogram. A single pair has no loss.
    The authors' code and pytorch-metric-learning's take F at the node below δ_i.

    h is the buffer ``histogram``, which starts at 0. In training mode each call stores h' in it: it is equal on every rank,
    and equal to that of one process. If a step has several calls, use :func:`contrastive_zoo.one_step`.

    Args:
        num_bins: number of steps from −2 to 2; a few hundred, since F is linear within a step.
        momentum: m, the share of this batch, 0 … 1.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.

    Examples:
        >>> eye, loss = torch.eye(2), DynamicSoftMargin(2)
        >>> loss(eye, eye.flip(0)), loss.histogram   # (0.2929² + 0.7071) √2
        (tensor(1.1213), tensor([0.0000, 0.2929, 0.7071]))

    Source: Zhang & Rusinkiewicz 2019, §3, https://doi.org/10.1109/ICCV.2019.00306
    """

    num_bins: Bins = field(kw_only=False)
    momentum: Momentum = 0.01
    reduction: Reduction = "mean"

    histogram: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.histogram = nn.Buffer(torch.zeros(self.num_bins + 1))

    def inputs(self, anchors: Float[Tensor, "n d"], positives: Float[Tensor, "n d"]) -> Inputs:
        nodes = self.num_bins + 1
        problem = f"the histogram has num_bins + 1 nodes, [{nodes}], got {described(self.histogram)}."
        return Inputs({"view 0": anchors, "view 1": positives}, problem if self.histogram.shape != (nodes,) else None)

    def entries(self, stated: CallInputs) -> list[Entry]:
        directions = ("view 0", "view 1"), ("view 1", "view 0")
        nearest = [Blocks([x], [y], reduction="none") for x, y in directions]
        return [*nearest, Summed(len(self.histogram) * stated.wide), *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        difference = _differences(batch)
        valid = torch.full_like(difference, batch.total > 1)
        lower, share = nearest_nodes(difference.detach() / 2, len(self.histogram) - 1)
        share = share.clamp(0, 1)
        counts = difference.new_zeros(len(self.histogram)).index_add_(0, lower, (1 - share) * valid)
        counts = batch.sum(counts.index_add_(0, lower + 1, share * valid), gradient="complete")
        momentum = batch.settings.momentum
        histogram = self._moved(momentum, counts)
        below = histogram.cumsum(0)
        weights = (1 - share) * below[lower] + share * below[lower + 1]
        loss = batch.reduce(weights * difference, valid, reduction=self.reduction)
        if self.training:
            self.record((momentum, counts))
        return loss

    def move(self, calls: Sequence[tuple[float | Tensor, Tensor]]) -> None:
        momenta, counts = zip(*calls, strict=True)
        self.histogram.copy_(self._moved(momenta[-1], torch.stack(counts).sum(0)))

    def _moved(self, momentum: float | Tensor, counts: Tensor) -> Tensor:
        """Return the histogram after a step towards the counts of all ranks; it stays as it is without any."""
        histogram, count = self.histogram.to(counts), counts.sum()
        step = torch.where(histogram.sum() > 0, momentum, 1.0).where(count > 0, 0).to(counts)
        return histogram + step * (counts / count.where(count > 0, 1) - histogram)


def _differences(batch: Batch) -> Tensor:
    """Return δ of the local pairs; a gradient is shared by equal minima, and 0 where a distance is 0."""
    towers = [batch.candidates(name, normalize=True) for name in batch.rows]
    a, p = (x.local for x in towers)
    squares = (a - p).square().sum(1)
    distances = squares.where(squares > 0, 1).sqrt().where(squares > 0, 0)
    pairs = batch.indices()
    of_anchor, of_positive = (
        reduce_rows(batch, BlockLoss(_nearest), x, pairs, candidates=y, candidate_ids=pairs, reduction="none")
        for x, y in (towers, reversed(towers))
    )
    # of repeated embeddings the two differ by rounding only
    equal = (of_anchor.square() - of_positive.square()).abs() <= _ROUNDING_UNITS * torch.finfo(a.dtype).eps
    return distances - ((of_anchor + of_positive) / 2).where(equal, torch.minimum(of_anchor, of_positive))


def _nearest(block: AnchorBlock) -> tuple[Tensor, Tensor]:
    distance = block.with_equal_columns(distances(block.anchors, block.candidates))
    return masked_min(distance, block.negative), block.negative.any(1)


_ROUNDING_UNITS = 64  # units of the precision of numbers near 1, below whose distance squares count as equal
