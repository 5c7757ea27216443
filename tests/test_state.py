"""A state is read with weights_only=True; copies share the process group; a call that raises moves nothing on any rank."""

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.settings import Temperature
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, drawn, error_message, numbers
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.own_losses import OF_CATALOGUE, OwnLoss
from tests.zoo import BatchHard
from tools.vectors.cases import LABELLED, VIEWS, WIDTH


def test_weights_only_reads_every_state() -> None:
    """Also the position of a sampler, which is plain numbers."""
    sampler, others = cz.data.GlobalBatchSampler(8, batch_size=2), [cz.MomentumEncoder(nn.BatchNorm1d(3))]
    modules = [*(of.make() for of in OF_CATALOGUE.values()), cz.CrossBatchMemory(cz.SupCon(), 6, 3), *others]
    for x in modules:
        x.load_state_dict(saved_and_loaded(x.state_dict(), weights_only=True))
    sampler.set_position(saved_and_loaded(sampler.get_position(step=1), weights_only=True))


def rows(seed: int = 1) -> Tensor:
    return numbers(4, 3, seed=seed).float()


def test_a_queue_whose_content_differs_is_noticed(worlds: Worlds) -> None:
    def job() -> str | None:
        queue = cz.MemoryQueue(4, 3)
        queue.enqueue(rows(dist.get_rank())[: 2 - dist.get_rank()])
        if dist.get_rank() == 1:
            queue.embeddings[1, 2] += 1e-3
        # the ring is full after the fourth row, and begins again
        return error_message(lambda: [queue.enqueue(rows()[: 1 - dist.get_rank()]) for _ in range(3)])

    first, second = worlds.run(2, job)
    assert first == second
    assert "its content" in str(first)


def views() -> tuple[Tensor, Tensor]:
    rows = numbers(2, 3, seed=dist.get_rank())
    return rows, rows.flip(0)


class Holder(NamedTuple):
    """How an object with a process group is made, what it computes, and where in it the group is."""

    make: Callable[[Any], Any]
    use: Callable[[Any], Any]
    of: Callable[[Any], Any] = lambda x: x


def cached(group: Any) -> cz.GradCache:
    return cz.GradCache(nn.Linear(3, 1).double(), 1, process_group=group)


def wrapped(group: Any) -> cz.DistributedLoss:
    return cz.DistributedLoss(cz.NTXent(), process_group=group)


HOLDERS = {
    "DistributedLoss": Holder(wrapped, lambda x: x(*views())),
    "Monitor": Holder(lambda group: cz.Monitor(wrapped(group)), lambda x: x._loss_fn(*views()), lambda x: x._loss_fn),
    "DistributedMiner": Holder(
        lambda group: cz.data.DistributedMiner(BatchHardMiner(), process_group=group),
        lambda x: x(views()[0], torch.arange(2)),
    ),
    "GradCache": Holder(cached, lambda x: x(views()[0]).shape),
    "MomentumEncoder": Holder(
        lambda group: cz.MomentumEncoder(cached(group)), lambda x: x.encoder(views()[0]).shape, lambda x: x.encoder
    ),
    "GlobalBatchSampler": Holder(
        lambda group: cz.data.GlobalBatchSampler(6, batch_size=4, shuffle=False, process_group=group), list
    ),
    "RetrievalMetrics": Holder(
        lambda group: cz.metrics.RetrievalMetrics("recall@1", process_group=group),
        lambda x: (x.reset(), x.update(views()[0], torch.arange(2)), x.compute())[2],
    ),
}


def saved_and_loaded(value: Any, *, weights_only: bool = False) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def copies(name: str, as_world: bool) -> tuple[str | None, str]:
    make, use, holder = HOLDERS[name]
    group = dist.new_group()
    first = make(cz.World.of(group) if as_world else group)
    expected = str(use(copy.deepcopy(first)))
    others = [first, copy.copy(first), copy.deepcopy(copy.deepcopy(first))]
    if isinstance(first, nn.Module):
        others.append(AveragedModel(first).module)
    for other in others:
        assert cz.World.of(holder(other).process_group).process_group is group
        assert str(use(copy.deepcopy(other))) == expected
    loaded = saved_and_loaded(first)
    message = error_message(lambda: use(loaded))
    holder(loaded).process_group = group
    assert str(use(loaded)) == expected
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert str(holder(saved_and_loaded(make(mesh))).process_group).startswith("left out of the file")
    without = saved_and_loaded(make(None))
    assert holder(without).process_group is None
    assert str(use(without)) == expected
    return message, expected


@pytest.mark.parametrize("name", HOLDERS)
def test_a_copy_shares_the_group_and_a_file_says_that_it_has_none(name: str, worlds: Worlds) -> None:
    for as_world in (False, True):
        (message, _), _ = worlds.run(2, copies, name, as_world)
        assert_says(message, "process_group: … got str 'left out of the file, … set .process_group of what was loaded'")


def memory(loss: Callable[[], Any]) -> Callable[[], Loss]:
    return lambda: cz.CrossBatchMemory(loss(), 20, WIDTH, dtype=torch.float64)


class References(nn.Module):
    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple, ref_emb: Tensor, ref_labels: Tensor) -> Tensor:
        return (embeddings.sum(0) - ref_emb.sum(0)).square().sum()


class Negatives(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        return (queries.sum(0) + keys.sum(0)).square().sum() + negatives.sum()


INNER = {
    f"memory of {kind.__name__}": OwnLoss(memory(kind), kinds)
    for kind, kinds in [(BatchHard, LABELLED), (References, LABELLED), (Negatives, VIEWS)]
}
"""Memories of losses that fail inside."""

STATEFUL = {name: OF_CATALOGUE[name] for name in ("dino", "tico", "sigreg", "lejepa", "nnclr")} | {
    "memory of InfoNCE": OwnLoss(memory(cz.InfoNCE), VIEWS),
    "memory of SupCon": OwnLoss(memory(cz.SupCon), LABELLED),
    **INNER,
}


LAST = {name: OF_CATALOGUE[name] for name in ("dino", "ibot", "sogclr", "curricular-face")}


def fails_last(loss: Loss, arguments: dict[str, Tensor]) -> None:
    with patch.object(Batch, "reduce", side_effect=RuntimeError("out of memory")):
        cz.DistributedLoss(loss, check_distinct=False)(*arguments.values())


def refused(loss: Loss, arguments: dict[str, Tensor]) -> None:
    first = next(iter(arguments.values())).detach().clone()
    first[0, 0] = torch.nan if dist.get_rank() == dist.get_world_size() - 1 else 0.0
    cz.DistributedLoss(loss, check_distinct=False)(first, *list(arguments.values())[1:])


class Raising(Loss):
    def inputs(self, *rows: Tensor) -> Inputs:
        return Inputs({f"argument {i}": x for i, x in enumerate(rows)})

    def compute(self, batch: Batch) -> Tensor:
        raise RuntimeError("the term failed")


def raises(*_: Any, **named: Any) -> Tensor:
    raise RuntimeError("the user's loss failed.")


def failing(loss: Any) -> Any:
    return patch.object(type(loss.loss), "rows" if isinstance(loss.loss, cz.RowLoss) else "forward", raises)


def fails_inside(loss: Any, arguments: dict[str, Tensor]) -> None:
    with failing(loss):
        cz.DistributedLoss(loss, check_distinct=False)(*arguments.values())


def moved_first(loss: Any) -> None:
    """Let the state move before the batch is checked."""

    def inputs(self: Any, *rows: Tensor) -> Inputs:
        for buffer in self.buffers():
            buffer.add_(1)
        stated: Inputs = super(type(self), self).inputs(*rows)
        return stated

    loss.__class__ = type(type(loss).__name__, (type(loss),), {"inputs": inputs})


def stores_first(loss: Any) -> None:
    """Let the batch enter the memory before the inner loss is computed."""

    def holding(entering: Any) -> cz.MemoryQueue:
        loss.memory.record(entering)
        return loss.memory

    loss.memory.holding = holding


class Failure(NamedTuple):
    """A call that fails, and the mistake that would let it move the state: of the loss, or a context that is missing."""

    call: Callable[[Any, dict[str, Tensor]], Any]
    losses: dict[str, OwnLoss]
    damage: Callable[[Any], None] = lambda loss: None
    without: Sequence[str] = ()


FAILURES = {
    "a refused batch": Failure(refused, STATEFUL, damage=moved_first),
    "a failed reduction": Failure(fails_last, LAST, damage=moved_first),
    "a failed inner loss": Failure(
        fails_inside, INNER, damage=stores_first, without=["contrastive_zoo.wrapper.step.state_kept_on_error"]
    ),
    "a failed term": Failure(
        lambda loss, of: cz.DistributedLoss(cz.WeightedSum([loss, Raising()]), check_distinct=False)(*of.values()),
        STATEFUL,
        without=[f"contrastive_zoo.{place}.state_kept_on_error" for place in ("losses.compositions", "wrapper.step")],
    ),
}


def moved(failure: str, name: str, *, split: bool, mutant: bool = False) -> list[str]:
    """On every rank: the buffers that a call which fails has moved, after one that did not fail."""
    torch.manual_seed(0)
    how, case = FAILURES[failure], FAILURES[failure].losses[name]
    loss = case.make().double()
    first, second = (case.arguments(dist.get_rank(), dist.get_world_size(), draw) for draw in (0, 1))
    with splitting(always=split), ExitStack() as stack:
        cz.DistributedLoss(loss, check_distinct=False)(*first.values())
        before = {name: x.clone() for name, x in loss.named_buffers()}
        if mutant:
            how.damage(loss)
            for context in how.without:
                stack.enter_context(patch(context, nullcontext))
        with pytest.raises((ValueError, RuntimeError)):
            how.call(loss, second)  # of the same batch a moving average would stay where it is
    return [name for name, x in loss.named_buffers() if not torch.equal(x, before[name])]


CASES = [(failure, name) for failure, of in FAILURES.items() for name in of.losses]


@pytest.mark.parametrize(("case", "world_size"), drawn(CASES, [2, 1], one_in=2), ids=str)
def test_a_call_that_fails_moves_nothing(case: tuple[str, str], world_size: int, worlds: Worlds) -> None:
    failure, name = case
    split = CASES.index(case) // 2 % 2 == 0 or failure == "a failed inner loss"
    assert worlds.run(world_size, moved, failure, name, split=split) == [[]] * world_size
    if name in ("dino", "nnclr", "memory of SupCon", "memory of References"):
        assert any(worlds.run(2, moved, failure, name, split=True, mutant=True))


class Remembering(cz.RowLoss):
    """It counts calls in an attribute and in a setting, and binds its buffer to a new tensor in each."""

    temperature: Temperature = 0.5
    blocks: int = 0

    def __post_init__(self) -> None:
        self.calls, self.mean = 0, nn.Buffer(torch.zeros((), dtype=torch.float64))

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        self.calls, self.blocks = self.calls + 1, self.blocks + 1
        self.mean = (self.mean + similarity.detach().mean()) / 2
        logits = self.calls * similarity / self.temperature - self.mean  # type: ignore[operator]  # a number or a tensor
        return logits.logsumexp(1) - logits.where(positive, 0).sum(1), positive.any(1)


@pytest.mark.parametrize("temperature", [0.5, cz.LearnableTemperature(0.5)], ids=["constant", "learnt"])
def test_what_a_row_loss_remembers_stays(temperature: Any, worlds: Worlds) -> None:
    def job() -> list[float]:
        loss = Remembering(temperature=temperature).double()
        loss_fn, shards = cz.DistributedLoss(loss), [6] if dist.get_world_size() == 1 else [4, 2]
        with splitting(always=True):
            values = [
                loss_fn(*(x.split(shards)[dist.get_rank()] for x in (numbers(6, 3, seed=step), torch.arange(6) % 2)))
                for step in range(3)
            ]
        return [*map(float, values), loss.calls, loss.blocks, float(loss.mean)]

    (expected,) = worlds.run(1, job)
    assert expected[3:5] == [3, 3]
    for found in worlds.run(2, job):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("split", [False, True])
def test_a_loss_that_fails_on_one_rank_fails_on_all(split: bool, worlds: Worlds) -> None:
    """The memory of no rank moves, also not that of the rank whose loss has a value; and the next call is as any other."""

    def job() -> list[Any]:
        torch.manual_seed(0)
        loss = memory(References)()
        loss_fn: Any = cz.DistributedLoss(loss).double()
        arguments = OwnLoss(lambda: loss, LABELLED).arguments(dist.get_rank(), 2).values()
        found: list[Any] = []
        with splitting(always=split):
            for fails in (False, dist.get_rank() == 1, False):
                with failing(loss) if fails else nullcontext():
                    found.append(error_message(lambda: loss_fn(*arguments)) or len(loss.memory))
        return found

    text = "CrossBatchMemory: rank 1: RuntimeError: the user's loss failed."
    assert worlds.run(2, job) == [[8, text, 16]] * 2


def test_a_replaced_buffer_comes_back() -> None:
    """A third-party module may assign a buffer instead of writing into it."""
    norm = nn.BatchNorm1d(1)
    kept = norm.running_mean

    class Assigns(cz.RowLoss):
        def __post_init__(self) -> None:
            self.norm = norm

        def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
            self.norm.running_mean = torch.ones(1)
            return raises(), positive.any(1)

    with pytest.raises(RuntimeError, match="the user's loss failed"):
        cz.WeightedSum([Assigns()])(torch.eye(WIDTH), torch.arange(WIDTH) % 2)
    assert norm.running_mean is kept


def test_a_monitor_refuses_before_the_loss_moves(worlds: Worlds) -> None:
    def job() -> tuple[str | None, list[Tensor], str]:
        calls: list[Tensor] = []
        loss_fn = cz.DistributedLoss(lambda scores: calls.append(scores) or scores.sum(), check_distinct=False)
        monitor = cz.Monitor(loss_fn)
        return error_message(lambda: loss_fn(torch.ones(3))), calls, monitor.compared()

    for text, *state in worlds.run(2, job):
        assert "holds embeddings" in str(text)
        assert state == [[], "Monitor(every=50), call 0"]


def two_steps(call: Callable[..., Tensor], case: OwnLoss) -> tuple[str | None, list[Tensor | None]]:
    """The error of the second step if there is one, and the gradients of its arguments."""
    for draw in (0, 1):
        given = [*case.arguments(draw=draw).values()]
        text = error_message(lambda given=given: call(*given).sum().backward())
    return text, [x.grad for x in given]


@pytest.mark.parametrize("wrap", [cz.DistributedLoss, lambda loss: loss], ids=["wrapped", "bare"])
def test_what_a_checkpoint_computes_again_moves_no_state(wrap: Any) -> None:
    """On one process as on several; in eval mode, where no state moves, nothing is refused."""
    cases = {name: of for name, of in (OF_CATALOGUE | STATEFUL).items() if [*of.make().buffers()]}
    for (name, case), training, reentrant in product(cases.items(), (True, False), (True, False)):
        plain = case.make().double().train(training)
        again = copy.deepcopy(plain)
        _, expected = two_steps(wrap(plain), case)
        text, found = two_steps(partial(checkpoint, wrap(again), use_reentrant=reentrant), case)
        if training and (reentrant or text is not None):
            assert_says(text, ": a backward pass computes the loss again")
            found = expected
        torch.testing.assert_close([*again.buffers(), *found], [*plain.buffers(), *expected], msg=name)


STATES: dict[str, Callable[[], Loss]] = {
    "AdaFace": lambda: cz.AdaFace(3, 3, check_finite=False),
    "CurricularFace": lambda: cz.CurricularFace(3, 3, check_finite=False),
    "SogCLR": lambda: cz.SogCLR(4, check_finite=False),
    "TiCo": lambda: cz.TiCo(3, check_finite=False),
}


@pytest.mark.parametrize("name", STATES)
def test_an_overflow_that_a_scaler_skips_leaves_running_statistics(name: str) -> None:
    loss, labels, bad = STATES[name](), torch.arange(4) % 3, rows().where(torch.arange(4)[:, None] != 1, torch.nan)
    further = {"SogCLR": [rows(2), torch.arange(4)], "TiCo": [rows(2)]}.get(name, [labels])
    loss(rows(), *further)
    before = {key: x.clone() for key, x in loss.named_buffers() if x.is_floating_point()}
    assert not loss(bad, *further).isfinite()
    assert all(torch.equal(x, before[key]) for key, x in loss.named_buffers() if key in before)
    assert loss(rows(), *further).isfinite()


def test_a_queue_is_not_filled_again_by_a_backward_pass() -> None:
    queue = cz.MemoryQueue(8, 3)
    value = checkpoint(lambda x: queue.enqueue(x).sum() * x.sum(), rows().requires_grad_(), use_reentrant=True)
    assert_says(error_message(value.backward), "MemoryQueue: a backward pass")
    assert len(queue) == 4


def test_a_checkpoint_holds_the_whole_state_of_every_loss() -> None:
    losses = {entry.name: entry.make(temperature=0.3) for entry in WHOLE_ZOO}
    states = {name: {key for key, _ in loss.named_buffers()} for name, loss in losses.items()}
    assert len([name for name, state in states.items() if state]) > 20
    assert {name for name, state in states.items() if state - losses[name].state_dict().keys()} == set()
