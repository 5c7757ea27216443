"""Statistics of a row of similarities that merge: those of two sets of candidates give the one of their union.

A block function that yields its statistics, and receives those of whole rows, can see the candidates in parts::

    def rows(self, similarity, positive, negative):
        farthest, nearest = yield Minimum(similarity, positive), Maximum(similarity, negative)
        return (nearest - farthest).relu(), ...

With all candidates in one block, :func:`complete` sends back the statistics as they are. With a ring, each block of
candidates gives a part; the function runs again on every block, once for each ``yield``, and receives the merged values.
A later ``yield`` may depend on the values of earlier ones. Their number must not depend on data.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastive_zoo.engine.masked import masked_extreme, masked_log_sum_exp, tie_width

State = tuple[Tensor, ...]
"""What a statistic merges, without gradient."""


class Statistic(ABC):
    """A statistic of the rows of a block."""

    @abstractmethod
    def partial(self) -> Tensor:
        """Return the value over the block's candidates, [c, …], differentiable."""

    def value(self) -> Tensor:
        """Return the value where the block holds all candidates."""
        return self.partial()

    def state(self, partial: Tensor) -> State:
        """Return what merges."""
        return (partial.detach(),)

    @abstractmethod
    def merge(self, one: State, other: State) -> State:
        """Return the state of both sets of candidates together."""

    def whole(self, state: State) -> Tensor:
        """Return the value over all candidates."""
        return state[0]

    @abstractmethod
    def derivative(self, partial: State, state: State) -> Tensor | None:
        """Return the derivative of the whole value by this block's, None for 1."""


@dataclass(frozen=True)
class Sum(Statistic):
    """A sum over the block's candidates, [c] or [c, k]; also a count.

    Examples:
        >>> Sum(torch.tensor([2.0])).merge((torch.tensor([2.0]),), (torch.tensor([3.0]),))
        (tensor([5.]),)
    """

    sums: Tensor

    def partial(self) -> Tensor:
        return self.sums

    def merge(self, one: State, other: State) -> State:
        return (one[0] + other[0],)

    def derivative(self, partial: State, state: State) -> None:
        return None


class AnyOf(Sum):
    """Whether any of the block's candidates has a property, [c]: in torch the sum of two booleans is ``or``.

    Examples:
        >>> AnyOf(torch.tensor([False])).merge((torch.tensor([False]),), (torch.tensor([True]),))
        (tensor([True]),)
    """


@dataclass(frozen=True)
class LogSumExp(Statistic):
    """log Σ exp over the selected entries of each row, ``empty`` for a row without any.

    Examples:
        >>> none = LogSumExp(torch.zeros(1, 2), torch.tensor([[False, False]]), empty=0.0)
        >>> none.partial(), none.value(), none.whole((none.partial(),))
        (tensor([-inf]), tensor([0.]), tensor([0.]))
    """

    entries: Tensor
    mask: Tensor
    empty: float = -torch.inf

    def partial(self) -> Tensor:
        return masked_log_sum_exp(self.entries, self.mask)

    def value(self) -> Tensor:
        return masked_log_sum_exp(self.entries, self.mask, empty=self.empty)

    def merge(self, one: State, other: State) -> State:
        return (torch.logaddexp(one[0], other[0]),)

    def whole(self, state: State) -> Tensor:
        return state[0].where(state[0] > -torch.inf, self.empty)

    def derivative(self, partial: State, state: State) -> Tensor:
        return (partial[0] - state[0]).exp().where(partial[0] > -torch.inf, 0)


@dataclass(frozen=True)
class _Extreme(Statistic):
    """An extreme of the selected entries of each row; equal ones share the gradient, or the first gets all of it.

    ``first`` is for blocks of all candidates. Extremes of two parts come from two matmuls, which may round the same product
    differently: they count as equal up to :func:`tie_width`.
    """

    entries: Tensor
    mask: Tensor
    first: bool = False
    sign: ClassVar[int]

    def partial(self) -> Tensor:
        return masked_extreme(self.entries, self.mask, self.sign, self.first)

    def state(self, partial: Tensor) -> State:
        """The extreme and how many entries attain it, which are counted in floats: a CPU adds booleans one by one."""
        entries, extreme = self.entries.detach(), partial.detach()
        hits = torch.eq(entries, extreme[:, None], out=torch.empty_like(entries))
        ties = hits.sum(1)
        if len(ties) and int(ties.amax()) > 1:  # some of them may not be selected
            ties = hits.mul_(self.mask).sum(1)
        return extreme, ties.long()

    def derivative(self, partial: State, state: State) -> Tensor:
        ties, all_ties = (x[1].to(state[0].dtype) for x in (partial, state))
        return (ties / all_ties.clamp(min=1)).where(_tied(partial[0], state[0]), 0)

    def merge(self, one: State, other: State) -> State:
        extreme = torch.maximum(one[0], other[0]) if self.sign == -1 else torch.minimum(one[0], other[0])
        return extreme, one[1].where(_tied(one[0], extreme), 0) + other[1].where(_tied(other[0], extreme), 0)


def _tied(x: Tensor, y: Tensor) -> Tensor:
    # of two infinities the difference is no number
    return (x == y) | ((x - y).abs() <= tie_width(x) * y.abs().clamp(1, torch.finfo(x.dtype).max))


class Maximum(_Extreme):
    """The largest of the selected entries of each row, −inf for a row without any.

    Examples:
        >>> one, other = (Maximum(x, x > 0) for x in (torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, 2.0]])))
        >>> one.merge(one.state(one.partial()), other.state(other.partial()))   # two entries are 3
        (tensor([3.]), tensor([2]))
    """

    sign = -1


class Minimum(_Extreme):
    """The smallest of the selected entries of each row, +inf for a row without any.

    Examples:
        >>> Minimum(torch.tensor([[1.0, 3.0]]), torch.tensor([[False, True]])).partial()
        tensor([3.])
    """

    sign = 1


Rows = Generator[Sequence[Statistic], tuple[Tensor, ...], tuple[Tensor, Tensor]]
"""What a block function that yields statistics returns."""


def complete(result: tuple[Tensor, Tensor] | Rows) -> tuple[Tensor, Tensor]:
    """Return losses and counts of a block that holds all candidates.

    Examples:
        >>> def rows(similarity):
        ...     total, = yield (Sum(similarity.sum(1)),)
        ...     return total, total > 0
        >>> complete(rows(torch.ones(1, 3)))
        (tensor([3.]), tensor([True]))
    """
    if not isinstance(result, Generator):
        return result
    results, values = run(result, None)
    while values is None:
        assert results is not None
        results, values = run(result, tuple([x.value() for x in results]))
    return values


def run(rows: Rows, values: Any) -> tuple[Sequence[Statistic] | None, tuple[Tensor, Tensor] | None]:
    """Send values of whole rows; return the next statistics, or losses and counts at the end."""
    try:
        return rows.send(values), None
    except StopIteration as stop:
        return None, stop.args[0] if stop.args else None  # torch.compile knows no ``stop.value``
