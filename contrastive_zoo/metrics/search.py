"""The k nearest embeddings of all ranks: each rank searches in its own, and the owners of queries merge the answers.

faiss proposes candidates in float32, whose scores are computed again in float64. A query is certain if its k-th score is
higher than anything that faiss may have missed by rounding. The rest is compared with every embedding.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from contrastive_zoo.metrics.exact import TIE_BITS, norms, prepared, scores_of
from contrastive_zoo.metrics.rounds import Round, local_positions, rounds
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.row_checks import described, flag_problem, is_integer, tensor_problem
from contrastive_zoo.ranks.session import agree
from contrastive_zoo.ranks.world import Processes, World

_BLOCK_ELEMENTS = 2**24  # elements of the queries that faiss searches at once, 64 MiB in float32
_ELEMENTS = 2**21  # elements of the float64 matrices that are held at once, 16 MiB each
_PAIR_ELEMENTS = 2**19  # elements of candidates at once: they stay in the cache (three times as fast as 2^22)
_UNCERTAIN = 256  # queries that are compared with all embeddings at once
_MARGIN = 8  # candidates beyond k, as rounding may exchange neighbours in order; an eighth of k is added


# scores and positions of the nearest embeddings, and for which queries no other one has the score of the k-th
Nearest = tuple[Float[Tensor, "n c"], Int[Tensor, "n c"], Bool[Tensor, " n"]]


class Proposals(NamedTuple):
    """Candidates of n queries among the embeddings of one rank, best first, before their exact scores are known."""

    positions: Int[Tensor, "n c"]  # −1 where there is none
    scores: Float[Tensor, "n c"]  # scores in float32, held in float64; −∞ where there is no candidate
    error: Float[Tensor, "n 1"]  # how much they may differ from the exact scores
    missed: Float[Tensor, "n 1"]  # what no item exceeds that is not a candidate; −∞ if there is no such item

    def reached(self, k: int) -> Float[Tensor, "n k"]:
        """Return k scores that different items reach at least; −∞ where there are fewer candidates."""
        best = (self.scores - self.error).topk(min(k, self.scores.shape[1])).values
        return pad(best, (0, k - best.shape[1]), value=-torch.inf)


class Gallery:
    """The embeddings [m, d] of one rank to search in, normalised block by block: a memory map stays on the disk."""

    def __init__(self, rows: Tensor, normalize: bool) -> None:
        self.rows, self.normalize = rows, normalize
        step = max(1, _ELEMENTS // max(1, rows.shape[1]))
        self.lengths = torch.cat([torch.empty(0, 1, dtype=torch.float64), *(norms(x.cpu()) for x in rows.split(step))])

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: slice | Tensor) -> Tensor:
        return prepared(self.rows[which], normalize=self.normalize, lengths=self.lengths[which])

    def blocks(self, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[int, Tensor]]:
        """Yield all embeddings in blocks, each with the position of its first."""
        step = max(1, elements // max(1, self.rows.shape[1]))
        for start in range(0, len(self), step):
            yield start, self.take(slice(start, start + step))

    def nearest(self, block: Round, queries: Float[Tensor, "n d"], k: int, excluded: Int[Tensor, "n e"]) -> Nearest:
        """Return this rank's items among the k nearest of all ranks, by score and position; −∞ and −1 for none."""
        k_local = min(k, len(self))
        proposals = self.proposals(queries, k_local, excluded)
        return self.top(queries, k_local, excluded, proposals, block.floors(proposals.reached(k)))

    def proposals(self, queries: Float[Tensor, "n d"], k: int, excluded: Int[Tensor, "n e"]) -> Proposals:
        """Return the best k candidates by faiss, and some more, as rounding may exchange neighbours in order."""
        depth = min(len(self), k + excluded.shape[1] + _MARGIN + k // 8)
        scores, positions = self._found_by_faiss(queries, depth)
        error = self._rounding(queries)
        missed = scores[:, -1:] + error if depth < len(self) else torch.full_like(error, -torch.inf)
        overflow = ~(scores.isfinite() & (positions >= 0)).all(1, keepdim=True)
        scores = scores.masked_fill(overflow, 0.0)
        error, missed = (x.masked_fill(overflow, torch.inf) for x in (error, missed))
        for column in excluded.T:
            positions = positions.masked_fill(positions == column[:, None], -1)
        return Proposals(positions, scores.masked_fill(positions < 0, -torch.inf), error, missed)

    def top(
        self, queries: Tensor, k: int, excluded: Tensor, proposals: Proposals, floor: Float[Tensor, "n 1"]
    ) -> Nearest:
        """Return what :meth:`nearest` does; the floor is a score that k items of all ranks reach, −∞ if none is known."""
        if k == 0:
            nothing = torch.empty(len(queries), 0)
            return nothing.double(), nothing.long(), torch.ones(len(queries), dtype=torch.bool)
        needed = (proposals.positions >= 0) & (proposals.scores + proposals.error >= floor)
        positions = proposals.positions.masked_fill(~needed, -1)
        scores = self.pair_scores(queries, torch.arange(len(queries)), positions)
        scores, positions = ordered(scores, positions, scores.shape[1])
        complete = torch.maximum(scores[:, k - 1 : k], floor) > proposals.missed
        complete = (complete | (proposals.missed == -torch.inf))[:, 0]
        for some in (~complete).nonzero().flatten().split(_UNCERTAIN):
            exact = self._compared_with_all(queries[some], k, excluded[some])
            scores[some], positions[some] = ordered(*exact, scores.shape[1])
        return scores, positions, complete

    def _rounding(self, queries: Tensor) -> Float[Tensor, "n 1"]:
        """Return how much the float32 scores of each query may differ from the exact ones."""
        width = queries.shape[1]
        longest = 1.0 + 2.0**-20 if self.normalize else self.lengths.amax().item() if len(self) else 0.0
        lengths = norms(queries)
        flushed = width**0.5 * (lengths + longest) + width  # float32 has no elements below 2^-126
        of_ties = 2.0 ** -(TIE_BITS[queries.dtype] + 1) if self.normalize else 0.0
        return (width + 8) * 2.0**-24 * longest * lengths + flushed * 2.0**-126 + of_ties

    def _found_by_faiss(self, queries: Tensor, depth: int) -> tuple[Float[Tensor, "n depth"], Int[Tensor, "n depth"]]:
        import faiss  # an optional dependency

        best, positions = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        threads = faiss.omp_get_max_threads()
        for start, rows in self.blocks():
            vectors = queries.float().numpy(), rows.float().numpy()
            faiss.omp_set_num_threads(torch.get_num_threads())  # the ranks of one machine share its cores
            try:
                nearest = faiss.knn(*vectors, min(depth, len(rows)), faiss.METRIC_INNER_PRODUCT)
            finally:
                faiss.omp_set_num_threads(threads)
            scores, places = map(torch.from_numpy, nearest)
            positions = torch.cat([positions, (places + start).masked_fill(places < 0, -1)], 1)
            best, order = torch.cat([best, scores], 1).topk(min(depth, positions.shape[1]), dim=1)
            positions = positions.gather(1, order)
        return best.double(), positions

    def pair_scores(self, queries: Tensor, which: Tensor, positions: Int[Tensor, "p c"]) -> Float[Tensor, "p c"]:
        """Return the exact scores of query ``which[i]`` and items ``positions[i]``; −∞ where a position is −1."""
        scores = torch.full(positions.shape, -torch.inf, dtype=torch.float64)
        step = max(1, _PAIR_ELEMENTS // max(1, positions.shape[1] * queries.shape[1]))
        for start in range(0, len(which), step):
            some = slice(start, start + step)
            # candidates are ordered by their float32 scores, so those that are needed come first
            width = positions.shape[1] - int((positions[some] >= 0).any(0).flip(0).int().argmax())
            kept = positions[some, :width]
            rows = self.take(kept.clamp(min=0).flatten()).view(*kept.shape, queries.shape[1])
            of_pairs = scores_of(queries[which[some], None], rows, normalize=self.normalize)[:, 0]
            scores[some, :width] = of_pairs.masked_fill_(kept < 0, -torch.inf)
        return scores

    def _compared_with_all(self, queries: Tensor, k: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
        best, positions = torch.empty(len(queries), 0).double(), torch.empty(len(queries), 0).long()
        for start, scores in self.score_blocks(queries, excluded):
            here = torch.arange(start, start + scores.shape[1]).expand(scores.shape)
            best, positions = ordered(torch.cat([best, scores], 1), torch.cat([positions, here], 1), k)
        return best, positions

    def score_blocks(self, queries: Tensor, excluded: Tensor) -> Iterator[tuple[int, Float[Tensor, "n c"]]]:
        """Yield the exact scores of all items in blocks; −∞ for excluded ones."""
        for start, rows in self.blocks(_ELEMENTS):
            for first in range(0, len(rows), step := max(1, _ELEMENTS // max(1, len(queries)))):
                scores = scores_of(queries, rows[first : first + step], normalize=self.normalize)
                begin = start + first
                which, column = ((excluded >= begin) & (excluded < begin + scores.shape[1])).nonzero(as_tuple=True)
                scores[which, excluded[which, column] - begin] = -torch.inf
                yield begin, scores


def ordered(scores: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row by score, then by position; padded with −∞ and −1."""
    positions, order = positions.sort(dim=1)
    scores, order = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    scores, positions, missing = scores[:, :k], positions.gather(1, order[:, :k]), max(0, k - scores.shape[1])
    scores, positions = pad(scores, (0, missing), value=-torch.inf), pad(positions, (0, missing), value=-1)
    return scores, positions.masked_fill(scores == -torch.inf, -1)


class Neighbors(NamedTuple):
    """The nearest embeddings of each query, best first.

    Examples:
        >>> top_k(torch.eye(2), 2 * torch.eye(2), k=1, normalize=False).scores.flatten()
        tensor([2., 2.], dtype=torch.float64)
    """

    scores: Float[Tensor, "n k"]
    """Dot products in float64; −∞ where a query has fewer than k that are not excluded."""
    indices: Int[Tensor, "n k"]
    """Indices into the gallery of all ranks, in rank order; −1 where there is none."""


@torch.no_grad()
def top_k(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    k: int,
    excluded: Int[Tensor, "n e"] | None = None,
    normalize: bool = True,
    process_group: Processes = None,
) -> Neighbors:
    """Return the k nearest embeddings of the gallery of all ranks, for this rank's queries.

    Equal to ``torch.topk(queries @ all_gather(gallery).T, k)`` in float64, where equal scores are ordered by index, and the
    same bits for every split. Cosines are rounded to multiples of 2^-21, of float64 embeddings to 2^-40. Embeddings of one
    direction are then equally near, but for queries whose cosine with them is at the boundary of two multiples. Each rank
    holds its own embeddings, k numbers per query, and blocks of constant size.

    Args:
        queries: this rank's queries; ranks may hold different numbers, including zero.
        gallery: this rank's embeddings to search in; None for the other queries. A memory map is read block by block.
        k: number of neighbours.
        excluded: indices into the gallery of all ranks that a query must not find; −1 for none. The same e on every rank.
        normalize: compare cosines; otherwise dot products. float64 embeddings are normalised in float64, others in float32.
        process_group: who holds embeddings.

    Raises:
        ValueError: the same on every rank: arguments that do not belong together, embeddings that are not finite or whose
            dot products overflow float64, k outside of 1 … embeddings to search in; faiss is missing.

    Examples:
        >>> found = top_k(torch.tensor([[1.0, 0.1]]), torch.eye(3)[:, :2], k=2)
        >>> found.indices
        tensor([[0, 1]])
    """
    world = World.of(process_group, "top_k")
    rows = queries if gallery is None else gallery
    arguments = {"queries": queries, "gallery": rows} | ({} if excluded is None else {"excluded": excluded})
    problem = settings_problem(k=k, normalize=normalize) or rows_problem(queries, rows)
    if excluded is not None:
        problem = problem or tensor_problem("excluded", excluded)
        if problem is None and (excluded.dtype != torch.int64 or excluded.ndim != 2 or len(excluded) != len(queries)):
            got = described(excluded)
            problem = f"excluded are int64 [n, e], indices for each of the {len(queries)} queries, got {got}."
    elif gallery is not None:
        problem = problem or repeated_problem(queries, gallery, "Leave out gallery, or pass excluded.")
    problem = problem or overflow_problem(normalize, queries=queries, gallery=rows)
    settings = {"k": k, "normalize": normalize, "leave one out": gallery is None}
    stated: Any = {"problem": problem, "settings": settings, "distinct": rows}
    shards = agree("top_k", arguments, world=world, **stated).shards
    candidates = max(0, shards[1].total - (gallery is None))
    if not 1 <= k <= candidates:
        raise ValueError(f"top_k: k is between 1 and the {candidates} rows to search in, got {k}. Lower k.")
    shape, start = (len(queries), k), shards[1].start
    with reported(world), torch.device("cpu"):
        result = Neighbors(torch.empty(shape, dtype=torch.float64), torch.empty(shape, dtype=torch.int64))
        excluded = torch.empty(len(queries), 0, dtype=torch.int64) if excluded is None else excluded.cpu()
        if gallery is None:
            self_indices = torch.arange(shards[0].start, shards[0].start + shards[0].size)
            excluded = torch.cat([excluded, self_indices[:, None]], 1)
        prepared_queries = prepared(queries, normalize=normalize)
        local = Gallery(rows.detach(), normalize)
        for block in rounds(shards[0], world):
            outside = local_positions(block.gathered(excluded), start, len(local))
            scores, positions, _ = local.nearest(block, block.gathered(prepared_queries), k, outside)
            scores, positions = ordered(scores, positions, k)
            indices = positions + start * (positions >= 0)
            scores, indices = (torch.cat(block.answered(x), 1) for x in (scores, indices))
            result.scores[block.local], result.indices[block.local] = ordered(scores, indices, k)
    return result


def rows_problem(queries: Tensor, rows: Tensor, name: str = "gallery") -> str | None:
    if problem := tensor_problem("queries", queries) or tensor_problem(name, rows):
        return problem
    valid = all(x.ndim == 2 and x.is_floating_point() for x in (queries, rows))
    if valid and queries.shape[1] == rows.shape[1] and queries.dtype == rows.dtype:
        return None
    got = f"{described(queries)} and {described(rows)}"
    return f"queries [n, d] and {name} [m, d] are floating-point rows of one width and dtype, got {got}."


def repeated_problem(queries: Tensor, rows: Tensor, fix: str, name: str = "gallery") -> str | None:
    same_memory = queries.data_ptr() == rows.data_ptr() != 0 and queries.shape == rows.shape  # 0 of a tensor subclass
    if not queries.numel() or not (queries is rows or same_memory):
        return None
    return f"queries and {name} are one tensor, in which each query finds itself. {fix}"


def overflow_problem(normalize: bool, **rows: Tensor) -> str | None:
    """Return which embeddings may have dot products, or norms, that float64 does not hold, in words; None if none have."""
    for name, x in rows.items():
        limit = 2.0 ** (1022 if normalize else 511) / max(1, x.shape[1]) ** 0.5
        if x.dtype == torch.float64 and x.numel():
            largest = max(abs(bound.item()) for bound in x.detach().aminmax())
            if limit < largest < torch.inf:
                what = "norms" if normalize else "dot products"
                return f"{name} must be below {limit:.3g}, as their {what} overflow, got {largest:.3g}. Scale them."
    return None


def settings_problem(*, k: object = 1, normalize: object) -> str | None:
    try:
        import faiss  # noqa: F401 - whether it can be imported
    except ImportError:
        return "searches with faiss, which is not installed: pip install 'contrastive_zoo[faiss]'."
    if not is_integer(k):
        return f"k is an integer, got {described(k)}."
    return flag_problem(normalize=normalize)
