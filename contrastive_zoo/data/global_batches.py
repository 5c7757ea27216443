"""Batches in random or stored order."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches
from contrastive_zoo.loss_base.numbers import flag_problem, of_size
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import is_integer
from contrastive_zoo.ranks.world import Processes


class GlobalBatchSampler(BaseBatchSampler):
    """Global batches of ``batch_size`` samples, each sample once per epoch.

    It replaces torch's DistributedSampler with a BatchSampler, whose ranks repeat samples to make their numbers equal, and
    whose global batches depend on W. Here the last batch is smaller, and is split over the ranks like the others.

    Args:
        num_samples: the length of the dataset.
        batch_size: samples of a global batch, on all ranks together.
        shuffle: whether the order is random, another one in each epoch; otherwise it is that of the dataset.
        seed: see :class:`BaseBatchSampler`.
        rank_weights: each rank's share of a global batch; None is an even split.
        process_group: see :class:`BaseBatchSampler`.

    Raises:
        ValueError: sizes that are no integers of at least 1, or what the base class refuses.

    Examples:
        >>> from contrastive_zoo import World
        >>> for rank in range(2):
        ...     sampler = GlobalBatchSampler(9, batch_size=4, shuffle=False, process_group=World(rank, 2))
        ...     print(list(sampler))
        [[0, 1], [4, 5], [8]]
        [[2, 3], [6, 7], []]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        rank_weights: Sequence[float] | None = None,
        process_group: Processes = None,
    ) -> None:
        self.num_samples, self.batch_size, self.shuffle = num_samples, batch_size, shuffle
        settings = {"num_samples": num_samples, "batch_size": batch_size, "shuffle": shuffle}
        problem = flag_problem(shuffle=shuffle)
        problem = problem or size_problem("num_samples", num_samples) or size_problem("batch_size", batch_size)
        super().__init__(settings, problem, seed=seed, rank_weights=rank_weights, process_group=process_group)

    def global_batches(self, epoch: int) -> Batches:
        """Return consecutive parts of the epoch's order."""
        return of_size("GlobalBatchSampler", partial(self._parts_of_order, epoch), num_samples=self.num_samples)

    def _parts_of_order(self, epoch: int) -> Batches:
        samples = np.arange(self.num_samples)
        order = np.argsort(random_keys(self.seed, epoch, samples)) if self.shuffle else samples
        return np.split(order, range(self.batch_size, self.num_samples, self.batch_size))


def size_problem(name: str, size: object, at_least: int = 1) -> str | None:
    """Return why this is no size, in words; None if it is one.

    Examples:
        >>> size_problem("batch_size", 0)
        'batch_size is an integer of at least 1, got 0.'
        >>> size_problem("m", 2**64)
        'm is below 2**60, got 18446744073709551616.'
    """
    if not is_integer(size, at_least=at_least):
        return f"{name} is an integer of at least {at_least}, got {size!r}."
    # NumPy counts the bytes of samples in int64; np.arange(2**63 - 1) is empty
    return f"{name} is below 2**60, got {size!r}." if size >= 2**60 else None  # type: ignore[operator]  # an integer
