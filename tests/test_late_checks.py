"""Values on an accelerator that are checked in the next call: the same error on every rank, and nothing is lost before."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import classes
from contrastive_zoo.loss_base import loss as loss_base
from contrastive_zoo.losses import pair_margins
from contrastive_zoo.ranks import devices, row_checks
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers
from tests.simulated import device

N, D, C = 4, 3, 5


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    rows: list[Tensor]
    wrong: Tensor
    says: str
    indexes: bool = False
    """Whether the loss uses the value as an index."""


Z = [numbers(N, D, seed=seed) for seed in range(3)]
LABELS, BEYOND, BELOW = torch.tensor([0, 1, 1, 4]), torch.tensor([0, 1, 1, 5]), torch.tensor([0, -1, 1, 4])
CLASSES = "labels are classes 0 … 4, got "
PAIRS = torch.tensor([0, 1, 1, 0])
TARGETS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
WEIGHTS = torch.ones(N, 2, dtype=torch.float64)


def sum_with_a_state() -> nn.Module:
    return cz.WeightedSum([cz.CrossBatchMemory(cz.SupCon(), 20, D), cz.ProxyAnchor(C, D)])


CASES = {
    "ArcFace": Case(lambda: cz.ArcFace(C, D), [Z[0], LABELS], BEYOND, CLASSES + "5"),
    "sharded": Case(lambda: cz.ArcFace(C, D, shard_over=cz.World.of()), [Z[0], LABELS], BELOW, CLASSES + "-1"),
    "ProxyAnchor": Case(lambda: cz.ProxyAnchor(C, D), [Z[0], LABELS], BEYOND, CLASSES + "5", True),
    "Margin": Case(lambda: cz.Margin(num_classes=C), [Z[0], LABELS], BEYOND, "labels are 0 … 4, got 0 … 5.", True),
    "prefixes": Case(
        lambda: cz.Matryoshka(cz.Margin(num_classes=C), (2, 3)), [Z[0], LABELS], BEYOND, "got 0 … 5.", True
    ),
    "sum": Case(sum_with_a_state, [Z[0], LABELS], BEYOND, CLASSES + "5", True),
    "OnlineContrastive": Case(cz.OnlineContrastive, [Z[0], Z[1], PAIRS], 2 * PAIRS, "got 0 … 2."),
    "MultiPositive": Case(
        cz.MultiPositive, [Z[0], Z[1], TARGETS, torch.arange(N), WEIGHTS], WEIGHTS.log() - 1, "weights are non-negative"
    ),
    "MNRL": Case(
        lambda: cz.MNRL(hardness_mode="hard_negatives", hardness_strength=1.0),
        [*Z, torch.arange(N)],
        torch.arange(N) + 1,
        "owners are rows of this rank's 4 queries, or -1, got 1 … 4.",
    ),
    "NaN": Case(cz.NTXent, Z[:2], torch.full((N, D), torch.nan, dtype=torch.float64), "held NaN or infinite values"),
}


def state_of(loss: nn.Module) -> list[Tensor]:
    return [x.detach().cpu().clone() for x in (*loss.parameters(), *loss.buffers())]


def calls(name: str, bad: bool, **options: Any) -> list[str | None]:
    case = CASES[name]
    torch.manual_seed(0)
    with device() as mode:
        put = mode.put
        loss = cz.DistributedLoss(put(case.make().double()), check_distinct=False, **options)
        *right, wrong = [put(x.clone().requires_grad_(x.is_floating_point())) for x in (*case.rows, case.wrong)]
        first = [*right[:-1], wrong] if bad else right
        errors = [error_message(lambda: loss(*first).sum().backward())]
        before = state_of(loss)
        errors.append(error_message(lambda: loss(*right)))
        if errors[-1] is not None:
            assert all(torch.equal(x, y) for x, y in zip(before, state_of(loss), strict=True))
        errors.append(error_message(lambda: loss(*right)))
    return errors


def wrong_errors(name: str, found: list[list[str | None]]) -> bool:
    """Return whether the ranks do not all refuse the second call, and only that, with one text."""
    first, second, third = zip(*found, strict=True)
    says = str(second[0])
    return not (
        {*first, *third} == {None} and len({*second}) == 1 and CASES[name].says in says and "previous call" in says
    )


@pytest.mark.parametrize("splits", [True, False])
def test_every_rank_refuses_the_next_call(splits: bool, device_worlds: Worlds) -> None:
    def job(bad: bool) -> list[list[str | None]]:
        with splitting(always=splits):
            return [calls(name, bad) for name in CASES]

    by_rank = device_worlds.run(2, job, each=[(False,), (True,)])
    by_name = dict(zip(CASES, zip(*by_rank, strict=True), strict=True))
    assert [name for name, found in by_name.items() if wrong_errors(name, [*found])] == []


@pytest.mark.parametrize("name", CASES)
def test_one_process_refuses_the_next_call_and_a_bare_loss_this_one(name: str) -> None:
    assert not wrong_errors(name, [calls(name, True)])
    assert calls(name, True, check_finite=False) == [None] * 3
    case = CASES[name]
    with device() as mode:
        loss, rows = mode.put(case.make().double()), [mode.put(x) for x in (*case.rows[:-1], case.wrong)]
        text = error_message(lambda: loss(*rows))
    assert name == "sharded" or case.says.replace("held", "hold") in str(text)
    if case.indexes:  # the mutant: labels are used as they came
        unsafe = {"safe_index": lambda x, stop: x}
        with patch.multiple(classes, **unsafe), patch.multiple(pair_margins, **unsafe), pytest.raises(IndexError):
            calls(name, True)


@pytest.mark.parametrize("name", ["ArcFace", "MNRL"])
def test_a_check_waits_for_nothing(name: str) -> None:
    def waits_and_copies() -> tuple[int, int]:
        case = CASES[name]
        with device() as mode:
            put = mode.put
            loss = cz.DistributedLoss(put(case.make().double()))
            loss(*map(put, case.rows))
            return len(mode.reads), len(mode.copies)

    assert waits_and_copies() == (0, 1)
    with patch.object(loss_base, "values_problem", lambda *x, **_: row_checks.values_problem(*x)):  # the mutant
        assert waits_and_copies() == (1, 1)


def test_a_copy_of_a_wrapper_has_no_checks_to_come_and_a_compiled_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda x: False)
    loss = cz.DistributedLoss(cz.ArcFace(C, D).double())
    run = torch.compile(lambda z, labels: loss(z, labels), backend="eager")
    for call in (loss, run):
        call(Z[0], BEYOND)
        for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            assert other(Z[0], LABELS).isfinite()
        with pytest.raises(ValueError, match=f"ArcFace: at the previous call.*{CLASSES}"):
            call(Z[0], LABELS)
        assert call(Z[0], LABELS).isfinite()
