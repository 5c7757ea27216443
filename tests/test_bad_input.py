"""Bad input is one clear sentence, the same on every rank, and the next step finds every rank ready."""

import re
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.ranks.world import Shards
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.arguments import GlobalIndices
from tests.helpers import assert_says, close, error_message, later, numbers, refused
from tests.test_arguments import VALUES, WITHOUT_SAMPLES, D, Output, by_name, called, of_all, of_rank
from tests.test_roles import Phases, Prototypes, Relations, Views

Wrap = Callable[..., Callable[..., Any]]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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


class Mining(nn.Module):
    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.share = share

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return INDICES


@dataclass
class Pair:
    z: Tensor


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3, dtype=torch.float64)

    def forward(self, embeddings: Tensor, labels: Any = None) -> Tensor:
        return self.head(embeddings).square().sum()


class Unreadable(cz.SupCon):
    def split_reason(self) -> str | None:
        raise LookupError("no such setting")


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


class DrawnSetting(nn.Module):
    def forward(self) -> Tensor:
        torch.manual_seed(rank())
        return 0.1 + torch.rand((), dtype=torch.float64)


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


def in_a_checkpoint(reentrant: bool) -> None:
    loss = cz.DistributedLoss(cz.CrossBatchMemory(cz.InfoNCE(), 8, 3))
    checkpoint(loss, z(), z(seed=20), use_reentrant=reentrant).backward()


def after_a_validation() -> None:
    loss = cz.DistributedLoss(cz.NTXent())
    with torch.no_grad():
        loss(z(), z(seed=20))
    loss(SAME, SAME + 1)


def at_a_later_step() -> None:
    loss = cz.DistributedLoss(Prototypes())
    for prototypes in (of_rank(seed=30), of_all()):
        loss(of_rank(), of_rank(seed=7), prototypes)


def remembering(loss: Any, *arguments: Any, **named: Any) -> None:
    """A call of a memory, into which nothing enters."""
    memory = cz.CrossBatchMemory(loss, 8, 3)
    try:
        cz.DistributedLoss(memory)(*arguments, **named)
    finally:
        assert len(memory.memory) == 0


def with_another_pointer() -> None:
    loss = cz.CrossBatchMemory(cz.SupCon(), 8, 3)
    loss.memory.pointer.fill_(rank())
    cz.DistributedLoss(loss)(z(), y())


def averaged(model: Any, *, with_gradients: bool = True) -> None:
    for parameter in model.parameters() if with_gradients else ():
        parameter.grad = torch.zeros_like(parameter)
    cz.average_gradients(model)


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(2, 4))


def prototypes_of(prototypes: Tensor | None = None, **options: Any) -> Any:
    """A call with prototypes that are equal on every rank, or with other ones."""
    prototypes = of_all() if prototypes is None else prototypes
    return called(of_rank(), of_rank(seed=7), prototypes, loss=Prototypes(), **options)


def views_of(n: int = 3, **options: Any) -> Any:
    return called(numbers(2, n, D, seed=rank()), torch.arange(n), loss=Views(), **options)


def stacked(n: int = 2, seed: int = 0) -> Tensor:
    return numbers(n, 5, D, seed=seed + rank())


def documents(*lengths: int) -> list[Tensor]:
    return [of_rank(length, seed=10 + 10 * i) for i, length in enumerate(lengths)]


def copied(labels: Tensor) -> Any:
    """A call in which pairs of ranks bring the same embeddings."""
    return called(of_rank(rank=rank() // 2), labels)


INDICES, SAME, X, C = (torch.tensor([0]),) * 3, numbers(4, 3, seed=1), torch.ones(3, 2), cz.collectives
YES, LIST = torch.arange(5) % 3, "is a list of … pad_sequence( … batch_dim={"
EQUAL = "other is equal on every rank … shared={'other'}"
STACK = "samples or 5 … batch_dim={'z': 1} … batch_dim={'z': 0}"
NO_INDICES = "holds integers, but not one for each embedding … find them in the loss … batch_dim={'other"
ROW_NUMBERS = "below … as row numbers do … find them in the loss … batch_dim={'"
COPIES = (
    "ranks 0 and 1 brought the very same embeddings … context … process_group=mesh.get_group('dp') … check_distinct"
)
GATHERED = "NTXent: every rank brought the very same embeddings"
TWICE = "CrossBatchMemory: a backward pass computes the loss again, as torch.utils.checkpoint does"
DISAGREE = "average_gradients: ranks disagree on … rank 0 … rank 1"
NO_ROOT, NO_OP = "rank {} is not one of the group's ranks 0 … 2", "op is 'sum' or 'mean', got {}"
WHOLE = {"gradient": "whole"}

ANYWHERE: list[tuple[Callable[[Wrap], Any], str]] = [
    (
        lambda w: w(cz.NTXent())(z(), z(last(3, 4))),
        "NTXent: … row i of view 1 belongs to row i of view 0 … view 0 float32 [4, 3] … view 1 float32 [3, 3]",
    ),
    (lambda w: w(cz.NTXent())(*[z()] * last(1, 2)), "two or more views … got 1 … loss(view1, view2)"),
    (lambda w: w(cz.SupCon())(z(), *[y()] * last(0, 1)), "labels are missing … call loss"),
    (lambda w: w(cz.SupCon())(z(), y(last(5, 4))), "one per row, got 5 for 4 rows … own labels"),
    (
        lambda w: w(later(cz.NTXent(), temperature=last(0.0, 0.1)))(z(), z()),
        "temperature must be positive and finite … got 0.0 … temperature=1/s",
    ),
    (
        lambda w: w(cz.NTXent())(z(), spoilt(-torch.inf)),
        "view 1 hold NaN or infinite values in 1 of 4 rows (row 2) … check_finite=False",
    ),
]
"""Mistakes that one process makes, too: of a call with DistributedLoss, or without, and words of the error."""


def wrapped(loss: Any, *arguments: Any, options: dict[str, Any] | None = None, **named: Any) -> Any:
    return cz.DistributedLoss(loss, **options or {})(*arguments, **named)


BETWEEN: list[tuple[int, Callable[[], Any], str]] = [
    (2, lambda: wrapped(cz.SupCon(), z(), **{last("lables", "labels"): y()}), "SupCon: … 'lables'"),
    (
        3,
        lambda: wrapped(cz.NTXent(), z(4, last(5, 3)), z(4, last(5, 3))),
        "NTXent: ranks disagree on the width of view 0 … rank 0 brought d=3 … brought d=5 … same encoder head",
    ),
    (
        2,
        lambda: wrapped(cz.SupCon(), z(dtype=last(torch.bfloat16, torch.float32)), y()),
        "SupCon: ranks disagree on the dtype of embeddings … float32 … bfloat16 … same precision",
    ),
    (3, lambda: wrapped(cz.NTXent(), *[z()] * last(3, 2)), "ranks disagree on what they bring … view 2 … or on none"),
    (
        2,
        lambda: wrapped(cz.NTXent(), z(learnt=last(False, True)), z(learnt=last(False, True))),
        "disagree on whether view 0 carry a gradient … with gradient … without gradient … empty batch",
    ),
    (2, lambda: wrapped(third_party, z(), *[y()] * last(0, 1)), "third_party: … missing a required argument … labels"),
    (2, lambda: wrapped(lenient, z(), last(y(), None)), "lenient: ranks disagree on … labels"),
    (3, lambda: wrapped(third_party, z(), y(4 + rank())), "rank 1: labels are one … got 5 … rank 2: labels … got 6"),
    (2, lambda: wrapped(last(cz.Circle, cz.Triplet)(), z(), y()), "the loss: rank 0 has Triplet … has Circle"),
    (
        2,
        lambda: wrapped(cz.WeightedSum([cz.SupCon(), cz.Triplet(margin=last(0.9, 0.1))]), z(), y()),
        "ranks disagree on losses.1.margin: rank 0 has 0.1 … has 0.9",
    ),
    (2, in_plain_formulas, "ranks disagree on plain_formulas(): rank 0 has False … has True"),
    (
        2,
        lambda: wrapped(lambda embeddings, margin: embeddings.sum() * margin, z(), last(1.5, 0.5)),
        "ranks disagree on margin … 0.5 … 1.5",
    ),
    (
        2,
        lambda: wrapped(lambda embeddings, weight: embeddings.sum() * weight, z(), torch.tensor(last(2.0, 1.0))),
        "weight has norm 1 on rank 0 and 2 on rank",
    ),
    (2, lambda: wrapped(third_party, spoilt(), y()), "third_party: … embeddings hold NaN or infinite values in 1 of 4"),
    (2, lambda: wrapped(cz.NTXent(), z(0), z(0)), "NTXent: the global batch is empty"),
    (2, lambda: wrapped(third_party, z(0), y(0)), "third_party: the global batch is empty … skip the step"),
    (
        2,
        lambda: wrapped(lenient, z(), y(), indices_tuple=last(INDICES, None)),
        "indices_tuple was mined on this rank's rows … DistributedLoss(loss, miner=miner) … DistributedMiner(miner)",
    ),
    (
        2,
        lambda: wrapped(lenient, z(), y(), DistributedMiner(Mining())(z(), y())[:2]),
        "indices_tuple was mined on this rank's rows … as it is",
    ),
    (
        2,
        lambda: wrapped(lenient, z(), y(), last(GlobalIndices(INDICES), None)),
        "ranks disagree on indices_tuple",
    ),
    (
        2,
        lambda: wrapped(lenient, z(), y(), GlobalIndices(INDICES), options={"miner": Mining()}),
        "indices_tuple came along … has a miner",
    ),
    (2, lambda: wrapped(lenient, z(), y(), options={"miner": Mining(last(0.5, 0.25))}), "disagree on miner.share"),
    (2, lambda: DistributedMiner(lambda x, labels: labels)(z(), y()), "returns a tuple of indices … got Tensor"),
    (2, lambda: DistributedMiner(Mining())(z(), y(last(3, 4))), "Mining: … labels are one per row, got 3 for 4 rows"),
    (2, lambda: DistributedMiner(Mining())(spoilt(), y()), "Mining: … embeddings hold NaN or infinite values"),
    (2, lambda: wrapped(last(Unreadable, cz.SupCon)(), z(), y()), "LookupError: no such setting"),
    (
        2,
        lambda: wrapped(lambda rows: Pair(rows.sum()), z(), options={"grad_reduction": "sum"}),
        "gradients cannot be scaled inside a Pair … tuples, lists and dicts",
    ),
    (2, lambda: wrapped(cz.NTXent(), last(z().detach().to("meta"), z(learnt=False)), z()), "view 0 must hold values"),
    (2, lambda: wrapped(third_party, z(), last(y().to_sparse(), y())), "labels must be a dense tensor, got sparse"),
    (
        2,
        lambda: wrapped(Phases(), torch.view_as_complex(numbers(2, 3, 2, seed=rank())) / torch.arange(3)),
        "z hold NaN",
    ),
    (2, lambda: wrapped(turned(), torch.view_as_complex(numbers(2, 3, 2, seed=rank()))), "scale has norm"),
    # of the loss
    (2, lambda: wrapped(Powered(last("b", "a")), z(), torch.tensor(0.5)), "the loss's grad_reduction"),
    (2, lambda: wrapped(Powered(scale=last(3.0, 2.0)), z(), torch.tensor(0.5)), "parameters"),
    (2, lambda: wrapped(nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, last(3.0, 1.0)])), z(), y()), "weight has norm"),
    (
        2,
        lambda: wrapped(cz.SupCon(temperature=DrawnSetting()), z(), y()),
        "temperature has norm … A module that is a setting must return the same number on every rank",
    ),
    (2, lambda: hooked(cz.MNRL()), "indices of local rows do not allow"),
    (2, lambda: hooked(cz.WeightedSum([cz.MNRL()])), "indices of local rows do not allow"),
    (2, lambda: wrapped(Drawing(reduction="none"), z(), y()), "reduction='none'"),
    (2, lambda: wrapped(Drawing(reduction="none", of_all=True), z(), y()), "reduction='none'"),
    (2, after_a_validation, GATHERED),
    (2, lambda: in_a_checkpoint(False), TWICE),
    (2, lambda: in_a_checkpoint(True), TWICE),
    (
        2,
        lambda: wrapped(lambda a, b: (a @ b.T).sum(), x := z(), last(x.clone(), x)),
        "ranks disagree on which arguments are one tensor",
    ),
    # what an argument of a third-party loss means
    *(
        (2, lambda make=make: called(make(of_rank()), torch.arange(5) % 2), said)
        for make, said in [
            (lambda z: Pair(z=z), "got a Pair. Pass tensors, such as vars(z)"),
            (lambda z: UserDict(z=z), "got a UserDict. Pass tensors, such as dict(z)"),
            (lambda z: (x for x in [z]), "got a generator. Pass tensors, such as list(z)"),
            (
                lambda z: [Output([Output({"z": z})])],
                "z[0] must be a tensor … Output. Pass tensors, such as vars(z[0])",
            ),
            (lambda z: z.numpy(), "got a ndarray. Pass tensors, such as torch.as_tensor(z)"),
        ]
    ),
    *((2, lambda make=make: called(of_rank(), make(rank())), "disagree on other … rank 0 has") for make in VALUES),
    *((2, lambda make=make: called(of_rank(), make(), YES), EQUAL) for make in WITHOUT_SAMPLES),
    (3, lambda: called(of_rank(5 * (rank() > 0)), torch.ones(7), YES[: 5 * (rank() > 0)]), EQUAL),
    (2, lambda: called(of_rank(3), documents(4, 2, 5)), LIST),
    (2, lambda: called([*of_rank(3)], torch.arange(3) + rank()), LIST),
    (2, lambda: called(stacked(), torch.arange(5)), STACK),
    (2, lambda: called(stacked(last(2, 3)), None), STACK),
    (2, lambda: called(of_rank(), numbers(7, 2, seed=rank()).long()), NO_INDICES),
    (2, lambda: called(of_rank(), tuple(numbers(3, 7, seed=rank()).long())), NO_INDICES),
    (4, lambda: copied(YES), COPIES),
    (4, lambda: called(of_rank(rank=max(rank(), 1)), YES), COPIES),
    (2, lambda: called(of_rank(8), torch.arange(8).roll(4) * last(9, 1)), ROW_NUMBERS),
    (2, lambda: called(of_rank(), torch.tensor([[1, -1]] * 5), loss=by_name), ROW_NUMBERS),
    (2, lambda: called(of_rank(), YES, loss=Lazy()), "LazyLinear has no parameters yet … bare loss once"),
    (
        2,
        lambda: called(of_rank(), of_rank(seed=7), {"queue": of_all(9)}, loss=Relations()),
        "DistributedLoss(loss, shared={\"memory['queue']\"})",
    ),
    (
        2,
        lambda: called(of_rank(), YES % 2, None, of_all(7), torch.arange(7) % 2, loss=losses.TripletMarginLoss()),
        "shared={'ref_emb'} … with its labels",
    ),
    (2, views_of, "views [2, 3, 4] on rank 0 may hold 2 samples or 3 … batch_dim={'views': 1}"),
    (2, lambda: views_of(last(4, 3)), "ranks disagree on the width of views … batch_dim={'views': 1}"),
    (
        2,
        lambda: prototypes_of(of_rank(seed=8), shared={"prototypes"}),
        "the shared prototypes differs between ranks … out of shared",
    ),
    (2, lambda: called(of_rank(), F.normalize(of_rank(2**16)).float(), shared={"other"}), "shared other differs"),
    (
        2,
        lambda: prototypes_of(of_all(last(6, 5)), shared={"prototypes"}),
        "ranks disagree on the shared prototypes: rank 0 has float64 [5, 4], rank 1 has float64 [6, 4]",
    ),
    (
        2,
        lambda: prototypes_of(of_all().requires_grad_(last(False, True)), shared={"prototypes"}),
        "rank 0 has float64 [5, 4] with a gradient, rank 1 has float64 [5, 4]",
    ),
    (
        2,
        lambda: prototypes_of(shared=last(None, {"prototypes"}), check_distinct=False),
        "ranks disagree on the roles of arguments: rank 0 has shared={'prototypes'}",
    ),
    (
        2,
        lambda: prototypes_of(shared={"prototype"}),
        "shared names prototype, which is no argument of this call. Its arguments are anchors, targets, prototypes.",
    ),
    (3, at_a_later_step, "Prototypes: prototypes is equal on every rank"),
    (2, lambda: views_of(batch_dim={"views": 3}), "batch_dim['views'] is 3, which is no dimension of [2, 3, 4]"),
    (
        2,
        lambda: called(of_rank(2)[None], torch.arange(3), loss=third_party, batch_dim={"embeddings": 1}),
        "labels are one per row, got 3 for 2 rows",
    ),
    # memories
    (2, lambda: remembering(cz.SupCon(), z(4, 3 + rank()), y()), "CrossBatchMemory: … holds rows of width 3"),
    (2, lambda: remembering(cz.InfoNCE(), z(), spoilt()), "CrossBatchMemory: … NaN or infinite"),
    (2, lambda: remembering(cz.InfoNCE(), z(), y()), "partners of InfoNCE are keys"),
    (2, lambda: remembering(later(cz.SupCon(), temperature=-1.0), z(), y()), "temperature must be positive"),
    (2, with_another_pointer, "the memory's pointer: rank 0 has 0, rank 1 has 1"),
    # average_gradients
    (2, lambda: averaged(nn.Linear(2, last(4, 3))), f"{DISAGREE} … weight … [3, 2] … [4, 2] … the same on every rank"),
    (2, lambda: averaged(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank())])), f"{DISAGREE} … none"),
    (
        2,
        lambda: averaged(nn.Linear(2, 2).parameters(), with_gradients=False),
        "average_gradients: … got generator. Pass the model itself",
    ),
    (2, lambda: averaged(sharded(), with_gradients=False), "are DTensors (weight) … leave average_gradients out"),
    # collectives
    (3, lambda: C.broadcast([1.0]), "broadcast: x must be a tensor, got list."),
    *((3, lambda f=f: f(torch.tensor(1.0)), "at least one dimension") for f in (C.all_gather, C.reduce_scatter)),
    (
        3,
        lambda: C.all_reduce(last(X.long(), X)),
        "all_reduce: … disagree on the dtype … rank 0 brought float32 … rank 2 brought int64",
    ),
    (3, lambda: C.all_gather(last(torch.ones(3, 4), X)), "all_gather: … on the width … rank 0 … rank 2 brought"),
    *(
        (3, lambda f=f: getattr(C, f)(last(torch.ones(6, 2), X)), f"{f}: … disagree … rank 0 … rank 2")
        for f in ("all_reduce", "broadcast", "reduce_scatter")
    ),
    (3, lambda: C.all_gather(torch.eye(2).to_sparse()), "all_gather: x must be a dense tensor"),
    (3, lambda: C.all_reduce(X, []), f"all_reduce: … {NO_OP.format([])}"),
    (3, lambda: C.reduce_scatter(X, op="max"), f"reduce_scatter: … {NO_OP.format(repr('max'))}"),
    (3, lambda: C.all_reduce(X, **WHOLE), "all_reduce: … 'partial' or 'complete', got 'whole'"),
    (3, lambda: C.all_gather(X, **WHOLE), "all_gather: … 'partial' or 'complete', got 'whole'"),
    *((3, lambda x=x: C.broadcast(X, x), f"broadcast: … {NO_ROOT.format(x)}") for x in (-1, 3)),
    (3, lambda: C.reduce_scatter(X, shards=Shards((1, 4, 0))), "shards [1, 4, 0] hold 5 rows, got 3"),
    (3, lambda: C.all_reduce(X, last("mean", "sum")), "all_reduce: … disagree on op … sum … mean"),
    (3, lambda: C.all_reduce(X, last("prod", "sum")), "all_reduce: … rank 2 … 'prod'"),
    (3, lambda: C.broadcast(X, last(1, 0)), "broadcast: … disagree on src … has 0 … has 1"),
    (3, lambda: C.broadcast(X, last(9, 0)), "broadcast: … rank 2: rank 9 is not one"),
    (3, lambda: C.reduce_scatter(X, op=last("mean", "sum")), "reduce_scatter: … disagree on op … sum … mean"),
    (
        3,
        lambda: C.reduce_scatter(X, shards=last(Shards((3, 0, 0)), Shards((1, 1, 1)))),
        "disagree on … [1, 1, 1] … [3, 0, 0]",
    ),
    (3, lambda: C.all_gather(X, gradient=last("complete", "partial")), "disagree on gradient … partial … complete"),
]
"""Mistakes that take several ranks: how many, the call on each, and words of the error."""


@pytest.mark.parametrize(("call", "words"), ANYWHERE, ids=[words for _, words in ANYWHERE])
def test_a_mistake_of_one_rank_of_all_and_of_one_process(
    call: Callable[[Wrap], Any], words: str, worlds: Worlds
) -> None:
    for wrap in (lambda loss: loss, cz.DistributedLoss):
        with pytest.raises(ValueError, match=r"\w+: .*\w") as raised:
            call(wrap)
        assert_says(str(raised.value), words)
        assert "rank 0: " not in str(raised.value)
    assert "rank 1: " in refused(worlds, 2, lambda: call(cz.DistributedLoss), words)


@pytest.mark.parametrize(("world_size", "bad", "words"), BETWEEN, ids=[words for *_, words in BETWEEN])
def test_every_rank_says_the_same_and_goes_on(
    world_size: int, bad: Callable[[], Any], words: str, worlds: Worlds
) -> None:
    refused(worlds, world_size, bad, words)


def test_a_mistake_of_all_ranks_names_the_first_and_one_of_some_not_the_others(worlds: Worlds) -> None:
    assert "rank 2: " not in refused(worlds, 3, lambda: wrapped(cz.SupCon(), z(), y(5)), "got 5 for 4 rows")
    assert "rank 0" not in refused(worlds, 3, lambda: wrapped(cz.SupCon(), z(), y(4 + rank())), "rank 1: … rank 2: ")


def test_check_finite_can_be_turned_off(worlds: Worlds) -> None:
    def job() -> list[float]:
        wrappers = [cz.DistributedLoss(loss, check_finite=False) for loss in (cz.SupCon(), third_party)]
        found = [*wrappers, cz.DistributedLoss(cz.SupCon(check_finite=False)), cz.SupCon(check_finite=False)]
        return [loss(z() * torch.nan, y()).item() for loss in found]

    assert np.isnan(worlds.run(2, job)).all()


ROWS, OTHERS = numbers(6, 3, seed=0), numbers(6, 3, seed=1)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
ONE_HOT = F.one_hot(LABELS)
EXPRESSION = re.compile(r"(?:Use|Pass|such as) (\w+(?:\[[^\]]*\])?(?:\.\w+(?:\([^()]*\))?)*(?:\([^()]*\))?)")


def of_labels(labels: Tensor) -> Tensor:
    return cz.SupCon()(ROWS, labels)


def of_embeddings(embeddings: Tensor) -> Tensor:
    return cz.SupCon()(embeddings, LABELS)


TENSORS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "a column of labels": (of_labels, LABELS[:, None], LABELS),
    "a row of labels": (of_labels, LABELS[None], LABELS),
    "one-hot labels": (of_labels, ONE_HOT, LABELS),
    "one-hot labels as floats": (of_labels, ONE_HOT.double(), LABELS),
    "a column of labels as floats": (of_labels, LABELS.double()[:, None], LABELS),
    "one label": (lambda labels: cz.ArcFace(3, 3).double()(ROWS[:1], labels), torch.tensor(1), torch.tensor([1])),
    "sparse embeddings": (of_embeddings, ROWS.to_sparse(), ROWS),
    "nested embeddings": (of_embeddings, torch.nested.nested_tensor([*ROWS], layout=torch.jagged), ROWS),
    "short floats": (
        of_embeddings,
        *(ROWS.to(torch.float8_e4m3fn).to(x) for x in (torch.float8_e4m3fn, torch.bfloat16)),
    ),
    "a single number to gather": (C.all_gather, torch.tensor(3.0), torch.tensor([3.0])),
    "a learnable constant": (
        lambda tau_plus: cz.HCL(tau_plus=tau_plus)(ROWS, OTHERS),
        torch.tensor(0.1, requires_grad=True),
        torch.tensor(0.1),
    ),
}
"""A call of a tensor, a wrong one, and the one that is meant."""


def obeyed(text: str, x: Any) -> Any:
    """Return what the error's expression makes of the argument, whatever name it has there."""
    (expression, *_) = [found for found in EXPRESSION.findall(text) if re.search(r"[.(\[]", found)]
    name = re.match(r"\w+", expression).group()  # type: ignore[union-attr]  # it begins with one
    return eval(expression.replace(name, "x", 1) if name != "torch" else expression, {"x": x, "torch": torch})


@pytest.mark.parametrize("name", TENSORS)
def test_an_expression_is_right(name: str) -> None:
    call, bad, right = TENSORS[name]
    torch.manual_seed(0)
    text = error_message(lambda: call(bad))
    assert text is not None
    corrected = obeyed(text, bad)
    torch.manual_seed(0)
    found = call(corrected)
    torch.manual_seed(0)
    close(found.double(), call(right).double())
