"""Batch samplers whose global batches are split over the ranks: the base class, and batches in random or stored order."""

import copy
import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler, default_collate
from typing_extensions import Unpack

from contrastive_zoo.ranks.handshake import Statement, shake_hands
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import array_in_one_line, described, flag_problem, in_one_line, is_integer
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, World

Batches = Sequence[NDArray[np.int64]]  # the sample indices of each global batch of an epoch


class SamplerOptions(TypedDict, total=False):
    """The arguments that all batch samplers pass on to :class:`BaseBatchSampler`."""

    seed: int
    drop_last: bool
    process_group: Processes


def even_bounds(total: int, world_size: int) -> list[int]:
    """Return W + 1 bounds ``⌈total · r / W⌉``: rank r takes samples ``bounds[r]`` … ``bounds[r + 1] − 1``."""
    return [-(-total * rank // world_size) for rank in range(world_size + 1)]


class BaseBatchSampler(Sampler[list[int]], ABC):
    """Base class of batch samplers whose global batches do not depend on the world size.

    A subclass returns the global batches of an epoch (:meth:`global_batches`). Iteration yields this rank's consecutive
    part of each, a list of sample indices, which may be empty: collate it with :class:`CollateEmptyBatches`.

    Iteration does not change the position, since a DataLoader reads ahead of the training. :meth:`set_epoch` and
    :meth:`set_position` do. A trainer that asks for ``drop_last`` would split parts again, and gets a ValueError.

    Construct it on every rank: ranks compare their data and settings. A :class:`contrastive_zoo.World` as
    ``process_group`` is that world's view, without messages.

    Args:
        settings: what determines the global batches, by name: numbers, words and arrays.
        problem: an error in the subclass's arguments, in words.
        seed: the random order is a function of seed and epoch.
        drop_last: leave out the global batches at the end of an epoch that are not full, as torch's ``BatchSampler`` does.
            A part of a rank may be empty nevertheless.
        process_group: a process group, a 1-d DeviceMesh, or None for the default group at the time of the call.

    Raises:
        ValueError: on every rank alike: a problem on any rank, or ranks whose data or settings differ.

    Examples:
        >>> class Halves(BaseBatchSampler):
        ...     def __init__(self, n, **options):
        ...         super().__init__({"samples": n}, **options)
        ...         self.n = n
        ...     def global_batches(self, epoch):
        ...         return np.array_split(np.arange(self.n), 2)
        >>> [list(Halves(7, process_group=World(rank, 3))) for rank in range(3)]
        [[[0, 1], [4]], [[2], [5]], [[3], [6]]]
    """

    process_group = ProcessGroupAttribute()

    def __init__(
        self,
        settings: Mapping[str, object],
        problem: str | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        process_group: Processes = None,
    ) -> None:
        self.seed, self.process_group = seed, process_group
        self.epoch = self.step = 0
        self._asked: list[int] = []  # the epochs that were set or loaded since a batch was drawn
        self._drop_last = drop_last
        world = World.of(process_group, type(self).__name__)
        if problem is None and not is_integer(seed, at_least=0):
            problem = f"seed is an integer of at least 0, got {seed!r}."
        problem = problem or flag_problem(drop_last=drop_last)
        words = {
            name: array_in_one_line(value) if isinstance(value, np.ndarray) else in_one_line(value)
            for name, value in {**settings, "seed": seed, "drop_last": drop_last}.items()
        }
        self._digest = hashlib.blake2b(repr((type(self).__name__, words)).encode(), digest_size=8).hexdigest()
        if not isinstance(process_group, World):
            shake_hands(Statement(type(self).__name__, words, problem=problem), world)
        elif problem is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        self._batches: tuple[int, Batches] | None = None

    @abstractmethod
    def global_batches(self, epoch: int) -> Batches:
        """Return the sample indices of each global batch: a function of the data, the seed and the epoch."""

    def is_full(self, batch: NDArray[np.int64]) -> bool:
        """Return whether a batch, which ``drop_last`` leaves out otherwise, has as many samples as ``self.batch_size``."""
        return len(batch) == getattr(self, "batch_size", len(batch))

    def kept_batches(self, epoch: int) -> Batches:
        """Return :meth:`global_batches` but for those that ``drop_last`` leaves out."""
        batches = self.global_batches(epoch)
        end = len(batches)
        while self._drop_last and end and not self.is_full(batches[end - 1]):
            end -= 1
        return batches[:end]

    def bounds(self, batch: NDArray[np.int64], world_size: int) -> list[int]:
        """Return W + 1 bounds: rank r's part is ``batch[bounds[r] : bounds[r + 1]]``."""
        return even_bounds(len(batch), world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each global batch, from the position on.

        Raises:
            ValueError: one epoch was set or loaded, and then an earlier one, before a batch was drawn.
        """
        asked = self._asked
        # a loader that counts epochs itself has set it; who counts the batches of all epochs sets more than two
        if len(asked) == 2 and asked[1] < asked[0]:
            raise ValueError(
                f"{type(self).__name__}: epoch {asked[0]} was set or loaded, so the next batch is of that epoch or a later "
                f"one, got epoch {asked[1]}. With a loader that Accelerate has prepared, call "
                "loader.set_epoch(epoch) in place of sampler.set_epoch(epoch); to go back, call "
                f"sampler.set_position({{'epoch': {self.epoch}, 'step': 0}})."
            )
        self._asked = []
        world = World.of(self.process_group)
        for batch in self._of_epoch()[self.step :]:
            bounds = self.bounds(batch, world.size)
            yield batch[bounds[world.rank] : bounds[world.rank + 1]].tolist()

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch, wherever iteration begins."""
        return len(self._of_epoch())

    def _of_epoch(self) -> Batches:
        if self._batches is None or self._batches[0] != self.epoch:
            self._batches = self.epoch, self.kept_batches(self.epoch)
        return self._batches[1]

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch; in the current epoch, keep the step that was loaded.

        Raises:
            ValueError: ``epoch`` is no integer in 0 … 2**62.
        """
        if not is_integer(epoch, at_least=0, at_most=2**62):
            raise ValueError(f"{type(self).__name__}: an epoch is an integer in 0 … 2**62, got {epoch!r}.")
        if epoch != self.epoch:
            self.epoch, self.step = int(epoch), 0
        if self._asked[-1:] != [self.epoch]:
            self._asked = [*self._asked, self.epoch]

    def get_position(self, *, step: int) -> dict[str, Any]:
        """Return the position after ``step`` batches of the epoch, which you count: a DataLoader's workers have read more.

        After the last batch the position is the beginning of the next epoch.

        Raises:
            ValueError: ``step`` is not in 0 … number of batches.
        """
        self._check_step(step)
        epoch, step = (self.epoch, int(step)) if step < len(self) else (self.epoch + 1, 0)
        return {"epoch": epoch, "step": step, "digest": self._digest}

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Continue at a position, a dict with ``epoch`` and ``step``, on any number of ranks.

        Raises:
            ValueError: no position, or one of other data, another seed or other settings.
        """
        name = type(self).__name__
        if not (isinstance(position, Mapping) and {"epoch", "step"} <= position.keys()):
            got = sorted(position) if isinstance(position, Mapping) else described(position)
            raise ValueError(f"{name}: a position has an epoch and a step, got {got}.")
        if position.get("digest", self._digest) != self._digest:
            raise ValueError(
                f"{name}: the position belongs to a sampler of other data, another seed or other settings. Construct the "
                "sampler as before; to begin at a position of other batches, pass only its epoch and step."
            )
        moved = copy.copy(self)  # what is refused changes nothing here
        moved.set_epoch(position["epoch"])
        moved._check_step(position["step"])
        self.epoch, self.step, self._batches = moved.epoch, int(position["step"]), moved._batches
        self._asked = [self.epoch]

    def _check_step(self, step: Any) -> None:
        if not is_integer(step, at_least=0) or step > len(self):
            raise ValueError(
                f"{type(self).__name__}: a step is an integer in 0 … {len(self)}, the number of batches of epoch "
                f"{self.epoch}, got {step!r}."
            )

    @property
    def drop_last(self) -> bool:
        """Whether batches that are not full are left out; trainers that would split a rank's parts again ask for it.

        Raises:
            ValueError: there are several ranks.
        """
        if World.of(self.process_group).size == 1:
            return self._drop_last
        raise ValueError(
            f"{type(self).__name__}: the trainer would split the batches over the ranks again, but this sampler has split "
            "them. Accelerate, Hugging Face: do not prepare the loader, or pass it through "
            "accelerate.data_loader.prepare_data_loader(loader, accelerator.device, num_processes=1, process_index=0, "
            "put_on_device=True) and call loader.set_epoch(epoch). Lightning: use_distributed_sampler=False."
        )

    @property
    def sampler(self) -> "BaseBatchSampler":
        """This sampler: Lightning calls its ``sampler.set_epoch``, Hugging Face's Trainer ``batch_sampler.set_epoch``."""
        return self

    batch_sampler = sampler


class GlobalBatchSampler(BaseBatchSampler):
    """Global batches of ``batch_size`` samples, each sample once per epoch.

    The last batch may be smaller, and is split over the ranks like the others.

    Args:
        num_samples: the length of the dataset.
        batch_size: samples of a global batch, on all ranks together.
        shuffle: whether the order is random, another one in each epoch; otherwise it is that of the dataset.
        options: ``seed``, ``drop_last`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: sizes that are no integers of at least 1, or what the base class refuses.

    Examples:
        >>> for rank in range(2):
        ...     sampler = GlobalBatchSampler(9, batch_size=4, shuffle=False, process_group=World(rank, 2))
        ...     print(list(sampler))
        [[0, 1], [4, 5], [8]]
        [[2, 3], [6, 7], []]
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, shuffle: bool = True, **options: Unpack[SamplerOptions]
    ) -> None:
        self.num_samples, self.batch_size, self.shuffle = num_samples, batch_size, shuffle
        settings = {"num_samples": num_samples, "batch_size": batch_size, "shuffle": shuffle}
        problem = flag_problem(shuffle=shuffle) or size_problem("num_samples", num_samples)
        super().__init__(settings, problem or size_problem("batch_size", batch_size), **options)

    def global_batches(self, epoch: int) -> Batches:
        samples = np.arange(self.num_samples)
        order = np.argsort(random_keys(self.seed, epoch, samples)) if self.shuffle else samples
        return np.split(order, range(self.batch_size, self.num_samples, self.batch_size))


def size_problem(name: str, size: Any, at_least: int = 1) -> str | None:
    if not is_integer(size, at_least=at_least):
        return f"{name} is an integer of at least {at_least}, got {size!r}."
    # NumPy counts the bytes of samples in int64; np.arange(2**63 - 1) is empty
    return f"{name} is below 2**60, got {size!r}." if size >= 2**60 else None


class CollateEmptyBatches:
    """``collate_fn`` for ranks that may have no samples in a batch: an empty batch has the structure of the others.

    The example is collated once and twice. Tensors, arrays and lists that are twice as long for two samples are empty in the
    empty batch, also within dicts, tuples and dataclasses. A word or a number that is the same for both stays.

    Args:
        example: any one sample, such as ``dataset[0]``.
        collate_fn: collates samples; its results have the batch dimension first.

    Raises:
        ValueError: a ``collate_fn`` that cannot be called, or a result of another kind, such as the number of samples.

    Examples:
        >>> import torch
        >>> collate = CollateEmptyBatches({"image": torch.ones(2, 3), "label": 5, "name": "x"})
        >>> collate([])
        {'image': tensor([], size=(0, 2, 3)), 'label': tensor([], dtype=torch.int64), 'name': []}
    """

    def __init__(self, example: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        if not callable(collate_fn):
            raise ValueError(f"CollateEmptyBatches: collate_fn is a function of samples, got {described(collate_fn)}.")
        self.collate_fn = collate_fn
        self.empty = _emptied(collate_fn([example]), collate_fn([example, example]))

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        return self.collate_fn(samples) if len(samples) else copy.deepcopy(self.empty)


def _emptied(one: Any, two: Any) -> Any:
    """Return what a batch of no samples has in place of ``one`` and ``two``, those of one and of two equal samples."""
    kind: Any = type(one)
    if kind is type(two):
        has_length = isinstance(one, (Tensor, np.ndarray, list, tuple)) and getattr(one, "ndim", True)
        if has_length and len(two) == 2 * len(one):
            return one[:0]
        if isinstance(one, (list, tuple)) and len(two) == len(one):
            parts = map(_emptied, one, two)
            return kind(*parts) if hasattr(one, "_fields") else kind(parts)
        if isinstance(one, Mapping) and one.keys() == two.keys():
            return kind({name: _emptied(value, two[name]) for name, value in one.items()})
        if dataclasses.is_dataclass(kind):
            names = [x.name for x in dataclasses.fields(kind) if x.init]
            return dataclasses.replace(one, **{x: _emptied(getattr(one, x), getattr(two, x)) for x in names})
        if one is None or (isinstance(one, (str, bytes, complex, float, int, np.generic)) and one == two):
            return one
    raise ValueError(
        f"CollateEmptyBatches: collate_fn returns {described(one)} for one sample and {described(two)} for two. Return "
        "tensors with a row for each sample, in dicts, lists, tuples or dataclasses, so that there is an empty batch."
    )
