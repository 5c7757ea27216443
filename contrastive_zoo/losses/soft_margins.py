"""Soft maxima over an anchor's positives and negatives: Circle, multi-similarity, lifted structures."""

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry
from contrastive_zoo.engine.masked import (
    any_in_row,
    log1p_exp,
    log1p_sum_exp,
    masked_log_sum_exp,
    masked_max,
    masked_min,
)
from contrastive_zoo.engine.pairwise import distances
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.row_loss import CountedTerms, DissimilarityLoss, RowLoss
from contrastive_zoo.loss_base.settings import Number, Positive, Reduction


class Circle(RowLoss):
    r"""Compute a log-sum-exp over all pairs of a positive and a negative, with self-paced weights.

        loss_i = log(1 + Σ_{n∈N(i)} exp(γ a_n (s_in − m)) · Σ_{p∈P(i)} exp(−γ a_p (s_ip − 1 + m)))
        a_p = max(0, 1 + m − s_ip),  a_n = max(0, s_in + m),  both without gradient

    averaged over the anchors with a positive and a negative.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        m: relaxation, the radius of the decision boundary.
        gamma: γ > 0, scale; the paper's pairs (m, γ) are 0.25, 256 for faces, 0.25, 128 for persons, 0.4, 80 for images.
        average: ``"nonzero"`` leaves out anchors whose loss has underflowed to 0, as pytorch-metric-learning does.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Circle(m=0.5, gamma=1.0)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(−½·½) · exp(−½·½)); row 2 has no positive
        tensor(0.4741)

    Source: Sun et al. 2020, eq. 6, https://arxiv.org/abs/2002.10857
    """

    m: Number = 0.4
    gamma: Positive = 80.0
    average: CountedTerms = "all"

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        s, constant = similarity, similarity.detach()
        positive_term = (constant - 1 - self.m).clamp_(max=0).mul_(self.gamma) * (s - 1 + self.m)
        negative_term = (constant + self.m).clamp_(min=0).mul_(self.gamma) * (s - self.m)
        of_positives = masked_log_sum_exp(positive_term, positive, empty=0.0)
        of_negatives = masked_log_sum_exp(negative_term, negative, empty=0.0)
        losses, valid = log1p_exp(of_positives + of_negatives), any_in_row(positive) & any_in_row(negative)
        return losses, valid & (losses > 0) if self.average == "nonzero" else valid


class MultiSimilarity(RowLoss, matrices=5.5):
    r"""Compute soft sums of an anchor's similarities, to positives below a base and to negatives above it.

        loss_i = 1/α · log(1 + Σ_{p∈P(i)} exp(−α (s_ip − λ)))  +  1/β · log(1 + Σ_{n∈N(i)} exp(β (s_in − λ)))

    averaged over all anchors with any pair.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        alpha: α > 0, how much the least similar positives dominate.
        beta: β > 0, how much the most similar negatives dominate.
        base: λ, a similarity.
        epsilon: if given, the paper's mining, as pytorch-metric-learning's MultiSimilarityMiner: only negatives with
            s_in > min_p s_ip − ε and positives with s_ip < max_n s_in + ε.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> MultiSimilarity(base=1.0)(z, torch.tensor([0, 0]))   # log(1 + 1) / 2
        tensor(0.3466)

    Source: Wang et al. 2019, https://arxiv.org/abs/1904.06627
    """

    alpha: Positive = 2.0
    beta: Positive = 50.0
    base: Number = 0.5
    epsilon: Number | None = None

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        any_pair = any_in_row(positive) | any_in_row(negative)
        if self.epsilon is not None:
            fixed = similarity.detach()
            lowest, highest = masked_min(fixed, positive), masked_max(fixed, negative)
            positive = positive & (fixed < highest[:, None] + self.epsilon)
            negative = negative & (fixed > lowest[:, None] - self.epsilon)
        of_positives = log1p_sum_exp(-self.alpha * (similarity - self.base), positive)
        of_negatives = log1p_sum_exp(self.beta * (similarity - self.base), negative)
        return of_positives / self.alpha + of_negatives / self.beta, any_pair


class LiftedStructure(LabelledLoss, engine="rows"):
    r"""Compute a squared hinge on positive pairs, with a soft minimum of both embeddings' distances to negatives as margin.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers.
    With D_ij the distance of unit embeddings, over all ordered positive pairs (i, p) of the embeddings of all ranks,

        loss = mean_{i, p∈P(i)} ½ max(0, D_ip − pos_margin + log Σ_{k∈{i,p}} Σ_{n∈N(k)} exp(neg_margin − D_kn))²

    Args:
        pos_margin: distance.
        neg_margin: distance; the paper's margin, with pos_margin 0.
        normalize: the paper does not.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> LiftedStructure(neg_margin=3.0)(z, torch.tensor([0, 0, 1]))   # (log(e + e))² / 2
        tensor(1.4334)

    Source: Song et al. 2016, eq. 4, https://arxiv.org/abs/1511.06452
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    normalize: bool = True
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        names, width = ["embeddings"], stated.inputs.rows["embeddings"].shape[1]
        crowding = Blocks(names, (), "labels", parameters=stated.learnt("neg_margin"), reduction="none", matrices=5.5)
        learnt = stated.learnt("pos_margin")
        return [crowding, crowding._replace(parameters=learnt, reduction=self.reduction, width=width + 1)]

    def compute(self, batch: Batch) -> Tensor:
        z = batch.candidates("embeddings", normalize=self.normalize)
        ids, settings = batch.rows["labels"].long(), batch.settings
        crowding = reduce_rows(batch, BlockLoss(_negative_sums, margin=settings.neg_margin), z, ids, reduction="none")
        loss = BlockLoss(_pairs, margin=settings.pos_margin)
        return reduce_rows(batch, loss, torch.cat([z.local, crowding[:, None]], 1), ids, reduction=self.reduction)


def _negative_sums(block: AnchorBlock, margin: float) -> tuple[Tensor, Tensor]:
    logits = margin - distances(block.anchors, block.candidates)
    return masked_log_sum_exp(logits, block.negative, empty=0.0), block.negative.any(1)


def _pairs(block: AnchorBlock, margin: float) -> tuple[Tensor, Tensor]:
    distance = distances(block.anchors[:, :-1], block.candidates[:, :-1])
    crowding = torch.logaddexp(block.anchors[:, -1:], block.candidates[:, -1])
    hinges = (distance - margin + crowding).relu().square().where(block.positive, 0)
    return hinges.sum(1) / 2, block.positive.sum(1).where(block.negative.any(1), 0)


class GeneralizedLiftedStructure(DissimilarityLoss, matrices=6.0):
    r"""Compute a hinge on two soft extremes: the farthest positive and the nearest negative.

    With D_ij the distance of unit embeddings,

        loss_i = max(0, log Σ_{p∈P(i)} exp(D_ip − pos_margin) + log Σ_{n∈N(i)} exp(neg_margin − D_in))

    averaged over the anchors with a positive and a negative. pytorch-metric-learning counts other anchors, too.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        pos_margin: in units of the metric.
        neg_margin: in units of the metric; the paper's margin is neg_margin − pos_margin.
        metric: ``"distance"``, ``"squared distance"`` or ``"similarity"``; for the last set both margins.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> GeneralizedLiftedStructure(neg_margin=3.0)(z, torch.tensor([0, 0, 1]))   # 0 + (3 − 2); row 2 has no positive
        tensor(1.)

    Source: Hermans et al. 2017, eq. 8, https://arxiv.org/abs/1703.07737
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        farthest = masked_log_sum_exp(similarity - self.sign * self.pos_margin, positive, empty=0.0)
        nearest = masked_log_sum_exp(self.sign * self.neg_margin - similarity, negative, empty=0.0)
        return (farthest + nearest).relu(), positive.any(1) & negative.any(1)
