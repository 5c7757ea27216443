"""Histogram loss: the probability that a random negative pair is more similar than a random positive pair."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.pair_histograms import histogram_overlap
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.settings import Bins


class Histogram(LabelledLoss):
    r"""Compute the overlap of the histograms of positive and of negative similarities of unit rows.

    With h⁺ and h⁻ the histograms of s_ij = z_i·z_j over all positive and all negative pairs of all ranks, at R + 1 nodes
    from −1 to 1, where a pair is shared linearly between its two nearest nodes,

        loss = Σ_r h⁻_r Σ_{q≤r} h⁺_q

    which is 0 without a positive or a negative pair. Two passes over the pairs: the first sums histograms over ranks,
    the second takes the gradient, with memory linear in N. pytorch-metric-learning's HistogramLoss leaves out negative pairs
    of two rows that both have no positive.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        num_bins: R, the number of steps; the paper finds little effect between 100 and 200.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: num_bins below 1, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> Histogram(num_bins=2)(z, torch.tensor([0, 0, 1]))   # positives at 0; negatives at 0 and 1
        tensor(1.)
        >>> Histogram(num_bins=2)(z, torch.tensor([0, 1, 0]))   # positives at 1, negatives at 0
        tensor(0.)

    Source: Ustinova & Lempitsky 2016, https://arxiv.org/abs/1611.00822
    """

    num_bins: Bins = 100

    def compute(self, batch: Batch) -> Tensor:
        z, ids = batch.prepared(batch.rows["embeddings"], normalize=True), batch.int64(batch.rows["labels"])
        return histogram_overlap(batch, z, ids, self.num_bins)
