"""The cases of the benchmarks: losses, implementations and sizes. A new case is a new row.

An implementation of a case is a function of the loss's inputs: this library's, a plain dense formula, or a peer's. A
peer's package is imported when the function is constructed; :class:`Absent` is raised if it is not installed.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.tiling import memory_budget
from suite.harness import Absent, step_of
from tests.losses.zoo_margins import dense_circle, dense_multi_similarity, dense_triplet
from tests.zoo import info_nce, sup_con
from tools.peer_losses.packages import loaded

TEMPERATURE = 0.1
OF_A_CLASS = 16  # samples per class
GEMM = "GEMM"  # one matmul into preallocated memory: the unit of time of all others

Function = Callable[..., Tensor]
Group = Literal["softmax", "rows", "small", "ranks"]


@dataclass(frozen=True)
class Case:
    """A loss (a key of :data:`LOSSES`) with a matrix of so many embeddings, of all ranks, in one table (the group).

    Times are those of the implementations, with one thread per rank and the embeddings of each rank in ``shards``; memory is
    measured in new processes.
    """

    group: Group
    loss: str
    rows: int
    width: int
    implementations: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    memory_of: tuple[str, ...] = ()
    dtype: str = "float32"

    @property
    def name(self) -> str:
        size = f"{self.loss}, {self.rows:,} × {self.width}"
        if self.shards:
            even = len(set(self.shards)) == 1
            size += f", W = {len(self.shards)}" + ("" if even else f" ({' + '.join(map(str, self.shards))})")
        return size + f", {self.dtype}" * (self.dtype != "float32")

    @property
    def world(self) -> int:
        return max(1, len(self.shards))

    def inputs(self) -> list[Tensor]:
        """Return the local inputs, equal for all implementations; embeddings are leaves."""
        torch.manual_seed(0)
        inputs = LOSSES[self.loss].inputs(self)
        if self.shards:
            inputs = [x.split([size * len(x) // self.rows for size in self.shards])[dist.get_rank()] for x in inputs]
        dtype = getattr(torch, self.dtype)
        return [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]

    def scale(self) -> nn.Parameter:
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        return nn.Parameter(torch.tensor(-math.log(TEMPERATURE), dtype=torch.float32).to(wide))

    def function(self, implementation: str) -> Function:
        return LOSSES[self.loss].implementations[implementation](self)

    def step(self, implementation: str) -> Callable[[], Tensor]:
        return step_of(self.function(implementation), self.inputs())

    def gemm(self) -> Callable[[], object]:
        """Return one matmul, of local embeddings and all, into memory that is there already."""
        dtype, rows = getattr(torch, self.dtype), max(self.shards, default=self.rows)
        a, b = (torch.randn(n, self.width, dtype=dtype) for n in (rows, self.rows))
        out = torch.empty(rows, self.rows, dtype=dtype)
        return lambda: torch.mm(a, b.T, out=out)


@dataclass(frozen=True)
class Subject:
    """A loss: its inputs for a case, and its implementations; ``dense`` in float64 is the reference."""

    inputs: Callable[[Case], list[Tensor]]
    implementations: dict[str, Callable[[Case], Function]] = field(default_factory=dict)


def pairs(case: Case) -> list[Tensor]:
    return [torch.randn(case.rows, case.width), torch.randn(case.rows, case.width)]


def views(case: Case) -> list[Tensor]:
    return [torch.randn(case.rows // 2, case.width) for _ in range(2)]


def labelled(case: Case) -> list[Tensor]:
    return [torch.randn(case.rows, case.width), torch.arange(case.rows) % max(2, case.rows // OF_A_CLASS)]


def ours(make: Callable[[float], Any], *, budget: int | None = None, **distributed: bool) -> Callable[[Case], Function]:

    def implementation(case: Case) -> Function:
        loss = make(TEMPERATURE)
        if case.shards:
            loss = cz.DistributedLoss(loss, **distributed)
        return loss if budget is None else within(budget, loss)

    return implementation


def within(budget: int, loss: Function) -> Function:
    def call(*rows: Tensor) -> Tensor:
        with memory_budget(budget):
            return loss(*rows)

    return call


def by_softmax(make: Callable[[float], Any]) -> dict[str, Callable[[Case], Function]]:
    return {
        "ours": ours(make),
        "ours, tiled": ours(make, budget=0),
        "ours, tiled, ring": ours(make, budget=0, ring=True),
    }


class Dense(nn.Module):
    def __init__(self, formula: Function, case: Case) -> None:
        super().__init__()
        self.formula, self.log_scale = formula, case.scale()

    def forward(self, *inputs: Tensor) -> Tensor:
        unit = [F.normalize(x, dim=1) if x.is_floating_point() else x for x in inputs]
        return self.formula(*unit, self.log_scale.exp())


def clip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    s = scale * a @ b.T
    partner = torch.arange(len(a))
    return (F.cross_entropy(s, partner) + F.cross_entropy(s.T, partner)) / 2


def nt_xent(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    z = torch.cat([a, b])
    s = (scale * z @ z.T).fill_diagonal_(-torch.inf)
    return F.cross_entropy(s, torch.arange(len(z)).roll(len(a)))


@cache
def peer(module: str) -> Any:
    """Import a module of a package that is installed, or of which only the loss code is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return loaded(module)
        except ModuleNotFoundError as error:
            raise Absent(f"{error.name} is not installed") from error


def pml(name: str, *, miner: str | None = None, warm: bool = False) -> Callable[[Case], Function]:
    def implementation(case: Case) -> Function:
        library, settings = "pytorch_metric_learning", {"temperature": TEMPERATURE} if warm else {}
        loss = getattr(peer(f"{library}.losses"), name)(**settings)
        if miner is None:
            return loss
        mining_function = getattr(peer(f"{library}.miners"), miner)()
        return lambda z, labels: loss(z, labels, mining_function(z, labels))

    return implementation


def lightly(case: Case) -> Function:
    return peer("lightly.loss.ntx_ent_loss").NTXentLoss(temperature=TEMPERATURE)


def open_clip(**settings: bool) -> Callable[[Case], Function]:
    """Return a constructor of OpenCLIP's ClipLoss with normalised features and a learnable scale, as in its training."""

    def implementation(case: Case) -> Function:
        ranks = {"rank": dist.get_rank(), "world_size": case.world} if case.shards else {}
        return Dense(peer("open_clip.loss").ClipLoss(cache_labels=True, **settings, **ranks), case)

    return implementation


def sentence_transformers(case: Case) -> Function:
    losses = peer("sentence_transformers.sentence_transformer.losses")
    loss = losses.MultipleNegativesRankingLoss(nn.Identity(), scale=1 / TEMPERATURE)
    return lambda *towers: loss([{"sentence_embedding": x} for x in towers], torch.empty(0))


class _Gathered(torch.autograd.Function):
    """Gather equal shards; the adjoint is that of a replicated loss under a trainer that averages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        dist.all_gather(list(parts.chunk(dist.get_world_size())), x)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].chunk(dist.get_world_size())[dist.get_rank()] * dist.get_world_size()


def recipe(formula: Function) -> Callable[[Case], Function]:
    """Return a constructor of the fastest correct hand-written recipe: one gather, the whole loss on every rank."""

    def implementation(case: Case) -> Function:
        loss = Dense(formula, case)
        return lambda *x: loss(*_Gathered.apply(torch.cat(x, 1)).split(case.width, 1))

    return implementation


def by_rows(make: Callable[[], Any], dense: Function, peer: Callable[[Case], Function]) -> Subject:
    replicated = {"pml, replicated": lambda case: cz.DistributedLoss(peer(case))}
    return Subject(labelled, {"ours": ours(lambda _: make()), "dense": lambda _: dense, "pml": peer} | replicated)


LOSSES = {
    "CLIP": Subject(
        pairs,
        by_softmax(lambda t: cz.Clip(temperature=cz.LearnableTemperature(t)))
        | {
            "dense": partial(Dense, clip),
            "by hand": recipe(clip),
            "open_clip": open_clip(),
            "open_clip, gather_with_grad": open_clip(gather_with_grad=True),
            "open_clip, local_loss + gather_with_grad": open_clip(gather_with_grad=True, local_loss=True),
        },
    ),
    "InfoNCE": Subject(
        pairs,
        by_softmax(lambda t: cz.InfoNCE(temperature=t))
        | {"ours, as MNRL": ours(lambda t: cz.MNRL(temperature=t)), "dense": partial(Dense, info_nce)}
        | {"sentence-transformers MNRL": sentence_transformers},
    ),
    "NT-Xent": Subject(
        views,
        by_softmax(lambda t: cz.NTXent(temperature=t))
        | {"dense": partial(Dense, nt_xent), "by hand": recipe(nt_xent)}
        | {"lightly NTXentLoss": lightly},
    ),
    "SupCon": Subject(
        labelled,
        by_softmax(lambda t: cz.SupCon(temperature=t))
        | {"dense": partial(Dense, sup_con)}
        | {"pml SupConLoss": pml("SupConLoss", warm=True)},
    ),
    "Triplet, batch-hard": by_rows(
        partial(cz.Triplet, mining="hard"),
        partial(dense_triplet, margin=0.05, mining="hard"),
        pml("TripletMarginLoss", miner="BatchHardMiner"),
    ),
    "Multi-similarity": by_rows(cz.MultiSimilarity, dense_multi_similarity, pml("MultiSimilarityLoss")),
    "Circle": by_rows(cz.Circle, dense_circle, pml("CircleLoss")),
}

_TILED_OR_NOT = ("ours, tiled", "ours")
_CLIP = (*_TILED_OR_NOT, "dense", "open_clip")
_NT_XENT = (*_TILED_OR_NOT, "dense", "lightly NTXentLoss")
_OPEN_CLIP = ("open_clip, local_loss + gather_with_grad", "open_clip, gather_with_grad")
_RANKS = (*_TILED_OR_NOT, "ours, tiled, ring", *_OPEN_CLIP)
_WRAPPER = ("ours", "by hand")
_PML = "pml SupConLoss"
_SUP_CON = (*_TILED_OR_NOT, _PML)
_ROWS = ("ours", "pml")  # the plain formula of 4,096 samples takes more than 24 GB

CASES = [
    # softmax losses on one process
    Case("softmax", "CLIP", 4096, 512, _CLIP, memory_of=("ours, tiled", "ours", "open_clip")),
    Case("softmax", "NT-Xent", 8192, 512, (*_TILED_OR_NOT, "lightly NTXentLoss")),
    Case("softmax", "NT-Xent", 8192, 128, _NT_XENT, memory_of=_NT_XENT),
    Case("softmax", "SupCon", 8192, 512, _TILED_OR_NOT),
    Case("softmax", "SupCon", 8192, 128, _SUP_CON, memory_of=_SUP_CON),
    Case("softmax", "InfoNCE", 2048, 384, (*_TILED_OR_NOT, "ours, as MNRL", "dense", "sentence-transformers MNRL")),
    Case("softmax", "CLIP", 4096, 512, _CLIP, dtype="bfloat16"),
    Case("softmax", "NT-Xent", 8192, 512, _NT_XENT, dtype="bfloat16"),
    # losses of the rows engine
    *(
        Case("rows", x, 4096, 128, _ROWS, memory_of=_ROWS)
        for x in ("Triplet, batch-hard", "Multi-similarity", "Circle")
    ),
    # small batches, where dense may be faster
    *(Case("small", "CLIP", n, 128, ("ours", "dense")) for n in (64, 128, 256, 512)),
    *(Case("small", "NT-Xent", 2 * n, 128, ("ours", "dense")) for n in (64, 128, 256, 512)),
    # ranks
    Case("ranks", "CLIP", 4096, 512, _RANKS, shards=(2048,) * 2),
    Case("ranks", "CLIP", 4096, 512, _RANKS, shards=(1024,) * 4),
    *(Case("ranks", "CLIP", 64 * ranks, 128, _WRAPPER, shards=(64,) * ranks) for ranks in (1, 2)),
    *(Case("ranks", "NT-Xent", 128 * ranks, 128, _WRAPPER, shards=(128,) * ranks) for ranks in (1, 2)),
    Case("ranks", "Multi-similarity", 2048, 128, ("ours", "pml, replicated"), shards=(1024,) * 2),
]


FASTER = (
    ("CLIP, 4,096 × 512", "open_clip"),
    ("NT-Xent, 8,192 × 512", "lightly NTXentLoss"),
    ("NT-Xent, 8,192 × 128", "lightly NTXentLoss"),
    ("SupCon, 8,192 × 128", _PML),
    ("CLIP, 4,096 × 512, W = 2", "open_clip, local_loss + gather_with_grad"),
    ("CLIP, 4,096 × 512, W = 2", "open_clip, gather_with_grad"),
    ("CLIP, 4,096 × 512, W = 4", "open_clip, gather_with_grad"),
    *((f"{loss}, 4,096 × 128", "pml") for loss in ("Triplet, batch-hard", "Multi-similarity", "Circle")),
)
"""Rows of the table of the page: a case, and the other library that it is beside."""
