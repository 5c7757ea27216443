"""Everything public on a second device: the results of a CPU, labels anywhere, sums where there is no float64."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import contrastive_zoo as cz
from contrastive_zoo import call_history, loss_summary
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.trial import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, common_error
from tests.simulated import Simulated, simulated
from tests.test_contract import WHOLE_ZOO
from tests.zoo import Entry

Put = Callable[[Any], Any]
"""Puts a tensor, or a module's parameters and buffers, on the device."""


@contextmanager
def device(name: str = "ipu:0", *, float64: bool = True) -> Iterator[Simulated]:
    """Simulate a device with all that this library asks of one."""
    with pytest.MonkeyPatch.context() as patch, simulated(name, float64=float64) as mode:
        for module in (call_history, loss_summary):  # there is no event of this device
            patch.setattr(module, "read_later", lambda x: x.detach().flatten().cpu().tolist)
        kind, generator = name.split(":")[0], SimpleNamespace(get_rng_state=lambda _=None: torch.get_rng_state())
        generator.set_rng_state = generator.manual_seed = generator.manual_seed_all = lambda *_: None
        generator._is_in_bad_fork = lambda: False
        patch.setattr(torch, kind, generator, raising=False)
        patch.setattr(torch, "get_device_module", lambda device: generator)
        yield mode


def put_by(mode: Simulated) -> Put:
    def put(x: Any) -> Any:
        if isinstance(x, nn.Module):
            x = copy.deepcopy(x)
            for part in x.modules():
                for name, p in part._parameters.items():
                    part._parameters[name] = p if p is None else nn.Parameter(mode.put(p.detach()), p.requires_grad)
                for name, b in part._buffers.items():
                    part._buffers[name] = b if b is None else mode.put(b)
            return x
        return mode.put(x)

    return put


def on_cpu(found: Any) -> Any:
    return tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, found)


def value_and_gradients(loss: nn.Module, rows: list[Tensor]) -> list[Any]:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in rows]
    value = loss(*leaves)
    learnt = [x for x in (*leaves, *loss.parameters()) if x.requires_grad]
    return [
        value,
        *torch.autograd.grad(value, learnt, allow_unused=True, materialize_grads=True),
        *(x.clone() for x in loss.buffers()),
    ]


# ----------------------------------------------------------------------------------------------------------- losses


LEFT_OUT = {"MNRL", "MNRL, all directions", "MNRL, symmetric"}
"""The zoo's draws its negatives from values."""
LOSSES = [entry for entry in WHOLE_ZOO if str(entry) not in LEFT_OUT]


@pytest.mark.parametrize("entry", LOSSES[:: 1 if EVERY_CASE else 2], ids=str)
def test_a_loss_with_labels_on_the_cpu(entry: Entry) -> None:
    rows = whole_batch(entry.case(), GlobalBatch((7,), d=3, seed=1))
    loss = entry.case(temperature=0.3).make().double()
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
    expected = value_and_gradients(copy.deepcopy(loss).double(), wide)
    with device("mps:0", float64=False) as mode:
        put = put_by(mode)
        found = on_cpu(value_and_gradients(put(loss), [put(x) for x in rows]))
    expected = [x.to(y.dtype) for x, y in zip(expected, found, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_a_mean_without_float64_has_the_stated_error() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100_000, 4, generator=draw)
    expected = cz.negative_cosine(a.double(), b.double())
    with device("mps:0", float64=False) as mode:
        found = cz.negative_cosine(mode.put(a), mode.put(b)).cpu()
    assert abs(found.double() - expected) < 1e-6


def test_mixtures_would_be_noticed() -> None:
    """The mutant: an operation of a tensor on the device and one on the CPU."""
    with device() as mode, pytest.raises(AssertionError, match="add: tensors on ipu:0 and on the CPU"):
        mode.put(torch.ones(2)) + torch.ones(2)


def test_float64_would_be_noticed() -> None:
    with device("mps:0", float64=False) as mode, pytest.raises(AssertionError, match="has no float64"):
        mode.put(torch.ones(2)).double()


REFUSED: dict[str, tuple[Callable[[Put], Any], str]] = {
    "towers": (lambda put: cz.clip(put(torch.eye(3)), torch.eye(3)), "queries on ipu:0 and keys on cpu"),
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


# ------------------------------------------------------------------------------------------------------ several ranks


def makers() -> list[Callable[[], nn.Module]]:
    return [
        lambda: cz.DistributedLoss(cz.SupCon(temperature=0.3)),
        lambda: cz.DistributedLoss(cz.SupSigmoid(), ring=True, static_shapes=True),
        lambda: cz.DistributedLoss(cz.IntraPairVariance(), check_finite=False),
        lambda: cz.DistributedLoss(cz.Triplet(), grad_reduction="sum"),
        lambda: cz.DistributedLoss(cz.ProxyAnchor(num_classes=4, embedding_size=3)),
        lambda: cz.DistributedLoss(cz.CrossBatchMemory(cz.SupCon(), size=16, embedding_size=3)),
        lambda: cz.DistributedLoss(losses.TripletMarginLoss(), miner=miners.BatchHardMiner()),
    ]


def with_labels_anywhere(index: int, rows: Tensor, labels: Tensor) -> list[list[Any]]:
    """Compute two steps; rank 1 leaves its labels on the CPU, rank 0 moves them."""
    torch.manual_seed(0)
    loss = makers()[index]().double()
    with device() as mode:
        put = put_by(mode)
        loss, place = put(loss), (put, lambda x: x)[dist.get_rank()]
        return [on_cpu(value_and_gradients(loss, [put(rows), place(labels)])) for _ in range(2)]


@pytest.mark.parametrize("index", range(len(makers())))
def test_labels_on_the_cpu_of_one_rank(index: int, worlds: Worlds) -> None:
    batch, shards = GlobalBatch((5, 4), seed=3), [5, 4]
    rows, labels = batch.samples()[0], batch.classes()
    torch.manual_seed(0)
    loss = makers()[index]().double()
    expected = [value_and_gradients(loss, [rows, labels]) for _ in range(2)]
    parts = list(zip(rows.split(shards), labels.split(shards), strict=True))
    found = worlds.run(2, with_labels_anywhere, index, each=parts)
    factor = 1 if index == 3 else 2
    for step, whole in enumerate(expected):
        for rank, part in enumerate(rows.split(shards)):
            value, gradient, *rest = found[rank][step]
            torch.testing.assert_close(value, whole[0].detach(), rtol=1e-9, atol=1e-10)
            start = shards[0] * rank
            whole_gradient = factor * whole[1][start : start + len(part)]
            torch.testing.assert_close(gradient, whole_gradient, rtol=1e-9, atol=1e-10)
            if index != 3:
                torch.testing.assert_close(rest, [x.detach() for x in whole[2:]], rtol=1e-9, atol=1e-10)


def test_ranks_on_other_devices_are_refused(worlds: Worlds) -> None:
    def bad() -> None:
        with device() as mode:
            x = torch.eye(3)[: 2 + dist.get_rank()]
            cz.DistributedLoss(cz.NTXent())(*[mode.put(x) if dist.get_rank() else x] * 2)

    text, _ = common_error(worlds, 2, bad, lambda: cz.all_reduce(torch.ones(1)))
    assert "on ipu" in text


# ------------------------------------------------------------------------------------------------------- other entries


def samples(n: int = 8, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(seed + 7 * rank)
    return torch.randn(n + rank, d, generator=draw), torch.randint(3, (n + rank,), generator=draw)


def monitored(put: Put) -> dict[str, float]:
    (a, _), (b, _) = samples(), samples(seed=1)
    loss = cz.DistributedLoss(put(cz.NTXent()))
    monitor = cz.Monitor(loss, every=1)
    loss(put(a), put(b))
    return monitor.take()


def monitored_labels(put: Put) -> dict[str, float]:
    x, labels = samples()
    encoder, loss = put(nn.Linear(4, 4)), cz.DistributedLoss(put(cz.SupCon()))
    monitor = cz.Monitor(loss, every=1, encoder=encoder)
    loss(put(x), labels)
    return {name: x for name, x in monitor.take().items() if "drift" not in name}


def collected(put: Put) -> Any:
    x, labels = samples()
    metric = cz.RetrievalMetrics()
    metric.update(put(x), labels)
    metric.update(put(x + 1), put(labels))
    return metric.compute()


def judged(put: Put) -> Any:
    x, _ = samples()
    rank = dist.get_rank() if dist.is_initialized() else 0
    ids = 100 * rank + torch.arange(len(x))
    judgements = (ids[:3], ids[1:4], torch.tensor([1.0, 2.0, 1.0]))
    return cz.evaluate(put(x), put(x + 0.1), ids=put(ids), gallery_ids=ids, judgements=judgements, metrics=["ndcg@3"])


def remembered(put: Put) -> Any:
    x, labels = samples()
    memory = put(cz.MemoryQueue(11, embedding_size=4))
    slots = memory.enqueue(put(x), labels)
    more = memory.enqueue(put(x), put(labels), enqueue_mask=labels > 0)
    return slots, more, memory.rows, memory.labels


def remembered_on_the_cpu(put: Put) -> Any:
    x, labels = samples()
    memory = cz.MemoryQueue(11, embedding_size=4)
    return memory.enqueue(put(x), put(labels)), memory.rows, memory.labels


def compared_with_memory(put: Put) -> Any:
    x, labels = samples()
    loss = put(cz.CrossBatchMemory(cz.SupCon(), size=20, embedding_size=4))
    negatives = put(cz.CrossBatchMemory(cz.InfoNCE(), size=20, embedding_size=4))
    found = [cz.DistributedLoss(loss)(put(x), labels) for _ in range(2)]
    return found, [cz.DistributedLoss(negatives)(put(x), put(x + 1)) for _ in range(2)]


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
    value = cz.cached_step(encoder, put(x).split(3), loss, labels)
    cz.average_gradients(encoder)
    return value, encoder.weight.grad


def messages(put: Put) -> Any:
    x, labels = samples()
    x = put(x).requires_grad_()
    gathered = cz.all_gather(x)
    scattered = cz.reduce_scatter(gathered)
    total = cz.all_reduce(gathered.sum(0)) + cz.broadcast(x[:1].sum(0)) + cz.all_reduce(x.sum(0), "max")
    (gradient,) = torch.autograd.grad(scattered.sum() + total.square().sum(), x)
    return gathered, scattered, total, gradient, cz.pair_masks(put(labels)).positive


def mined(put: Put) -> Any:
    x, _ = samples()
    labels = torch.arange(len(x)) % 3
    found = cz.mine_hard_negatives(put(x), put(x + 0.1), put(torch.arange(len(x))), num_negatives=2,
                                   query_labels=labels, corpus_labels=put(labels))  # fmt: skip
    return {name: x.tolist() for name, x in found.items()}


def mined_by_pml(put: Put) -> Any:
    x, labels = samples()
    return tuple(cz.DistributedMiner(miners.BatchHardMiner())(put(x), put(labels)))


ENTRIES: dict[str, Callable[[Put], Any]] = {
    "top_k": lambda put: tuple(cz.top_k(put(samples()[0]), put(samples(seed=1)[0]), k=3)),
    "top_k, excluded": lambda put: tuple(
        cz.top_k(put(samples()[0]), k=2, excluded=put(torch.zeros(len(samples()[0]), 1, dtype=torch.int64)))
    ),
    "evaluate": lambda put: cz.evaluate(put(samples()[0]), labels=samples()[1], metrics=["map", "knn_accuracy@3"]),
    "evaluate, labels on the device": lambda put: cz.evaluate(*map(put, samples()[:1]), labels=put(samples()[1])),
    "evaluate, judgements": judged,
    "recall_at_k": lambda put: cz.recall_at_k(put(samples()[0]), put(samples(seed=1)[0]), k=2),
    "cross_modal_recall": lambda put: cz.cross_modal_recall(put(samples()[0]), put(samples(seed=1)[0]), k=[1, 2]),
    "index_recall": lambda put: cz.index_recall(
        put(samples()[0]), put(samples(seed=1)[0]), k=2, index=cz.ApproximateIndex("IVF2,Flat")
    ),
    "RetrievalMetrics": collected,
    "mine_hard_negatives": mined,
    "DistributedMiner": mined_by_pml,
    "Monitor": monitored,
    "Monitor, labels": monitored_labels,
    "MemoryQueue": remembered,
    "MemoryQueue on the CPU": remembered_on_the_cpu,
    "CrossBatchMemory": compared_with_memory,
    "MomentumEncoder": momentum,
    "cached_step": cached,
    "messages": messages,
    "CollateEmpty": lambda put: cz.CollateEmpty({"x": put(torch.ones(2)), "y": 5})([]),
}


def on_both(name: str, kind: str = "ipu:0", *, float64: bool = True) -> tuple[Any, Any]:
    expected = on_cpu(ENTRIES[name](lambda x: copy.deepcopy(x) if isinstance(x, nn.Module) else x))
    with device(kind, float64=float64) as mode:
        return expected, on_cpu(ENTRIES[name](put_by(mode)))


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_on_a_device(name: str, worlds: Worlds) -> None:
    for expected, found in [on_both(name), *worlds.run(2, on_both, name)]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_without_float64(name: str) -> None:
    expected, found = on_both(name, "mps:0", float64=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
