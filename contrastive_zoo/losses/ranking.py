"""Ranking: soft average precision, histograms of similarities, and the order of continuous labels."""

from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry
from contrastive_zoo.engine.hinges import sum_over_positives
from contrastive_zoo.engine.pairwise import Metric, dissimilarities, distances, shifted
from contrastive_zoo.engine.precision import at_least_float32, sum_dtype
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Bins, Reduction, Temperature


class _SoftRanks(RowLoss, matrices=6.5):
    """The mean, over an anchor's positives, of a penalty on how many embeddings are softly before each of them."""

    temperature: Temperature = 0.01
    with_self: bool = False

    def penalty(self, before: Tensor, relevant: Tensor, negative: Tensor) -> Tensor:
        """Return the penalties on one positive of each anchor, [c], given what share of embeddings is before it, [c, N]."""
        raise NotImplementedError(f"{type(self).__name__} must define penalty(before, relevant, negative).")

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        relevant = ~negative if self.with_self else positive
        logits = similarity / self.temperature  # type: ignore[operator]  # here it is a number or a tensor
        ranked = logits.masked_fill(~(relevant | negative), -torch.inf)

        def of_positive(p: Tensor) -> Tensor:
            return self.penalty((ranked - logits.gather(1, p)).sigmoid(), relevant, negative)

        total = sum_over_positives(of_positive, relevant)
        return total / relevant.sum(1).clamp(min=1), positive.any(1)


class SmoothAP(_SoftRanks):
    r"""Compute one minus average precision, with a soft count of the embeddings before each positive.

    With σ_k(p) = sigmoid((s_ik − s_ip) / t), the soft comparison of embedding k and positive p in anchor i's ranking,

        loss_i = 1 − mean_{p∈P(i)} (1 + Σ_{k∈P(i), k≠p} σ_k(p)) / (1 + Σ_{k∈P(i)∪N(i), k≠p} σ_k(p))

    averaged over the anchors with a positive.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        temperature: t > 0, in units of similarity; the smaller, the closer to true average precision.
        with_self: whether an anchor is its own positive, as in the authors' code and in pytorch-metric-learning, which needs
            classes of equal size, in blocks.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
        >>> SmoothAP()(z, torch.tensor([0, 0, 1]))   # row 0 ranks row 2 first: 1 − 1/2; row 1 sees a tie: 1 − 1/1.5
        tensor(0.4167)

    Source: Brown et al. 2020, https://arxiv.org/abs/2007.12163
    """

    def penalty(self, before: Tensor, relevant: Tensor, negative: Tensor) -> Tensor:
        # both sums contain sigmoid(0) = ½ of the positive itself
        return 1 - (before.where(relevant, 0).sum(1) + 0.5) / (before.sum(1) + 0.5)


class FastAP(RowLoss, matrices=10.5):
    r"""Compute one minus average precision, with ranks from a histogram of squared distances of unit embeddings.

    With h_l, h⁺_l the numbers of an anchor's other embeddings and of its positives in bin l (each shared linearly between
    the two nearest bin centres), H, H⁺ their running sums, and M positives,

        loss_i = 1 − 1/M Σ_l h⁺_l H⁺_l / H_l

    averaged over the anchors with a positive. Bin centres are 0, 4/L, … 4.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        num_bins: L, the number of steps between distances 0 and 4.
        normalize: must be True; embeddings are always normalised.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> FastAP()(z, torch.tensor([0, 1, 0]))   # rows 0 and 2 find the positive last: 1 − 1/2 and, tied, 1 − 1/2
        tensor(0.5000)

    Source: Cakir et al. 2019, https://openaccess.thecvf.com/content_CVPR_2019/html/Cakir_Deep_Metric_Learning_to_Rank_CVPR_2019_paper.html
    """

    num_bins: Bins = 10

    def settings_problem(self) -> str | None:
        unit = "its histogram spans the distances of unit rows. Leave normalize=True."
        return super().settings_problem() or (None if self.normalize else unit)

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        return distances(anchors, candidates, squared=True)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        position = similarity * (self.num_bins / 4)
        lower = position.detach().long().clamp_(0, self.num_bins)
        above = position - lower
        of_positives, of_negatives = (self._histogram(lower, above, where) for where in (positive, negative))
        positives, ranked = positive.sum(1), (of_positives + of_negatives).cumsum(1)
        precision = (of_positives * of_positives.cumsum(1) / ranked.where(ranked > 0, 1)).sum(1)
        return 1 - precision / positives.clamp(min=1), positives > 0

    def _histogram(self, lower: Tensor, above: Tensor, where: Tensor) -> Tensor:
        bins = above.new_zeros(len(above), self.num_bins + 2)
        bins = bins.scatter_add(1, lower, (1 - above).where(where, 0))
        return bins.scatter_add(1, lower + 1, above.where(where, 0))


class RankNContrast(Loss, engine="rows"):
    r"""Compute the cross-entropy of each other embedding among those whose labels are at least as far from the anchor's.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] or [n, k] numbers. Views of a sample are embeddings with equal
    labels: ``loss(views.flatten(0, 1), labels.repeat_interleave(2, 0))`` of [n, 2, d].
    With D_ij the distance of embeddings, δ_ij = Σ_l |y_il − y_jl| that of labels and S_ij the k ≠ i with δ_ik ≥ δ_ij,

        loss_i = mean_{j≠i} −log [ exp(−D_ij / t) / Σ_{k∈S_ij} exp(−D_ik / t) ]

    A single embedding has no loss. Labels whose distances are to count as equal must be so in their own precision; 16-bit
    ones are compared in float32.

    Args:
        temperature: t > 0, in units of D.
        metric: ``"distance"``, as the authors, ``"squared distance"`` or ``"similarity"``, of which D is the negative.
        normalize: the authors do not.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings and labels.

    Examples:
        >>> z = torch.tensor([[0.0], [1.0], [2.0]])
        >>> RankNContrast(temperature=1.0)(z, z[:, 0])   # log(1 + 1/e) / 2, at the ends twice: log 2 in the middle
        tensor(0.3355)

    Source: Zha et al. 2023, eq. 2, https://arxiv.org/abs/2210.01189
    """

    compares = ("embeddings",), ("embeddings",)

    temperature: Temperature = 2.0
    metric: Metric = "distance"
    normalize: bool = False
    reduction: Reduction = "mean"

    def inputs(self, embeddings: Float[Tensor, "n d"], labels: Shaped[Tensor, " n"] | Shaped[Tensor, "n k"]) -> Inputs:
        return Inputs({"embeddings": embeddings, "labels": labels.detach()})

    def entries(self, stated: CallInputs) -> list[Entry]:
        of_64_bits = 14  # matrices, such as those of the order and of sums
        how: Any = {"parameters": stated.learnt("temperature"), "matrices": of_64_bits * 8 / stated.wide}
        return [Blocks(["embeddings"], companions=["labels"], reduction=self.reduction, **how)]

    def compute(self, batch: Batch) -> Tensor:
        z, labels = batch.candidates("embeddings", normalize=self.normalize), batch.rows["labels"]
        loss = BlockLoss.of(_order_losses, batch.settings)
        return reduce_rows(batch, loss, z, batch.indices(), companions=[(labels, labels)], reduction=self.reduction)


def _order_losses(block: AnchorBlock, temperature: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    points = block.anchors, block.candidates
    points = points if metric == "similarity" else shifted(*points)
    logits = -dissimilarities(*points, metric) / temperature
    # the anchor itself comes last, and no sum of another candidate contains it
    farthest_first, order = (-_label_distances(*block.companions[0])).masked_fill(~block.negative, 1).sort(1)
    # in float32 the gradient of logcumsumexp errs by the rounding of logits, which may be large
    logits = logits.gather(1, order).to(sum_dtype(logits))
    ends = torch.searchsorted(farthest_first, farthest_first, right=True)
    losses = (logits.logcumsumexp(1).gather(1, ends - 1) - logits).to(block.anchors.dtype)
    others = block.negative.sum(1)
    return losses[:, :-1].sum(1) / others.clamp(min=1), others > 0


def _label_distances(labels: Tensor, candidates: Tensor) -> Float[Tensor, "c N"]:
    """Return Σ_l |y_il − y_jl|, added up in one order: ranks agree on which are equal, however large their blocks are."""
    both = [x[..., None].flatten(1).T for x in (labels, candidates)]
    both = [at_least_float32(x) if x.is_floating_point() else x.long() for x in both]
    return reduce(torch.add, ((x[:, None] - y).abs() for x, y in zip(*both, strict=True)))
