"""Annotated pairs: in the order of their scores (CoSENT, AnglE), or positive and negative."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Shared, Summed
from contrastive_zoo.engine.masked import tie_width
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.softmax_arithmetic import log_sum_of_inversions
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Number, Reduction, Temperature
from contrastive_zoo.ranks.row_checks import range_rule

PairSimilarity = Literal["cosine", "angle"]


class CoSENT(Loss, engine="statistics"):
    r"""Compute the log-sum-exp over all pairs of pairs that the similarity may put in the wrong order.

    With s_i the similarity of pair i and y_i its annotated score, over the pairs of all ranks,

        loss = log(1 + Σ_{i, j: y_i < y_j} exp((s_i − s_j) / t))

    Pairs with equal scores are not compared. Equal to sentence-transformers' CoSENTLoss(scale=1/t), AnglELoss(scale=1/t).

    Called as ``loss(queries, keys, scores)``, q and k, [n, d], and y, [n] numbers of any scale; only their order matters.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        similarity: of unit embeddings, ``"cosine"``, s_i = q_i·k_i, or ``"angle"``, s_i = |Re⟨q_i, k_i⟩ + Im⟨q_i, k_i⟩|
            of complex numbers whose real parts come first; an odd width is padded by a 0.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> CoSENT(temperature=1.0)(q, k, torch.tensor([0.2, 0.9]))   # log(1 + e^(1 − 0))
        tensor(1.3133)

    Source: Su 2022, https://kexue.fm/archives/8847; AnglE: Li & Li 2023, https://arxiv.org/abs/2309.12871
    """

    temperature: Temperature = 0.05
    similarity: PairSimilarity = "cosine"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], scores: Shaped[Tensor, " n"]) -> Inputs:
        return Inputs({"queries": queries, "keys": keys, "scores": scores})

    def entries(self, stated: CallInputs) -> list[Entry]:
        gathered = Gathered(["queries"], stated.wide), Gathered(["scores"], stated.inputs.rows["scores"].dtype.itemsize)
        copies = 3 if self.similarity == "cosine" else 3.5
        return [stated.held(copies), *self.scale_of(stated)[1], *gathered]

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.prepared(batch.rows[name], normalize=True) for name in ("queries", "keys"))
        s = batch.scale(batch.settings.temperature) * _pair_similarities(q, k, self.similarity)
        s, ordered = batch.gather_with_gradient(s), batch.gather_detached(batch.rows["scores"])
        # torch cannot search among bools
        return log_sum_of_inversions(s, ordered.to(torch.uint8) if ordered.dtype == torch.bool else ordered)


@without_autocast
def _pair_similarities(q: Tensor, k: Tensor, similarity: PairSimilarity) -> Tensor:
    cosine = (q * k).sum(1)
    if similarity == "cosine":
        return cosine
    (q_real, q_imaginary), (k_real, k_imaginary) = (F.pad(x, (0, x.shape[1] % 2)).chunk(2, 1) for x in (q, k))
    return (cosine + (q_imaginary * k_real - q_real * k_imaginary).sum(1)).abs()


class OnlineContrastive(Loss, engine="statistics"):
    r"""Compute the contrastive loss of the positive pairs and negative pairs that overlap in distance.

    With D_i = 1 − q_i·k_i of unit embeddings, and positives y_i = 1 and negatives y_i = 0 of all ranks,

        loss = Σ_{i: y_i = 1, D_i > min_{y_j = 0} D_j} D_i²  +  Σ_{i: y_i = 0, D_i < max_{y_j = 1} D_j} max(0, margin − D_i)²

    If there are only positives or only negatives, their mean distance takes the place of the extreme of the other kind.
    Distances are equal up to rounding. Equal to OnlineContrastiveLoss of sentence-transformers since its release 6.2.

    Called as ``loss(queries, keys, labels)``, q and k, [n, d], and y, [n], 1 for a positive pair and 0 for a negative one.

    Args:
        margin: cosine distance beyond which negatives have no loss.
        reduction: ``"sum"``, as the original; ``"mean"`` is over the hard pairs of all ranks.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.6, 0.8]])
        >>> OnlineContrastive()(q, k, torch.tensor([1, 0]))   # distances 0.4 and 0.2 overlap: 0.4² + 0.3²
        tensor(0.2500)

    Source: sentence-transformers, https://sbert.net/docs/package_reference/sentence_transformer/losses.html, after
    Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """

    margin: Number = 0.5
    reduction: Reduction = "sum"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], labels: Int[Tensor, " n"]) -> Inputs:
        values = [range_rule(labels, 0, 1, "labels are 1 for a positive pair and 0 for a negative one")]
        return Inputs({"queries": queries, "keys": keys, "labels": labels}, values=values)

    def entries(self, stated: CallInputs) -> list[Entry]:
        extremes = [Summed(2 * stated.wide)] * 2
        return [stated.held(3), *map(Shared, stated.learnt("margin")), *extremes, *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.prepared(batch.rows[name], normalize=True) for name in ("queries", "keys"))
        distance = 1 - (q * k).sum(1)
        positive = batch.rows["labels"] == 1
        farthest, nearest = _thresholds(batch, distance.detach(), positive)
        width = tie_width(distance)
        hard = distance.detach().gt(nearest + width).where(positive, distance.detach() < farthest - width)
        losses = distance.where(positive, (batch.shared_settings.margin - distance).relu()).square()
        return batch.reduce(losses, hard, reduction=self.reduction)


def _thresholds(batch: Batch, distance: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest distance of all ranks' positives and the smallest of their negatives, as the loss uses them."""
    ends = [distance.where(positive, -torch.inf), (-distance).where(~positive, -torch.inf)]
    local = [torch.cat([x, x.new_full((1,), -torch.inf)]).max() for x in ends]
    farthest, nearest = batch.maximum(torch.stack(local)).unbind()
    sums = torch.stack([distance.sum(), distance.new_full((), len(distance))])
    total, count = batch.sum(sums, gradient="complete").unbind()
    return farthest.where(farthest.isfinite(), total / count), (-nearest).where(nearest.isfinite(), total / count)
