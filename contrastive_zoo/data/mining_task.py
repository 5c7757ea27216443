"""One mining: its arguments, the checks that all ranks agree on, and the search step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.data.mining_inputs import Guide, bar, called_on_every_rank, fetched, guided, progress_problem
from contrastive_zoo.data.mining_selection import Selection
from contrastive_zoo.loss_base.numbers import flag_problem
from contrastive_zoo.metrics.exact import prepared, similarities
from contrastive_zoo.metrics.local_search import ApproximateIndex, faiss_problem
from contrastive_zoo.metrics.search import Neighbors, rows_problem, settings_problem, top_k
from contrastive_zoo.ranks.row_checks import described, tensor_problem
from contrastive_zoo.ranks.session import Session, agree_on_shards
from contrastive_zoo.ranks.world import Processes, Shards, World

QUERIES_OF_A_STEP = 16384
"""Queries of a rank whose candidates are held at once."""


class Mined(NamedTuple):
    """The hard negatives of this rank's queries."""

    negatives: Int[Tensor, "n num"]
    """Global indices, best first; −1 where there are fewer."""
    scores: Float[Tensor, "n num"]
    """Their similarities to the query; −∞ where there are fewer."""
    positive_scores: Float[Tensor, "n p"]
    """The similarities of the positives."""


@dataclass(frozen=True)
class Task:
    """The arguments of :func:`mine_hard_negatives` as tensors."""

    queries: Tensor
    corpus: Tensor
    positives: Tensor
    selection: Selection
    query_labels: Tensor | None = None
    corpus_labels: Tensor | None = None
    corpus_ids: Tensor | None = None
    guide: Guide | None = None
    normalize: bool = True
    index: ApproximateIndex | None = None
    progress: bool = False
    process_group: Processes = None

    @property
    def rows(self) -> dict[str, Tensor]:
        """The tensors, by argument."""
        names = ("queries", "corpus", "positives", "query_labels", "corpus_labels", "corpus_ids")
        required = names[:3]
        arguments = {name: x for name in names if (x := getattr(self, name)) is not None or name in required}
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in arguments.items()}

    @property
    def positive_table(self) -> Int[Tensor, "n p"]:
        """The positives with a second dimension, on the CPU."""
        return (self.positives if self.positives.ndim == 2 else self.positives[:, None]).detach().cpu()

    @property
    def problem(self) -> str | None:
        """Why this cannot be searched, in words; None if it can."""
        problem = flag_problem(progress=self.progress) or faiss_problem()
        problem = problem or (progress_problem() if self.progress else None)
        problem = problem or next(filter(None, starmap(tensor_problem, self.rows.items())), None)
        if problem := problem or settings_problem(normalize=self.normalize, index=self.index):
            return problem
        if not (self.guide is None or callable(self.guide)):
            return f"guide is a function of queries and candidates, or None, got {described(self.guide)}."
        if problem := rows_problem(self.queries, self.corpus, "corpus"):
            return problem
        if (self.query_labels is None) != (self.corpus_labels is None):
            return "query_labels and corpus_labels come together: a candidate's label is compared with the query's."
        if self.positives.ndim not in (1, 2):
            return f"positives are [n] or [n, p], got {described(self.positives)}."
        for name, tensor in self.rows.items():
            of = self.corpus if name.startswith("corpus") else self.queries
            single = name not in ("queries", "corpus", "positives")
            if not tensor.ndim or len(tensor) != len(of) or (single and tensor.ndim != 1):
                return f"{name} are one entry for each of {len(of)} rows, got {described(tensor)}."
            if name not in ("queries", "corpus") and tensor.dtype != torch.int64:
                return f"{name} are int64, got {described(tensor)}."
        return self.selection.problem


NO_LABEL = torch.iinfo(torch.int64).min
"""The label of a query that no row has."""


@dataclass(frozen=True)
class Corpus:
    """The rows of all ranks in which negatives are searched.

    Args:
        rows: this rank's.
        shards: the split of all of them.
        labels: [m, l], labels of this rank's rows; a candidate is no negative if one of them is the query's.
        normalize: whether scores are cosines.
        index: the approximate index; None for an exact search.
        world: the ranks.
    """

    rows: Tensor
    shards: Shards
    labels: Int[Tensor, "m l"] | None
    normalize: bool
    index: ApproximateIndex | None
    world: World

    def candidates(
        self, queries: Float[Tensor, "n d"], excluded: Int[Tensor, "n e"], labels: Int[Tensor, "n l q"] | None, k: int
    ) -> Neighbors:
        """Return the k best rows of each query that are not excluded and have none of the query's labels.

        The number of rows with the query's labels is not known before, so the search is repeated with twice the depth for
        queries that need it; all ranks repeat it together.

        ``excluded`` are global indices, −1 for none; ``labels`` are the query's, of each kind, or None.
        """
        everything = self.shards.total
        k = min(k, everything)
        results = self._searched(queries, excluded, k)
        if labels is None:
            return results
        result = Neighbors(results.scores.clone(), results.indices.clone())
        open_queries, depth = torch.arange(len(queries)), k
        while True:
            differs = self._differs(results.indices, labels[open_queries])
            results = Neighbors(
                results.scores.masked_fill(~differs, -torch.inf), results.indices.masked_fill(~differs, -1)
            )
            order = (~differs).int().argsort(dim=1, stable=True)[:, :k]
            result.scores[open_queries] = results.scores.gather(1, order)
            result.indices[open_queries] = results.indices.gather(1, order)
            open_queries = open_queries[differs.sum(1) < k]
            # a search of the whole corpus has found all there is
            if depth == everything or not any(number for (number,) in self.world.exchange([len(open_queries)])):
                return result
            depth = min(2 * depth, everything)
            results = self._searched(queries[open_queries], excluded[open_queries], depth)

    def _searched(self, queries: Tensor, excluded: Tensor, k: int) -> Neighbors:
        return top_k(
            queries, self.rows, k=k, excluded=excluded, normalize=self.normalize, index=self.index,
            process_group=self.world,
        )  # fmt: skip

    def _differs(self, indices: Int[Tensor, "n k"], labels: Int[Tensor, "n l q"]) -> Tensor:
        """Return which candidates exist and have none of the query's labels."""
        assert self.labels is not None
        theirs = fetched(self.labels, self.shards, indices.clamp(min=0), self.world)
        same = (theirs[..., None] == labels[:, None]) & (labels[:, None] != NO_LABEL)
        return ~same.flatten(2).any(2) & (indices >= 0)


@torch.no_grad()
def mine(task: Task, problem: str | None = None, settings: dict[str, Any] | None = None) -> tuple[int, Mined]:
    """Return the global index of this rank's first query, and the negatives of its queries.

    Raises:
        ValueError: see :func:`mine_hard_negatives`.
    """
    name = "mine_hard_negatives"
    world = World.of(task.process_group, name)
    session = Session.of(world, check_finite=False)  # the search checks rows
    arguments = {
        "selection": task.selection,
        "normalize": task.normalize,
        "guide": task.guide is not None,
        **(settings or {}),
    }
    rows = task.rows
    agreed = agree_on_shards(name, rows, world=session, problem=task.problem or problem, settings=arguments)
    shards = dict(zip(rows, agreed, strict=True))
    positives = task.positive_table
    total = shards["corpus"].total
    outside = (positives < -1) | (positives >= total)
    if total == 0:
        problem = "the corpus is empty on every rank."
    elif outside.any():
        problem = (
            f"positives are indices into the {total} rows of the corpus, or -1, got {positives[outside][0].item()}."
        )
    agree_on_shards(name, {}, world=world, problem=problem)
    labels = [x for x in (task.corpus_labels, task.corpus_ids) if x is not None]
    stacked = torch.stack(labels, 1) if labels else None
    corpus = Corpus(task.corpus, shards["corpus"], stacked, task.normalize, task.index, world)
    start = shards["queries"].start
    blocks = [
        _mined(task, corpus, positives, part, start, name) for part in _steps(shards["queries"], task.progress, world)
    ]
    return start, Mined(*(torch.cat(x) for x in zip(*blocks, strict=True)))


def _mined(task: Task, corpus: Corpus, all_positives: Tensor, part: slice, start: int, name: str) -> Mined:
    """Return the negatives of some of this rank's queries; all ranks call it together."""
    selection, world = task.selection, corpus.world
    queries, positives = task.queries[part], all_positives[part]
    scores_of_positives = _positive_scores(queries, positives, corpus)
    result = corpus.candidates(
        queries, positives, _labels(task, positives, part, corpus), selection.depth(task.guide is not None)
    )
    lowest = scores_of_positives.amin(1) if positives.shape[1] else torch.full((len(queries),), torch.inf).double()
    allowed = selection.allowed(result.scores, lowest)
    allowed[:, : selection.range_min] = False
    query = torch.arange(len(queries)) + start + part.start
    if task.guide is not None:
        judge = partial(guided, task.guide, query, positives, result.indices, allowed, selection.guide_margin)
        allowed &= called_on_every_rank(name, "the guide", judge, world=world)
    chosen = selection.chosen(allowed, result.indices, query)
    missing, place = chosen < 0, chosen.clamp(min=0)
    return Mined(
        result.indices.gather(1, place).masked_fill(missing, -1),
        result.scores.gather(1, place).masked_fill(missing, -torch.inf),
        scores_of_positives.masked_fill(positives < 0, torch.nan),
    )


def _positive_scores(queries: Tensor, positives: Int[Tensor, "n p"], corpus: Corpus) -> Float[Tensor, "n p"]:
    """Return the similarities of the positives; +∞ for none."""
    rows = fetched(corpus.rows, corpus.shards, positives.clamp(min=0), corpus.world)
    left, right = (prepared(x, normalize=corpus.normalize) for x in (queries, rows))
    return similarities(left[:, None], right)[:, 0].masked_fill(positives < 0, torch.inf)


def _labels(task: Task, positives: Int[Tensor, "n p"], part: slice, corpus: Corpus) -> Int[Tensor, "n l q"] | None:
    """Return for each kind of label those that a query's negatives must not have."""
    result = []
    if task.query_labels is not None:
        result.append(task.query_labels[part].cpu()[:, None])
    if task.corpus_ids is not None:
        ids = fetched(task.corpus_ids, corpus.shards, positives.clamp(min=0), corpus.world)
        result.append(ids.masked_fill(positives < 0, NO_LABEL))
    if not result:
        return None
    width = max(x.shape[1] for x in result)
    padded = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=NO_LABEL) for x in result]
    return torch.stack(padded, 1)


def _steps(queries: Shards, progress: bool, world: World) -> Iterator[slice]:
    """Yield parts of this rank's queries: equally many on every rank, the last ones possibly empty, but at least one."""
    number = max(1, -(-max(queries.sizes) // QUERIES_OF_A_STEP))
    with bar(queries.size, wanted=progress, shown=world.rank == 0) as advance:
        for step in range(number):
            part = slice(*(min(queries.size, QUERIES_OF_A_STEP * (step + x)) for x in (0, 1)))
            yield part
            advance(part.stop - part.start)
