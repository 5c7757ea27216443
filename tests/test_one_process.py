"""Losses that communicate by themselves: inside of DistributedLoss they see one process."""

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.ranks import one_process
from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import CONTRACT, Broken, same_at_later_steps, same_state
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import loss_call
from tests.helpers import close, drawn, error_message, groups, later, numbers

D = 3
SPLITS = [(3, 4), (7, 0), (1, 4, 2), (0, 5, 2)]


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Gather(torch.autograd.Function):
    """All ranks' rows; its backward pass sums gradients over ranks and keeps this rank's, as in SimCLR's code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = [torch.zeros_like(x) for _ in range(world_size())]
        dist.all_gather(rows, x)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        local = len(gradient) // dist.get_world_size()
        return gradient[dist.get_rank() * local : (dist.get_rank() + 1) * local]


class SumsInBackward(torch.autograd.Function):
    """The identity, whose backward pass sums over ranks, those of the default group if none is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any = None) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Loss(nn.Module):
    def __init__(self, rows_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rows_of = rows_of
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(D, dtype=torch.float64))

    def forward(self, z: Tensor, w: Tensor) -> Tensor:
        z, w = (self.rows_of(x) if world_size() >= 1 and dist.is_initialized() else x for x in (z, w))
        self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        logits = self.scale * (z - self.mean) @ w.T
        return F.cross_entropy(logits, torch.arange(len(z))) * world_size()


def with_dist_nn(x: Tensor) -> Tensor:
    return torch.cat(dist_nn.all_gather(x))


def with_functional_collectives(x: Tensor) -> Tensor:
    return funcol.all_gather_single(x, 0, dist.group.WORLD)


def with_objects(x: Tensor) -> Tensor:
    sizes: list[Any] = [None] * world_size()
    dist.all_gather_object(sizes, len(x))
    dist.barrier()
    return x / sum(sizes)


def with_sinkhorn(x: Tensor) -> Tensor:
    """Rows and their assignments to prototypes: a row of q sums up to 1, over all ranks a column does, too."""
    q = torch.exp(x.detach() / 2)
    for _ in range(3):
        of_prototypes = q.sum(0)
        dist.all_reduce(of_prototypes)
        q = q / of_prototypes
        q = q / q.sum(1, keepdim=True)
    return x + q


GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer": Gather.apply,
    "torch.distributed.nn, all_gather": with_dist_nn,
    "functional collectives": with_functional_collectives,
    "objects and a barrier": with_objects,
    "sinkhorn": with_sinkhorn,
    "in the backward pass only": SumsInBackward.apply,
}


def remembering() -> cz.CrossBatchMemory:
    def miner(z: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        total = torch.tensor(len(z))
        dist.all_reduce(total)
        return tuple(torch.arange(int(total) // 2) for _ in range(3))

    def loss(z: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor) -> Tensor:
        rows = Gather.apply(z), ref_emb, ref_emb
        anchors, *others = (x.index_select(0, i) for x, i in zip(rows, indices_tuple, strict=True))
        return torch.stack([(anchors * x).sum() for x in others]).sum() / dist.get_world_size()

    return cz.CrossBatchMemory(loss, 8, D, miner=miner)


MAKES: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Loss, gather) for name, gather in GATHERS.items()},
    "in DDP, which sends buffers before each call": lambda: nn.parallel.DistributedDataParallel(Loss(Gather.apply)),
    "compiled": lambda: torch.compile(Loss(Gather.apply), backend="eager"),
    "with a memory": remembering,
}


def check(name: str, shards: Sequence[int], reduction: Any, worlds: Worlds, wrap: Any = cz.DistributedLoss) -> None:
    make, call = MAKES[name], "labels" if name == "with a memory" else "views"
    case = Case(lambda: wrap(make(), grad_reduction=reduction), call, reduction)
    trial = Trial(case, GlobalBatch(shards, d=D, seed=5), worlds)
    for invariant in (*CONTRACT, same_state, same_at_later_steps):
        invariant(trial)


@pytest.mark.parametrize(("name", "shards", "reduction"), drawn(MAKES, SPLITS, ["mean", "sum"], one_in=5), ids=str)
def test_a_loss_that_communicates_is_that_of_one_process(name: str, shards, reduction, worlds: Worlds) -> None:
    check(name, shards, reduction, worlds)


WITHOUT_A_WORLD_OF_ONE = loss_call, "in_one_process", lambda compute, *_: compute()
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "a layer": WITHOUT_A_WORLD_OF_ONE,
    "sinkhorn": WITHOUT_A_WORLD_OF_ONE,
    "in the backward pass only": (one_process, "_python_functions", lambda *_: []),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_guard_they_are_wrong(name: str, worlds: Worlds) -> None:
    class Unguarded(cz.DistributedLoss):
        def forward(self, *rows: Tensor) -> Any:
            with patch.object(*MUTANTS[name]):
                return super().forward(*rows)

    with pytest.raises(Broken):
        check(name, (3, 4), "mean", worlds, Unguarded)


def gathering_by_a_default() -> Callable[[Tensor], Tensor]:
    """As code that was imported after init_process_group: its functions hold the default group of then."""
    spec: Any = importlib.util.find_spec(dist_nn.__name__)
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)

    def gathers_by_a_default(z: Tensor) -> Tensor:
        rows: Tensor = torch.cat(late.all_gather(z))
        return (rows - z).square().sum()  # of W times as many rows: an error of its own

    return gathers_by_a_default


def raises(z: Tensor) -> Tensor:
    raise KeyError(f"in a world of {dist.get_world_size()}")


class Holding(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, z: Tensor) -> Tensor:
        dist.all_reduce(z.detach().sum(0), group=self.group)
        dist.barrier(self.group)
        return z.square().mean()


def refusals(of_its_own: bool) -> list[Any]:
    world = dist.group.WORLD
    group: Any = dist.new_group([0, 1]) if of_its_own else world
    names, z = len(dist.distributed_c10d._world.pg_names), numbers(3, D, seed=dist.get_rank())
    z, labels = z.requires_grad_(), torch.zeros(3, dtype=torch.int64)

    def miner(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        dist.barrier(group)
        return (labels,)

    jobs = [
        lambda: cz.DistributedLoss(Holding(group))(z),
        lambda: cz.DistributedLoss(lambda z: SumsInBackward.apply(z, group).sum())(z).backward(),
        lambda: cz.DistributedLoss(lambda z, labels, indices_tuple: z.sum(), miner=miner)(z, labels),
        lambda: DistributedMiner(miner)(z, labels),
        lambda: cz.DistributedLoss(gathering_by_a_default())(z),
        lambda: cz.DistributedLoss(raises)(z),
    ]
    messages: list[Any] = [error_message(job, (ValueError, KeyError)) for job in jobs]
    assert dist.group.WORLD is world
    assert len(dist.distributed_c10d._world.pg_names) == names
    assert dist.get_world_size() == 2
    return messages


@pytest.mark.parametrize("of_its_own", [False, True])
def test_a_loss_that_holds_a_group_is_refused_on_every_rank(of_its_own: bool, worlds: Worlds) -> None:
    first, second = worlds.run(2, refusals, of_its_own)
    assert first == second
    assert "Holding: it sends 2 messages by a process group that it holds" in first[0]
    for text, name in zip(first[1:-1], ("<lambda>", "miner", "miner", "gathers_by_a_default"), strict=True):
        assert f"{name}: it sends 1 message by" in text
    assert "in a world of 1" in first[-1]


def among_some() -> list[str | None]:
    """Refusals where ranks 0 and 1 share a batch: of WORLD, and of a group of 0 and 2, as tensor parallelism has them."""
    z, found = numbers(3, D, seed=dist.get_rank()), list[str | None]()
    with groups([0, 1], [2]) as of_batch, groups([0, 2], [1]) as across:
        of_class: Any = type("Late", (Holding,), {"group": dist.group.WORLD, "__init__": nn.Module.__init__})
        for loss in (of_class(), Holding(across)):
            loss_fn = cz.DistributedLoss(loss, process_group=of_batch)
            found.append(error_message(lambda loss_fn=loss_fn: loss_fn(z)))
    return found


def test_only_a_group_that_joins_ranks_of_the_batch_is_refused(worlds: Worlds) -> None:
    first, second, third = worlds.run(3, among_some)
    assert "it sends 2 messages" in first[0]
    assert second == first == [first[0], None]
    assert third == [None, None]


def beside_another_thread() -> float:
    """The mean of ones while another thread sends by a group that the loss does not hold."""
    group, turn = dist.new_group([0, 1]), Barrier(2, timeout=60)
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: [turn.wait(), dist.barrier(group), turn.wait()])
        loss_fn = cz.DistributedLoss(lambda z: [turn.wait(), turn.wait(), z.mean()][-1], check_distinct=False)
        return float(loss_fn(torch.ones(2, D)))


def sized() -> list[float]:
    """Losses that have a world_size and gather nothing: of this library in a user's module, and in FSDP."""
    in_fsdp = FullyShardedDataParallel(nn.Sequential(cz.KoLeo()), device_id=torch.device("cpu"))
    losses = nn.Sequential(later(cz.KoLeo(), world_size=2)), in_fsdp
    return [float(cz.DistributedLoss(loss)(numbers(3, D, seed=dist.get_rank()))) for loss in losses]


def held_graph() -> float:
    """The gradient of a number that is summed over ranks outside of the loss, which holds it."""
    offset = torch.ones((), dtype=torch.float64, requires_grad=True)
    held = SumsInBackward.apply(offset)
    cz.DistributedLoss(lambda z: z.sum() * 0 + held, check_equal=False)(numbers(3, D, seed=dist.get_rank())).backward()
    return float(offset.grad)


class Squared(torch.autograd.Function):
    """x², whose backward pass reads x, which a checkpoint computes anew then, and sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return 2 * x * gradient


def of_gathered(embeddings: Tensor, weights: Tensor) -> Tensor:
    return Squared.apply(Gather.apply(embeddings) * weights.sum()).sum()


def checkpointed(reentrant: bool | None) -> list[Tensor]:
    rank = dist.get_rank()
    loss_fn = cz.DistributedLoss(of_gathered)
    x, w = (numbers(3 + rank, D, seed=10 * i + rank).requires_grad_() for i in range(2))

    def step(x: Tensor, w: Tensor) -> Tensor:
        return loss_fn(x - dist_nn.all_reduce(x.sum(0)), w)  # an encoder that communicates, as SyncBatchNorm does

    value = step(x, w) if reentrant is None else checkpoint(step, x, w, use_reentrant=reentrant)
    value.backward()
    assert dist.get_world_size() == 2
    return [value.detach(), x.grad, w.grad]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_calls_encoder_and_wrapper_anew_for_all_ranks(reentrant: bool, worlds: Worlds) -> None:
    for found, expected in zip(worlds.run(2, checkpointed, reentrant), worlds.run(2, checkpointed, None), strict=True):
        for x, y in zip(found, expected, strict=True):
            close(x, y)


def nested() -> float:
    """A wrapper within a loss sees one process."""
    rows, inner = numbers(7, D, seed=1), cz.DistributedLoss(torch.sum)
    local = rows.split([3, 4])[dist.get_rank()]
    return float(cz.DistributedLoss(lambda z: inner(z))(local) - rows.sum())


def test_who_sees_how_many_ranks(worlds: Worlds) -> None:
    assert worlds.run(2, held_graph) == [2, 2]
    assert worlds.run(2, beside_another_thread) == [1, 1]
    koleo = float(cz.KoLeo()(torch.cat([numbers(3, D, seed=rank) for rank in range(2)])))
    assert worlds.run(2, sized) == [[pytest.approx(koleo)] * 2] * 2
    assert worlds.run(2, nested) == [pytest.approx(0, abs=1e-12)] * 2


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ONE = {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # LOCAL_RANK names the device


def environment() -> tuple[dict[str, str], int]:
    """Return torchrun's variables and the number of ranks, as code of the user's reads them here."""
    return {name: x for name, x in os.environ.items() if name in TORCHRUN}, dist.get_world_size()


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Any]) -> Tensor:
        ctx.found = found
        with patch.dict(os.environ), ThreadPoolExecutor(1) as other:  # the first writes what it has read
            assert other.submit(dist.get_world_size).result() == 2  # other threads see all ranks
            assert other.submit(in_one_process, environment, "another", cz.World.of()).result()[1] == 1
        found.append(environment())
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.found.append(environment())
        raise KeyError("after it is read")


def environments(*variables: str) -> list[Any]:
    """In a forward pass, in a checkpoint's hooks that call the encoder anew, after it, in a backward pass and after it."""
    found: list[Any] = []
    group: Any = dist.group.WORLD

    def loss(z: Tensor) -> Tensor:
        value = Reads.apply(z, found)
        with default_group(group):
            found.append(environment())
        return value

    others = {name: x for name, x in os.environ.items() if name not in TORCHRUN}  # trainers' tests leave them set
    with patch.dict(os.environ, {**others, **{name: TORCHRUN[name] for name in variables}}, clear=True):
        value = cz.DistributedLoss(loss)(numbers(3, 2, seed=dist.get_rank()).requires_grad_())
        found.append(environment())
        error_message(value.backward, KeyError)
        found.append(environment())
    return found


def test_a_loss_reads_the_environment_of_one_process_also_in_a_backward_pass_that_raises(worlds: Worlds) -> None:
    """And none where there is none."""
    of_all = TORCHRUN, 2
    assert worlds.run(2, environments, *TORCHRUN) == [[(ONE, 1), of_all, of_all, (ONE, 1), of_all]] * 2
    assert [[variables for variables, _ in found] for found in worlds.run(2, environments)] == [[{}] * 5] * 2
