"""Triplet loss: positives nearer than negatives by a margin, over all, hard or semi-hard triplets."""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo import devices
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.engine.masked import READS_COUNTS, masked_indices
from contrastive_zoo.engine.row_statistics import Maximum, Minimum, Rows
from contrastive_zoo.loss_base.checks import flag_problem, number_problem, word_problem
from contrastive_zoo.loss_base.distances import CountedTerms, DissimilarityLoss, Metric, sum_over_positives
from contrastive_zoo.loss_base.row_loss import RowSettings

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
        row_settings: normalize, reduction, check_finite of :class:`RowLoss`; ``"none"`` returns sums over an
            anchor's triplets.

    Raises:
        ValueError: an unknown mining, metric or average, a margin that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> Triplet(margin=0.5)(z, torch.tensor([0, 0, 1]))   # √0.4 − √0.8 + 0.5; √0.4 − √2 + 0.5 is below 0
        tensor(0.2380)

    Source: Schroff et al. 2015, eq. 3, https://arxiv.org/abs/1503.03832; hard, all and soft: Hermans et al. 2017,
    eq. 5 and 6, https://arxiv.org/abs/1703.07737
    """

    first_of_equals: ClassVar[bool] = False
    """Whether the first of equally hard rows gets the whole gradient; otherwise they share it."""

    def __init__(
        self,
        *,
        margin: float = 0.05,
        mining: Mining = "all",
        soft: bool = False,
        metric: Metric = "distance",
        average: CountedTerms = "nonzero",
        **row_settings: Unpack[RowSettings],
    ) -> None:
        super().__init__(metric=metric, **row_settings)
        self.margin, self.mining, self.soft, self.average = margin, mining, soft, average
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        least, rule = (
            (0, "semi-hard negatives lie within a positive margin")
            if isinstance(self.mining, str) and self.mining == "semi-hard"
            else (None, None)
        )
        return (
            super().settings_problem()
            or flag_problem(soft=self.soft)
            or word_problem("mining", self.mining, Mining, one_of=True)
            or word_problem("average", self.average, CountedTerms, one_of=True)
            or number_problem(rule, above=least, margin=self.margin)
        )

    ring_refusal = (
        "only mining='hard' needs no list of an anchor's distances; all and semi-hard triplets are counted in it"
    )

    def can_ring(self) -> bool:
        return super().can_ring() and self.mining == "hard" and not self.first_of_equals

    def lists_positives(self) -> bool:
        return self.soft and self.mining != "hard"

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor, most_positives: int | None = None) -> Rows:
        distance = similarity
        if self.mining == "hard":
            first = self.first_of_equals
            farthest, nearest = yield Maximum(distance, positive, first), Minimum(distance, negative, first)
            violation = farthest - nearest
            both = violation != -torch.inf
            losses = self._penalty(violation.masked_fill(~both, 0))
            return losses, both & (losses > 0) if self.average == "nonzero" else both
        if not self.soft or self.mining == "semi-hard":
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.soft):
                losses, active = self._hinges(distance, positive, negative)
        mined = active if self.mining == "semi-hard" else positive.sum(1) * negative.sum(1)
        if self.soft:  # no triplet's loss is zero
            return self._sum_by_positive(distance, positive, negative, most_positives), mined
        return losses, active if self.average == "nonzero" else mined

    def _penalty(self, violation: Tensor) -> Tensor:
        return F.softplus(violation + self.margin, threshold=40) if self.soft else (violation + self.margin).relu()

    def _hinges(self, distance: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ (D_ip + margin − D_in) over active triplets, and their number, from each pair's number of triplets."""
        if devices.on_cpu(distance):
            return self._hinges_of_list(distance, positive, negative)
        # as many thresholds as candidates: the number of positives is not read
        return self._active_sums(distance.where(positive, -torch.inf).sort(1).values, distance, negative)

    @traced_as(lambda *args, **named: READS_COUNTS)
    def _hinges_of_list(self, distance: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        columns, present = masked_indices(positive)
        positives = distance.gather(1, columns).where(present, -torch.inf).sort(1).values
        return self._active_sums(positives, distance, negative)

    def _active_sums(self, positives: Tensor, distance: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, given each anchor's ascending distances to positives, after −inf in place of others."""
        with torch.no_grad():
            negatives = distance.where(negative, torch.inf)
            of_positive, of_negative = _active(positives + self.margin, negatives, torch.lt)
            if self.mining == "semi-hard":
                harder = _active(positives, negatives, torch.le)
                of_positive, of_negative = of_positive - harder[0], of_negative - harder[1]
        positive_term = (of_positive * (positives + self.margin).where(of_positive > 0, 0)).sum(1)
        return positive_term - (of_negative * distance).sum(1), of_negative.sum(1)

    def _sum_by_positive(self, distance: Tensor, positive: Tensor, negative: Tensor, most: int | None) -> Tensor:
        negatives = distance.where(negative, torch.inf)

        def losses(p: Tensor) -> Tensor:
            positives = distance.gather(1, p)
            values = self._penalty(positives - negatives)
            if self.mining == "semi-hard":
                values = values.where((negatives > positives) & (negatives < positives + self.margin), 0)
            return values.sum(1)

        return sum_over_positives(losses, positive, most)


def _active(thresholds: Tensor, negatives: Tensor, below: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Return the number of negatives below each ascending threshold, and of thresholds above each negative."""
    if not devices.on_cpu(negatives) or thresholds.shape[1] > _SEARCH_THRESHOLDS:
        lowest = torch.searchsorted(thresholds, negatives, right=below is torch.lt)
        ones = thresholds.new_ones(()).expand_as(negatives)
        counts_below = thresholds.new_zeros(len(thresholds), thresholds.shape[1] + 1)
        counts_below = counts_below.scatter_add_(1, lowest, ones).cumsum(1)
        return counts_below[:, :-1], (thresholds.shape[1] - lowest).to(thresholds.dtype)
    counts_below, above, hit = torch.empty_like(thresholds), torch.zeros_like(negatives), torch.empty_like(negatives)
    for threshold, count in zip(thresholds.unbind(1), counts_below.unbind(1), strict=True):
        above += below(negatives, threshold[:, None], out=hit)
        count.copy_(hit.sum(1))
    return counts_below, above


_SEARCH_THRESHOLDS = 128
"""Number of thresholds from which on a binary search is faster than comparing with one after another."""
