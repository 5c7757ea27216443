"""What arrives late: values of an accelerator, checked in the next call, and messages, used when they were waited for."""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import classes
from contrastive_zoo.engine.exchange import SendReceive
from contrastive_zoo.loss_base import loss as loss_base
from contrastive_zoo.losses import pair_margins
from contrastive_zoo.ranks import devices, row_checks, world
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, error_message, numbers
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.simulated import device, value_and_gradients
from tests.zoo import Entry

N, D, C = 4, 3, 5
Z = [numbers(N, D, seed=seed) for seed in range(3)]
LABELS, BEYOND, BELOW = torch.tensor([0, 1, 1, 4]), torch.tensor([0, 1, 1, 5]), torch.tensor([0, -1, 1, 4])


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    says: str
    rows: Sequence[Tensor] = (Z[0], LABELS)
    wrong: Tensor = BEYOND
    indexes: bool = False
    """Whether the loss uses the value as an index."""


CLASSES = "labels are classes 0 … 4, got "
PAIRS = torch.tensor([0, 1, 1, 0])
TARGETS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
WEIGHTS = torch.ones(N, 2, dtype=torch.float64)


CASES = {
    "ArcFace": Case(lambda: cz.ArcFace(C, D), CLASSES + "0 … 5"),
    "sharded": Case(lambda: cz.ArcFace(C, D, shard_over=cz.World.of()), CLASSES + "-1", wrong=BELOW),
    "ProxyAnchor": Case(lambda: cz.ProxyAnchor(C, D), CLASSES + "0 … 5", indexes=True),
    "Margin": Case(lambda: cz.Margin(num_classes=C), "labels are 0 … 4, got 0 … 5.", indexes=True),
    "prefixes": Case(lambda: cz.Matryoshka(cz.Margin(num_classes=C), (2, 3)), "got 0 … 5.", indexes=True),
    "sum with a state": Case(
        lambda: cz.WeightedSum([cz.CrossBatchMemory(cz.SupCon(), 20, D), cz.ProxyAnchor(C, D)]),
        CLASSES + "0 … 5",
        indexes=True,
    ),
    "OnlineContrastive": Case(cz.OnlineContrastive, "got 0 … 2.", [*Z[:2], PAIRS], 2 * PAIRS),
    "MultiPositive": Case(
        cz.MultiPositive, "weights are non-negative", [*Z[:2], TARGETS, torch.arange(N), WEIGHTS], WEIGHTS.log() - 1
    ),
    "MNRL": Case(
        lambda: cz.MNRL(hardness_mode="hard_negatives", hardness_strength=1.0),
        "owners are rows of this rank's 4 queries, or -1, got 1 … 4.",
        [*Z, torch.arange(N)],
        torch.arange(N) + 1,
    ),
    "NaN": Case(cz.NTXent, "held NaN or infinite values", Z[:2], torch.full((N, D), torch.nan, dtype=torch.float64)),
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
    said = {*first, *third} == {None} and len({*second}) == 1 and str(second[0])
    return not (said and CASES[name].says in said and "previous call" in said)


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
    assert name == "sharded" or case.says.removeprefix("held ") in str(text)
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


class LateWork:
    """A message that is sent when it is waited for; until then the tensors that receive it are NaN."""

    def __init__(self, send: Callable[[], Any], received: list[Tensor]) -> None:
        self.send: Callable[[], Any] | None = send
        for x in received:
            x.view(-1).view(torch.uint8).fill_(255)

    def wait(self, timeout: Any = None) -> bool:
        send, self.send = self.send, None
        if send is not None:
            send()
        return True

    def is_completed(self) -> bool:
        return self.send is None


def late(message: Callable[..., Any], *, receives: int | None) -> Callable[..., Any]:
    """Return a collective whose tensor at the index ``receives`` is an output, and arrives late."""

    def start(*args: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return message(*args, **named)
        return LateWork(lambda: message(*args, **named), [] if receives is None else [args[receives]])

    return start


def late_transfers(messages: list[Any]) -> list[LateWork]:
    begin = dist.distributed_c10d.batch_isend_irecv
    received = [x.tensor for x in messages if x.op is dist.irecv]
    return [LateWork(lambda: [work.wait() for work in begin(messages)], received)]


@contextmanager
def late_messages() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, receives in [
            (dist, "all_to_all_single", 0),
            (world, "all_gather_single", 0),
            (dist, "all_reduce", None),  # in place
            (dist, "broadcast", None),
        ]:
            stack.enter_context(patch.object(module, name, late(getattr(module, name), receives=receives)))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", late_transfers))
        yield


SHARDS = (4, 3)
DRAWN = WHOLE_ZOO[:: 1 if EVERY_CASE else 6]


def rows_of_rank(entry: Entry) -> list[Tensor]:
    rows = whole_batch(entry.case(), GlobalBatch(SHARDS, d=3, labels="mixed", seed=5))
    return [x.split(SHARDS)[dist.get_rank()] for x in rows]


def compare_late_with_in_time(indices: list[int]) -> int:
    """Return of how many losses candidates pass from rank to rank."""
    rings = 0
    for entry, ring in itertools.product([WHOLE_ZOO[index] for index in indices], [False, True]):
        make, rows = entry.case(temperature=0.3).make, rows_of_rank(entry)
        if ring and (make().loss.ring_problem() or make().loss.stated(rows, {}).needs.no_ring):  # by ids, for one
            continue
        loss = cz.DistributedLoss(make().loss, ring=ring).double()
        with splitting(always=True):
            expected = value_and_gradients(copy.deepcopy(loss), rows)
            with late_messages():
                found = value_and_gradients(loss, rows)
        says = f"{entry}, ring={ring}: {{}}".format
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=says)
        rings += ring
    return rings


def test_nothing_reads_a_message_before_it_arrives(worlds: Worlds) -> None:
    indices = [WHOLE_ZOO.index(entry) for entry in DRAWN]
    assert min(worlds.run(2, compare_late_with_in_time, indices)) > 3


def test_a_buffer_that_is_read_too_soon_would_be_noticed(worlds: Worlds) -> None:
    """The mutant: a ring that does not wait for the next candidates."""
    index = next(i for i, entry in enumerate(WHOLE_ZOO) if str(entry) == "InfoNCE")

    def job() -> Tensor:
        entry = WHOLE_ZOO[index]
        loss = cz.DistributedLoss(entry.case(temperature=0.3).make().loss, ring=True).double()
        with patch.object(SendReceive, "wait", lambda self: self.received), splitting(always=True), late_messages():
            return value_and_gradients(loss, rows_of_rank(entry))[0].detach()

    assert all(value.isnan() for value in worlds.run(2, job))
