"""The memory holds what it holds on one process, and a loss against it is the same function on any number of ranks."""

import copy
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch, splits
from contrastive_zoo.testing.invariants import INVARIANTS
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, assert_same, assert_says, close, error_message, local_shard, numbers
from tests.random_steps.losses import LOSSES, MEMORIES, moco

D = 3


def one_by_one(size: int, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each slot holds: what came last of every ``size``-th."""
    held = [range(slot, len(rows), size)[-1] for slot in range(min(size, len(rows)))]
    return rows[held], labels[held]


def batch(step: int, n: int, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = numbers(n, D, seed=step)
    return rows, numbers(n, seed=step, dtype=torch.int64), (rows[:, 0] > 0) | (not masked)


def enqueued(size: int, steps: list[tuple[int, ...]], masked: bool, saved: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the ring after these steps, each of a memory that was ``saved``, and the slots of the last local embeddings."""
    memory = cz.MemoryQueue(size, D, dtype=torch.float64)
    slots = torch.zeros(0)
    for step, shards in enumerate(steps):
        if saved:
            state, memory = memory.state_dict(), cz.MemoryQueue(size, D, dtype=torch.float64)
            memory.load_state_dict(state)
        rows, labels, mask = (local_shard(x, shards) for x in batch(step, sum(shards), masked))
        slots = memory.enqueue(rows, labels, enqueue_mask=mask)
    assert len(memory) == memory.filled
    return memory.state_dict(), slots


STEPS = st.integers(1, 4).flatmap(lambda size: st.lists(splits((size,), min_samples=0), min_size=1, max_size=5))


@settings(max_examples=10)
@given(steps=STEPS, size=st.integers(1, 12), masked=st.booleans(), saved=st.booleans())
def test_the_ring_holds_the_last_embeddings(steps, size, masked, saved, worlds: Worlds) -> None:
    """On every number of ranks bit by bit, so what one has saved continues on another; slots index the last batch."""
    batches = [batch(step, sum(shards), masked) for step, shards in enumerate(steps)]
    rows = torch.cat([x[mask] for x, _, mask in batches])
    labels = torch.cat([y[mask] for _, y, mask in batches])
    kept_rows, kept_labels = one_by_one(size, rows, labels)
    found = worlds.run(len(steps[0]), enqueued, size, steps, masked, saved)
    for state, _ in found:
        length = state["filled"]
        assert length == len(kept_rows) == min(size, len(rows))
        assert state["pointer"] == len(rows) % size
        assert torch.equal(state["embeddings"][:length], kept_rows)
        assert torch.equal(state["ids"][:length], kept_labels)
        assert not state["embeddings"][length:].any()
    slots, (last, _, mask) = torch.cat([slots for _, slots in found]), batches[-1]
    there = slots >= 0
    assert torch.equal(found[0][0]["embeddings"][slots[there]], last[there])
    assert there.sum() == min(size, int(mask.sum()))
    assert not there[~mask].any()


def test_rows_are_rounded_to_the_dtype_of_the_memory() -> None:
    memory = cz.MemoryQueue(4, D, dtype=torch.bfloat16)
    rows = numbers(2, D, seed=0)
    memory.enqueue(rows)
    assert torch.equal(memory.rows, rows.bfloat16())
    loss = cz.CrossBatchMemory(cz.InfoNCE(temperature=0.5), 4, D, dtype=torch.bfloat16)
    loss(rows, rows)
    assert torch.equal(loss.memory.rows, rows.bfloat16())
    expected = cz.InfoNCE(temperature=0.5)(rows, rows, rows.bfloat16().double())
    close(loss(rows, rows), expected)


PEERS = [
    ("TripletMarginLoss", {"margin": 0.3}, "TripletMarginMiner", None),
    ("MultiSimilarityLoss", {}, "MultiSimilarityMiner", None),
    ("NTXentLoss", {"temperature": 0.3}, "", None),
    ("SupConLoss", {"temperature": 0.3}, "", lambda: cz.SupCon(temperature=0.3)),
    ("MultiSimilarityLoss", {}, "", cz.MultiSimilarity),
]
"""A loss of theirs, its settings and its miner; and the loss of ours that equals it, None for the same loss.

tests/adapters/test_third_party.py has all losses in a memory, of one step.
"""


@pytest.mark.parametrize(("name", "kept", "miner", "make"), PEERS, ids=lambda x: x if isinstance(x, str) else "")
def test_losses_compare_as_in_pytorch_metric_learning(name, kept, miner, make) -> None:
    """All embeddings enter in one step, some in the next."""
    inner, mined = getattr(losses, name)(**kept), getattr(miners, miner)() if miner else None
    theirs = losses.CrossBatchMemory(inner, embedding_size=D, memory_size=13, miner=mined)
    ours = cz.CrossBatchMemory(inner if make is None else make(), 13, D, miner=mined, dtype=torch.float64)
    for step, n in enumerate([5, 4, 6, 3, 7]):
        rows, labels = numbers(n, D, seed=step).requires_grad_(), numbers(n, seed=step, dtype=torch.int64)
        extra = {"enqueue_mask": torch.arange(n) % 3 == 1} if step % 2 else {}
        assert_same(partial(ours, **extra), partial(theirs, **extra), rows, labels, tolerance=1e-12)
        held = len(ours.memory)
        assert torch.equal(ours.memory.rows, theirs.embedding_memory[:held])
        assert torch.equal(ours.memory.labels, theirs.label_memory[:held])


MOCO = cz.InfoNCE(temperature=0.2, in_batch_negatives=False)


@pytest.mark.parametrize("inner", [cz.InfoNCE(temperature=0.2), cz.MNRL(), moco, MOCO])
def test_negatives_are_earlier_keys(inner: Any) -> None:
    ours, expected = cz.CrossBatchMemory(inner, 9, D, dtype=torch.float64), moco if inner is MOCO else inner
    earlier: list[Tensor] = []

    def against(queries: Tensor, keys: Tensor) -> Tensor:
        return expected(queries, keys, torch.cat([keys[:0], *earlier])[-9:])

    for step, n in enumerate([4, 3, 6, 2]):
        queries, keys = numbers(n, D, seed=step).requires_grad_(), numbers(n, D, seed=50 + step)
        assert_same(ours, against, queries, keys)
        assert (against(queries, keys) == 0) == (step == 0 and expected is moco)  # nothing to confuse a key with
        earlier.append(keys)


def test_nothing_enters_in_eval_mode() -> None:
    rows = numbers(3, D, seed=0, dtype=torch.float32)
    labels, unit = torch.arange(3), F.normalize(rows, dim=1)
    learnt = cz.SupCon(temperature=nn.Parameter(torch.tensor(0.5)))
    inners = cz.InfoNCE(temperature=0.5), cz.Angular(), cz.SmoothAP(), losses.TripletMarginLoss(), learnt
    for inner, other in zip(inners, (rows, *[labels] * 4), strict=True):
        loss = cz.CrossBatchMemory(inner, 8, D).eval()
        leaves = [rows.clone().requires_grad_(), *loss.parameters()]
        value = loss(leaves[0], other)
        assert len(loss.memory) == 0
        if other is labels:  # there is nothing to compare with
            assert not any(map(torch.any, (value, *torch.autograd.grad(value, leaves))))
        loss.train()(rows, other)
        assert len(loss.memory) == 3
    close(loss.eval()(rows, labels), F.cross_entropy(unit @ unit.T / 0.5, labels))  # each with the copy in the memory


def test_two_forward_passes_before_a_backward_pass() -> None:
    """Slots are overwritten while an earlier graph still needs what was in them."""
    for inner in (cz.InfoNCE(normalize=False), cz.SupCon(normalize=False), losses.ContrastiveLoss()):
        rows = [numbers(3, D, seed=seed).requires_grad_() for seed in range(4)]
        other = [x.detach() if isinstance(inner, cz.InfoNCE) else torch.arange(3) % 2 for x in rows]
        loss, again = (cz.CrossBatchMemory(inner, 4, D, dtype=torch.float64) for _ in range(2))
        late = torch.autograd.grad(sum(loss(x, y) for x, y in zip(rows, other, strict=True)), rows)
        for x, y, expected in zip(rows, other, late, strict=True):
            close(torch.autograd.grad(again(x, y), x)[0], expected)


@pytest.mark.parametrize(("name", "shards"), list(zip(MEMORIES, cycle([(1, 4), (0, 3, 2), (3, 3)]))), ids=str)
def test_every_invariant_holds(name: str, shards: tuple[int, ...], worlds: Worlds) -> None:
    """Every memory has a third of the invariants, every invariant a third of the memories; a search has all."""
    loss, third = LOSSES[name], slice(None) if EVERY_CASE else slice([*MEMORIES].index(name) % 3, None, 3)
    case = Case(lambda: cz.DistributedLoss(loss.make()), call=loss.call, name=name)
    trial = Trial(case, GlobalBatch(shards, d=4, seed=5), worlds)
    for invariant in INVARIANTS[third]:
        invariant(trial)


GOOD = {"embeddings": torch.ones(4, 2), "ids": torch.ones(4).long()}
GOOD |= {"filled": torch.tensor(4), "pointer": torch.tensor(1)}
SPOILT: dict[str, dict[str, Tensor | None]] = {
    "pointer=1 with filled=5": {"filled": torch.tensor(5)},
    "a ring of 4 slots has no pointer=4": {"pointer": torch.tensor(4)},
    "pointer=1 with filled=3": {"filled": torch.tensor(3)},
    "embeddings are float32 ": {"embeddings": torch.ones(4, 3)},
    "Missing key": {"pointer": None},
}


@pytest.mark.parametrize("text", SPOILT)
def test_an_impossible_state_is_refused_and_changes_nothing(text: str) -> None:
    whole = cz.CrossBatchMemory(cz.SupCon(), 4, 2)
    state = {name: x for name, x in (GOOD | SPOILT[text]).items() if x is not None}
    whole.memory.enqueue(numbers(3, 2, seed=0), torch.arange(3))
    before = copy.deepcopy(whole.memory.state_dict())
    for module, prefix in ((whole, "memory."), (whole.memory, "")):
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict({prefix + name: x for name, x in state.items()})
        for name, x in whole.memory.state_dict().items():
            assert torch.equal(x, before[name]), name


def test_the_momentum_encoder_is_a_moving_average() -> None:
    encoder = nn.Linear(2, 2).double()
    keys = cz.MomentumEncoder(encoder, momentum=0.75)
    expected = encoder.weight.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            encoder.weight += 1
        keys.update(encoder)
        expected = 0.75 * expected + 0.25 * encoder.weight.detach()
        close(keys.encoder.weight.detach(), expected)
    assert not keys(torch.ones(1, 2).double()).requires_grad
    assert not any(x.requires_grad for x in keys.parameters())


@pytest.mark.parametrize("buffers", ["own", "copy"])
def test_momentum_0_and_1_are_exact_and_buffers_its_own_or_copied(buffers: str) -> None:
    for momentum in (0.0, 1.0):
        encoder = nn.BatchNorm1d(2)
        keys = cz.MomentumEncoder(encoder, momentum=momentum, buffers=buffers)
        before = keys.encoder.weight.clone()
        nn.init.normal_(encoder.weight)
        encoder(torch.ones(4, 2) * 5)
        keys(torch.ones(4, 2))
        keys.update(encoder)
        assert torch.equal(keys.encoder.weight, before if momentum else encoder.weight)
        assert torch.allclose(keys.encoder.running_mean, torch.full((2,), 0.1 if buffers == "own" else 0.5))


def test_an_update_that_is_refused_moves_nothing() -> None:
    """Parameters came before buffers; a schedule may leave [0, 1]."""
    encoder = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    keys = cz.MomentumEncoder(encoder, momentum=0.5, buffers="copy")
    before = copy.deepcopy(keys.state_dict())
    nn.init.ones_(encoder[0].weight)
    other = nn.Sequential(encoder[0], nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match=r"differs in '1\.num_batches_tracked'"):
        keys.update(other)
    for momentum in (1.5, -0.1, torch.nan):
        keys.momentum = momentum
        with pytest.raises(ValueError, match=r"momentum is in \[0, 1\]"):
            keys.update(encoder)
    assert all(torch.equal(x, before[name]) for name, x in keys.state_dict().items())


def test_the_momentum_encoder_copies_without_ddp_and_moves_as_sharded_as_the_encoder(worlds: Worlds) -> None:
    def job() -> list[str | None]:
        encoder = DistributedDataParallel(nn.Linear(2, 2))
        keys, before = cz.MomentumEncoder(encoder, momentum=0.5), encoder.module.weight.detach().clone()
        keys.update(encoder)
        assert [*keys.state_dict()] == ["encoder.weight", "encoder.bias"]
        encoder = encoder.module
        nn.init.ones_(fully_shard(encoder).weight)
        flat = cz.MomentumEncoder(nn.Linear(2, 2))
        flat.encoder = FullyShardedDataParallel(flat.encoder, device_id=torch.device("cpu"))
        updates = keys.update, cz.MomentumEncoder, flat.update
        refusals = [error_message(partial(run, encoder)) for run in updates]
        fully_shard(keys.encoder)
        keys(torch.ones(1, 2)), encoder(torch.ones(1, 2))
        keys.update(encoder)
        close(keys.encoder.weight.full_tensor().detach(), (before + 1) / 2, 1e-7)
        return refusals

    for update, copied, of_fsdp1 in worlds.run(2, job):
        assert_says(update, "MomentumEncoder: … differs in … fully_shard(keys.encoder)")
        assert_says(copied, "MomentumEncoder: … First make keys = MomentumEncoder(encoder)")
        assert_says(of_fsdp1, "MomentumEncoder: FSDP1 drops what moves")
