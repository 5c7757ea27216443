"""Contrastive loss: positives within one margin, negatives beyond another."""

from typing import Annotated

from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.pairwise import row_sums
from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.loss_base.row_loss import CountedTerms, DissimilarityLoss
from contrastive_zoo.loss_base.settings import Bounds, Number

Power = Annotated[float, Bounds("power is at least 1", "Below, the gradient is infinite at the margin.", low=1)]


class Contrastive(DissimilarityLoss):
    r"""Compute hinges on pairs: the mean over positive pairs plus the mean over negative pairs.

    With D_ij the distance of unit rows, over all ordered pairs of the rows of all ranks,

        loss = mean_{i, p∈P(i)} max(0, D_ip − pos_margin)^power  +  mean_{i, n∈N(i)} max(0, neg_margin − D_in)^power

    Args:
        pos_margin: distance up to which positives have no loss, or similarity from which on.
        neg_margin: distance from which on negatives have no loss, or similarity up to which.
        power: 1, or 2 as in the paper, which halves both terms and divides their sum by the number of all pairs.
        average: ``"nonzero"``, the mean over pairs with a loss, or ``"all"``, as pytorch-metric-learning's MeanReducer.
        metric: ``"distance"``, ``"squared distance"`` or ``"similarity"``; for the last set both margins, such as 1, 0.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`; ``"none"`` returns sums over an anchor's pairs.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an unknown metric or average, a power below 1, a margin that is not finite; at the call as
            :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> Contrastive()(z, torch.tensor([0, 0, 1]))   # √0.4; √2 and √0.8, of which one is below 1
        tensor(0.7380)

    Source: Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    power: Power = 1.0
    average: CountedTerms = "nonzero"

    terms = 2

    def on_block(self, block: AnchorBlock) -> Rows:
        distance, margins = self.similarity(block.anchors, block.candidates), (self.pos_margin, self.neg_margin)
        pos_margin, neg_margin = (self.sign * x for x in margins)
        return (yield from pair_hinges(distance, block, pos_margin, neg_margin, self.power, self.average))


def pair_hinges(
    distance: Tensor, block: AnchorBlock, pos_margin: float, neg_margin: float, power: float, average: CountedTerms
) -> Rows:
    """Return the sums of the hinges of each anchor's positives and negatives, and how many of either count."""
    positive_term = (distance - pos_margin).relu().where(block.positive, 0)
    negative_term = (neg_margin - distance).relu().where(block.negative, 0)
    counted = (positive_term > 0, negative_term > 0) if average == "nonzero" else (block.positive, block.negative)
    losses, counts = yield Sum(row_sums(positive_term.pow(power), negative_term.pow(power))), Sum(row_sums(*counted))
    return losses, counts
