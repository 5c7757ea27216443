"""Hard negatives of the queries of all ranks in the corpus of all ranks."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from itertools import starmap
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.metrics.exact import prepared, scores_of
from contrastive_zoo.metrics.rounds import ask
from contrastive_zoo.metrics.search import (
    ApproximateIndex,
    Neighbors,
    repeated_problem,
    rows_problem,
    settings_problem,
    top_k,
)
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, flag_problem, is_integer, tensor_problem, word_problem
from contrastive_zoo.ranks.session import Session, agree_on_shards
from contrastive_zoo.ranks.world import Processes, Shards, World

QUERIES_OF_A_STEP = 16384  # queries of a rank whose candidates are held at once
_NAME = "mine_hard_negatives"

Rows: TypeAlias = Tensor | NDArray[np.generic]
Guide: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of query indices [p] and corpus indices [p] that returns scores [p]."""

Sampling = Literal["top", "random"]
Output = Literal["triplet", "n-tuple"]

_INTEGERS = (("num_negatives", 1, 10**6), ("range_min", 0, 2**62), ("range_max", 0, 2**62), ("seed", 0, math.inf))
"""The settings that are integers, and their bounds. The result has ``num_negatives`` columns."""

_THRESHOLDS = ("max_score", "min_score", "absolute_margin", "relative_margin")
_ROWS, _LABELS = ("queries", "corpus", "positives"), ("query_labels", "corpus_labels", "corpus_ids")
_OF_THIS_RANK = {*_ROWS, *_LABELS, "guide", "index", "progress", "process_group"}  # the search compares the index


def mine_hard_negatives(
    queries: Rows,
    corpus: Rows | None,
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

    Indices count the queries, or the corpus, of all ranks in rank order. The result is the same for every split. The corpus
    may be a NumPy memory map.

    Args:
        queries: [n, d], this rank's; n may differ between ranks.
        corpus: [m, d], this rank's part; None: the other queries.
        positives: [n] or [n, p], indices; −1 for none.
        num_negatives: per query.
        range_min: the best candidates to skip.
        range_max: the best candidates to look at; None: as many as needed, or ten times as many for a choice.
        max_score: of a negative.
        min_score: of a negative.
        absolute_margin: how far a negative scores below the query's worst positive.
        relative_margin: the same, times the positive's absolute score.
        sampling: ``"top"`` takes the best ones, ``"random"`` any.
        seed: of random sampling.
        query_labels: [n] integers; items with the query's label are no negatives.
        corpus_labels: [m] integers.
        corpus_ids: [m] integers; items with the id of a positive are no negatives.
        guide: a better model's scores for pairs of indices of queries and items; sends no messages.
        guide_margin: how far below the worst positive the guide places a negative.
        output: ``"triplet"``: a row for each negative; ``"n-tuple"``: one of ``num_negatives`` for each positive.
        normalize: compare cosines, not dot products.
        index: search approximately.
        progress: show a progress bar.
        process_group: the ranks.

    Returns:
        ``query``, ``positive``, ``negative``, ``positive_score`` and ``negative_score``, arrays of one length.

    Raises:
        ValueError: on every rank: bad inputs, settings that differ, faiss or tqdm is missing.

    Examples:
        >>> corpus = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.5, 0.5], [0.0, 1.0]])
        >>> mined = mine_hard_negatives(corpus[:2], corpus, torch.tensor([1, 0]), num_negatives=1, range_min=1)
        >>> mined["query"], mined["positive"], mined["negative"]
        (array([0, 1]), array([1, 0]), array([2, 2]))

    Source: Xiong et al. 2021 (ANCE), https://arxiv.org/abs/2007.00808; margins: Moreira et al. 2024 (NV-Retriever),
    https://arxiv.org/abs/2407.15831
    """
    arguments: dict[str, Any] = dict(locals())
    tensors = {name: as_tensor(arguments[name]) for name in (*_ROWS, *_LABELS)}
    if corpus is None:
        tensors["corpus"] = tensors["queries"]
        tensors["corpus_labels"] = tensors["query_labels" if corpus_labels is None else "corpus_labels"]
    return Mining(**arguments | tensors, among_themselves=corpus is None).columns()


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


@dataclass(kw_only=True)
class Mining:
    """The arguments of :func:`mine_hard_negatives` as tensors, and the search; ranks call each method of it together."""

    queries: Tensor
    corpus: Tensor
    positives: Tensor
    num_negatives: int
    range_min: int
    range_max: int | None
    max_score: float | None
    min_score: float | None
    absolute_margin: float | None
    relative_margin: float | None
    sampling: Sampling
    seed: int
    query_labels: Tensor | None
    corpus_labels: Tensor | None
    corpus_ids: Tensor | None
    guide: Guide | None
    guide_margin: float
    output: Output
    normalize: bool
    index: ApproximateIndex | None
    progress: bool
    process_group: Processes
    among_themselves: bool

    @property
    def rows(self) -> dict[str, Tensor]:
        return {x: getattr(self, x) for x in (*_ROWS, *_LABELS) if x in _ROWS or getattr(self, x) is not None}

    @property
    def problem(self) -> str | None:
        problem = flag_problem(progress=self.progress)
        if problem is None and self.progress and find_spec("tqdm") is None:
            problem = "progress=True needs tqdm, which is not installed: pip install 'contrastive_zoo[mining]'."
        problem = problem or next(filter(None, starmap(tensor_problem, self.rows.items())), None)
        if problem := problem or settings_problem(normalize=self.normalize, index=self.index):
            return problem
        if not (self.guide is None or callable(self.guide)):
            return f"guide is a function of queries and candidates, or None, got {described(self.guide)}."
        if problem := rows_problem(self.queries, self.corpus, "corpus"):
            return problem
        fix = "Pass corpus=None, or query_labels and corpus_labels."
        is_known = self.among_themselves or self.query_labels is not None
        if not is_known and (problem := repeated_problem(self.queries, self.corpus, fix, "corpus")):
            return problem
        if (self.query_labels is None) != (self.corpus_labels is None):
            return "query_labels and corpus_labels come together: a candidate's label is compared with the query's."
        if self.positives.ndim not in (1, 2):
            return f"positives are [n] or [n, p], got {described(self.positives)}."
        for name, tensor in self.rows.items():
            of = self.corpus if name.startswith("corpus") else self.queries
            if not tensor.ndim or len(tensor) != len(of) or (name in _LABELS and tensor.ndim != 1):
                return f"{name} are one entry for each of {len(of)} rows, got {described(tensor)}."
            if name not in ("queries", "corpus") and tensor.dtype != torch.int64:
                return f"{name} are int64, got {described(tensor)}."
        for name, at_least, at_most in _INTEGERS:
            value = getattr(self, name)
            if not (is_integer(value, at_least=at_least, at_most=at_most) or (name == "range_max" and value is None)):
                most = f", {at_least} … {at_most}" if at_most < math.inf else f" of at least {at_least}"
                return f"{name} is an integer{most}, got {described(value)}."
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            return (
                f"range_min={self.range_min} … range_max={self.range_max} has fewer candidates than "
                f"num_negatives={self.num_negatives}. Raise range_max."
            )
        numbers = [self.guide_margin, *(x for name in _THRESHOLDS if (x := getattr(self, name)) is not None)]
        if not all(is_number(x, finite=False) for x in numbers):
            return f"scores and margins are numbers, got {numbers}."
        return word_problem("sampling", self.sampling, Sampling) or word_problem("output", self.output, Output)

    @property
    def depth(self) -> int:
        """How many candidates are looked at: ``range_max``, or ten per negative where some may be refused."""
        if self.range_max is not None:
            return self.range_max
        chooses = self.sampling == "random" or any(getattr(self, name) is not None for name in ("guide", *_THRESHOLDS))
        return self.range_min + self.num_negatives * (10 if chooses else 1)

    def allowed(self, scores: Float[Tensor, "n k"], positive: Float[Tensor, "n 1"]) -> Bool[Tensor, "n k"]:
        """Return which candidates may be negatives by their scores; the lowest positive score is +∞ if there is none."""
        fine = scores > -torch.inf
        if self.absolute_margin is not None:
            fine &= scores <= positive - self.absolute_margin
        if self.relative_margin is not None:
            fine &= (scores <= positive - positive.abs() * self.relative_margin) | positive.isinf()
        if self.max_score is not None:
            fine &= scores <= self.max_score
        if self.min_score is not None:
            fine &= scores >= self.min_score
        fine[:, : self.range_min] = False
        return fine

    def chosen(
        self, allowed: Bool[Tensor, "n k"], candidates: Int[Tensor, "n k"], query: Int[Tensor, " n"]
    ) -> Int[Tensor, "n num"]:
        """Return the chosen candidates' positions, best first, then −1; random by the seed and both indices."""
        if self.sampling == "random":
            keys = random_keys(self.seed, query[:, None].numpy(), candidates.numpy()) >> np.uint64(1)
            order = torch.from_numpy(keys.astype(np.int64)).masked_fill(~allowed, torch.iinfo(torch.int64).max)
            drawn = order.argsort(dim=1, stable=True)[:, : self.num_negatives]
            allowed = torch.zeros_like(allowed).scatter(1, drawn, True) & allowed
        ranks, end = torch.arange(allowed.shape[1]).expand(allowed.shape), allowed.shape[1]
        best = ranks.masked_fill(~allowed, end).sort(1).values[:, : self.num_negatives]
        best = pad(best, (0, self.num_negatives - best.shape[1]), value=end)
        return best.masked_fill(best == end, -1)

    @torch.no_grad()
    def columns(self) -> dict[str, NDArray[Any]]:
        """Return a row for each pair of query and positive, or for each triplet."""
        self.world = World.of(self.process_group, _NAME)
        session = Session.of(self.world, check_finite=False)  # the search checks embeddings
        settings = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in _OF_THIS_RANK}
        settings["guide"] = self.guide is not None
        shards = agree_on_shards(_NAME, self.rows, world=session, problem=self.problem, settings=settings)
        queries, self.shards = shards[:2]  # of the queries, and of the corpus
        with reported(self.world):
            # with a second dimension, on the CPU
            positives = (self.positives if self.positives.ndim == 2 else self.positives[:, None]).detach().cpu()
            outside, problem = (positives < -1) | (positives >= self.shards.total), None
            if self.shards.total == 0:
                problem = "the corpus is empty on every rank."
            elif outside.any():
                first = positives[outside][0].item()
                problem = f"positives are indices into the {self.shards.total} rows of the corpus, or -1, got {first}."
            agree_on_shards(_NAME, {}, world=self.world, problem=problem)
            blocks = [self._mined(part, positives[part], queries.start) for part in self._steps(queries)]
        negatives, scores, positive_scores = (torch.cat(x) for x in zip(*blocks, strict=True))
        exists = negatives >= 0
        complete = exists.all(1, keepdim=True) if self.output == "n-tuple" else exists.any(1, keepdim=True)
        query, column = ((positives >= 0) & complete).nonzero(as_tuple=True)
        columns = {
            "query": query + queries.start,
            "positive": positives[query, column],
            "negative": negatives[query],
            "positive_score": positive_scores[query, column],
            "negative_score": scores[query],
        }
        if self.output == "triplet":
            pair, rank = exists[query].nonzero(as_tuple=True)
            columns = {name: x[pair, rank] if x.ndim == 2 else x[pair] for name, x in columns.items()}
        return {name: x.numpy() for name, x in columns.items()}

    def _steps(self, queries: Shards) -> Iterable[slice]:
        """Return parts of this rank's queries: equally many on every rank, some possibly empty, but at least one."""
        starts = range(0, max(1, *queries.sizes), QUERIES_OF_A_STEP)
        parts = [slice(*(min(queries.size, start + x) for x in (0, QUERIES_OF_A_STEP))) for start in starts]
        if not self.progress:
            return parts
        from tqdm.auto import tqdm

        bar: Iterable[slice] = tqdm(parts, desc="Mining hard negatives", unit=" steps", disable=self.world.rank != 0)
        return bar

    def _mined(self, part: slice, positives: Int[Tensor, "n p"], start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of negatives, best first, −1 where there are fewer, their scores and the positives' scores."""
        queries = self.queries[part]
        left, right = (prepared(x, normalize=self.normalize) for x in (queries, self._fetched(self.corpus, positives)))
        positive_scores = scores_of(left[:, None], right, normalize=self.normalize)[:, 0]
        positive_scores.masked_fill_(positives < 0, torch.inf)
        query = torch.arange(len(queries)) + start + part.start
        known = torch.cat([positives, query[:, None]], 1) if self.among_themselves else positives
        result = self._candidates(queries, known, part)
        allowed = self.allowed(result.scores, _lowest(positive_scores))
        if self.guide is not None:
            judge = partial(_guided, self.guide, query, positives, result.indices, allowed, self.guide_margin)
            allowed &= failing_together(f"{_NAME}: the guide", judge, self.world)
        chosen = self.chosen(allowed, result.indices, query)
        indices = result.indices.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        return indices, result.scores.gather(1, chosen.clamp(min=0)), positive_scores

    def _candidates(self, queries: Float[Tensor, "n d"], known: Int[Tensor, "n p"], part: slice) -> Neighbors:
        """Return the best items of each query that are not known, of another label and of other ids than known ones."""
        depth = k = min(self.depth, self.shards.total)
        search = partial(top_k, normalize=self.normalize, index=self.index, process_group=self.world)
        nearest = search(queries, self.corpus, k=k, excluded=known)
        if self.query_labels is None and self.corpus_ids is None:
            return nearest
        result, unfinished = Neighbors(nearest.scores.clone(), nearest.indices.clone()), torch.arange(len(queries))
        # How many items have a query's label or id is not known, so all ranks repeat the search with twice the depth.
        while True:
            differs = self._differ(nearest.indices, known[unfinished], part.start + unfinished)
            order = (~differs).int().argsort(dim=1, stable=True)[:, :k]
            result.scores[unfinished] = nearest.scores.masked_fill(~differs, -torch.inf).gather(1, order)
            result.indices[unfinished] = nearest.indices.masked_fill(~differs, -1).gather(1, order)
            unfinished = unfinished[differs.sum(1) < k]
            # a search of the whole corpus has found all there is
            if depth == self.shards.total or not any(n for (n,) in self.world.exchange([len(unfinished)])):
                return result
            depth = min(2 * depth, self.shards.total)
            nearest = search(queries[unfinished], self.corpus, k=depth, excluded=known[unfinished])

    def _differ(
        self, candidates: Int[Tensor, "n k"], known: Int[Tensor, "n p"], query: Int[Tensor, " n"]
    ) -> Bool[Tensor, "n k"]:
        """Return which candidates have neither the label of the query nor the id of a known item."""
        differs = candidates >= 0
        if self.query_labels is not None and self.corpus_labels is not None:
            differs &= self._fetched(self.corpus_labels, candidates) != self.query_labels.cpu()[query, None]
        if self.corpus_ids is not None:
            ids, of_known = (self._fetched(self.corpus_ids, x) for x in (candidates, known))
            differs &= ((ids[..., None] != of_known[:, None]) | (known < 0)[:, None]).all(2)
        return differs

    def _fetched(self, rows: Tensor, wanted: Tensor) -> Tensor:
        """Return the rows of the corpus with these global indices, [*wanted, *row] on the CPU; any row for −1."""
        needed, place = wanted.clamp(min=0).cpu().unique(return_inverse=True)
        owners = torch.searchsorted(torch.tensor(self.shards.sizes).cumsum(0), needed, right=True)

        def of_rank(indices: Tensor) -> Tensor:
            return rows[(indices - self.shards.start).to(rows.device)].cpu()

        return ask(owners, needed, of_rank, self.world)[place]


def _lowest(scores: Float[Tensor, "n p"]) -> Float[Tensor, "n 1"]:
    """Return the lowest score of each query's positives; +∞ if there are none."""
    return pad(scores, (0, 1), value=torch.inf).amin(1, keepdim=True)


def _guided(
    guide: Guide, query: Tensor, positives: Tensor, candidates: Tensor, allowed: Tensor, margin: float
) -> Tensor:
    def scores(which: Tensor, corpus: Tensor) -> Tensor:
        pairs = which.nonzero(as_tuple=True)
        answer = guide(query[pairs[0]], corpus[pairs])
        result = torch.as_tensor([] if answer is None else answer).double().cpu()
        if result.shape != pairs[0].shape or result.isnan().any():
            got = f"{len(pairs[0])}, got {described(answer if answer is None else result)}"
            raise ValueError(f"{_NAME}: the guide returns one number per pair, {got}.")
        return torch.full(which.shape, torch.inf, dtype=torch.float64).index_put(pairs, result)

    if not len(query):
        return allowed
    return scores(allowed, candidates) <= _lowest(scores(positives >= 0, positives)) - margin
