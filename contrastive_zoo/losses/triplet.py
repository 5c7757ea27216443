"""Margins over triplets: all of them, their angles, and those with the hardest other embedding of the batch."""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.hinges import hinge_sums, soft_sums, sum_over_positives
from contrastive_zoo.engine.masked import log1p_sum_exp, masked_max, masked_min
from contrastive_zoo.engine.pairwise import dot_products
from contrastive_zoo.engine.rowwise import BlockLoss, reduce_rows
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.row_loss import CountedTerms, DissimilarityLoss, RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Number, Reduction

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
        check_finite: refuse NaN and infinite embeddings.

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

    @property
    def matrices(self) -> float:  # type: ignore[override]  # depends on settings
        if self.mining == "hard":
            return 2.75
        return 4.75 if self.mining == "all" and not self.soft else 6.0

    def settings_problem(self) -> str | None:
        if (problem := super().settings_problem()) or self.mining != "semi-hard" or isinstance(self.margin, nn.Module):
            return problem
        return Bounds("semi-hard negatives lie within a positive margin", above=0).problem("margin", self.margin)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
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
            return sum_over_positives(of_positive, positive), mined
        return losses, active if self.average == "nonzero" else mined

    def hardest(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return D_ip − D_in of the farthest positive and the nearest negative; equally hard ones share the gradient."""
        return masked_max(distance, positive) - masked_min(distance, negative)

    def penalty(self, violation: Tensor) -> Tensor:
        """Return the loss of triplets whose distances differ so much."""
        return F.softplus(violation + self.margin, threshold=40) if self.soft else (violation + self.margin).relu()


class Angular(RowLoss, matrices=4.75):
    r"""Compute a soft maximum, over the negatives of a positive pair, of the excess of their angle over α.

    With unit embeddings z, over all ordered positive pairs (i, p) whose class has a negative,

        loss = mean_{i, p∈P(i)} log(1 + Σ_{n∈N(i)} exp(4 tan²α (z_i + z_p)·z_n − 2 (1 + tan²α) z_i·z_p))

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        alpha: α in degrees, between 0 and 90; the paper tries 36 … 45.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Angular(alpha=45)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(0 − 4)); row 2 has no positive
        tensor(0.0181)

    Source: Wang et al. 2017, https://arxiv.org/abs/1708.01682
    """

    alpha: Annotated[
        float, Bounds("alpha is an angle in degrees, between 0 and 90", above=0, below=90, constant=True)
    ] = 40.0

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
        return sum_over_positives(pair_losses, positive), counts


class MegaBatchMargin(Loss, engine="rows", matrices=2.75):
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
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        >>> MegaBatchMargin()(q, k)   # 0.8 − 0.6 and 0.8 − 0.3, twice
        tensor(0.7000)

    Source: Wieting & Gimpel 2018, https://arxiv.org/abs/1711.05732
    """

    compares = ("view 0",), ("view 1",)

    positive_margin: Number = 0.8
    negative_margin: Number = 0.3
    normalize: bool = True
    reduction: Reduction = "mean"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": queries, "view 1": keys})

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
