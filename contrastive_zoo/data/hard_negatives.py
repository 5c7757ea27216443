"""Batches of near neighbours, whose in-batch negatives are hard."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, SamplerOptions, grouped, size_problem
from contrastive_zoo.data.mining import as_tensor
from contrastive_zoo.metrics.search import top_k
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, tensor_problem
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Processes, World


class HardNegativeBatchSampler(BaseBatchSampler):
    """Global batches of near neighbours, each sample once per epoch: in-batch negatives are hard negatives.

    A batch is filled with groups: a random sample that no batch has yet, and its nearest neighbours that no batch has yet,
    up to ``group_size``.

    Args:
        neighbours: [n, k] indices of each sample's neighbours, nearest first, the same on every rank; −1 is none. The
            sample itself is skipped. Leave out known positives, or pair this with labels in the loss.
        batch_size: samples of a global batch, on all ranks together.
        group_size: samples that are near each other, at most ``batch_size``.
        options: ``seed``, ``drop_last``, ``rank_weights`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: neighbours or sizes that are not as above, or what the base class refuses.

    Examples:
        >>> neighbours = [[1, 2], [0, 2], [3, 1], [2, 1]]  # 0 and 1, 2 and 3
        >>> sampler = HardNegativeBatchSampler(neighbours, batch_size=2, group_size=2, process_group=World())
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        neighbours: Tensor | NDArray[np.integer] | Sequence[Sequence[int]],
        *,
        batch_size: int,
        group_size: int,
        **options: Unpack[SamplerOptions],
    ) -> None:
        rows = as_tensor(neighbours)
        problem = size_problem("batch_size", batch_size) or size_problem("group_size", group_size)
        problem = problem or _table_problem(rows)
        table = rows.numpy(force=True) if problem is None else np.empty((0, 0), np.int64)
        if problem is None and group_size > batch_size:
            problem = f"a group is not larger than a batch, got group_size={group_size} and batch_size={batch_size}."
        self.neighbours, self.batch_size, self.group_size = table, batch_size, group_size
        settings = {"neighbours": table, "batch_size": batch_size, "group_size": group_size}
        super().__init__(settings, problem, **options)

    @classmethod
    def from_embeddings(
        cls,
        embeddings: Float[Tensor, "n d"],
        *,
        num_neighbours: int,
        positives: Int[Tensor, "n p"] | None = None,
        normalize: bool = True,
        process_group: Processes = None,
        **settings: Any,
    ) -> "HardNegativeBatchSampler":
        """Return a sampler over the nearest of all ranks' embeddings, by an exact search.

        Args:
            embeddings: this rank's; the dataset is those of all ranks in rank order.
            num_neighbours: neighbours of each sample.
            positives: global indices that are not wanted as neighbours; −1 for none.
            normalize: whether neighbours have the highest cosine; otherwise the highest dot product.
            process_group: who holds embeddings, and trains.
            settings: ``batch_size``, ``group_size``, ``seed``, ``drop_last`` and ``rank_weights``.

        Raises:
            ValueError: on every rank alike, what :func:`contrastive_zoo.metrics.top_k` and the constructor refuse.
        """
        world = World.of(process_group, cls.__name__)
        result = top_k(embeddings, k=num_neighbours, excluded=positives, normalize=normalize, process_group=world)
        table = gather_rows(result.indices, world.shards(len(embeddings)), world)
        return cls(table, process_group=process_group, **settings)

    def global_batches(self, epoch: int) -> Batches:
        size = len(self.neighbours)
        unused = [True] * size
        order, keys = list[int](), random_keys(self.seed, epoch, np.arange(size))
        for first in np.argsort(keys).tolist():
            if not unused[first]:
                continue
            end = min(len(order) + self.group_size, -(-(len(order) + 1) // self.batch_size) * self.batch_size)
            unused[first] = False
            order.append(first)
            for near in self.neighbours[first].tolist():
                if len(order) == end:
                    break
                if near >= 0 and unused[near]:
                    unused[near] = False
                    order.append(near)
        batch_of = np.empty(size, np.int64)
        batch_of[order] = np.arange(size) // self.batch_size
        return grouped(batch_of, keys)  # in random order, so that no rank gets whole groups


def _table_problem(table: Any) -> str | None:
    if not isinstance(table, Tensor):
        return f"neighbours are a table of indices, one row per sample, got {described(table)}."
    if problem := tensor_problem("neighbours", table):
        return problem
    if table.ndim != 2 or not len(table) or table.is_floating_point() or table.dtype is torch.bool:
        return f"neighbours are integers [n, k], got {described(table)}."
    if table.numel() and (table.min() < -1 or table.max() >= len(table)):
        return f"neighbours of {len(table)} samples are between -1 and {len(table) - 1}, got {table.min()} … {table.max()}."
    return None
