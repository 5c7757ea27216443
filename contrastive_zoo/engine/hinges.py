"""Sum over an anchor's positives one by one, and over its triplets without holding one.

A hinge's sum needs only how often each pair is active: N log N work an anchor, even for all of its N² triplets.
"""

from collections.abc import Callable
from functools import partial, reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.masked import masked_indices
from contrastive_zoo.ranks import devices


def hinge_sums(
    distance: Tensor, positive: Tensor, negative: Tensor, margin: float | Tensor, *, semi_hard: bool
) -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """Return Σ (D_ip + margin − D_in) over active triplets, if ``semi_hard`` with D_ip < D_in, and their number."""
    if devices.on_cpu(distance):
        columns, present = masked_indices(positive)
        positives = distance.gather(1, columns).where(present, -torch.inf)
    else:  # as many thresholds as candidates: the number of positives is not read
        positives = distance.where(positive, -torch.inf)
    positives = positives.sort(1).values
    with torch.no_grad():
        negatives = distance.where(negative, torch.inf)
        of_positive, of_negative = _active(positives + margin, negatives, torch.lt)
        if semi_hard:
            harder = _active(positives, negatives, torch.le)
            of_positive, of_negative = of_positive - harder[0], of_negative - harder[1]
    positive_term = (of_positive * (positives + margin).where(of_positive > 0, 0)).sum(1)
    return positive_term - (of_negative * distance).sum(1), of_negative.sum(1)


def soft_sums(
    penalty: Callable[[Tensor], Tensor], distance: Tensor, negative: Tensor, margin: float | Tensor, *, semi_hard: bool
) -> Callable[[Int[Tensor, "c 1"]], Float[Tensor, " c"]]:
    """Return a function of an anchor's positive: Σ ``penalty`` of D_ip − D_in, in (−margin, 0) if ``semi_hard``."""
    negatives = distance.where(negative, torch.inf)

    def of(p: Tensor) -> Tensor:
        positives = distance.gather(1, p)
        values = penalty(positives - negatives)
        if semi_hard:
            values = values.where((negatives > positives) & (negatives < positives + margin), 0)
        return values.sum(1)

    return of


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


_SEARCH_THRESHOLDS = 128  # from so many on a binary search is faster than comparing with one after another


def sum_over_positives(
    term: Callable[[Int[Tensor, "c 1"]], Float[Tensor, " c"]], positive: Bool[Tensor, "c N"]
) -> Float[Tensor, " c"]:
    """Return Σ over each anchor's positives p of ``term(p)``, whose c × N matrices live one at a time."""
    columns, present = masked_indices(positive)
    if not columns.shape[1]:  # one call of padding alone keeps the sum connected to the graph
        columns, present = columns.new_zeros(len(columns), 1), present.new_zeros(len(present), 1)
    evaluate = term if is_dense() else partial(checkpoint, term, use_reentrant=False, preserve_rng_state=False)
    terms = zip(columns.split(1, dim=1), present.split(1, dim=1), strict=True)
    return reduce(torch.add, (evaluate(column).where(counts[:, 0], 0) for column, counts in terms))
