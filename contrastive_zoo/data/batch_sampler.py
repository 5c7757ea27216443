"""The base class of batch samplers: global batches by epoch, from columns of a dataset, split over the ranks."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from contrastive_zoo.ranks.handshake import Statement, shake_hands
from contrastive_zoo.ranks.row_checks import array_in_one_line, described, in_one_line, is_integer, tensor_problem
from contrastive_zoo.ranks.world import Processes, World

Column: TypeAlias = Tensor | NDArray[np.generic] | Sequence[Hashable]
"""One value per sample: a tensor, an array or a sequence, of integers or strings."""


def columns_problem(columns: Sequence[Column]) -> str | None:
    """Return why these are no columns, in words; None if they are."""
    for column in columns:
        if not isinstance(column, (Tensor, np.ndarray, Sequence)) or isinstance(column, (str, bytes)):
            return f"labels and columns are tensors, arrays or lists, got {described(column)}."
        if isinstance(column, Tensor) and (problem := tensor_problem("labels and columns", column)):
            return problem
        if not isinstance(column, (Tensor, np.ndarray)) and not all(isinstance(x, Hashable) for x in column):
            return f"labels and columns hold numbers, words or other hashable values, got {described(column)}."
    shapes = (list(column.shape) for column in columns if isinstance(column, (Tensor, np.ndarray)))
    bad = next((shape for shape in shapes if len(shape) != 1), None)
    return None if bad is None else f"labels and columns have one value per sample, [n], got shape {bad}."


def codes(columns: Sequence[Column]) -> tuple[list[NDArray[np.int64]], list[Hashable]]:
    """Return the columns with equal values as equal integers, 0, 1, … in order of appearance, and the distinct values.

    Examples:
        >>> codes([["a", "b", "a"], np.array(["c", "b", "b"])])
        ([array([0, 1, 0]), array([2, 1, 1])], ['a', 'b', 'c'])
    """
    known: dict[Hashable, int] = {}
    result = []
    for column in columns:
        values = column.tolist() if isinstance(column, (Tensor, np.ndarray)) else column
        result.append(np.fromiter((known.setdefault(value, len(known)) for value in values), np.int64, len(values)))
    return result, list(known)


@lru_cache(maxsize=1024)  # most batches of an epoch have one size
def rank_bounds(total: int, weights: tuple[float, ...]) -> list[int]:
    """Return W + 1 bounds: rank r takes samples ``bounds[r]`` … ``bounds[r + 1] − 1`` of ``total``.

    ``bounds[r] = ⌈total · (w₀ + … + wᵣ₋₁) / (w₀ + … + w_W₋₁)⌉``, computed with fractions, so that no rounding depends on
    the machine. Each rank's number of samples differs from its exact share by less than 1.

    Examples:
        >>> rank_bounds(5, (1, 1))
        [0, 3, 5]
        >>> rank_bounds(1, (1, 1, 1))
        [0, 1, 1, 1]
        >>> rank_bounds(8, (1, 0.5, 0.5))
        [0, 4, 6, 8]
    """
    sums = [Fraction(0), *accumulate(map(Fraction, weights))]
    return [math.ceil(total * x / sums[-1]) for x in sums]


def weights_problem(weights: Sequence[float] | None, world_size: int) -> str | None:
    """Return why these are not the ranks' weights, in words; None if they are."""
    if weights is None:
        return None
    if not isinstance(weights, (list, tuple)) or not all(isinstance(x, (int, float)) for x in weights):
        return f"rank_weights are a list of one number per rank, got {described(weights)}."
    if len(weights) != world_size:
        return (
            f"rank_weights are one number per rank, got {len(weights)} for W = {world_size}. Pass one weight for each "
            "rank, or None for an even split."
        )
    if not all(math.isfinite(x) and x >= 0 for x in weights) or not any(weights):
        return f"rank_weights are finite, at least 0, and not all 0, got {list(weights)}."
    return None


Batches = Sequence[NDArray[np.int64]]
"""The sample indices of each global batch of an epoch."""


class BaseBatchSampler(Sampler[list[int]], ABC):
    """Base class of batch samplers whose global batches do not depend on the world size.

    A subclass returns the global batches of an epoch from the data, the seed and the epoch (:meth:`global_batches`).
    Iteration yields this rank's consecutive part of each global batch, as a list of sample indices; concatenated in rank
    order the parts are the global batch. All ranks yield equally many batches, and a rank without samples yields an empty
    list: collate it with :class:`CollateEmptyBatches`.

    Iteration does not change the position, since a DataLoader reads ahead of the training. The position is set by
    :meth:`set_epoch` and :meth:`load_state_dict`. :meth:`state_dict` takes the number of batches trained.

    Construct it on every rank of the process group: ranks compare their data and settings. A
    :class:`contrastive_zoo.World` as ``process_group`` is that world's view, without messages.

    Args:
        settings: what determines the global batches, by name: numbers, words and arrays.
        problem: an error in the subclass's arguments, in words.
        seed: the random order is a function of seed and epoch.
        rank_weights: each rank's share of a global batch; None is an even split.
        process_group: who trains: a process group, a 1-d DeviceMesh, or None for the default group at the time of the
            call.

    Raises:
        ValueError: on every rank alike: a problem on any rank, a seed that is no integer ≥ 0, weights that are not one
            number ≥ 0 per rank, or ranks whose data or settings differ.

    Examples:
        >>> class Halves(BaseBatchSampler):
        ...     def __init__(self, n, **where):
        ...         super().__init__({"samples": n}, **where)
        ...         self.n = n
        ...     def global_batches(self, epoch):
        ...         return np.array_split(np.arange(self.n), 2)
        >>> [list(Halves(7, process_group=World(rank, 3))) for rank in range(3)]
        [[[0, 1], [4]], [[2], [5]], [[3], [6]]]
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        problem: str | None = None,
        *,
        seed: int = 0,
        rank_weights: Sequence[float] | None = None,
        process_group: Processes = None,
    ) -> None:
        self.seed, self.rank_weights, self.process_group = seed, rank_weights, process_group
        self.epoch = self.step = 0
        world = World.of(process_group, type(self).__name__)
        if problem is None and not is_integer(seed, at_least=0):
            problem = f"seed is an integer of at least 0, got {seed!r}."
        problem = problem or weights_problem(rank_weights, world.size)
        words = {name: _in_words(value) for name, value in {**settings, "seed": seed}.items()}
        self._digest = hashlib.blake2b(repr((type(self).__name__, words)).encode(), digest_size=8).hexdigest()
        if not isinstance(process_group, World):
            statement = Statement(type(self).__name__, {**words, "rank_weights": _in_words(rank_weights)})
            statement.problem = problem
            shake_hands(statement, world)
        elif problem is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        self._batches: tuple[int, Batches] | None = None

    @abstractmethod
    def global_batches(self, epoch: int) -> Batches:
        """Return the sample indices of each global batch of an epoch: a function of the data, the seed and the epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each global batch, from the position on."""
        world = World.of(self.process_group)
        if (problem := weights_problem(self.rank_weights, world.size)) is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        weights = tuple(self.rank_weights or [1.0] * world.size)
        for batch in self._of_epoch()[self.step :]:
            bounds = rank_bounds(len(batch), weights)
            yield batch[bounds[world.rank] : bounds[world.rank + 1]].tolist()

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch, wherever iteration begins."""
        return len(self._of_epoch())

    def _of_epoch(self) -> Batches:
        if self._batches is None or self._batches[0] != self.epoch:
            self._batches = self.epoch, self.global_batches(self.epoch)
        return self._batches[1]

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch; in the current epoch, keep the step that was loaded.

        Raises:
            ValueError: ``epoch`` is no integer of at least 0.
        """
        if not is_integer(epoch, at_least=0):
            raise ValueError(f"{type(self).__name__}: an epoch is an integer of at least 0, got {epoch!r}.")
        if epoch != self.epoch:
            self.epoch, self.step = int(epoch), 0

    def state_dict(self, *, step: int) -> dict[str, Any]:
        """Return the position after ``step`` batches of the current epoch have been trained, whichever rank asks.

        Args:
            step: batches trained, counted from the beginning of the epoch. The sampler cannot count them: workers of a
                DataLoader have read more. After the last batch the position is the beginning of the next epoch.

        Raises:
            ValueError: ``step`` is not in 0 … number of batches.
        """
        self._check_step(step)
        epoch, step = (self.epoch, int(step)) if step < len(self) else (self.epoch + 1, 0)
        return {"epoch": epoch, "step": step, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position, on any number of ranks.

        Args:
            state: what :meth:`state_dict` returned, or a dict with ``epoch`` and ``step``.

        Raises:
            ValueError: an epoch or a step is missing or out of range, or the position belongs to other data, another seed
                or other settings.
        """
        name = type(self).__name__
        if not (isinstance(state, Mapping) and {"epoch", "step"} <= state.keys()):
            got = sorted(state) if isinstance(state, Mapping) else described(state)
            raise ValueError(f"{name}: a position has an epoch and a step, got {got}.")
        if state.get("digest", self._digest) != self._digest:
            raise ValueError(
                f"{name}: the position belongs to a sampler of other data, another seed or other settings. Construct the "
                "sampler as before; to begin at a position of other batches, pass only its epoch and step."
            )
        before = self.epoch, self.step
        self.set_epoch(state["epoch"])
        try:
            self._check_step(state["step"])
        except ValueError:
            self.epoch, self.step = before
            raise
        self.step = int(state["step"])

    def _check_step(self, step: Any) -> None:
        if not is_integer(step, at_least=0) or step > len(self):
            raise ValueError(
                f"{type(self).__name__}: a step is an integer in 0 … {len(self)}, the number of batches of epoch "
                f"{self.epoch}, got {step!r}."
            )

    @property
    def sampler(self) -> BaseBatchSampler:
        """This sampler: Lightning calls ``loader.batch_sampler.sampler.set_epoch``."""
        return self

    @property
    def batch_sampler(self) -> BaseBatchSampler:
        """This sampler: Hugging Face's Trainer calls ``loader.batch_sampler.batch_sampler.set_epoch``."""
        return self


def grouped(batch_of: NDArray[np.int64], keys: NDArray[np.uint64]) -> Batches:
    """Return the samples of each batch in the order of their keys, given each sample's batch; −1 is in none.

    Examples:
        >>> grouped(np.array([1, 0, -1, 1]), np.array([8, 3, 0, 5], dtype=np.uint64))
        [array([1]), array([3, 0])]
    """
    order = np.lexsort((keys, batch_of))
    counts = np.bincount(batch_of + 1)
    return np.split(order[counts[0] :], np.cumsum(counts[1:])[:-1])


def _in_words(value: object) -> str:
    """Return a setting as text that ranks compare."""
    return array_in_one_line(value) if isinstance(value, np.ndarray) else in_one_line(value)
