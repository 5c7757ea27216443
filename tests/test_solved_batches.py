"""Gradients of batches that are solved at a low temperature: float32 keeps digits of them, where plain torch keeps none."""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import anchor_block, plan, small_batch, softmax, softmax_arithmetic, tiling
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.ranks.world import Shards
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, called, drawn, local_shard, numbers

pytestmark = [pytest.mark.figures, pytest.mark.path("engines")]  # but for the path "small"

GOAL = 2e-5
"""Relative error of a float32 gradient at t = 0.01: rounding a logit of 100 changes its exponential by 4e-6."""

Softmaxes = list[tuple[Tensor, Tensor]]


def views(n: int, noise: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows in a few dimensions, where others are near, and noisy copies of them."""
    rows = numbers(n, 24, seed=0)
    return [x.to(dtype) for x in (rows, rows + noise * numbers(n, 24, seed=1))]


def without(own: int, s: Tensor) -> Tensor:
    """The columns of s without column i + own · k of row i for any k: [n, m] without the own sample's."""
    mine = torch.arange(s.shape[1]) % own == torch.arange(len(s))[:, None] % own
    return s[~mine].view(len(s), -1)


def of_nt_xent(*views: Tensor) -> Softmaxes:
    z, n = torch.cat(views), len(views[0])
    s = z @ z.T
    return [(s.gather(1, torch.arange(2 * n).roll(n)[:, None]), without(n, s))]


def of_info_nce(q: Tensor, k: Tensor) -> Softmaxes:
    s = q @ k.T
    return [(s.diagonal()[:, None], without(len(q), s))]


def of_mnrl(q: Tensor, k: Tensor) -> Softmaxes:
    """Documents, queries of the own document, and other queries, in one sum: it contains the positive twice."""
    pair, n = (q * k).sum(1, keepdim=True), len(q)
    return [(pair, torch.cat([without(n, x) for x in (q @ k.T, k @ q.T, q @ q.T)], 1))]


def labelled(kind: Any, scale: float = 1.0, **fixed: Any) -> Callable[..., Tensor]:
    def loss(*rows: Tensor, temperature: float, **settings: Any) -> Tensor:
        labels = torch.arange(len(rows[0])).repeat(len(rows))
        return called(kind, **fixed)(torch.cat(rows), labels, temperature=scale * temperature, **settings)

    return loss


def sup_con_by_anchor(*rows: Tensor, temperature: float) -> Tensor:
    """As against a memory."""
    z, ids = F.normalize(torch.cat(rows), dim=1), torch.arange(len(rows[0])).repeat(len(rows))
    loss = cz.SupCon(temperature=temperature)
    rows = {"embeddings": z, "labels": ids}
    batch = Batch(rows, dict.fromkeys(rows, Shards((len(z),))), loss.evaluated()[0])
    return reduce_rows(batch, loss.block_loss(batch), z, ids)


our_sup_con, our_nca = labelled(cz.SupCon), labelled(cz.NCA, 2.0)  # distances of unit embeddings are 2 − 2 cos


def our_multi_positive(queries: Tensor, keys: Tensor, **settings: Any) -> Tensor:
    return called(cz.MultiPositive)(queries, keys, ids := torch.arange(len(queries)), ids, **settings)


our_mnrl = functools.partial(called, cz.MNRL, directions=("query_to_doc", "query_to_query", "doc_to_query"))
ranked_mnrl = our_mnrl(hardness_mode="hard_negatives", hardness_strength=9.0)
"""Without hard negatives nothing is added to logits; the loss goes anchor by anchor."""


@dataclass(frozen=True)
class Solved:
    """A loss and its definition; losses of one definition are equal."""

    ours: Callable[..., Tensor] = field(compare=False)
    softmaxes: Callable[..., Softmaxes]  # of unit embeddings: products with the positive [n, 1] and others [n, m]
    times: int = 1  # how often the sum over all contains the positive

    def plain(self, *rows: Tensor, temperature: float) -> Tensor:
        """The loss as it is written everywhere: log-sum-exp of all minus the positive."""

        def mean(positive: Tensor, others: Tensor) -> Tensor:
            return (torch.cat([positive] * self.times + [others], 1).logsumexp(1) - positive[:, 0]).mean()

        return self._mean(mean, rows, temperature)

    def exact(self, *rows: Tensor, temperature: float) -> Tensor:
        """The same without its cancellation: at a loss of 1e-13 the plain formula has few digits in float64, too."""

        def mean(positive: Tensor, others: Tensor) -> Tensor:
            logits = others.logsumexp(1) - positive[:, 0] - math.log(self.times)
            return F.softplus(logits, threshold=100).mean()

        return self._mean(mean, rows, temperature)

    def _mean(self, mean: Callable[[Tensor, Tensor], Tensor], rows: Sequence[Tensor], temperature: float) -> Tensor:
        found = self.softmaxes(*(F.normalize(x, dim=1) for x in rows))
        return torch.stack([mean(x / temperature, y / temperature) for x, y in found]).mean()


TILED = {
    "NTXent": Solved(called(cz.NTXent), of_nt_xent),
    "InfoNCE": Solved(called(cz.InfoNCE), of_info_nce),
    "CLIP": Solved(called(cz.InfoNCE, symmetric=True), lambda q, k: of_info_nce(q, k) + of_info_nce(k, q)),
    "MNRL": Solved(our_mnrl(), of_mnrl, times=2),
}

LOSSES = {
    **TILED,
    "MNRL, anchor by anchor": Solved(ranked_mnrl, of_mnrl, times=2),
    "SupCon": Solved(our_sup_con, of_nt_xent),
    "SupCon, in": Solved(labelled(cz.SupCon, variant="in"), of_nt_xent),
    "SupCon, anchor by anchor": Solved(sup_con_by_anchor, of_nt_xent),
    "NPairs": Solved(labelled(cz.NPairs, normalize=True), of_info_nce),
    "NCA": Solved(our_nca, of_nt_xent),
    "MultiPositive": Solved(our_multi_positive, of_info_nce),
}


def gradient(loss: Callable[..., Tensor], rows: Sequence[Tensor], dtype: torch.dtype, **settings: Any) -> Tensor:
    leaves = [x.to(dtype).requires_grad_() for x in rows]
    return torch.stack(torch.autograd.grad(loss(*leaves, **settings), leaves)).double()


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@functools.cache
def expected(loss: Solved, n: int, t: float, noise: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    rows = views(n, noise, dtype)
    exact = gradient(loss.exact, rows, torch.float64, temperature=t)
    return exact, relative_error(gradient(loss.plain, rows, dtype, temperature=t), exact)


def errors(name: str, n: int, t: float, noise: float, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    loss = LOSSES[name]
    exact, plain = expected(loss, n, t, noise, dtype)
    found = gradient(loss.ours, views(n, noise, dtype), dtype, temperature=t)
    return relative_error(found, exact), plain


PATHS: dict[str, Callable[[], list[Any]]] = {
    "tiled": lambda: [patch.object(tiling, "TILE_BYTES", 2**16), tiling.memory_budget(0)],
    "cached": lambda: [patch.object(tiling, "TILE_BYTES", 2**16), tiling.memory_budget(2**30)],
    "a maximum for each row": lambda: [patch.object(softmax.SoftmaxSweep, "lost_precision", lambda *_: True)],
    "small": lambda: [patch.multiple(plan, SMALL_MATRIX=2**24, SMALL_PLAIN=2**24)],
    "dense": lambda: [cz.engine.plain_formulas()],
}


@contextmanager
def path(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for context in PATHS[name]():
            stack.enter_context(context)
        yield


CONDITIONS = [(0.05, 0.3), (0.02, 0.1), (0.01, 0.3), (0.01, 0.1)] if EVERY_CASE else [(0.02, 0.1), (0.01, 0.3)]


@pytest.mark.parametrize(("name", "where"), drawn(LOSSES, PATHS, one_in=3))
def test_float32_keeps_digits_of_the_gradient(name: str, where: str) -> None:
    """At the temperature 0.01 plain torch is off by 1e-2 and more."""
    for t, noise in CONDITIONS:
        with path(where):
            found, plain = errors(name, 256, t, noise)
        assert found <= 2 * GOAL, (t, noise)
        assert found <= plain, (t, noise)
        if t < 0.02:
            assert plain > 100 * GOAL  # the batch is solved: the test says something


def test_the_goal_is_met_at_its_size() -> None:
    for name in ("NTXent", "CLIP", "SupCon", "NCA", "MultiPositive"):
        for noise in (0.3, 0.1):
            assert errors(name, 700, 0.01, noise)[0] <= GOAL


SIZES = (100, 0, 120, 36)


def on_rank(ring: bool, always: bool) -> list[Tensor]:
    found = []
    for noise in (0.3, 0.1):
        wrap = functools.partial(cz.DistributedLoss, grad_reduction="sum", ring=ring)
        with splitting(always=always):
            for loss in TILED.values():
                rows = [local_shard(x, SIZES) for x in views(sum(SIZES), noise)]
                found.append(gradient(loss.ours, rows, torch.float32, temperature=0.01, wrap=wrap))
            z, labels = torch.cat(views(sum(SIZES), noise)), torch.arange(sum(SIZES)).repeat(2)
            sizes = [2 * n for n in SIZES]
            loss = functools.partial(wrap(cz.SupCon(temperature=0.01)), labels=local_shard(labels, sizes))
            found.append(gradient(loss, [local_shard(z, sizes)], torch.float32))
    return found


@pytest.mark.parametrize(("ring", "always"), [(False, False), (False, True), (True, True)])
def test_ranks_keep_the_same_digits(ring: bool, always: bool, worlds: Worlds) -> None:
    """Gathered, small, and in a ring."""
    found = [torch.cat(x, 1) for x in zip(*worlds.run(len(SIZES), lambda: on_rank(ring, always)), strict=True)]
    for noise in (0.3, 0.1):
        for name in (*TILED, "SupCon"):
            exact, _ = expected(LOSSES[name], sum(SIZES), 0.01, noise)
            of_ranks = found.pop(0)
            assert relative_error(of_ranks, exact.view_as(of_ranks)) <= 2 * GOAL, (name, noise)


def softmaxes_with_the_positive(logits: Tensor, comparison: Any, softmaxes: Any = small_batch.softmaxes) -> Any:
    losses, weights = softmaxes(logits, comparison)

    def rounded_weights() -> Tensor:
        w = weights()
        for offset in (len(w) // 2, -len(w) // 2) if comparison == "views" else (0,):
            w.diagonal(offset).add_(1).sub_(1)
        return w

    return losses, rounded_weights


BY_HAND = ("NTXent", "InfoNCE", "CLIP")
"""Losses whose small batches have a path of their own, without the formula."""
PLACES = "tiled", "small", "dense"
SUBTRACTED = [pair for pair in drawn(LOSSES, PLACES, one_in=3) if pair[1] != "small" or pair[0] not in BY_HAND]
MUTANTS: list[tuple[Callable[..., Any], Callable[..., Any], str, str]] = [
    *((softmax_arithmetic.cross_entropy, lambda x, y: torch.logaddexp(y, x) - x, *pair) for pair in SUBTRACTED),
    # its former formula: the dot product with the sum of the class is rounded otherwise than the logit in the sum
    *((anchor_block.only_positives, lambda *_: None, "SupCon", where) for where in PLACES),
    *((small_batch.softmaxes, softmaxes_with_the_positive, name, "small") for name in BY_HAND),
]


@pytest.mark.parametrize(("function", "mutant", "name", "where"), MUTANTS)
def test_a_subtraction_is_caught(function: Any, mutant: Callable[..., Any], name: str, where: str) -> None:
    loaded = [x for name, x in sys.modules.items() if name.startswith("contrastive_zoo.")]
    with ExitStack() as stack:
        for module in loaded:
            if vars(module).get(function.__name__) is function:
                stack.enter_context(patch.object(module, function.__name__, mutant))
        stack.enter_context(path(where))
        assert errors(name, 256, 0.01, 0.3)[0] > 100 * GOAL
