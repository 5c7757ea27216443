"""Losses on an accelerator: they read none of its values, and autograd's own thread has the budget of the forward pass."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.engine import rowwise, tiling
from contrastive_zoo.ranks import devices
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from tests.helpers import EVERY_CASE
from tests.losses.whole_zoo import WHOLE_ZOO as ENTRIES
from tests.simulated import device, put_by, value_and_gradients
from tests.zoo import Entry

READS = {
    "Triplet, soft": "the number of positives of an anchor",
    "Triplet, semi-hard and soft": "the number of positives of an anchor",
    "SmoothAP": "the number of positives of an anchor",
    "Angular": "the number of positives of an anchor",
    "PNP": "the number of positives of an anchor",
    "MaxSim": "the numbers of tokens",
}
"""What some losses need to know before they compute; :func:`reading` calls the other losses of a family by their names."""


def all_directions() -> cz.MNRL:
    """Return the loss with every comparison it can make."""
    return cz.MNRL(directions=("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"))


def cases() -> dict[str, tuple[Callable[[], Any], list[torch.Tensor]]]:
    """Return losses by name, and a batch of 9 samples each; the zoo's MNRL draws its negatives from values."""
    found = {str(x): (x.make, whole_batch(x.case(), GlobalBatch((9,), d=4))) for x in ENTRIES if "MNRL" not in str(x)}
    ones = torch.ones(9, 4)
    return {**found, "MNRL": (all_directions, [ones, ones, ones[:5], torch.arange(5)])}


def reading(names: Iterable[str]) -> set[str]:
    """Return the losses that read values of an accelerator in two steps, in which values are checked."""
    chosen = cases()
    return {name for name in names if reads_of(*chosen[name])}


def reads_of(make: Callable[[], Any], rows: list[torch.Tensor]) -> list[str]:
    with device() as mode:
        put = put_by(mode)
        loss = put(cz.DistributedLoss(make(), check_finite=True).double())
        moved = [put(x.double() if x.is_floating_point() else x) for x in rows]
        mode.reads.clear()
        for _ in range(2):
            value_and_gradients(loss, moved)
        return list(mode.reads)


def may_read(name: str) -> bool:
    return name in READS or name.split(",")[0].removesuffix("Pairwise") in READS


CHECKED = ["ArcFace", "P2SGrad", "Margin, by class", "MultiPositive, several targets", "OnlineContrastive", "MNRL"]
"""Losses that check the values of labels, weights and owners."""


def test_no_loss_and_no_check_waits_for_an_accelerator() -> None:
    names = {*CHECKED, *[*cases()][:: 1 if EVERY_CASE else 2]}
    found = reading(names)
    assert all(may_read(name) for name in found), found


def test_what_a_cpu_does_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: all losses take an accelerator for a CPU."""
    monkeypatch.setattr(devices, "on_cpu", lambda x: True)
    names = {"Clip", "Histogram", "Contrastive", *CHECKED}
    assert names == reading(names)


class Recorded:
    """A context variable, and the values that were read of it."""

    def __init__(self, variable: ContextVar[int]) -> None:
        self.variable, self.seen = variable, set[int]()

    def get(self) -> int:
        self.seen.add(self.variable.get())
        return self.variable.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variable, name)


SET_BUDGET = 5 * 2**20


def budgets_of_backward(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the budgets that backward passes read in another thread, where an accelerator's gradients are computed."""
    recorded = Recorded(tiling._budget)
    monkeypatch.setattr(tiling, "_budget", recorded)
    values = []
    for entry in entries:
        rows = whole_batch(entry.case(), GlobalBatch((7,), d=3, labels="mixed", seed=1))
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in rows]
        with cz.engine.memory_budget(SET_BUDGET):
            values.append(entry.make().double()(*leaves))
    recorded.seen.clear()
    thread = threading.Thread(target=lambda: [value.backward() for value in values])
    thread.start()
    thread.join(timeout=60)
    return recorded.seen


RECOMPUTED = [entry for entry in ENTRIES if str(entry) in ("Contrastive", "LiftedStructure", "Histogram")]


def test_backward_passes_have_the_budget_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(RECOMPUTED) == 3
    assert budgets_of_backward(RECOMPUTED + ENTRIES[:: 1 if EVERY_CASE else 5], monkeypatch) == {SET_BUDGET}


def test_the_budget_of_another_thread_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "memory_budget", lambda size: contextlib.nullcontext())
    assert budgets_of_backward(RECOMPUTED, monkeypatch) == {tiling.budget()} != {SET_BUDGET}
