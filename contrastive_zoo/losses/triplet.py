"""Margins over triplets: the triplet loss, and the angular loss."""

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.hinges import hinge_sums, soft_sums, sum_over_positives
from contrastive_zoo.engine.masked import log1p_sum_exp
from contrastive_zoo.engine.row_statistics import Maximum, Minimum, Rows
from contrastive_zoo.loss_base.row_loss import CountedTerms, DissimilarityLoss, RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Number

Mining = Literal["all", "hard", "semi-hard"]


class Triplet(DissimilarityLoss):
    r"""Compute a hinge, or its soft form, on the distance to a positive minus the distance to a negative.

    With D_ij the distance of unit rows and the triplets (i, p, n) of the rows of all ranks,

        loss = mean_{(i,p,n)} max(0, D_ip − D_in + margin)        soft: log(1 + exp(D_ip − D_in + margin))

    No triplet is ever held. A hinge's sum needs only how often each pair is active: N log N work an anchor, even for
    all of its N² triplets. A soft sum takes P · N, one positive at a time.

    Args:
        margin: in units of the metric; negative or 0 are allowed.
        mining: ``"all"``; ``"hard"``, an anchor's farthest positive with its nearest negative; ``"semi-hard"``, all with
            D_ip < D_in < D_ip + margin.
        soft: the soft form; with margin 0 that of Hermans et al.
        metric: ``"distance"``, ``"squared distance"`` (FaceNet) or ``"similarity"``, of which D is the negative.
        average: over the triplets with a loss (``"nonzero"``, pytorch-metric-learning's default) or over all mined ones
            (``"all"``, its MeanReducer).
        reduction: ``"none"`` returns sums over an anchor's triplets.

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

    first_of_equals: ClassVar[bool] = False
    """Whether the first of equally hard rows gets the whole gradient; otherwise they share it."""
    ring_refusal = (
        "only mining='hard' needs no list of an anchor's distances; all and semi-hard triplets are counted in it"
    )

    def settings_problem(self) -> str | None:
        rule = "semi-hard negatives lie within a positive margin"
        if (problem := super().settings_problem()) or self.mining != "semi-hard" or isinstance(self.margin, nn.Module):
            return problem
        return Bounds(rule, above=0).problem("margin", self.margin)

    def can_ring(self) -> bool:
        return super().can_ring() and self.mining == "hard" and not self.first_of_equals

    def lists_positives(self) -> bool:
        return self.soft and self.mining != "hard"

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor, most_positives: int | None = None) -> Rows:
        distance, margin, semi_hard = similarity, self.margin, self.mining == "semi-hard"
        if self.mining == "hard":
            first = self.first_of_equals
            farthest, nearest = yield Maximum(distance, positive, first), Minimum(distance, negative, first)
            violation = farthest - nearest
            both = violation != -torch.inf
            losses = self.penalty(violation.masked_fill(~both, 0))
            return losses, both & (losses > 0) if self.average == "nonzero" else both
        if not self.soft or semi_hard:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.soft):
                losses, active = hinge_sums(distance, positive, negative, margin, semi_hard=semi_hard)
        mined = active if semi_hard else positive.sum(1) * negative.sum(1)
        if self.soft:  # no triplet's loss is zero
            of_positive = soft_sums(self.penalty, distance, negative, margin, semi_hard=semi_hard)
            return sum_over_positives(of_positive, positive, most_positives), mined
        return losses, active if self.average == "nonzero" else mined

    def penalty(self, violation: Tensor) -> Tensor:
        """Return the loss of triplets whose distances differ so much."""
        return F.softplus(violation + self.margin, threshold=40) if self.soft else (violation + self.margin).relu()


class Angular(RowLoss):
    r"""Compute a soft maximum, over the negatives of a positive pair, of the excess of their angle over α.

    With unit rows z, over all ordered positive pairs (i, p) whose class has a negative,

        loss = mean_{i, p∈P(i)} log(1 + Σ_{n∈N(i)} exp(4 tan²α (z_i + z_p)·z_n − 2 (1 + tan²α) z_i·z_p))

    One positive per anchor is processed at a time: memory is linear in N, and P positives take P matmuls.

    Args:
        alpha: α in degrees, between 0 and 90; the paper tries 36 … 45.
        normalize: normalise embeddings to unit length first. pytorch-metric-learning normalises a pair but not its
            negatives: give it unit rows to compare.
        reduction: ``"none"`` returns sums over an anchor's pairs.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Angular(alpha=45)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(0 − 4)); row 2 has no positive
        tensor(0.0181)

    Source: Wang et al. 2017, https://arxiv.org/abs/1708.01682
    """

    alpha: Annotated[
        float, Bounds("alpha is an angle in degrees, between 0 and 90", above=0, below=90, constant=True)
    ] = 40.0

    ring_refusal = "each of its terms joins an anchor's positive with all negatives, so it needs whole rows"

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
        return sum_over_positives(pair_losses, positive, block.most_positives), counts
