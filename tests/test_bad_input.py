"""Bad input is one clear sentence, the same on every rank, and the next step finds every rank ready."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.metrics import plots
from contrastive_zoo.ranks.world import Shards
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.arguments import GlobalIndices
from tests.helpers import assert_says, later, numbers, rank, refused
from tests.test_roles import Phases


def last(bad: Any, good: Any) -> Any:
    """Return what is bad on the last rank, or on one process."""
    return bad if not dist.is_initialized() or rank() == dist.get_world_size() - 1 else good


def z(n: int = 4, d: int = 3, *, seed: int = 7, learnt: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """Embeddings as an encoder makes them, on each rank others."""
    return numbers(n, d, seed=seed + rank()).to(dtype).requires_grad_(learnt)


def y(n: int = 4) -> Tensor:
    return torch.arange(n) % 2


def spoilt(value: float = torch.nan) -> Tensor:
    x = z().detach()
    x[2, 1] = last(value, 0.0)
    return x.requires_grad_()


def third_party(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings[labels == 0].square().sum()


def lenient(embeddings: Tensor, labels: Tensor | None = None, indices_tuple: Any = None) -> Tensor:
    return embeddings.square().sum()


def weighted(embeddings: Tensor, weight: Any) -> Tensor:
    return embeddings.sum() * weight


class Mining(nn.Module):
    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return INDICES


def turned() -> Phases:
    loss = Phases()
    loss.scale.data.imag += rank()
    return loss


class Drawing(cz.RowLoss):
    """A user's loss whose candidates need random numbers, on the last rank or on all."""

    of_all: bool = False

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        if last(True, self.of_all):
            torch.rand(())
        return (similarity * negative).sum(1), negative.any(1)


def for_ranks(number: int) -> Mining:
    return later(Mining(), world_size=number)


class Prototypes(nn.Module):
    """A third-party loss that computes with a DTensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2, 3))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        weight = self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight
        return nn.functional.cross_entropy(embeddings @ weight.T, labels)


class DrawnSetting(nn.Module):
    def forward(self) -> Tensor:
        torch.manual_seed(rank())
        return 0.1 + torch.rand((), dtype=torch.float64)


class Counting(nn.Module):
    """A third-party loss with a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return (view1 - view2).square().sum() * self.calls.add_(1).item()


class Powered(nn.Module):
    """A loss whose attribute has the name of an option, and whose parameter has that of an argument."""

    def __init__(self, grad_reduction: str = "a", scale: float = 2.0) -> None:
        super().__init__()
        self.grad_reduction, self.scale = grad_reduction, nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, embeddings: Tensor, scale: Tensor) -> Tensor:
        return (scale * self.scale * embeddings).square().sum()


def hooked(loss: nn.Module) -> None:
    """A call with indices of local rows, which no other rank can interpret."""
    loss.register_forward_hook(lambda module, args, value: value)
    rows = [numbers(2, 4, seed=3 * index + rank()) for index in range(3)]
    cz.DistributedLoss(loss)(*rows, torch.tensor([0, 1]))


def in_plain_formulas() -> None:
    with last(cz.engine.plain_formulas(), nullcontext()):
        cz.DistributedLoss(cz.InfoNCE())(z(), z())


def in_a_checkpoint(loss: nn.Module, reentrant: bool) -> None:
    checkpoint(cz.DistributedLoss(loss), z(), z(seed=20), use_reentrant=reentrant).backward()


def after_a_validation() -> None:
    loss = cz.DistributedLoss(cz.NTXent())
    with torch.no_grad():
        loss(z(), z(seed=20))
    loss(SAME, SAME + 1)


def remembering(loss: Any, *arguments: Any, **named: Any) -> None:
    """A call of a memory, into which nothing enters."""
    memory = cz.CrossBatchMemory(loss, 8, 3)
    try:
        cz.DistributedLoss(memory)(*arguments, **named)
    finally:
        assert len(memory.memory) == 0


def split(loss: Any, *arguments: Any, ring: bool = False, **named: Any) -> None:
    """A call of which each rank computes a part."""
    with splitting(always=True):
        cz.DistributedLoss(loss, ring=ring)(*arguments, **named)


def monitored(*, on_all: bool = True, every: int = 50) -> None:
    loss = cz.DistributedLoss(cz.NTXent())
    if on_all or rank():
        cz.Monitor(loss, every=every)
    loss(z(), z(seed=20))


def in_one_step(loss: nn.Module) -> None:
    with last(cz.one_step(loss), nullcontext()):
        cz.DistributedLoss(loss)(z(), z())


def recomputed_in_one_step() -> None:
    loss_fn, rows = cz.DistributedLoss(cz.DINO(3)), z()
    with cz.one_step(loss_fn):
        checkpoint(loss_fn, rows, rows.detach(), use_reentrant=False).backward()


def of_tokens(spoil: Callable[[Tensor], list[Any]]) -> None:
    tokens = torch.eye(3)[:, None].repeat(1, 2, 1)
    cz.DistributedLoss(cz.MaxSim(), check_distinct=False)(*last(spoil(tokens), [tokens] * 2))


def parted(dim: int, x: Tensor | None = None) -> Tensor:
    return DTensor.from_local(z() if x is None else x, init_device_mesh("cpu", (2,)), [Shard(dim)])


def outside_of_what_was_sharded(loss: nn.Module) -> None:
    loss_fn = cz.DistributedLoss(loss)
    fully_shard(nn.Sequential(loss_fn))
    loss_fn(z(), y())


def in_the_forward_pass() -> None:
    keys = cz.MomentumEncoder(encoder := nn.Linear(2, 2))
    fully_shard(nn.Sequential(keys, encoder))(z(4, 2))
    keys.update(encoder)


def with_another_pointer() -> None:
    loss = cz.CrossBatchMemory(cz.SupCon(), 8, 3)
    loss.memory.pointer.fill_(rank())
    cz.DistributedLoss(loss)(z(), y())


Pair = make_dataclass("Pair", ["z"])
INDICES, SAME, X, C = (torch.tensor([0]),) * 3, numbers(4, 3, seed=1), torch.ones(3, 2), cz.collectives

ANYWHERE: dict[str, Callable[..., Any]] = {
    "NTXent: … row i of view 1 belongs to … view 0 … [4, 3] … [3, 3]": lambda w: w(cz.NTXent())(z(), z(last(3, 4))),
    "two or more views … got 1 … loss(view1, view2)": lambda w: w(cz.NTXent())(*[z()] * last(1, 2)),
    "labels are missing … call loss": lambda w: w(cz.SupCon())(z(), *[y()] * last(0, 1)),
    "labels are classes 0 … 4, got 0 … 5": lambda w: w(cz.CrossBatchMemory(cz.BalSCL(5, 3), 8, 3))(
        z(), last(5, 1) * y()
    ),
    "labels are classes, columns of … [4, 3], got 0 … 3": lambda w: w(cz.PaCo())(z(), last(3, 1) * y(), z()),
    "keys and key_labels belong together: pass all or none, got keys.": lambda w: w(cz.PaCo())(
        z(), y(), z(), *[z()] * last(1, 0)
    ),
    "belong together: pass all or none, got negatives.": lambda w: w(cz.M3())(
        *[z()[:, None]] * 2, *[z()] * 4, **last({"negatives": z()[:, None]}, {})
    ),
    "[n, 2] … got int64 [4, 3]": lambda w: w(cz.HMLC(level_weights=[1, 1]))(z(), y()[:, None].repeat(1, last(3, 2))),
    "labels [n, C] are 1 … got 2 … 2": lambda w: w(cz.SupCon())(z(), last(2, 1) * torch.ones(4, 3).long()),
    "places in the data set, 0 … 8, got -1 … 2": lambda w: w(cz.SogCLR(9))(z(), z(), torch.arange(4) - last(1, 0)),
    "images … do not pair with texts … Pass ids and text_ids": lambda w: w(cz.SigLIP())(z(), z(last(3, 4)), y()),
    "MNRL: … only with its own negatives. Pass negatives=… and owners=…": lambda w: w(
        cz.MNRL(in_batch_negatives=False)
    )(z(), z(), *[z(), y()] * last(0, 1)),
    "one per row, got 5 for 4 rows … own labels": lambda w: w(cz.SupCon())(z(), y(last(5, 4))),
    "temperature must be positive and finite … got 0.0 … temperature=1/s": lambda w: w(
        later(cz.NTXent(), temperature=last(0.0, 0.1))
    )(z(), z()),
    "view 1: NaN or infinite values in 1 of 4 rows (row 2) … check_finite=False": lambda w: w(cz.NTXent())(
        z(), spoilt(-torch.inf)
    ),
}
"""Mistakes that one process makes, too: words of the error, and a call with DistributedLoss, or without."""


def wrapped(loss: Any, *arguments: Any, options: dict[str, Any] | None = None, **named: Any) -> Any:
    return cz.DistributedLoss(loss, **options or {})(*arguments, **named)


BETWEEN: dict[str, Callable[[], Any]] = {
    "SupCon: … 'lables'": lambda: wrapped(cz.SupCon(), z(), **{last("lables", "labels"): y()}),
    "SupCon: ranks disagree on the dtype of embeddings … float32 … bfloat16 … same precision": lambda: wrapped(
        cz.SupCon(), z(dtype=last(torch.bfloat16, torch.float32)), y()
    ),
    "disagree on whether view 0 carry a gradient … with gradient … without gradient … empty batch": lambda: wrapped(
        cz.NTXent(), z(learnt=last(False, True)), z(learnt=last(False, True))
    ),
    "third_party: … missing a required argument: 'labels'.": lambda: wrapped(third_party, z(), *[y()] * last(0, 1)),
    "lenient: ranks disagree on … labels": lambda: wrapped(lenient, z(), last(y(), None)),
    "the loss: rank 0 has Triplet … has Circle": lambda: wrapped(last(cz.Circle, cz.Triplet)(), z(), y()),
    "ranks disagree on losses.1.margin: rank 0 has 0.1 … has 0.9": lambda: wrapped(
        cz.WeightedSum([cz.SupCon(), cz.Triplet(margin=last(0.9, 0.1))]), z(), y()
    ),
    "ranks disagree on plain_formulas(): rank 0 has False … has True": in_plain_formulas,
    "ranks disagree on weight … 0.5 … 1.5": lambda: wrapped(weighted, z(), last(1.5, 0.5)),
    "weight has norm 1 on rank 0 and 2 on rank": lambda: wrapped(weighted, z(), torch.tensor(last(2.0, 1.0))),
    "third_party: … embeddings: NaN or infinite values in 1 of 4": lambda: wrapped(third_party, spoilt(), y()),
    "third_party: the global batch is empty … skip this step": lambda: wrapped(third_party, z(0), y(0)),
    "indices_tuple was mined on this rank's rows … DistributedLoss(loss, miner=miner) … DistributedMiner(miner)": lambda: (
        wrapped(lenient, z(), y(), indices_tuple=last(INDICES, None))
    ),
    "indices_tuple was mined on this rank's rows … unchanged": lambda: wrapped(
        lenient, z(), y(), DistributedMiner(Mining())(z(), y())[:2]
    ),
    "indices_tuple came along … has a miner": lambda: wrapped(
        lenient, z(), y(), GlobalIndices(INDICES), options={"miner": Mining()}
    ),
    "disagree on miner.share": lambda: wrapped(lenient, z(), y(), options={"miner": Mining(last(0.5, 0.25))}),
    "returns a tuple of indices … got Tensor": lambda: DistributedMiner(lambda x, labels: labels)(z(), y()),
    "Mining: … labels are one per row, got 3 for 4 rows": lambda: DistributedMiner(Mining())(z(), y(last(3, 4))),
    "Mining: … embeddings: NaN or infinite values": lambda: DistributedMiner(Mining())(spoilt(), y()),
    "KeyError: 'popitem(): dictionary is empty'": lambda: wrapped(
        later(cz.SupCon(), **last({"split_reason": {}.popitem}, {})), z(), y()
    ),
    "gradients cannot be scaled inside a Pair … tuples, lists and dicts": lambda: wrapped(
        lambda rows: Pair(rows.sum()), z(), options={"grad_reduction": "sum"}
    ),
    "view 0 must hold values": lambda: wrapped(cz.NTXent(), last(z().detach().to("meta"), z(learnt=False)), z()),
    "labels must be a dense tensor, got sparse": lambda: wrapped(third_party, z(), last(y().to_sparse(), y())),
    "z: NaN": lambda: wrapped(Phases(), torch.view_as_complex(numbers(2, 3, 2, seed=rank())) / torch.arange(3)),
    "scale has norm": lambda: wrapped(turned(), torch.view_as_complex(numbers(2, 3, 2, seed=rank()))),
    # of the loss
    "Mining: its world_size is 1 … got 2. Construct it for one process": lambda: wrapped(for_ranks(2), z(), y()),
    "Sequential: rank 1: its 0.world_size is 1 … got 2": lambda: wrapped(nn.Sequential(for_ranks(last(2, 1))), z()),
    "the loss's grad_reduction": lambda: wrapped(Powered(last("b", "a")), z(), torch.tensor(0.5)),
    "parameters": lambda: wrapped(Powered(scale=last(3.0, 2.0)), z(), torch.tensor(0.5)),
    "temperature has norm … a module that is a setting must return the same number on every rank": lambda: wrapped(
        cz.SupCon(temperature=DrawnSetting()), z(), y()
    ),
    "MNRL: … indices of local rows do not allow": lambda: hooked(cz.MNRL()),
    "WeightedSum: … indices of local rows do not allow": lambda: hooked(cz.WeightedSum([cz.MNRL()])),
    "reduction='none'": lambda: wrapped(Drawing(reduction="none"), z(), y()),
    "the loss draws random numbers": lambda: wrapped(Drawing(reduction="none", of_all=True), z(), y()),
    "NTXent: every rank brought the very same embeddings": after_a_validation,
    "CrossBatchMemory: a backward pass computes the loss again": lambda: in_a_checkpoint(
        cz.CrossBatchMemory(cz.InfoNCE(), 8, 3), False
    ),
    "Counting: … as torch.utils.checkpoint does": lambda: in_a_checkpoint(Counting(), True),
    "ranks disagree on which arguments are one tensor": lambda: wrapped(
        lambda a, b: (a @ b.T).sum(), x := z(), last(x.clone(), x)
    ),
    "DINO: … one_step": lambda: in_one_step(cz.DINO(3)),
    "CrossBatchMemory: … one_step": lambda: in_one_step(
        cz.CrossBatchMemory(cz.InfoNCE(in_batch_negatives=False), 8, 3)
    ),
    "WeightedSum: losses of a sum": lambda: wrapped(
        cz.WeightedSum([cz.InfoNCE(reduction="none"), cz.NTXent(reduction="none")]), z(last(0, 4)), z(last(0, 4))
    ),
    "a backward pass computes the loss again": recomputed_in_one_step,
    "rank 1: dims go up to 4, got": lambda: wrapped(cz.Matryoshka(cz.SupCon(), (2, 4)), z(4, last(3, 4)), y()),
    # tokens
    "disagree on the width of tokens of queries … d=3 … d=2": lambda: of_tokens(lambda x: [x[..., :2]] * 2),
    "rank 1: … got none in row 1": lambda: of_tokens(lambda x: [x, x, None, x[..., 0].long()]),
    # a ring
    "SupCon: with ring=True": lambda: split(cz.SupCon(), z(), mask=torch.ones(4, 8), ring=True),
    "MNRL: with ring=True": lambda: split(cz.MNRL(), z(), z(4), document_ids=y(), ring=True),
    "ring: rank 0 has False, rank 1 has True": lambda: split(cz.SigLIP(), z(), z(), ring=last(True, False)),
    # DTensors
    "got a DTensor … Pass embeddings.to_local() if": lambda: wrapped(cz.SupCon(), parted(0), y()),
    "third_party: … plain tensor, got … Pass labels.to_local() if … otherwise labels.full_tensor()": lambda: wrapped(
        third_party, z(), parted(0, y()), options={"check_distinct": False}
    ),
    "lenient: … Pass embeddings.full_tensor()": lambda: wrapped(lenient, parted(1)),
    "ArcFace: weights is a DTensor … Call the loss in": lambda: outside_of_what_was_sharded(cz.ArcFace(2, 3)),
    "Prototypes: weight is a DTensor": lambda: outside_of_what_was_sharded(Prototypes()),
    "MomentumEncoder: FSDP has gathered … Call update after optimizer.step()": in_the_forward_pass,
    # memories
    "CrossBatchMemory: … holds rows of width 3": lambda: remembering(cz.SupCon(), z(4, 3 + rank()), y()),
    "CrossBatchMemory: … NaN or infinite": lambda: remembering(cz.InfoNCE(), z(), spoilt()),
    "partners of InfoNCE are keys": lambda: remembering(cz.InfoNCE(), z(), y()),
    "the memory's pointer: rank 0 has 0, rank 1 has 1": with_another_pointer,
    # a monitor, and a picture
    "rank 1 brought the monitor, rank 0 brought none": lambda: monitored(on_all=False),
    "ranks disagree on the monitor: rank 0 has Monitor(every=7": lambda: monitored(every=7 + rank()),
    "rank 1: labels are one per row": lambda: plots.similarity_histogram(z(), labels=y(4 - rank())),
}
"""Mistakes that take two ranks: words of the error, and the call on each."""

AMONG_THREE: dict[str, Callable[[], Any]] = {
    "NTXent: ranks disagree on the width of view 0 … rank 0 brought d=3 … brought d=5 … same encoder head": lambda: (
        wrapped(cz.NTXent(), z(4, last(5, 3)), z(4, last(5, 3)))
    ),
    "ranks disagree on what they bring … view 2 … or on none": lambda: wrapped(cz.NTXent(), *[z()] * last(3, 2)),
    # collectives
    "broadcast: x must be a tensor, got list.": lambda: C.broadcast([1.0]),
    **{f"{f}: … at least one dimension": lambda f=f: getattr(C, f)(X[0, 0]) for f in ("all_gather", "reduce_scatter")},
    "all_reduce: … disagree on the dtype … rank 0 brought float32 … rank 2 brought int64": lambda: C.all_reduce(
        last(X.long(), X)
    ),
    "all_gather: … on the width … rank 0 … rank 2 brought": lambda: C.all_gather(last(torch.ones(3, 4), X)),
    **{
        f"{f}: … disagree … rank 0 … rank 2": lambda f=f: getattr(C, f)(last(torch.ones(6, 2), X))
        for f in ("all_reduce", "broadcast", "reduce_scatter")
    },
    "all_gather: x must be a dense tensor": lambda: C.all_gather(torch.eye(2).to_sparse()),
    "all_reduce: … op is 'sum' or 'mean', got []": lambda: C.all_reduce(X, []),
    "all_reduce: … 'partial' or 'complete', got 'whole'": lambda: C.all_reduce(X, gradient="whole"),
    **{f"broadcast: … rank {x} is not one of the group's ranks 0 … 2": lambda x=x: C.broadcast(X, x) for x in (-1, 3)},
    "shards [1, 4, 0] hold 5 rows, got 3": lambda: C.reduce_scatter(X, shards=Shards((1, 4, 0))),
    "all_reduce: … disagree on op … sum … mean": lambda: C.all_reduce(X, last("mean", "sum")),
    "broadcast: … disagree on src … has 0 … has 1": lambda: C.broadcast(X, last(1, 0)),
    "reduce_scatter: … disagree on op … sum … mean": lambda: C.reduce_scatter(X, op=last("mean", "sum")),
    "disagree … [1, 1, 1] … [3, 0, 0]": lambda: C.reduce_scatter(X, shards=last(Shards((3, 0, 0)), Shards((1, 1, 1)))),
    "disagree on gradient … partial … complete": lambda: C.all_gather(X, gradient=last("complete", "partial")),
}


@pytest.mark.parametrize("words", ANYWHERE)
def test_a_mistake_of_one_rank_of_all_and_of_one_process(words: str, worlds: Worlds) -> None:
    call = ANYWHERE[words]
    for wrap in (lambda loss: loss, cz.DistributedLoss):
        with pytest.raises(ValueError, match=r"\w+: .*\w") as raised:
            call(wrap)
        assert_says(str(raised.value), words)
        assert "rank 0: " not in str(raised.value)
    assert "rank 1: " in refused(worlds, 2, lambda: call(cz.DistributedLoss), words)


@pytest.mark.parametrize("words", BETWEEN | AMONG_THREE)
def test_every_rank_says_the_same_and_goes_on(words: str, worlds: Worlds) -> None:
    refused(worlds, 3 if words in AMONG_THREE else 2, (BETWEEN | AMONG_THREE)[words], words)


def test_a_mistake_of_all_ranks_names_the_first_and_one_of_some_not_the_others(worlds: Worlds) -> None:
    assert "rank 2: " not in refused(worlds, 3, lambda: wrapped(cz.SupCon(), z(), y(5)), "got 5 for 4 rows")
    assert "rank 0" not in refused(worlds, 3, lambda: wrapped(cz.SupCon(), z(), y(4 + rank())), "rank 1: … rank 2: ")


def test_a_third_party_loss_may_compute_with_a_dtensor(worlds: Worlds) -> None:
    def job() -> bool:
        whole, split = Prototypes(), Prototypes()
        split.weight = nn.Parameter(parted(0, torch.eye(2, 3)[[rank()]]))
        expected, found = (cz.DistributedLoss(loss)(z(), y()) for loss in (whole, split))
        (expected + found).backward()
        return bool(expected == found) and torch.equal(whole.weight.grad, split.weight.grad.full_tensor())

    assert worlds.run(2, job) == [True, True]


def test_check_finite_can_be_turned_off(worlds: Worlds) -> None:
    def job() -> list[float]:
        wrappers = [cz.DistributedLoss(loss, check_finite=False) for loss in (cz.SupCon(), third_party)]
        found = [*wrappers, cz.DistributedLoss(cz.SupCon(check_finite=False)), cz.SupCon(check_finite=False)]
        return [loss(z() * torch.nan, y()).item() for loss in found]

    for values in (*worlds.run(2, job), job()):
        assert np.isnan(values).all()
    with pytest.raises(ValueError, match="third_party: embeddings: NaN"):  # on one process, too
        wrapped(third_party, z() * torch.nan, y())
