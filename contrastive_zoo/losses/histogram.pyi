# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def histogram(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    num_bins: int = 100,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the overlap of the histograms of positive and of negative similarities of unit rows.

    With h⁺ and h⁻ the histograms of s_ij = z_i·z_j over all positive and all negative pairs of all ranks, at R + 1 nodes
    from −1 to 1, where a pair is shared linearly between its two nearest nodes,

        loss = Σ_r h⁻_r Σ_{q≤r} h⁺_q

    which is 0 without a positive or a negative pair. Two passes over the pairs: the first sums histograms over ranks,
    the second takes the gradient, with memory linear in N. pytorch-metric-learning's HistogramLoss leaves out negative pairs
    of two rows that both have no positive.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        num_bins: R, the number of steps; the paper finds little effect between 100 and 200.
        world: the ranks that share the batch.

    Raises:
        ValueError: num_bins below 1, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> histogram(z, torch.tensor([0, 0, 1]), num_bins=2)   # positives at 0; negatives at 0 and 1
        tensor(1.)
        >>> histogram(z, torch.tensor([0, 1, 0]), num_bins=2)   # positives at 1, negatives at 0
        tensor(0.)

    Source: Ustinova & Lempitsky 2016, https://arxiv.org/abs/1611.00822
    """

class Histogram(Loss):
    """Compute the overlap of the histograms of positive and of negative similarities of unit rows.

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
        check_finite: whether NaN and infinite embeddings are refused.

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

    num_bins: int
    check_finite: bool

    def __init__(self, *, num_bins: int = 100, check_finite: bool = True) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
