"""Losses on an accelerator: they read none of its values, and autograd's own thread has the budget of the forward pass."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.engine import rowwise, tiling
from contrastive_zoo.ranks import devices
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.device_entries import ENTRIES
from tests.helpers import EVERY_CASE, common_error
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.simulated import Put, device, draws_of_a_device, on_cpu, put_by, value_and_gradients
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
    return cz.MNRL(directions=("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"))


def cases() -> dict[str, tuple[Callable[[], Any], list[torch.Tensor]]]:
    """Return losses by name, and a batch of 9 samples each; the zoo's MNRL draws its negatives from values."""
    found = {str(x): (x.make, whole_batch(x.case(), GlobalBatch((9,), d=4))) for x in WHOLE_ZOO if "MNRL" not in str(x)}
    ones = torch.ones(9, 4)
    return {**found, "MNRL": (all_directions, [ones, ones, ones[:5], torch.arange(5)])}


def reading(names: Iterable[str]) -> set[str]:
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
    def __init__(self, variable: ContextVar[int]) -> None:
        self.variable, self.seen = variable, set[int]()

    def get(self) -> int:
        self.seen.add(self.variable.get())
        return self.variable.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variable, name)


SET_BUDGET = 5 * 2**20


def budgets_of_backward(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> set[int]:
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


RECOMPUTED = [entry for entry in WHOLE_ZOO if str(entry) in ("Contrastive", "LiftedStructure", "Histogram")]


def test_backward_passes_have_the_budget_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(RECOMPUTED) == 3
    assert budgets_of_backward(RECOMPUTED + WHOLE_ZOO[:: 1 if EVERY_CASE else 5], monkeypatch) == {SET_BUDGET}


def test_the_budget_of_another_thread_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "memory_budget", lambda size: contextlib.nullcontext())
    assert budgets_of_backward(RECOMPUTED, monkeypatch) == {tiling.budget()} != {SET_BUDGET}


LEFT_OUT = {"MNRL", "MNRL, all directions", "MNRL, symmetric", "MNRL, masked", "MNRL, Qwen3"}
"""The zoo's draws its negatives from values."""
LOSSES = [entry for entry in WHOLE_ZOO if str(entry) not in LEFT_OUT]


@pytest.mark.parametrize("entry", LOSSES[:: 1 if EVERY_CASE else 2], ids=str)
def test_a_loss_with_labels_on_the_cpu(entry: Entry) -> None:
    rows = whole_batch(entry.case(), GlobalBatch((7,), d=3, seed=1))
    loss = entry.case(temperature=0.3).make().double()
    with draws_of_a_device(str(entry)):
        expected = value_and_gradients(copy.deepcopy(loss), rows)
    with device() as mode:
        put = put_by(mode)
        moved = [put(x) if x.is_floating_point() else x for x in rows]
        found = value_and_gradients(put(loss), moved)
        assert found[0].device == mode.place
        torch.testing.assert_close(on_cpu(found), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("entry", [x for x in LOSSES if str(x) != "MarginMSE"][1 :: 1 if EVERY_CASE else 3], ids=str)
def test_a_loss_without_float64(entry: Entry) -> None:
    rows = [
        x.float() if x.is_floating_point() else x for x in whole_batch(entry.case(), GlobalBatch((40,), d=3, seed=1))
    ]
    loss = entry.case(temperature=0.3).make().float()
    wide = [x.double() if x.is_floating_point() else x for x in rows]
    with draws_of_a_device(str(entry)):
        expected = value_and_gradients(copy.deepcopy(loss).double(), wide)
    with device("mps:0", float64=False) as mode:
        put = put_by(mode)
        found = on_cpu(value_and_gradients(put(loss), [put(x) for x in rows]))
    expected = [x.to(y.dtype) for x, y in zip(expected, found, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_a_mean_without_float64_has_the_stated_error() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100_000, 4, generator=draw)
    expected = cz.NegativeCosine()(a.double(), b.double())
    with device("mps:0", float64=False) as mode:
        found = cz.NegativeCosine()(mode.put(a), mode.put(b)).cpu()
    assert abs(found.double() - expected) < 1e-6


def test_mixtures_would_be_noticed() -> None:
    """The mutant: an operation of a tensor on the device and one on the CPU."""
    with device() as mode, pytest.raises(AssertionError, match="add: tensors on ipu:0 and on the CPU"):
        mode.put(torch.ones(2)) + torch.ones(2)


def test_float64_would_be_noticed() -> None:
    with device("mps:0", float64=False) as mode, pytest.raises(AssertionError, match="has no float64"):
        mode.put(torch.ones(2)).double()


REFUSED: dict[str, tuple[Callable[[Put], Any], str]] = {
    "towers": (lambda put: put(cz.Clip())(put(torch.eye(3)), torch.eye(3)), "images on ipu:0 and texts on cpu"),
    "views": (lambda put: cz.NTXent()(torch.eye(3), put(torch.eye(3))), "on cpu and .* on ipu:0"),
    "weights": (
        lambda put: cz.ArcFace(num_classes=3, embedding_size=3)(put(torch.eye(3)), torch.arange(3)),
        r"weights are on cpu .* loss\.to\('ipu:0'\)",
    ),
    "centre": (lambda put: cz.DINO(3)(put(torch.eye(3)), put(torch.eye(3))), "centre values are on cpu"),
    "prototypes": (lambda put: cz.SwAV(4, 3)(put(torch.eye(3)), put(torch.eye(3))), "prototypes are on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_elsewhere_is_refused_in_words(name: str) -> None:
    run, text = REFUSED[name]
    with device() as mode, pytest.raises(ValueError, match=text):
        run(put_by(mode))


def test_ranks_on_other_devices_are_refused(worlds: Worlds) -> None:
    def bad() -> None:
        with device() as mode:
            x = torch.eye(3)[: 2 + dist.get_rank()]
            cz.DistributedLoss(cz.NTXent())(*[mode.put(x) if dist.get_rank() else x] * 2)

    text, _ = common_error(worlds, 2, bad, lambda: cz.collectives.all_reduce(torch.ones(1)))
    assert "on ipu" in text


def on_both(name: str, kind: str = "ipu:0", *, float64: bool = True) -> tuple[Any, Any]:
    expected = on_cpu(ENTRIES[name](lambda x: copy.deepcopy(x) if isinstance(x, nn.Module) else x))
    with device(kind, float64=float64) as mode:
        return expected, on_cpu(ENTRIES[name](put_by(mode)))


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_on_a_device(name: str, worlds: Worlds) -> None:
    for expected, found in [on_both(name), *worlds.run(2, on_both, name)]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    expected, found = on_both(name, "mps:0", float64=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
