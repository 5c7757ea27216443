"""Numbers at the edge: every loss equals its formula in float64, or says what is wrong; and the same bits twice."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.engine.precision import MIN_NORM
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, local_shard, numbers
from tests.losses.whole_zoo import EVERY
from tests.zoo import Entry, dense_clip

pytestmark = pytest.mark.figures

N, D = 8, 6

UNDEFINED = {
    "SignalToNoise": ("subnormal rows",), "AlignUniform": ("subnormal rows", "every second row is zero"),
    "MSN": ("subnormal rows",), "MSN, Sinkhorn": ("subnormal rows",),
}  # fmt: skip
"""Situations in which a formula divides 0 by 0, or is one of embeddings of length 1: a zero has no place on the sphere.
MSN's gradient is then a difference of equal numbers, divided by the smallest norm."""

GOAL = {torch.float64: 1e-10, torch.float32: 2e-5}
"""What is allowed besides 8 times the effect of embeddings off in their last bit, and twice the formula's own error."""

EXCEPTIONS = {"NTXent, three views": 1e-4, "SupCon, views": 1e-5}
"""More is allowed in float32: a solved loss of several positives is a difference of equal numbers."""


def ordinary(entry: Entry, n: int = N, d: int = D) -> list[Tensor]:
    labels = torch.arange(n) % max(2, n // 4)
    centres = numbers(n, d, seed=1)[labels]
    views = [centres + 0.7 * numbers(n, d, seed=2 + view) for view in range(entry.views)]
    return views if entry.call == "views" else [views[0], labels]


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Entry], list[Tensor]]:
    return lambda entry: [change(x) if x.is_floating_point() else x for x in ordinary(entry)]


def labelled(labels: Tensor) -> Callable[[Entry], list[Tensor] | None]:
    return lambda entry: [ordinary(entry)[0], labels] if entry.call == "labels" else None


def wide(entry: Entry) -> list[Tensor] | None:
    """Four embeddings of 65,536 numbers; None for losses that hold a matrix of width times width."""
    of_moments = ("VICReg", "Barlow", "TiCo", "Orthogonal", "Matryoshka", "Cyclic")
    return None if entry.name.startswith(of_moments) else ordinary(entry, 4, 2**16)


class Situation(NamedTuple):
    """A kind of batch: the arguments of an entry in float64, or None if the entry has no such batch."""

    rows: Callable[[Entry], list[Tensor] | None]
    temperature: float = 0.1


SITUATIONS = {
    "temperature 0.001": Situation(ordinary, 1e-3),
    "temperature 0.0001, logits to ±10,000": Situation(ordinary, 1e-4),
    "rows of length 200": Situation(changed(lambda x: 80 * x)),
    "every second row is zero": Situation(changed(lambda x: x * (torch.arange(N) % 2)[:, None])),
    "every row twice": Situation(changed(lambda x: x[torch.arange(N) // 2 * 2])),
    "all rows equal": Situation(changed(lambda x: x[:1].expand(N, D).clone())),
    "one sample": Situation(lambda entry: ordinary(entry, 1)),
    "one class": Situation(labelled(torch.zeros(N, dtype=torch.int64))),
    "no two of a class": Situation(labelled(torch.arange(N))),
    "subnormal rows": Situation(changed(lambda x: x * 1e-310)),
    "rows of 65,536 numbers": Situation(wide),
}
"""By name; subnormal embeddings are those of float64, and zeros in float32."""


class Result(NamedTuple):
    value: Tensor
    gradients: list[Tensor]

    @classmethod
    def of(cls, loss: Callable[..., Tensor], rows: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> "Result":
        leaves = [x.to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x for x in rows]
        value, floating = loss(*leaves), [x for x in leaves if x.requires_grad]
        if not value.requires_grad:
            return cls(value, [torch.zeros_like(x) for x in floating])
        gradients = torch.autograd.grad(value, floating, allow_unused=True, materialize_grads=True)
        return cls(value.detach(), list(gradients))

    @property
    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (self.value, *self.gradients))


def deviation(found: Result, exact: Result, rows: Sequence[Tensor], temperature: float = 0.1) -> float:
    errors = [(found.value.double() - exact.value).abs() / exact.value.abs().clamp(min=1)]
    floating = [x for x in rows if x.is_floating_point()]
    for g, e, x in zip(found.gradients, exact.gradients, floating, strict=True):
        g, e, x = g.double().flatten(1), e.flatten(1), x.flatten(1)
        by_row, tiny = e.abs().amax(1), x.norm(dim=1) < MIN_NORM
        divided = bool((torch.maximum(by_row, g.abs().amax(1))[tiny] > 1e3).any())
        usual = by_row[~tiny] if bool((~tiny).any()) else by_row
        scale = by_row.clamp(min=max(usual.median().item(), 1e-3, 1e-4 / temperature))
        scale = scale.where(~tiny, scale.clamp(min=1 / MIN_NORM)) if divided else scale
        errors.append(((g - e).abs().amax(1) / scale).max())
    return max(x.item() for x in errors)


def nudged(rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Rows that are off in the last bit of a dtype, each number by chance up or down."""
    eps = torch.finfo(dtype).eps
    signs = [numbers(*x.shape, seed=90 + i).sign() if x.is_floating_point() else 0 for i, x in enumerate(rows)]
    return [x * (1 + eps * sign) if x.is_floating_point() else x for x, sign in zip(rows, signs, strict=True)]


def formula(entry: Entry, rows: list[Tensor], temperature: float, dtype: torch.dtype = torch.float64) -> Result | None:
    with patch.object(Tensor, "double", lambda x: x.to(dtype)):
        try:
            found = Result.of(lambda *x: entry.dense(*x, temperature=temperature), rows, dtype)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError):
            return None
    return found if found.finite else None


def loss(entry: Entry, rows: list[Tensor], temperature: float, dtype=torch.float64, wrap=None) -> Result | str:
    torch.manual_seed(0)
    try:
        made = entry.make(temperature=temperature)
        made = made.to(dtype) if isinstance(made, nn.Module) else made
        return Result.of(wrap(made) if wrap else made, rows, dtype)
    except ValueError as error:
        return str(error)


def problem(entry: Entry, situation: Situation, dtype: torch.dtype) -> str | None:
    """Return how the loss is not its formula; where that is not defined, any answer is right that ends."""
    rows, temperature = situation.rows(entry), situation.temperature
    if rows is None or (entry.name == "Clip" and temperature < 0.01):  # its temperature has a bound
        return None
    undefined = situation in [SITUATIONS[name] for name in UNDEFINED.get(entry.name, ())]
    rows = [x.to(dtype).double() if x.is_floating_point() else x for x in rows]
    exact = None if undefined else formula(entry, rows, temperature)
    found = loss(entry, rows, temperature, dtype)
    if exact is None:
        return None
    if isinstance(found, str) or not found.finite:
        return str(found)
    allowed = GOAL[dtype] + (EXCEPTIONS.get(entry.name, 0.0) if dtype == torch.float32 else 0.0)
    others = (8, formula(entry, nudged(rows, dtype), temperature)), (2, formula(entry, rows, temperature, dtype))
    allowed += sum(factor * deviation(x, exact, rows, temperature) for factor, x in others if x is not None)
    error = deviation(found, exact, rows, temperature)
    return None if error <= allowed else f"{found} instead of {exact}: {error} > {allowed}"


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("dtype", GOAL, ids=str)
def test_every_loss_is_its_formula(name: str, dtype: torch.dtype) -> None:
    """A sixth of the losses in each situation and dtype; in the long search, and for the page, all of them."""
    first = (2 * list(SITUATIONS).index(name) + list(GOAL).index(dtype)) % 6
    entries = EVERY if EVERY_CASE else EVERY[first::12]
    assert {x.name: why for x in entries if (why := problem(x, SITUATIONS[name], dtype)) is not None} == {}


def two_pass(*rows: Tensor, temperature: float) -> Tensor:
    """CLIP without the maximum: exp(10,000) is infinite."""
    a, b = (torch.nn.functional.normalize(x, dim=1) for x in rows)
    weights = (a @ b.T / temperature).exp()
    positive = weights.diagonal()
    return -((positive / weights.sum(1)).log() + (positive / weights.sum(0)).log()).mean() / 2


def test_a_formula_that_overflows_would_not_pass() -> None:
    entry = Entry("CLIP", lambda **settings: functools.partial(two_pass, **settings), dense_clip)
    ordinary, extreme = SITUATIONS["every row twice"], SITUATIONS["temperature 0.0001, logits to ±10,000"]
    assert problem(entry, ordinary, torch.float64) is None
    assert problem(entry, extreme, torch.float64)


PATHS = {"small batch": (False, {}), "split": (True, {}), "ring": (True, {"ring": True})}

Drawn = tuple[Entry, list[Tensor], float]


def drawn() -> list[Drawn]:
    """Every loss in one situation, every situation with several losses; all of them in the long search."""
    situations = list(SITUATIONS.values())
    return [
        (entry, rows, situation.temperature)
        for i, entry in enumerate(EVERY)
        for situation in (situations if EVERY_CASE else [situations[i % len(situations)]])
        if (rows := situation.rows(entry)) is not None
    ]


def on_a_rank(cases: list[Drawn]) -> list[dict[str, list[Result | str]]]:
    """For each case and path the results of two runs, or their errors."""
    torch.set_default_dtype(torch.float32)  # that of this process, which rounds constants of some losses
    found = []
    for entry, rows, temperature in cases:
        local = [local_shard(x, [len(x) // 3, 0, len(x) - len(x) // 3]) for x in rows]
        of_path = {}
        for name, (split, options) in PATHS.items():
            wrap = functools.partial(cz.DistributedLoss, check_distinct=False, **options)
            with splitting(always=split):
                of_path[name] = [loss(entry, local, temperature, wrap=wrap) for _ in range(2)]
        found.append(of_path)
    return found


def test_every_path_of_three_ranks_is_one_process_and_gives_the_same_bits_twice(worlds: Worlds) -> None:
    cases = drawn()[:: 1 if EVERY_CASE else 4]
    by_rank = worlds.run(3, on_a_rank, cases)
    for i, (entry, rows, temperature) in enumerate(cases):
        one = loss(entry, rows, temperature)
        for path in PATHS:
            ranks = [found[i][path] for found in by_rank]
            if isinstance(ranks[0][0], str):
                assert len(set(map(str, ranks))) == 1, (entry, path, ranks)
                assert path == "ring" or isinstance(one, str), (entry, path, ranks[0])
                continue
            assert isinstance(one, Result), (entry, path, one)
            for first, second in ranks:
                assert all(map(torch.equal, tree_leaves(first), tree_leaves(second))), (entry, path)
                assert torch.equal(first.value, ranks[0][0].value), (entry, path)
            gathered = [torch.cat(parts) / 3 for parts in zip(*(x[0].gradients for x in ranks), strict=True)]
            found, near = Result(ranks[0][0].value, gathered), loss(entry, nudged(rows, torch.float64), temperature)
            assert found.finite == one.finite, (entry, path)
            if one.finite and isinstance(near, Result):
                off, moved = (deviation(x, one, rows, temperature) for x in (found, near))
                assert off <= 1e-10 + 8 * moved, (entry, path, off)
