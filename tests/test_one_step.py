"""The state of a loss moves once a step, however many calls a step has, as one batch moves it on one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base import state
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.testing.catalogue import CATALOGUE
from tests.helpers import EVERY_CASE, close, numbers
from tests.random_steps.losses import LOSSES, D, global_rows

CASES = [name for name, loss in LOSSES.items() if loss.remembers and not loss.user_code]
VALUE_OF_ONE_BATCH = {"DINO", "DINO, three views", "IBOT", "MoCo", "MoCo's own"}
"""Losses that also return the value of one batch: they do not compare its samples with each other."""

Batch = tuple[list[Tensor], dict[str, Tensor]]


def batch(name: str, n: int, seed: int) -> Batch:
    """Samples, of which a memory of labels takes a part."""
    rows = global_rows(LOSSES[name], n, seed, torch.float64)
    masks = {"enqueue_mask": torch.arange(n) % 3 > 0} if name == "memory of SupCon" else {}
    return [x.requires_grad_(x.is_floating_point()) for x in rows], masks


def called(loss: nn.Module, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
    value, leaves = loss(*batch[0], **batch[1]), [x for x in batch[0] if x.requires_grad]
    return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)


def made(name: str) -> nn.Module:
    """The loss, after a first call."""
    torch.manual_seed(0)
    loss: nn.Module = LOSSES[name].make().double()
    called(loss, batch(name, 5, 0))
    return loss


def check(name: str, sizes: Sequence[int]) -> None:
    """A step of several calls moves the state, and returns the values, of one batch of all its samples.

    Each call is repeated, as by SAM. tests/random_steps compares ranks with one process.
    """
    several, whole = made(name), made(name)
    batches = [batch(name, n, seed) for seed, n in enumerate(sizes, 1)]
    with cz.one_step(several) as step:
        calls = [called(several, x) for x in batches]
        with step.again():
            for x, (value, gradients) in zip(batches, calls, strict=True):
                again = called(several, x)
                close(again[0], value)
                assert all(map(torch.equal, again[1], gradients))
    of_all = [torch.cat(x).detach() for x in zip(*(x for x, _ in batches), strict=True)]
    of_all = [x.requires_grad_(x.is_floating_point()) for x in of_all]
    masks = {key: torch.cat([masks[key] for _, masks in batches]) for key in batches[0][1]}
    value, gradients = called(whole, (of_all, masks))
    for (of, x), y in zip(several.named_buffers(), whole.buffers(), strict=True):
        if of != "log_u":  # the negatives of a sample are those of its call
            close(x, y)
    if name in VALUE_OF_ONE_BATCH:
        shares = [n / sum(sizes) for n in sizes]
        close(torch.stack([share * x for share, (x, _) in zip(shares, calls, strict=True)]).sum(), value)
        for parts, x in zip(zip(*(of for _, of in calls), strict=True), gradients, strict=True):
            close(torch.cat([share * part for share, part in zip(shares, parts, strict=True)]), x)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=30 if EVERY_CASE else 1, deadline=None)
@given(sizes=st.lists(st.integers(2, 9), min_size=2, max_size=4))
@example(sizes=(7, 5, 6))
def test_a_step_of_several_calls_is_one_step(name: str, sizes: Sequence[int]) -> None:
    check(name, sizes)


def at_every_call(self: Stateful, found: Any) -> None:
    with torch.no_grad():
        self.move([found])


MUTANTS: dict[str, Any] = {
    "at every call": (Stateful, "record", at_every_call),
    "again": (state.OpenStep, "add", lambda self, module, found: self.calls.append((module, found))),
}


CAUGHT = [(name, "at every call") for name in CASES if "small" not in name and "Sinkhorn" not in name]
# a mean over the same samples twice is the mean, and a small memory holds the last samples only
CAUGHT += [(name, "again") for name in ("NNCLR", "MoCo", "memory of SupCon", "memory of a third-party loss")]


@pytest.mark.parametrize(("name", "mutant"), CAUGHT)
def test_a_state_that_moves_too_often_is_caught(name: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        check(name, (7, 5, 6))


def test_every_state_of_the_library_is_here() -> None:
    losses = [entry.make() for entry in CATALOGUE.values()]
    with_buffers = {type(x) for loss in losses for x in loss.modules() if x._buffers}
    assert with_buffers, "no loss has a state"
    assert all(issubclass(kind, Stateful) for kind in with_buffers)
    here = {kind for name in CASES for x in LOSSES[name].make().modules() for kind in type(x).__mro__}
    assert here >= with_buffers
    assert {x for x in Stateful.__subclasses__() if x.__module__.startswith("contrastive_zoo")} <= {
        *here, cz.MomentumEncoder
    }  # fmt: skip


def test_a_step_that_fails_moves_nothing() -> None:
    loss, rows = cz.DINO(D), numbers(4, D, seed=0, dtype=torch.float32)
    with pytest.raises(ZeroDivisionError), cz.one_step(loss):
        loss(rows, rows) / (1 // len(rows[:0]))
    assert not loss.centre.any()
    loss(rows, rows)
    close(loss.centre, 0.1 * rows.mean(0))


def test_a_sum_that_fails_in_a_step_leaves_nothing_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    dino, rows = cz.DINO(D), numbers(4, D, seed=0, dtype=torch.float32)
    loss = cz.WeightedSum([dino, later := cz.NTXent()])
    with cz.one_step(loss):
        loss(rows, rows)
        monkeypatch.setattr(type(later), "compute", lambda self, batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(rows + 5, rows + 5)
    close(dino.centre, 0.1 * rows.mean(0))


def test_a_memory_and_a_momentum_encoder_move_once() -> None:
    encoder, memory = nn.Linear(1, 1, bias=False), cz.MemoryQueue(4, 1)
    keys = cz.MomentumEncoder(encoder, momentum=0.5)
    nn.init.ones_(encoder.weight), nn.init.zeros_(keys.encoder.weight)
    with cz.one_step(memory, keys):
        keys.update(encoder), keys.update(encoder)
        slots = [memory.enqueue(torch.ones(2, 1)), memory.enqueue(torch.ones(1, 1))]
        assert len(memory) == 0
        nn.init.constant_(encoder.weight, 3.0)
    assert torch.cat(slots).tolist() == [0, 1, 2]
    assert len(memory) == 3
    assert keys.encoder.weight.item() == 1.5


def test_what_moves_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="BatchNorm1d moves its buffers itself"), cz.one_step(nn.BatchNorm1d(2)):
        pass
    with pytest.raises(ValueError, match="modules, got a list"), cz.one_step([cz.DINO(2)]):  # type: ignore[arg-type]  # the mistake
        pass
    with cz.one_step(loss := cz.DINO(2)), pytest.raises(ValueError, match="in a step already"), cz.one_step(loss):
        pass
    with cz.one_step(cz.NTXent(), cz.ArcFace(2, 2)):  # without a state
        pass
