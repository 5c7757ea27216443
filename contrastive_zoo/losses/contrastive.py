"""Contrastive loss: positives within one margin, negatives beyond another."""

from typing_extensions import Unpack

from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.checks import is_number, number_problem, word_problem
from contrastive_zoo.loss_base.distances import CountedTerms, DissimilarityLoss, Metric, row_sums
from contrastive_zoo.loss_base.row_loss import RowSettings


class Contrastive(DissimilarityLoss):
    r"""Compute hinges on pairs: the mean over positive pairs plus the mean over negative pairs.

    With D_ij the distance of unit rows, over all ordered pairs of the rows of all ranks,

        loss = mean_{i, p∈P(i)} max(0, D_ip − pos_margin)^power  +  mean_{i, n∈N(i)} max(0, neg_margin − D_in)^power

    Args:
        pos_margin: distance up to which positives have no loss, or similarity from which on.
        neg_margin: distance from which on negatives have no loss, or similarity up to which.
        power: 1, or 2 as in the paper, which halves both terms and divides their sum by the number of all pairs.
        metric: ``"distance"``, ``"squared distance"`` or ``"similarity"``; for the last set both margins, such as 1, 0.
        average: ``"nonzero"``, the mean over pairs with a loss, or ``"all"``, as pytorch-metric-learning's MeanReducer.
        row_settings: normalize, reduction, check_finite of :class:`RowLoss`; ``"none"`` returns sums over an
            anchor's pairs.

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

    terms = 2

    def __init__(
        self,
        *,
        pos_margin: float = 0.0,
        neg_margin: float = 1.0,
        power: float = 1.0,
        metric: Metric = "distance",
        average: CountedTerms = "nonzero",
        **row_settings: Unpack[RowSettings],
    ) -> None:
        super().__init__(metric=metric, **row_settings)
        self.pos_margin, self.neg_margin, self.power = pos_margin, neg_margin, power
        self.average = average
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        return (
            super().settings_problem()
            or self._power_problem()
            or number_problem(pos_margin=self.pos_margin, neg_margin=self.neg_margin)
            or word_problem("average", self.average, CountedTerms, one_of=True)
        )

    def _power_problem(self) -> str | None:
        if is_number(self.power, low=1):
            return None
        return f"power is at least 1, got {self.power}: below, the gradient is infinite at the margin."

    def on_block(self, block: AnchorBlock) -> Rows:
        distance = self.similarity(block.anchors, block.candidates)
        positive_term = (distance - self.sign * self.pos_margin).relu().where(block.positive, 0)
        negative_term = (self.sign * self.neg_margin - distance).relu().where(block.negative, 0)
        counted = (
            (positive_term > 0, negative_term > 0) if self.average == "nonzero" else (block.positive, block.negative)
        )
        sums = row_sums(positive_term.pow(self.power), negative_term.pow(self.power))
        losses, counts = yield Sum(sums), Sum(row_sums(*counted))
        return losses, counts
