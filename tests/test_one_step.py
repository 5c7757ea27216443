"""The state of a loss moves once a step, however many calls a step has, as one batch moves it on one process."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base import state
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, assert_says, close, common_error, drawn, numbers

D = 3
FIRST = 5  # samples of the step before


class Case(NamedTuple):
    make: Callable[[], Any]
    tensors: int = 2  # of floating-point numbers, in a call
    labels: bool = False
    masked: bool = False
    state_of_one_batch: bool = True  # its state moves as by one batch of all samples
    value_of_one_batch: bool = False  # and so does its value: samples of a batch are not compared with each other


def remembering(loss: Callable[[], Any], size: int = 12) -> Callable[[], Any]:
    return lambda: cz.CrossBatchMemory(loss(), size, D)


def contrastive() -> Any:
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning import losses

    return losses.ContrastiveLoss()


CASES = {
    "DINO": Case(lambda: cz.DINO(D), value_of_one_batch=True),
    "TiCo": Case(lambda: cz.TiCo(D)),
    "SIGReg": Case(lambda: cz.SIGReg(D, num_slices=4), tensors=1),
    "LeJEPA": Case(lambda: cz.LeJEPA(D, num_slices=4)),
    # its differences are those of the hardest of the call
    "DynamicSoftMargin": Case(lambda: cz.DynamicSoftMargin(8), state_of_one_batch=False),
    "NNCLR": Case(lambda: cz.NNCLR(12, D), tensors=4),
    "ReSSL": Case(lambda: cz.ReSSL(12, D), value_of_one_batch=True),
    "ReSSL, small memory": Case(lambda: cz.ReSSL(2, D), value_of_one_batch=True),
    "MoCo": Case(remembering(lambda: cz.InfoNCE(in_batch_negatives=False)), value_of_one_batch=True),
    "InfoNCE": Case(remembering(cz.InfoNCE, size=4)),
    "SupCon": Case(remembering(cz.SupCon), tensors=1, labels=True),
    "SupCon, masked": Case(remembering(cz.SupCon, size=7), tensors=1, labels=True, masked=True),
    "pytorch-metric-learning's": Case(remembering(contrastive), tensors=1, labels=True),
    "a sum": Case(lambda: cz.WeightedSum([cz.TiCo(D), cz.NTXent(), cz.DINO(D)])),
    "a sum of memories": Case(
        lambda: cz.WeightedSum([remembering(cz.InfoNCE, 7)(), cz.InfoNCE(symmetric=True), cz.LeJEPA(D), cz.VICReg()])
    ),
    "a sum of two of a kind": Case(
        lambda: cz.WeightedSum([cz.NNCLR(7, D), cz.NNCLR(5, D, temperature=0.5)]), tensors=4
    ),
}

Found = tuple[list[tuple[Tensor, list[Tensor]]], dict[str, Tensor]]
"""The values of the calls of a step, each with the gradients of its embeddings, and the state after the step."""


def batch(case: Case, n: int, seed: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    rows = [numbers(n, D, seed=10 * seed + index) for index in range(case.tensors)]
    labels = [torch.randint(2, (n,), generator=torch.Generator().manual_seed(seed))] if case.labels else []
    return rows + labels, {"enqueue_mask": torch.arange(n) % 3 > 0} if case.masked else {}


def of_rank(x: Tensor, shards: Sequence[int]) -> Tensor:
    x = x.split(list(shards))[dist.get_rank() if dist.is_initialized() else 0].clone()
    return x.requires_grad_(x.is_floating_point())


def called(
    loss_fn: nn.Module, batch: tuple[list[Tensor], dict[str, Tensor]], shards: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    local = [of_rank(x, shards) for x in batch[0]]
    value = loss_fn(*local, **{name: of_rank(x, shards) for name, x in batch[1].items()})
    leaves = [x for x in local if x.requires_grad]
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return value.detach(), [x / len(shards) for x in gradients]


def trained(name: str, step: Sequence[tuple[int, ...]], *, repeats: bool = False) -> Found:
    """Train for one call, and then for a step of several calls; each is repeated, as by SAM, if ``repeats``."""
    case = CASES[name]
    torch.manual_seed(0)
    loss = case.make().double()
    loss_fn, ranks = cz.DistributedLoss(loss), len(step[0])
    called(loss_fn, batch(case, FIRST, 0), [FIRST, *[0] * (ranks - 1)])
    found = []
    with cz.one_step(loss_fn) as one:
        for seed, shards in enumerate(step, 1):
            found.append(called(loss_fn, batch(case, sum(shards), seed), shards))
        if repeats:
            with one.again():
                for seed, shards in enumerate(step, 1):
                    value, gradients = called(loss_fn, batch(case, sum(shards), seed), shards)
                    close(value, found[seed - 1][0])
                    assert all(map(torch.equal, gradients, found[seed - 1][1]))
    return found, {name: x.clone() for name, x in loss.named_buffers()}


def by_one_batch(name: str, step: Sequence[tuple[int, ...]]) -> Found:
    case = CASES[name]
    torch.manual_seed(0)
    loss = case.make().double()
    called(loss, batch(case, FIRST, 0), [FIRST])
    batches = [batch(case, sum(shards), seed) for seed, shards in enumerate(step, 1)]
    rows = [torch.cat(x) for x in zip(*(rows for rows, _ in batches), strict=True)]
    masks = [x["enqueue_mask"] for _, x in batches if x]
    whole = rows, {"enqueue_mask": torch.cat(masks)} if masks else {}
    return [called(loss, whole, [len(rows[0])])], {name: x.clone() for name, x in loss.named_buffers()}


def check_one_batch(name: str, step: Sequence[tuple[int, ...]]) -> None:
    """On one process the step moves the state, and returns the values, of one batch of all its samples."""
    on_one = [(sum(shards),) for shards in step]
    (calls, after), ([whole], expected) = trained(name, on_one, repeats=True), by_one_batch(name, on_one)
    if CASES[name].state_of_one_batch:
        for key, x in expected.items():
            close(after[key], x)
    if CASES[name].value_of_one_batch:
        shares = [count / sum(map(sum, on_one)) for (count,) in on_one]
        close(torch.stack([share * value for share, (value, _) in zip(shares, calls, strict=True)]).sum(), whole[0])
        for parts, x in zip(zip(*(of for _, of in calls), strict=True), whole[1], strict=True):
            close(torch.cat([share * part for share, part in zip(shares, parts, strict=True)]), x)


def check_ranks(name: str, step: Sequence[tuple[int, ...]], worlds: Worlds) -> None:
    """On several ranks values, gradients and the state after the step are those of one process."""
    values, expected = trained(name, [(sum(shards),) for shards in step])
    found = worlds.run(len(step[0]), partial(trained, name, step, repeats=True))
    for calls, after in found:
        for key, x in expected.items():
            close(after[key], x)
        for (value, _), (x, _) in zip(calls, values, strict=True):
            close(value, x)
    for index, (_, of_one) in enumerate(values):
        of_ranks = zip(*(calls[index][1] for calls, _ in found), strict=True)
        for parts, x in zip(of_ranks, of_one, strict=True):
            close(torch.cat(parts), x)


STEPS = [[(3, 4), (0, 5), (4, 2)], [(2, 3, 1), (4, 0, 0)]]


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, ...]]:
    ranks = draw(st.sampled_from([1, 2, 3]))
    shards = st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(lambda sizes: sum(sizes) > 1)
    return draw(st.lists(shards.map(tuple), min_size=1, max_size=4))


@pytest.mark.parametrize(("name", "step"), drawn(CASES, STEPS, one_in=2))
def test_a_step_of_several_calls_is_one_step(name: str, step: Sequence[tuple[int, ...]], worlds: Worlds) -> None:
    check_one_batch(name, step)
    check_ranks(name, step, worlds)


@settings(max_examples=300 if EVERY_CASE else 6, deadline=None)
@given(name=st.sampled_from([*CASES]), step=steps())
def test_any_step_is_one_step(name: str, step: list[tuple[int, ...]], worlds: Worlds) -> None:
    check_one_batch(name, step)
    check_ranks(name, step, worlds)


def at_every_call(self: Stateful, found: Any) -> None:
    with torch.no_grad():
        self.move([found])


def also_if_repeated(self: state.OpenStep, module: Stateful, found: Any) -> None:
    self.calls.append((module, found))


MUTANTS = {"at every call": (Stateful, "record", at_every_call), "again": (state.OpenStep, "add", also_if_repeated)}


# a mean over the same samples twice is the mean, and a small memory holds the last samples twice
CAUGHT = [(name, "at every call") for name, case in CASES.items() if case.state_of_one_batch]
CAUGHT += [(name, "again") for name in ("NNCLR", "ReSSL", "MoCo", "InfoNCE", "SupCon", "pytorch-metric-learning's")]


@pytest.mark.parametrize(("name", "mutant"), CAUGHT)
def test_a_state_that_moves_too_often_is_caught(name: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        check_one_batch(name, STEPS[0])


def test_every_state_of_the_library_is_here() -> None:
    made = [entry.make() for entry in CATALOGUE.values()] + [case.make() for case in CASES.values()]
    with_buffers = {type(x) for loss in made for x in loss.modules() if x._buffers}
    assert with_buffers, "no loss has a state"
    assert all(issubclass(kind, Stateful) for kind in with_buffers)
    here = {type(x) for case in CASES.values() for x in case.make().modules()}
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


def on_one_rank(loss: nn.Module) -> None:
    rows = numbers(2, D, seed=dist.get_rank(), dtype=torch.float32)
    if dist.get_rank():
        with cz.one_step(loss):
            cz.DistributedLoss(loss)(rows, rows)
    else:
        cz.DistributedLoss(loss)(rows, rows)


@pytest.mark.parametrize("make", [CASES["DINO"].make, CASES["MoCo"].make])
def test_ranks_that_are_not_all_in_a_step_are_refused(make: Callable[[], nn.Module], worlds: Worlds) -> None:
    said, _ = common_error(worlds, 2, lambda: on_one_rank(make()), lambda: None)
    assert_says(said, "open_step")


def recomputed() -> None:
    from torch.utils.checkpoint import checkpoint

    loss_fn, rows = cz.DistributedLoss(cz.DINO(D)), numbers(2, D, seed=dist.get_rank(), dtype=torch.float32)
    with cz.one_step(loss_fn):
        checkpoint(loss_fn, rows.requires_grad_(), rows.detach(), use_reentrant=False).backward()


def test_a_call_that_a_backward_pass_repeats_is_refused(worlds: Worlds) -> None:
    said, _ = common_error(worlds, 2, recomputed, lambda: None)
    assert_says(said, "a backward pass computes the loss again")
