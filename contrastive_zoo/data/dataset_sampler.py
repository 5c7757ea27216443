"""Batches each of one data set, in random turns."""

from collections.abc import Iterator, Sequence
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, SamplerOptions, size_problem
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described


class OneDatasetBatchSampler(BaseBatchSampler):
    """Global batches each of one of several data sets, in random order; each data set has its own sampler.

    In-batch negatives of another data set would be easy. Indices are those of ``torch.utils.data.ConcatDataset``.

    With bᵢ the number of batches of data set i, b the largest of them and T the temperature, an epoch has

        bᵢ · (b / bᵢ)^(1 − 1/T)

    batches of data set i, rounded. At T = 1 these are all batches, each once; at T = ∞ all data sets have b. A data set that
    is exhausted begins again, in a new order. The data sets take turns at random. Each keeps the order of its sampler.

    Args:
        samplers: a batch sampler for each data set: any of this library or your own.
        sizes: samples of each data set.
        temperature: T ≥ 1, dimensionless, ``math.inf`` included.
        options: ``seed`` and ``process_group`` of :class:`BaseBatchSampler`. Samplers have ``drop_last``.

    Raises:
        ValueError: samplers, sizes or settings that are not as above; what the base class refuses. At an epoch: a sampler
            without batches or with indices beyond its data set.

    Examples:
        >>> from contrastive_zoo import World
        >>> from contrastive_zoo.data import GlobalBatchSampler
        >>> parts = [GlobalBatchSampler(n, batch_size=2, shuffle=False, process_group=World()) for n in (8, 2)]
        >>> list(OneDatasetBatchSampler(parts, sizes=[8, 2], temperature=2, process_group=World()))
        [[0, 1], [8, 9], [2, 3], [4, 5], [8, 9], [6, 7]]

    Source: T as in Xue et al. 2021, §3.1, where it is 1/α, https://arxiv.org/abs/2010.11934
    """

    def __init__(
        self,
        samplers: Sequence[BaseBatchSampler],
        *,
        sizes: Sequence[int],
        temperature: float = 1.0,
        **options: Unpack[SamplerOptions],
    ) -> None:
        problem = _samplers_problem(samplers, sizes)
        if problem is None and options.get("drop_last"):
            problem = "drop_last belongs to the samplers of the data sets. Pass drop_last=True to each of them."
        if problem is None and not (isinstance(temperature, (int, float)) and temperature >= 1):
            problem = f"temperature is a number of at least 1, got {described(temperature)}."
        self.samplers, self.sizes = (list(samplers), tuple(sizes)) if problem is None else ([], ())
        self.temperature = temperature
        settings = {"samplers": [x._digest for x in self.samplers], "sizes": self.sizes, "temperature": temperature}
        super().__init__(settings, problem, **options)
        self._starts = np.cumsum([0, *self.sizes])

    def global_batches(self, epoch: int) -> Batches:
        """Return the batches of all data sets.

        Raises:
            ValueError: a sampler has no batch.
        """
        plans = [x.kept_batches(epoch) for x in self.samplers]
        numbers = [len(plan) for plan in plans]
        if not all(numbers):
            raise ValueError(f"OneDatasetBatchSampler: each sampler has a batch, got {numbers} batches.")
        power = 1 - 1 / self.temperature
        counts = [round(n * (max(numbers) / n) ** power) for n in numbers]
        turns = np.repeat(np.arange(len(counts)), counts)
        shuffled = turns[np.argsort(random_keys(self.seed, epoch, np.arange(len(turns))))]
        batches = [self._passes(index, plan, epoch) for index, plan in enumerate(plans)]
        return [next(batches[index]) for index in shuffled.tolist()]

    def _passes(self, index: int, plan: Batches, epoch: int) -> Iterator[NDArray[np.int64]]:
        """Yield a data set's batches of this epoch, and then those of other epochs, which are random numbers."""
        epochs = (int(random_keys(self.seed, epoch, again)) >> 2 for again in count(1))
        for batch in chain(plan, chain.from_iterable(map(self.samplers[index].kept_batches, epochs))):
            if len(batch) and (batch.min() < 0 or batch.max() >= self.sizes[index]):
                raise ValueError(
                    f"OneDatasetBatchSampler: indices of data set {index} are between 0 and {self.sizes[index] - 1}, got "
                    f"{batch.min()} … {batch.max()}. Pass the sizes of the data sets that the samplers are of."
                )
            yield self._starts[index] + batch

    def bounds(self, batch: NDArray[np.int64], world_size: int) -> list[int]:
        index = int(np.searchsorted(self._starts, batch[:1], "right").max(initial=1)) - 1
        return self.samplers[index].bounds(batch - self._starts[index], world_size)


def _samplers_problem(samplers: object, sizes: object) -> str | None:
    if not isinstance(samplers, Sequence) or not samplers:
        return f"samplers are a list of one batch sampler for each data set, got {described(samplers)}."
    for x in samplers:
        if not isinstance(x, BaseBatchSampler):
            return f"samplers are batch samplers of contrastive_zoo.data, got {described(x)}."
    if not isinstance(sizes, Sequence) or len(sizes) != len(samplers):
        return f"sizes are one integer for each of the {len(samplers)} samplers, got {described(sizes)}."
    return next(filter(None, (size_problem("a size", x) for x in sizes)), None)
