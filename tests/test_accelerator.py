"""Everything public on an accelerator: the results of a CPU, no value read by the host, and the budget in both passes."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import rowwise, tiling
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks import random_keys as device_normals
from contrastive_zoo.ranks.random_keys import device_keys, normal_numbers, random_keys
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, rank, refused
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.simulated import Put, device, draws_of_a_device, on_cpu, value_and_gradients
from tests.zoo import Entry

pytestmark = pytest.mark.kernels


def samples(n: int = 8, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed + 7 * rank())
    return torch.randn(n + rank(), d, generator=draw), torch.randint(3, (n + rank(),), generator=draw)


def searched(put: Put) -> Any:
    (x, labels), (y, _) = samples(), samples(seed=1)
    a, b, first, metrics = put(x), put(y), put(torch.zeros(len(x), 1, dtype=torch.int64)), cz.metrics
    ids = 100 * rank() + torch.arange(len(x))
    judged = {"ids": put(ids), "gallery_ids": ids, "judgements": (ids[:3], ids[1:4], torch.tensor([1.0, 2.0, 1.0]))}
    collected = metrics.RetrievalMetrics()
    collected.update(a, labels)
    collected.update(a + 1, put(labels))
    return [
        collected.compute(),
        metrics.evaluate(a, a + 0.1, **judged, metrics=["ndcg@3"]),
        tuple(metrics.top_k(a, b, k=3)),
        tuple(metrics.top_k(a, k=2, excluded=first)),
        metrics.evaluate(a, labels=labels, metrics=["map", "knn_accuracy@3"]),
        metrics.evaluate(a, labels=put(labels), reduction="none"),
    ]


def monitored(put: Put) -> list[dict[str, float]]:
    (a, labels), (b, _) = samples(), samples(seed=1)
    views, classes = cz.DistributedLoss(put(cz.NTXent())), cz.DistributedLoss(put(cz.SupCon()))
    monitors = [cz.Monitor(views, every=1), cz.Monitor(classes, every=1, encoder=put(nn.Linear(4, 4)))]
    views(put(a), put(b))
    classes(put(a), labels)
    return [{name: x for name, x in monitor.take().items() if "drift" not in name} for monitor in monitors]


def remembered(put: Put) -> Any:
    x, labels = samples()
    memory, on_cpu = put(cz.MemoryQueue(11, embedding_size=4)), cz.MemoryQueue(11, embedding_size=4)
    slots = memory.enqueue(put(x), labels), on_cpu.enqueue(put(x), put(labels))
    more = memory.enqueue(put(x), put(labels), enqueue_mask=labels > 0)
    loss = put(cz.CrossBatchMemory(cz.SupCon(), size=20, embedding_size=4))
    negatives = put(cz.CrossBatchMemory(cz.InfoNCE(), size=20, embedding_size=4))
    found = [cz.DistributedLoss(loss)(put(x), labels) for _ in range(2)]
    found += [cz.DistributedLoss(negatives)(put(x), put(x + 1)) for _ in range(2)]
    return slots, more, memory.rows, memory.labels, on_cpu.rows, on_cpu.labels, found


def momentum(put: Put) -> Any:
    torch.manual_seed(0)
    encoder = put(nn.Linear(4, 3))
    teacher = cz.MomentumEncoder(encoder, momentum=0.5)
    with torch.no_grad():
        encoder.weight.add_(1)
    teacher.update(encoder)
    return teacher(put(samples()[0]))


def cached(put: Put) -> Any:
    torch.manual_seed(0)
    x, labels = samples()
    encoder, loss = put(nn.Linear(4, 3)), cz.DistributedLoss(put(cz.SupCon()))
    value = loss(cz.GradCache(encoder, 3)(put(x)), labels)
    value.backward()
    cz.average_gradients(encoder)
    return value, encoder.weight.grad


def messages(put: Put) -> Any:
    x, C = put(samples()[0]).requires_grad_(), cz.collectives
    gathered = C.all_gather(x)
    scattered = C.reduce_scatter(gathered)
    total = C.all_reduce(gathered.sum(0)) + C.broadcast(x[:1].sum(0)) + C.all_reduce(x.sum(0), "mean")
    shared = C.replicated(x.mean().detach().requires_grad_())
    (gradient,) = torch.autograd.grad(scattered.sum() + total.square().sum(), x)
    collated = cz.data.CollateEmptyBatches({"x": put(torch.ones(2)), "y": 5})([])
    return gathered, scattered, total, shared, gradient, collated


def mined(put: Put) -> Any:
    x, labels = samples()
    found = cz.data.mine_hard_negatives(put(x), put(x + 0.1), put(torch.arange(len(x))), num_negatives=2)
    by_pml = cz.data.DistributedMiner(miners.BatchHardMiner())(put(x), put(labels))
    drawn = [*cz.data.MPerClassBatchSampler(put(torch.arange(12) % 3), m=2, classes_per_batch=2)]
    return {name: x.tolist() for name, x in found.items()}, tuple(by_pml), drawn


def in_a_ring(put: Put) -> Any:
    (a, labels), (b, _) = samples(), samples(seed=1)
    towers = cz.DistributedLoss(put(cz.Clip()), ring=True)
    classes = cz.DistributedLoss(put(cz.SupCon()), ring=True, grad_reduction="sum")
    return value_and_gradients(towers, [put(a), put(b)]), value_and_gradients(classes, [put(a), labels])


def third_party(put: Put) -> Any:
    torch.manual_seed(0)
    x, labels = samples()
    proxies = cz.DistributedLoss(put(losses.ProxyAnchorLoss(3, 4)))
    native = cz.DistributedLoss(losses.NTXentLoss(), prefer_native=True, grad_reduction="sum")
    return [value_and_gradients(f, [put(x), labels]) for f in (proxies, proxies, native)]


def labelled_on_rank_0(put: Put) -> Any:
    """Labels on the device on rank 0 alone."""
    torch.manual_seed(0)
    x, labels = samples()
    labels = labels if rank() else put(labels)
    wrapped = [
        cz.DistributedLoss(put(cz.SupCon(temperature=0.3))),
        cz.DistributedLoss(put(cz.SupCon()), ring=True),
        cz.DistributedLoss(put(cz.LiftedStructure()), check_finite=False),
        cz.DistributedLoss(put(cz.Triplet()), grad_reduction="sum"),
        cz.DistributedLoss(put(cz.ProxyAnchor(num_classes=4, embedding_size=4))),
        cz.DistributedLoss(losses.TripletMarginLoss(), miner=miners.BatchHardMiner()),
    ]
    return [value_and_gradients(loss, [put(x), labels]) for loss in wrapped for _ in range(2)]


def remembered_by_losses(put: Put) -> Any:
    x = samples()[0].abs()
    loss = cz.DistributedLoss(put(cz.NNCLR(size=20, embedding_size=4)))
    a, b = put(x), put(x + 1)
    signs = (1, -1, -1)  # all that the second call compares is farther than an empty slot
    return [value_and_gradients(loss, [s * y for y in (a, b, b, a)]) for s in signs]


ENTRIES = [
    searched, mined, monitored, remembered, momentum, cached, messages, in_a_ring, third_party, labelled_on_rank_0,
    remembered_by_losses,
]  # fmt: skip
"""What it returns is the same on a CPU and on a device, on one process and on several ranks."""

READS = {
    "Triplet, soft": "the number of positives of an anchor",
    "Triplet, semi-hard and soft": "the number of positives of an anchor",
    "SmoothAP": "the number of positives of an anchor",
    "Angular": "the number of positives of an anchor",
    "MaxSim": "the numbers of tokens",
    "M3": "the numbers of tokens",
    "CosFace, those of the labels": "the number of classes of a batch, which may be more than a share of all",
    "IBOT": "which patches are masked, as its row of the table selects them",
    "PaCo, keys": "which samples have a key, as its row of the table selects them",
    "GE2E": "which embeddings are the last of their classes",
    "HMLC": "which samples coarser levels compare",
}
"""What some losses need to know before they compute; :func:`reading` calls the other losses of a family by their names."""


def cases() -> dict[str, tuple[Callable[[], Any], list[torch.Tensor]]]:
    """Return losses by name, and a batch of 9 samples each; the zoo's MNRL draws its negatives from values."""
    found = {str(x): (x.make, whole_batch(x.case(), GlobalBatch((9,), d=4))) for x in WHOLE_ZOO if "MNRL" not in str(x)}
    ones, directions = torch.ones(9, 4), ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")
    return {**found, "MNRL": (lambda: cz.MNRL(directions=directions), [ones, ones, ones[:5], torch.arange(5)])}


def reading(names: Iterable[str]) -> set[str]:
    chosen = cases()
    return {name for name in names if reads_of(*chosen[name])}


def reads_of(make: Callable[[], Any], rows: list[torch.Tensor]) -> list[str]:
    with device() as mode:
        loss = mode.put(cz.DistributedLoss(make(), check_finite=True).double())
        moved = [mode.put(x.double() if x.is_floating_point() else x) for x in rows]
        mode.reads.clear()
        for _ in range(2):
            value_and_gradients(loss, moved)
        return list(mode.reads)


def may_read(name: str) -> bool:
    return name in READS or name.split(",")[0].removesuffix("Pairwise") in READS


CHECKED = ["ArcFace", "Margin, by class", "MultiPositive, several targets", "OnlineContrastive", "MNRL"]
"""Losses that check the values of labels, weights and owners."""


def test_no_loss_and_no_check_waits_for_an_accelerator() -> None:
    names = {*CHECKED, *[*cases()][:: 1 if EVERY_CASE else 2]}
    found = reading(names)
    assert all(may_read(name) for name in found), found


def test_what_a_cpu_does_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda x: True)
    names = {"Clip", "Contrastive", *CHECKED}
    assert names == reading(names)


SET_BUDGET = 5 * 2**20


def budgets_of_backward(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the budgets that backward passes read in another thread, as those of autograd on an accelerator do."""
    plain, seen, values = tiling._budget, list[int](), []
    recorded = SimpleNamespace(set=plain.set, reset=plain.reset, get=lambda: seen.append(plain.get()) or seen[-1])
    monkeypatch.setattr(tiling, "_budget", recorded)
    for entry in entries:
        rows = whole_batch(entry.case(), GlobalBatch((7,), d=3, labels="mixed", seed=1))
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in rows]
        with cz.engine.memory_budget(SET_BUDGET):
            values.append(entry.make().double()(*leaves))
    seen.clear()
    thread = threading.Thread(target=lambda: [value.backward() for value in values])
    thread.start()
    thread.join()
    return set(seen)


RECOMPUTED = [entry for entry in WHOLE_ZOO if str(entry) in ("Contrastive", "LiftedStructure")]


def test_backward_passes_have_the_budget_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(RECOMPUTED) == 2
    assert budgets_of_backward(RECOMPUTED + WHOLE_ZOO[:: 1 if EVERY_CASE else 5], monkeypatch) == {SET_BUDGET}


def test_the_budget_of_another_thread_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "memory_budget", lambda size: contextlib.nullcontext())
    assert budgets_of_backward(RECOMPUTED, monkeypatch) == {tiling.budget()} != {SET_BUDGET}


LOSSES = [entry for entry in WHOLE_ZOO if "MNRL" not in str(entry)]


@pytest.mark.parametrize("entry", LOSSES[:: 1 if EVERY_CASE else 2], ids=str)
def test_a_loss_with_labels_on_the_cpu_and_one_without_float64(entry: Entry) -> None:
    rows = whole_batch(entry.case(), GlobalBatch((7,), d=3, seed=1))
    loss = entry.case(temperature=0.3).make().double()
    with draws_of_a_device(str(entry)):
        expected = value_and_gradients(copy.deepcopy(loss), rows)
    with device() as mode:
        found = value_and_gradients(mode.put(loss), [mode.put(x) if x.is_floating_point() else x for x in rows])
        assert found[0].device == mode.place
        torch.testing.assert_close(on_cpu(found), expected, rtol=1e-9, atol=1e-10)
    if str(entry) != "MarginMSE":
        with device("mps:0", float64=False) as mode:
            rows = [mode.put(x.float() if x.is_floating_point() else x) for x in rows]
            found = on_cpu(value_and_gradients(mode.put(loss.float()), rows))
        expected = [x.to(y.dtype) for x, y in zip(expected, found, strict=True)]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_a_mean_without_float64_has_the_stated_error() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100_000, 4, generator=draw)
    expected = cz.NegativeCosine()(a.double(), b.double())
    with device("mps:0", float64=False) as mode:
        found = cz.NegativeCosine()(mode.put(a), mode.put(b)).cpu()
    assert abs(found.double() - expected) < 1e-6


def test_mixtures_and_float64_would_be_noticed() -> None:
    with device() as mode, pytest.raises(AssertionError, match="add: tensors on ipu:0 and on the CPU"):
        mode.put(torch.ones(2)) + torch.ones(2)
    with device("mps:0", float64=False) as mode, pytest.raises(AssertionError, match="has no float64"):
        mode.put(torch.ones(2)).double()


EYE = torch.eye(3)
REFUSED: dict[str, tuple[Callable[[Put], Any], str]] = {
    "towers": (lambda put: put(cz.Clip())(put(EYE), EYE), "images on ipu:0 and texts on cpu"),
    "views": (lambda put: cz.NTXent()(EYE, put(EYE)), "on cpu and .* on ipu:0"),
    "weights": (lambda put: cz.ArcFace(3, 3)(put(EYE), torch.arange(3)), r"weights are on cpu .* loss\.to\('ipu:0'\)"),
    "step": (lambda put: cz.SIGReg(3)(put(torch.ones(5, 3))), "SIGReg: directions are on cpu and embeddings on ipu:0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_elsewhere_is_refused_in_words(name: str) -> None:
    run, text = REFUSED[name]
    with device() as mode, pytest.raises(ValueError, match=text):
        run(mode.put)


@pytest.mark.parametrize(("matmuls", "words"), [("highest", "on ipu"), ("high", "float32 matmuls … tf32")])
def test_ranks_on_other_devices_or_with_other_matmuls_are_refused(matmuls: str, words: str, worlds: Worlds) -> None:
    def bad() -> None:
        is_last, x = dist.get_rank() == 1, torch.eye(3)[: 2 + dist.get_rank()]
        torch.set_float32_matmul_precision(matmuls if is_last else "highest")
        try:
            with device() as mode:
                cz.DistributedLoss(cz.NTXent())(*[mode.put(x) if is_last or matmuls == "high" else x] * 2)
        finally:
            torch.set_float32_matmul_precision("highest")

    refused(worlds, 2, bad, words)


def of_cpu(entry: Any) -> Any:
    return on_cpu(entry(lambda x: copy.deepcopy(x) if isinstance(x, nn.Module) else x))


def of_device(entry: Any, kind: str = "ipu:0", *, float64: bool = True) -> Any:
    with device(kind, float64=float64) as mode:
        return on_cpu(entry(mode.put))


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_on_a_device(entry: Any, worlds: Worlds) -> None:
    alone = of_cpu(entry)
    for expected, found in [(alone, of_device(entry)), *worlds.run(2, lambda: (of_cpu(entry), of_device(entry)))]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(of_device(entry, "mps:0", float64=False), alone, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3])
def test_the_bits_are_those_of_the_library_s_random_keys(seed: int) -> None:
    expected = random_keys(seed, np.arange(1000)).view(np.int64)
    assert device_keys(torch.tensor(seed), 1000).tolist() == expected.tolist()


def wrong_moments(x: torch.Tensor) -> list[int]:
    """Return which of the first six moments are more than five standard errors from a normal distribution's."""
    expected = {1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 15}
    variance = {1: 1, 2: 2, 3: 15, 4: 96, 5: 945, 6: 10170}
    x = x.double().flatten()
    return [k for k in expected if abs((x**k).mean() - expected[k]) > 5 * (variance[k] / len(x)) ** 0.5]


def test_the_numbers_are_normal() -> None:
    x = normal_numbers(torch.tensor(7), 1000, 400)
    assert wrong_moments(x) == []
    assert x.unique().numel() > 0.9 * 2**19 * (1 - np.exp(-400_000 / 2**19)), "distinct values of 23 bits"
    assert np.abs(np.corrcoef(x.T.double().numpy()) - np.eye(400)).max() < 6 / 1000**0.5
    steps = torch.stack([normal_numbers(torch.tensor(seed), 400) for seed in range(1000)], 1)
    assert np.abs(np.corrcoef(steps.double().numpy()) - np.eye(400)).max() < 6 / 1000**0.5
    assert wrong_moments(steps) == []


def test_no_number_is_infinite() -> None:
    """The largest and the smallest of the uniform numbers."""
    for least_bits in (0, -1):
        with patch.object(device_normals, "device_keys", lambda *_, bits=least_bits: torch.full((1,), bits)):
            assert 5 < abs(normal_numbers(torch.tensor(0), 1)) < 5.4


def test_each_step_draws_others_without_reading_it_and_a_resumed_training_the_same() -> None:
    with device() as mode:
        z, loss, resumed = (mode.put(x) for x in (torch.randn(5, 3), cz.SIGReg(3), cz.SIGReg(3)))
        loss_fn = cz.DistributedLoss(loss)
        first = [loss_fn(z) for _ in range(3)]
        assert mode.reads + mode.uploads == []
        resumed.load_state_dict(loss.state_dict() | {"step": torch.tensor(1)})
        again = [resumed(z).item() for _ in range(2)]
        one, two, three = (x.item() for x in first)
    assert again == [two, three]
    assert len({one, two, three}) == 3
