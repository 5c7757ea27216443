"""Numbers at the edge: every loss equals its formula in float64, or says what is wrong; and the same bits twice."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.extremes import GOAL, SITUATIONS, Result, compare, deviation, loss, nudged
from tests.helpers import EVERY_CASE, local_shard
from tests.losses.whole_zoo import EVERY
from tests.zoo import Entry, dense_clip

pytestmark = pytest.mark.figures


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("dtype", GOAL, ids=str)
def test_every_loss_is_its_formula(name: str, dtype: torch.dtype) -> None:
    """A sixth of the losses in each situation and dtype; in the long search, and for the page, all of them."""
    first = (2 * list(SITUATIONS).index(name) + list(GOAL).index(dtype)) % 6
    entries = EVERY if EVERY_CASE else EVERY[first::12]
    found = {entry.name: compare(entry, SITUATIONS[name], dtype) for entry in entries}
    assert {entry: x for entry, x in found.items() if x is not None and not x.right} == {}


def two_pass(*rows: Tensor, temperature: float) -> Tensor:
    """CLIP without the maximum: exp(10,000) is infinite."""
    a, b = (torch.nn.functional.normalize(x, dim=1) for x in rows)
    weights = (a @ b.T / temperature).exp()
    positive = weights.diagonal()
    return -((positive / weights.sum(1)).log() + (positive / weights.sum(0)).log()).mean() / 2


def test_a_formula_that_overflows_would_not_pass() -> None:
    entry = Entry("CLIP", lambda **settings: functools.partial(two_pass, **settings), dense_clip)
    ordinary, extreme = SITUATIONS["every row twice"], SITUATIONS["temperature 0.0001, logits to ±10,000"]
    assert compare(entry, ordinary, torch.float64).right
    assert not compare(entry, extreme, torch.float64).right


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


def on_a_rank(cases: list[Drawn]) -> list[dict[str, list[Result] | str]]:
    """For each case and path the results of two runs, or the error of the first."""
    torch.set_default_dtype(torch.float32)  # that of this process, which rounds constants of some losses
    found = []
    for entry, rows, temperature in cases:
        local = [local_shard(x, [len(x) // 3, 0, len(x) - len(x) // 3]) for x in rows]
        of_path: dict[str, list[Result] | str] = {}
        for name, (split, options) in PATHS.items():
            with splitting(always=split):
                try:
                    of_path[name] = [once(entry, local, temperature, options) for _ in range(2)]
                except ValueError as error:
                    of_path[name] = str(error)
        found.append(of_path)
    return found


def once(entry: Entry, rows: list[Tensor], temperature: float, options: dict[str, Any]) -> Result:
    torch.manual_seed(0)
    made = entry.make(temperature=temperature).double()
    return Result.of(cz.DistributedLoss(made, check_distinct=False, **options), rows)


def test_every_path_of_three_ranks_is_one_process_and_gives_the_same_bits_twice(worlds: Worlds) -> None:
    cases = drawn()[:: 1 if EVERY_CASE else 4]
    by_rank = worlds.run(3, on_a_rank, cases)
    for i, (entry, rows, temperature) in enumerate(cases):
        one = loss(entry, rows, temperature)
        for path in PATHS:
            ranks = [found[i][path] for found in by_rank]
            if isinstance(ranks[0], str):
                assert len(set(map(str, ranks))) == 1, (entry, path, ranks)
                assert path == "ring" or isinstance(one, str), (entry, path, ranks[0])
                continue
            assert isinstance(one, Result), (entry, path, one)
            for first, second in ranks:
                assert first.equals(second), (entry, path)
                assert torch.equal(first.value, ranks[0][0].value), (entry, path)
            gathered = [torch.cat(parts) / 3 for parts in zip(*(x[0].gradients for x in ranks), strict=True)]
            found, near = Result(ranks[0][0].value, gathered), loss(entry, nudged(rows, torch.float64), temperature)
            assert found.finite == one.finite, (entry, path)
            if one.finite and isinstance(near, Result):
                off, moved = (deviation(x, one, rows, temperature) for x in (found, near))
                assert off <= 1e-10 + 8 * moved, (entry, path, off)
