"""Hard negatives: of the queries of all ranks in the corpus of all ranks, and as near neighbours in a batch."""

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, Where, grouped, size_problem
from contrastive_zoo.data.mining import Guide, Mined, Mining, Output, Sampling, Selection
from contrastive_zoo.metrics.local_search import ApproximateIndex
from contrastive_zoo.metrics.search import top_k
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, tensor_problem
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Processes, World

Rows: TypeAlias = Tensor | NDArray[np.generic]


def mine_hard_negatives(
    queries: Rows,
    corpus: Rows,
    positives: Rows,
    *,
    num_negatives: int = 3,
    range_min: int = 0,
    range_max: int | None = None,
    max_score: float | None = None,
    min_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    sampling: Sampling = "top",
    seed: int = 0,
    query_labels: Rows | None = None,
    corpus_labels: Rows | None = None,
    corpus_ids: Rows | None = None,
    guide: Guide | None = None,
    guide_margin: float = 0.0,
    output: Output = "triplet",
    normalize: bool = True,
    index: ApproximateIndex | None = None,
    progress: bool = False,
    process_group: Processes = None,
) -> dict[str, NDArray[Any]]:
    """Return hard negatives of this rank's queries in the corpus of all ranks, as columns.

    All indices count the queries, or the corpus, of all ranks in rank order. The columns of all ranks, concatenated in rank
    order, are the same bits for every split: candidates are the exact nearest items, scores are computed in float64, and a
    random choice is a function of the seed, the query and the candidate.

    The candidates of a query are the items of the corpus without its positives and without those of the same label or id,
    by descending score. Those on ranks ``range_min`` … ``range_max − 1`` are looked at; of these the ones that pass all
    thresholds are negatives. Margins refer to the query's positive with the lowest score.

    Memory: a rank's own embeddings, the candidates of 16,384 queries, and ``num_negatives`` per query. The corpus may
    be a NumPy memory map, which is read in blocks.

    Args:
        queries: [n, d], this rank's; ranks may hold different numbers, including zero.
        corpus: [m, d], this rank's part of the corpus.
        positives: [n] or [n, p], global indices of each query's positives in the corpus; −1 for none.
        num_negatives: negatives per query.
        range_min: the best candidates to skip: they may be positives without a label.
        range_max: end of the ranks to look at; None is ``range_min`` plus ``num_negatives``, or ten times as many where
            thresholds, a guide or random sampling need a choice.
        max_score: the highest score of a negative.
        min_score: the lowest score of a negative.
        absolute_margin: a negative's score is at least this much below the positive's.
        relative_margin: the same as a share of the positive's absolute score (NV-Retriever: 0.05).
        sampling: ``"top"`` takes the best ones, ``"random"`` any.
        seed: of random sampling.
        query_labels: [n] integers; items of the corpus with the query's label are no negatives.
        corpus_labels: [m] integers, to go with ``query_labels``.
        corpus_ids: [m] integers; items with the id of one of the query's positives are no negatives, such as duplicates.
        guide: returns scores of a better model for pairs of query and corpus indices (global). A candidate whose score is
            higher than that of the query's worst positive minus ``guide_margin`` is taken for a false negative. It is called
            on each rank with this rank's queries, and sends no messages.
        guide_margin: how much below the positive the guide's score must be.
        output: ``"triplet"`` has a row for each (query, positive, negative); ``"n-tuple"`` a row for each (query, positive)
            with all ``num_negatives``, without queries that have fewer.
        normalize: whether scores are cosines; otherwise dot products.
        index: search approximately; None for an exact search.
        progress: whether rank 0 shows a progress bar (tqdm).
        process_group: who holds embeddings.

    Returns:
        Arrays of one length by name: ``query``, ``positive``, ``negative`` (int64), ``positive_score`` and
        ``negative_score`` (float64); ``negative`` and ``negative_score`` are [rows, num_negatives] for n-tuples. Suitable
        for ``datasets.Dataset.from_dict`` and ``pyarrow.table``.

    Raises:
        ValueError: on every rank alike: shapes, widths or dtypes that do not belong together, embeddings that are not
            finite, positives that are not in the corpus, settings that select nothing or differ between ranks, or a guide
            that raised on some ranks only or returned anything but one number per pair; faiss is not installed, or tqdm
            with ``progress``.

    Examples:
        >>> corpus = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.5, 0.5], [0.0, 1.0]])
        >>> mined = mine_hard_negatives(corpus[:2], corpus, torch.tensor([1, 0]), num_negatives=1, range_min=1)
        >>> mined["query"], mined["positive"], mined["negative"]
        (array([0, 1]), array([1, 0]), array([2, 2]))

    Source: Xiong et al. 2021 (ANCE), https://arxiv.org/abs/2007.00808; margins: Moreira et al. 2024 (NV-Retriever),
    https://arxiv.org/abs/2407.15831
    """
    selection = Selection(
        num_negatives, range_min, range_max, max_score, min_score, absolute_margin, relative_margin, guide_margin,
        sampling, seed,
    )  # fmt: skip
    rows = map(as_tensor, (queries, corpus, positives))
    others = map(as_tensor, (query_labels, corpus_labels, corpus_ids))
    mining = Mining(*rows, selection, *others, guide, normalize, index, progress, output, process_group)  # type: ignore[call-arg]  # a map
    return _columns(*mining.run(), mining.table, output)


def _columns(start: int, mined: Mined, positives: Int[Tensor, "n p"], output: str) -> dict[str, NDArray[Any]]:
    """Return a row for each pair of query and positive, or for each triplet."""
    exists = mined.negatives >= 0
    complete = exists.all(1, keepdim=True) if output == "n-tuple" else exists.any(1, keepdim=True)
    query, column = ((positives >= 0) & complete).nonzero(as_tuple=True)
    columns = {
        "query": query + start,
        "positive": positives[query, column],
        "negative": mined.negatives[query],
        "positive_score": mined.positive_scores[query, column],
        "negative_score": mined.scores[query],
    }
    if output == "triplet":
        pair, rank = exists[query].nonzero(as_tuple=True)
        columns = {name: x[pair, rank] if x.ndim == 2 else x[pair] for name, x in columns.items()}
    return {name: x.numpy() for name, x in columns.items()}


def as_tensor(rows: Any) -> Any:
    """Return an array as a tensor that shares its memory, also a read-only memory map; None stays None."""
    if not isinstance(rows, (np.ndarray, list, tuple)):
        return rows  # None, a tensor, or something that is refused in words later
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        try:
            return torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):  # an array of text, or lists of unequal length
            return rows


class HardNegativeBatchSampler(BaseBatchSampler):
    """Global batches of near neighbours, each sample once per epoch: in-batch negatives are hard negatives.

    A batch is filled with groups: a random sample that no batch has yet, and its nearest neighbours that no batch has yet,
    up to ``group_size``. Neighbours that are used up make a group smaller; the batch is then filled with further groups.

    Args:
        neighbours: [n, k] indices of each sample's neighbours, nearest first, the same on every rank; −1 is none. The
            sample itself is skipped. Leave out known positives, or pair this with labels in the loss.
        batch_size: samples of a global batch, on all ranks together.
        group_size: samples that are near each other, at most ``batch_size``.
        where: ``seed``, ``rank_weights`` and ``process_group`` of :class:`BaseBatchSampler`.

    Raises:
        ValueError: neighbours that are not integers [n, k] between −1 and n − 1, sizes below 1, a group larger than a
            batch, or what the base class refuses.

    Examples:
        >>> from contrastive_zoo import World
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
        **where: Unpack[Where],
    ) -> None:
        rows = as_tensor(neighbours)
        problem = size_problem("batch_size", batch_size) or size_problem("group_size", group_size)
        problem = problem or _table_problem(rows)
        table = rows.numpy(force=True) if problem is None else np.empty((0, 0), np.int64)
        if problem is None and group_size > batch_size:
            problem = f"a group is not larger than a batch, got group_size={group_size} and batch_size={batch_size}."
        self.neighbours, self.batch_size, self.group_size = table, batch_size, group_size
        settings = {"neighbours": table, "batch_size": batch_size, "group_size": group_size}
        super().__init__(settings, problem, **where)

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
            settings: ``batch_size``, ``group_size``, ``seed`` and ``rank_weights``.

        Raises:
            ValueError: on every rank alike: embeddings that are not finite or not of one width, more neighbours than other
                embeddings, what the constructor refuses, or faiss is not installed.

        Examples:
            >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 0.9]])
            >>> sampler = HardNegativeBatchSampler.from_embeddings(
            ...     rows, num_neighbours=1, batch_size=2, group_size=2)
            >>> sorted(sorted(batch) for batch in sampler)
            [[0, 2], [1, 3]]
        """
        world = World.of(process_group, cls.__name__)
        result = top_k(embeddings, k=num_neighbours, excluded=positives, normalize=normalize, process_group=world)
        table = gather_rows(result.indices, world.shards(len(embeddings)), world)
        return cls(table, process_group=process_group, **settings)

    def global_batches(self, epoch: int) -> Batches:
        size = len(self.neighbours)
        unused = [True] * size
        order: list[int] = []
        keys = random_keys(self.seed, epoch, np.arange(size))
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
