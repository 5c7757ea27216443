"""Hard negatives of the queries of all ranks in the corpus of all ranks."""

import math
import warnings
from dataclasses import dataclass, fields
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
from contrastive_zoo.metrics.search import repeated_problem, rows_problem, settings_problem, top_k
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, is_integer, tensor_problem, word_problem
from contrastive_zoo.ranks.session import Session, agree
from contrastive_zoo.ranks.world import Processes, World

QUERIES_OF_A_STEP = 16384  # queries of a rank whose candidates are held at once
_NAME = "mine_hard_negatives"

Rows: TypeAlias = Tensor | NDArray[np.generic]
Sampling = Literal["top", "random"]
Output = Literal["triplet", "n-tuple"]

_INTEGERS = (("num_negatives", 1, 10**6), ("range_min", 0, 2**62), ("range_max", 0, 2**62), ("seed", 0, math.inf))
"""The settings that are integers, and their bounds. The result has ``num_negatives`` columns."""

_THRESHOLDS = ("max_score", "min_score", "absolute_margin", "relative_margin")
_ROWS = ("queries", "corpus", "positives")


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
    output: Output = "triplet",
    normalize: bool = True,
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
        range_max: the best candidates to look at; None: as many as needed, or ten times as many if some may be left out.
        max_score: of a negative.
        min_score: of a negative.
        absolute_margin: how far a negative scores below the query's worst positive.
        relative_margin: the same, times the positive's absolute score.
        sampling: ``"top"`` takes the best ones, ``"random"`` any.
        seed: of random sampling.
        output: ``"triplet"``: a row for each negative; ``"n-tuple"``: one of ``num_negatives`` for each positive.
        normalize: compare cosines, not dot products.
        process_group: the ranks.

    Returns:
        ``query``, ``positive``, ``negative``, ``positive_score`` and ``negative_score``, arrays of one length.

    Raises:
        ValueError: on every rank: bad inputs, settings that differ, faiss is missing.

    Examples:
        >>> corpus = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.5, 0.5], [0.0, 1.0]])
        >>> mined = mine_hard_negatives(corpus[:2], corpus, torch.tensor([1, 0]), num_negatives=1, range_min=1)
        >>> mined["query"], mined["positive"], mined["negative"]
        (array([0, 1]), array([1, 0]), array([2, 2]))

    Source: Xiong et al. 2021 (ANCE), https://arxiv.org/abs/2007.00808; margins: Moreira et al. 2024 (NV-Retriever),
    https://arxiv.org/abs/2407.15831
    """
    arguments: dict[str, Any] = dict(locals())
    tensors = {name: as_tensor(arguments[name]) for name in _ROWS}
    if corpus is None:
        tensors["corpus"] = tensors["queries"]
    return Mining(**arguments | tensors, among_themselves=corpus is None).columns()


def as_tensor(rows: Any) -> Any:
    """Return an array as a tensor that shares its memory, also a read-only memory map; None stays None."""
    if not isinstance(rows, (np.ndarray, list, tuple)):
        return rows  # None, a tensor, or something that is refused in words later
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        try:
            return torch.as_tensor(rows, device="cpu")
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
    output: Output
    normalize: bool
    process_group: Processes
    among_themselves: bool

    @property
    def problem(self) -> str | None:
        problem = settings_problem(normalize=self.normalize) or rows_problem(self.queries, self.corpus, "corpus")
        if problem is None and not self.among_themselves:
            problem = repeated_problem(self.queries, self.corpus, "Pass corpus=None.", "corpus")
        if problem := problem or tensor_problem("positives", self.positives):
            return problem
        paired = self.positives.ndim in (1, 2) and len(self.positives) == len(self.queries)
        if not paired or self.positives.dtype != torch.int64:
            got = described(self.positives)
            return f"positives are int64, [n] or [n, p], for each of {len(self.queries)} queries, got {got}."
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
        if not all(is_number(x, finite=False) for x in self.thresholds):
            return f"scores and margins are numbers, got {self.thresholds}."
        return word_problem("sampling", self.sampling, Sampling) or word_problem("output", self.output, Output)

    @property
    def thresholds(self) -> list[float]:
        return [x for name in _THRESHOLDS if (x := getattr(self, name)) is not None]

    @property
    def depth(self) -> int:
        """How many candidates are looked at: ``range_max``, or ten per negative where some may be refused."""
        if self.range_max is not None:
            return self.range_max
        return self.range_min + self.num_negatives * (10 if self.sampling == "random" or self.thresholds else 1)

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
        of_this_rank = {*_ROWS, "process_group"}
        settings = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in of_this_rank}
        stated: Any = {"problem": self.problem, "settings": settings, "distinct": self.corpus}
        shards = agree(_NAME, {name: getattr(self, name) for name in _ROWS}, world=session, **stated).shards
        queries, self.shards = shards[:2]  # of the queries, and of the corpus
        with reported(self.world), torch.device("cpu"):
            # with a second dimension, on the CPU
            positives = (self.positives if self.positives.ndim == 2 else self.positives[:, None]).detach().cpu()
            outside, problem = (positives < -1) | (positives >= self.shards.total), None
            if self.shards.total == 0:
                problem = "the corpus is empty on every rank."
            elif outside.any():
                first = positives[outside][0].item()
                problem = f"positives are indices into the {self.shards.total} rows of the corpus, or -1, got {first}."
            agree(_NAME, {}, world=self.world, problem=problem)
            steps = range(0, max(1, *queries.sizes), QUERIES_OF_A_STEP)  # on every rank, with queries or without
            parts = [slice(*(min(queries.size, x + more) for more in (0, QUERIES_OF_A_STEP))) for x in steps]
            blocks = [self._mined(part, positives[part], queries.start) for part in parts]
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

    def _mined(self, part: slice, positives: Int[Tensor, "n p"], start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of negatives, best first, −1 where there are fewer, their scores and the positives' scores."""
        queries = self.queries[part]
        left, right = (prepared(x, normalize=self.normalize) for x in (queries, self._items(positives)))
        positive_scores = scores_of(left[:, None], right, normalize=self.normalize)[:, 0]
        positive_scores.masked_fill_(positives < 0, torch.inf)
        query = torch.arange(len(queries)) + start + part.start
        known = torch.cat([positives, query[:, None]], 1) if self.among_themselves else positives
        k = min(self.depth, self.shards.total)
        result = top_k(queries, self.corpus, k=k, excluded=known, normalize=self.normalize, process_group=self.world)
        lowest = pad(positive_scores, (0, 1), value=torch.inf).amin(1, keepdim=True)
        chosen = self.chosen(self.allowed(result.scores, lowest), result.indices, query)
        indices = result.indices.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        return indices, result.scores.gather(1, chosen.clamp(min=0)), positive_scores

    def _items(self, wanted: Int[Tensor, "n p"]) -> Float[Tensor, "n p d"]:
        """Return the items of the corpus with these global indices, on the CPU; any item for −1."""
        needed, place = wanted.clamp(min=0).cpu().unique(return_inverse=True)
        owners = torch.searchsorted(torch.tensor(self.shards.sizes).cumsum(0), needed, right=True)

        def of_rank(indices: Tensor) -> Tensor:
            return self.corpus[(indices - self.shards.start).to(self.corpus.device)].cpu()

        return ask(owners, needed, of_rank, self.world)[place]
