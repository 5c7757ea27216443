"""FastAP: average precision of an anchor's ranking, from a soft histogram of distances."""

from torch import Tensor

from contrastive_zoo.engine.pairwise import squared_distances
from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Bins


class FastAP(RowLoss):
    r"""Compute one minus average precision, with ranks from a histogram of squared distances of unit rows.

    With h_l, h⁺_l the numbers of an anchor's other rows and of its positives in bin l (each row shared linearly between
    the two nearest bin centres), H, H⁺ their running sums, and M positives,

        loss_i = 1 − 1/M Σ_l h⁺_l H⁺_l / H_l

    averaged over the anchors with a positive. Bin centres are 0, 4/L, … 4.

    Args:
        num_bins: L, the number of steps between distances 0 and 4.
        normalize: must be True; rows are always normalised.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: num_bins below 1, ``normalize=False``; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
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
        return squared_distances(anchors, candidates)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        position = similarity * (self.num_bins / 4)
        lower = position.detach().long().clamp_(0, self.num_bins)
        above = position - lower
        of_positives, of_negatives, positives = yield (
            *(Sum(self._histogram(lower, above, where)) for where in (positive, negative)),
            Sum(positive.sum(1)),
        )
        ranked, result = (of_positives + of_negatives).cumsum(1), of_positives.cumsum(1)
        precision = (of_positives * result / ranked.where(ranked > 0, 1)).sum(1)
        return 1 - precision / positives.clamp(min=1), positives > 0

    def _histogram(self, lower: Tensor, above: Tensor, where: Tensor) -> Tensor:
        bins = above.new_zeros(len(above), self.num_bins + 2)
        bins = bins.scatter_add(1, lower, (1 - above).where(where, 0))
        return bins.scatter_add(1, lower + 1, above.where(where, 0))
