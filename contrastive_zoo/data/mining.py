"""One mining: how negatives are selected, its arguments that all ranks agree on, and the search step by step."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import starmap
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.metrics.exact import prepared, similarities
from contrastive_zoo.metrics.local_search import ApproximateIndex, faiss_problem
from contrastive_zoo.metrics.rounds import ask
from contrastive_zoo.metrics.search import Neighbors, rows_problem, settings_problem, top_k
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, flag_problem, is_integer, tensor_problem, word_problem
from contrastive_zoo.ranks.session import Session, agree_on_shards
from contrastive_zoo.ranks.world import Processes, Shards, World

QUERIES_OF_A_STEP = 16384  # queries of a rank whose candidates are held at once

NO_LABEL = torch.iinfo(torch.int64).min  # the label of a query that no item has

_NAME = "mine_hard_negatives"

Guide: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of query indices [p] and corpus indices [p] that returns scores [p]."""


Sampling = Literal["top", "random"]
Output = Literal["triplet", "n-tuple"]

_INTEGERS = (("num_negatives", 1, 10**6), ("range_min", 0, 2**62), ("range_max", 0, 2**62), ("seed", 0, math.inf))
"""The settings that are integers, and their bounds. The result has ``num_negatives`` columns."""


def _is_score(x: object) -> bool:
    """Return whether scores can be compared with x: an integer of 64 bits, or another number that is not NaN."""
    if isinstance(x, int):
        return not isinstance(x, bool) and abs(x) < 2**63
    return isinstance(x, (float, np.integer, np.floating)) and not math.isnan(x)


@dataclass(frozen=True)
class Selection:
    """How negatives are chosen among candidates ordered by score, by the arguments of ``mine_hard_negatives``."""

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    guide_margin: float = 0.0
    sampling: Sampling = "top"
    seed: int = 0

    @property
    def problem(self) -> str | None:
        for name, at_least, at_most in _INTEGERS:
            value = getattr(self, name)
            if not (is_integer(value, at_least=at_least, at_most=at_most) or (name == "range_max" and value is None)):
                most = f", {at_least} … {at_most}" if at_most < math.inf else f" of at least {at_least}"
                return f"{name} is an integer{most}, got {described(value)}."
        if problem := word_problem("sampling", self.sampling, Sampling):
            return problem
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            return (
                f"range_min={self.range_min} … range_max={self.range_max} has fewer candidates than "
                f"num_negatives={self.num_negatives}. Raise range_max."
            )
        arguments = [self.guide_margin, *(x for x in self.thresholds if x is not None)]
        if not all(map(_is_score, arguments)):
            return f"scores and margins are numbers, got {(*self.thresholds, self.guide_margin)}."
        return None

    @property
    def thresholds(self) -> tuple[float | None, ...]:
        """What scores are compared with."""
        return self.max_score, self.min_score, self.absolute_margin, self.relative_margin

    def depth(self, guided: bool) -> int:
        """Return how many candidates are looked at: ``range_max``, or ten per negative where some may be refused."""
        if self.range_max is not None:
            return self.range_max
        refused = guided or any(x is not None for x in self.thresholds)
        return self.range_min + self.num_negatives * (10 if refused or self.sampling == "random" else 1)

    def allowed(self, scores: Float[Tensor, "n k"], positive: Float[Tensor, " n"]) -> Bool[Tensor, "n k"]:
        """Return which candidates may be negatives by their scores; the lowest positive score is +∞ if there is none."""
        fine = scores > -torch.inf
        threshold = positive[:, None]
        if self.absolute_margin is not None:
            fine &= scores <= threshold - self.absolute_margin
        if self.relative_margin is not None:
            bound = threshold - threshold.abs() * self.relative_margin
            fine &= (scores <= bound) | threshold.isinf()
        if self.max_score is not None:
            fine &= scores <= self.max_score
        if self.min_score is not None:
            fine &= scores >= self.min_score
        return fine

    def chosen(
        self, allowed: Bool[Tensor, "n k"], candidates: Int[Tensor, "n k"], query: Int[Tensor, " n"]
    ) -> Int[Tensor, "n num"]:
        """Return the chosen candidates' positions, best first, then −1; random by the seed and both indices."""
        ranks = torch.arange(allowed.shape[1]).expand(allowed.shape)
        if self.sampling == "random":
            keys = random_keys(self.seed, query[:, None].numpy(), candidates.numpy()) >> np.uint64(1)
            order = torch.from_numpy(keys.astype(np.int64)).masked_fill(~allowed, torch.iinfo(torch.int64).max)
            drawn = order.argsort(dim=1, stable=True)[:, : self.num_negatives]
            allowed = torch.zeros_like(allowed).scatter(1, drawn, True) & allowed
        best = ranks.masked_fill(~allowed, allowed.shape[1]).sort(1).values[:, : self.num_negatives]
        best = torch.nn.functional.pad(best, (0, self.num_negatives - best.shape[1]), value=allowed.shape[1])
        return best.masked_fill(best == allowed.shape[1], -1)


class Mined(NamedTuple):
    """The hard negatives of this rank's queries."""

    negatives: Int[Tensor, "n num"]  # global indices, best first; −1 where there are fewer
    scores: Float[Tensor, "n num"]  # their similarities to the query; −∞ where there are fewer
    positive_scores: Float[Tensor, "n p"]  # the similarities of the positives


@dataclass
class Mining:
    """The arguments of :func:`mine_hard_negatives` as tensors, and the search; ranks call each method of it together."""

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
    output: Output = "triplet"
    process_group: Processes = None

    @property
    def rows(self) -> dict[str, Tensor]:
        names = ("queries", "corpus", "positives", "query_labels", "corpus_labels", "corpus_ids")
        arguments = {name: x for name in names if (x := getattr(self, name)) is not None or name in names[:3]}
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in arguments.items()}

    @property
    def problem(self) -> str | None:
        problem = flag_problem(progress=self.progress) or faiss_problem()
        if problem is None and self.progress and find_spec("tqdm") is None:
            problem = "progress=True needs tqdm, which is not installed: pip install contrastive_zoo[mining]."
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
        return self.selection.problem or word_problem("output", self.output, Output)

    @torch.no_grad()
    def run(self) -> tuple[int, Mined]:
        """Return the global index of this rank's first query, and the negatives of its queries."""
        self.world = World.of(self.process_group, _NAME)
        session = Session.of(self.world, check_finite=False)  # the search checks embeddings
        settings = {"selection": self.selection, "normalize": self.normalize, "guide": self.guide is not None}
        settings["output"] = self.output
        shards = agree_on_shards(_NAME, self.rows, world=session, problem=self.problem, settings=settings)
        queries, self.shards = shards[:2]  # of the queries, and of the corpus
        with reported(self.world):
            # with a second dimension, on the CPU
            self.table = (self.positives if self.positives.ndim == 2 else self.positives[:, None]).detach().cpu()
            labels = [x for x in (self.corpus_labels, self.corpus_ids) if x is not None]
            # [m, l], labels of this rank's items; a candidate is no negative if one of them is the query's
            self.labels = torch.stack(labels, 1) if labels else None
            outside = (self.table < -1) | (self.table >= self.shards.total)
            problem = None
            if self.shards.total == 0:
                problem = "the corpus is empty on every rank."
            elif outside.any():
                first = self.table[outside][0].item()
                problem = f"positives are indices into the {self.shards.total} rows of the corpus, or -1, got {first}."
            agree_on_shards(_NAME, {}, world=self.world, problem=problem)
            blocks = [self._mined(part, queries.start) for part in self._steps(queries)]
        return queries.start, Mined(*(torch.cat(x) for x in zip(*blocks, strict=True)))

    def _steps(self, queries: Shards) -> Iterable[slice]:
        """Return parts of this rank's queries: equally many on every rank, some possibly empty, but at least one."""
        starts = range(0, max(1, *queries.sizes), QUERIES_OF_A_STEP)
        parts = [slice(*(min(queries.size, start + x) for x in (0, QUERIES_OF_A_STEP))) for start in starts]
        if not self.progress:
            return parts
        from tqdm.auto import tqdm

        bar: Iterable[slice] = tqdm(parts, desc="Mining hard negatives", unit=" steps", disable=self.world.rank != 0)
        return bar

    def _mined(self, part: slice, start: int) -> Mined:
        selection, queries, positives = self.selection, self.queries[part], self.table[part]
        positive_scores = self._positive_scores(queries, positives)
        depth = selection.depth(self.guide is not None)
        result = self._candidates(queries, positives, self._query_labels(positives, part), depth)
        lowest = positive_scores.amin(1) if positives.shape[1] else torch.full((len(queries),), torch.inf).double()
        allowed = selection.allowed(result.scores, lowest)
        allowed[:, : selection.range_min] = False
        query = torch.arange(len(queries)) + start + part.start
        if self.guide is not None:
            judge = partial(_guided, self.guide, query, positives, result.indices, allowed, selection.guide_margin)
            allowed &= failing_together(f"{_NAME}: the guide", judge, self.world)
        chosen = selection.chosen(allowed, result.indices, query)
        missing, place = chosen < 0, chosen.clamp(min=0)
        return Mined(
            result.indices.gather(1, place).masked_fill(missing, -1),
            result.scores.gather(1, place).masked_fill(missing, -torch.inf),
            positive_scores.masked_fill(positives < 0, torch.nan),
        )

    def _candidates(
        self, queries: Float[Tensor, "n d"], excluded: Int[Tensor, "n e"], labels: Int[Tensor, "n l q"] | None, k: int
    ) -> Neighbors:
        """Return the k best items of each query that are not excluded and have none of the query's labels."""
        # How many items have a query's labels is not known, so all ranks repeat the search with twice the depth.
        depth = k = min(k, self.shards.total)
        search = partial(top_k, normalize=self.normalize, index=self.index, process_group=self.world)
        nearest = search(queries, self.corpus, k=k, excluded=excluded)
        if labels is None:
            return nearest
        result, unfinished = Neighbors(nearest.scores.clone(), nearest.indices.clone()), torch.arange(len(queries))
        while True:
            differs = self._differs(nearest.indices, labels[unfinished])
            order = (~differs).int().argsort(dim=1, stable=True)[:, :k]
            result.scores[unfinished] = nearest.scores.masked_fill(~differs, -torch.inf).gather(1, order)
            result.indices[unfinished] = nearest.indices.masked_fill(~differs, -1).gather(1, order)
            unfinished = unfinished[differs.sum(1) < k]
            # a search of the whole corpus has found all there is
            if depth == self.shards.total or not any(n for (n,) in self.world.exchange([len(unfinished)])):
                return result
            depth = min(2 * depth, self.shards.total)
            nearest = search(queries[unfinished], self.corpus, k=depth, excluded=excluded[unfinished])

    def _differs(self, indices: Int[Tensor, "n k"], labels: Int[Tensor, "n l q"]) -> Tensor:
        """Return which candidates exist and have none of the query's labels."""
        assert self.labels is not None
        theirs = self._fetched(self.labels, indices)
        same = (theirs[..., None] == labels[:, None]) & (labels[:, None] != NO_LABEL)
        return ~same.flatten(2).any(2) & (indices >= 0)

    def _positive_scores(self, queries: Tensor, positives: Int[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        """Return the similarities of the positives; +∞ for none."""
        rows = self._fetched(self.corpus, positives)
        left, right = (prepared(x, normalize=self.normalize) for x in (queries, rows))
        return similarities(left[:, None], right)[:, 0].masked_fill(positives < 0, torch.inf)

    def _query_labels(self, positives: Int[Tensor, "n p"], part: slice) -> Int[Tensor, "n l q"] | None:
        """Return for each kind of label those that a query's negatives must not have."""
        result = []
        if self.query_labels is not None:
            result.append(self.query_labels[part].cpu()[:, None])
        if self.corpus_ids is not None:
            result.append(self._fetched(self.corpus_ids, positives).masked_fill(positives < 0, NO_LABEL))
        if not result:
            return None
        width = max(x.shape[1] for x in result)
        padded = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=NO_LABEL) for x in result]
        return torch.stack(padded, 1)

    def _fetched(self, rows: Tensor, wanted: Tensor) -> Tensor:
        """Return the rows of the corpus with these global indices, [*wanted, *row] on the CPU; any row for −1."""
        needed, place = wanted.clamp(min=0).cpu().unique(return_inverse=True)
        owners = torch.searchsorted(torch.tensor(self.shards.sizes).cumsum(0), needed, right=True)

        def of_rank(indices: Tensor) -> Tensor:
            return rows[(indices - self.shards.start).to(rows.device)].cpu()

        return ask(owners, needed, of_rank, self.world)[place]


def _guided(
    guide: Guide, query: Tensor, positives: Tensor, candidates: Tensor, allowed: Tensor, margin: float
) -> Tensor:
    def scores(which: Tensor, corpus: Tensor) -> Tensor:
        pairs = which.nonzero(as_tuple=True)
        result = torch.as_tensor(guide(query[pairs[0]], corpus[pairs])).double().cpu()
        if result.shape != pairs[0].shape or result.isnan().any():
            got = f"{len(pairs[0])}, got {described(result)}"
            raise ValueError(f"{_NAME}: the guide returns one number per pair, {got}.")
        return torch.full(which.shape, torch.inf, dtype=torch.float64).index_put(pairs, result)

    if not len(query):
        return allowed
    of_positives = scores(positives >= 0, positives)
    lowest = of_positives.amin(1, keepdim=True) if positives.shape[1] else torch.full((len(query), 1), torch.inf)
    return scores(allowed, candidates) <= lowest - margin
