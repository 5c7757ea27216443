"""The losses of the random steps: those of the zoo, users' own and other libraries', with samples to call each with."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.loss_base.loss import Loss as ZooLoss
from contrastive_zoo.testing.measurement import Call
from tests.helpers import later
from tests.losses.whole_zoo import EVERY
from tests.zoo import BatchHard

D, CLASSES = 4, 5

SETTINGS: dict[str, tuple[Any, ...]] = {
    "partition_mode": ("joint", "per_direction"),
    "symmetric": (False, True),
    "denominator": ("exact", "reference"),
    "duplicates": ("positive", "ignore"),
    "neg_margin": (1.0, 0.8),
    "margin": (0.05, 0.3),
    "temperature": (0.5, 0.3, 0.02),
    "normalize": (True, False),
}
"""Values to which a setting may change between steps, of the first that a loss has as a plain value."""


@dataclass(frozen=True)
class Loss:
    make: Callable[..., Any]  # ``make(whole=False)`` returns a rank's loss, if it is sharded
    call: Call = "views"
    views: int = 2
    owners: bool = False  # whether it also takes indices of local queries, those that its negatives were mined for
    miner: Callable[[], Any] = lambda: None  # of DistributedLoss
    remembers: bool = False  # whether it keeps a state from step to step
    sharded: bool = False  # whether each rank keeps its part of the class weights
    user_code: bool = False  # in 64 bits, and its copies are not the same

    @property
    def towers(self) -> int:
        return self.views if self.call == "views" else 1

    @functools.cached_property
    def setting(self) -> tuple[str, tuple[Any, ...]] | None:
        """The path to the first setting of the loss or of a member that may change, and its values."""
        loss = self.make()
        modules = reversed([*loss.named_modules()]) if isinstance(loss, nn.Module) else ()
        for (path, module), (name, values) in itertools.product(modules, SETTINGS.items()):
            if isinstance(getattr(module, name, None), type(values[0])):
                return f"{path}.{name}".lstrip("."), values
        return None


learnt = functools.partial(cz.LearnableTemperature, 0.5)
miner = functools.partial(miners.TripletMarginMiner, margin=0.2, type_of_triplets="semihard")
number = functools.partial(torch.tensor, dtype=torch.float64)


def mnrl() -> nn.Module:
    return cz.MNRL(temperature=learnt(), directions=("query_to_doc", "doc_to_doc"))


def arc_face(*, whole: bool = True) -> nn.Module:
    return cz.ArcFace(CLASSES, D, scale=4.0, shard_over=None if whole else cz.World.of())


def moco(queries: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
    """MoCo's loss as in its authors' code: a query's own key against the queue alone."""
    q, k, x = (F.normalize(rows, dim=1) for rows in (queries, keys, negatives))
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ x.T], 1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def memory(loss: Callable[[], Any], call: Call = "labels", size: int = 12, **made: Callable[[], Any]) -> Loss:
    return Loss(lambda: cz.CrossBatchMemory(loss(), size, D, **{k: x() for k, x in made.items()}), call, remembers=True)


class Annealed(nn.Module):
    """A temperature that counts its calls, in a buffer or in a plain attribute."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.calls: Any = 0 if plain else nn.Buffer(number(0))

    def forward(self) -> Any:
        self.calls += 1
        return 0.1 + 0.1 * self.calls


class Held(cz.RowLoss):
    """A row loss that computes with everything that an attribute can be, and knows its rank."""

    def __post_init__(self) -> None:
        self.table = {"b": 1.0, "a": [0.5, number(2)]}
        self.array, self.options, self.scale = np.array([1.0, 2.0]), SimpleNamespace(power=2.0), number(1.5)
        self._private, self.rank = 0.25, cz.World.of().rank

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.table["b"] + self.table["a"][0] + self.table["a"][1] + float(self.array.sum())
        factor = factor * self.options.power * self.scale + self._private
        return factor * (similarity * negative).sum(1), negative.any(1)


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """Hide a number from ranks that read attributes."""
    return lambda x: factor * x


class OfAGenerator:
    """Return random numbers that ranks cannot synchronise: a copy of the loss holds the generator, too."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.generator.random(x.shape)).to(x.dtype)


class Hides:
    def __post_init__(self) -> None:
        self.hidden, self.noise = {"a closure": times(1.0)}, torch.zeros_like

    def changed(self, similarity: Tensor) -> Tensor:
        similarity = self.hidden["a closure"](similarity)
        return similarity + self.noise(similarity)


class HidesInRows(Hides, cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (self.changed(similarity) * negative).exp().sum(1).log(), negative.any(1)


class HidesInCompute(Hides, ZooLoss):
    """Its parameter meets embeddings in the mean over samples, where ``batch.shared`` makes its gradient whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight = nn.Parameter(number([1.0, 2.0]))
        self.shares: Literal["yes", "no"] = "yes"

    def inputs(this, embeddings: Tensor, labels: Tensor) -> Inputs:  # noqa: N805 - an object has any name
        return Inputs.of({"embeddings": embeddings, "labels": labels})

    def compute(self, batch: Batch) -> Tensor:
        weight = batch.shared(self.weight) if self.shares == "yes" else self.weight
        z = batch.rows["embeddings"]
        similarity = self.changed(z @ batch.gather_detached(z).detach().T)
        return batch.reduce(similarity.tanh().sum(1) + weight.sum() * z.square().sum(1))


class ScaleAfter(HidesInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return (self.weight * batch.reduce(batch.rows["embeddings"].square().sum(1))).sum()


class OwnForward(cz.SupCon):
    """A subclass that computes the loss twice, also of other embeddings, and counts its calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = nn.Buffer(number(0))

    def forward(self, z: Any, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(z - z.mean(0), labels) + super().forward(z, labels)


class OwnCall(OwnForward):
    forward = cz.SupCon.forward

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        self.calls += 1
        return self.calls * super().__call__(*args, **named)


class Bank(nn.Module):
    """As lightly's losses: its memory is empty, and the pointer left to chance, until a first forward pass, or always."""

    def __init__(self, *, fills: bool = True) -> None:
        super().__init__()
        self.bank, self.pointer = nn.Buffer(torch.empty(0)), nn.Buffer(torch.tensor([10**6 + cz.World.of().rank]))
        self.queue, self.fills = nn.Parameter(torch.empty(0, 4)), fills

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if not self.fills:
            return scaled(embeddings, labels)
        if not self.bank.numel():
            self.pointer.zero_()
            self.bank = embeddings.new_zeros(4, 4)
        self.pointer += 1
        self.bank[self.pointer % 4] = embeddings.detach().mean(0)
        return (embeddings @ self.bank.T).square().sum() + 0 * labels.sum()


def closure() -> Callable[..., Tensor]:
    weights, power, rank = {"all": number([1.0, 2.0])}, 2.0, cz.World.of().rank
    return lambda z, labels: (
        weights["all"].sum() * (z[:, None] - z).square().sum(2) ** power * (labels[:, None] != labels) + 0 * rank
    ).mean()


def scaled(z: Tensor, labels: Tensor, scale: float = 1.0, power: Any = 2.0) -> Tensor:
    return scale * ((z - z.mean(0)) ** power).sum() + 0 * labels.sum()


HOOKS: dict[str, Callable[..., Any]] = {
    "forward_pre": lambda module, args: (args[0] - args[0].mean(0), *args[1:]),
    "forward": lambda module, args, value: value * args[0].square().mean(),
    "full_backward": lambda module, of_inputs, of_outputs: tuple(x if x is None else 2 * x for x in of_inputs),
    "full_backward_pre": lambda module, of_outputs: tuple(2 * x for x in of_outputs),
}


def with_hook(kind: str) -> cz.SupCon:
    loss = cz.SupCon()
    getattr(loss, f"register_{kind}_hook")(HOOKS[kind])
    return loss


def counting() -> cz.InfoNCE:
    return cz.InfoNCE(temperature=Annealed(plain=True))


MEMORIES: dict[str, Loss] = {
    "CrossBatchMemory": memory(lambda: cz.InfoNCE(temperature=learnt(), symmetric=True), "views", 7),
    "MoCo": memory(lambda: cz.InfoNCE(temperature=learnt(), in_batch_negatives=False), "views"),
    "MoCo's own": memory(lambda: moco, "views", 5),
    "memory of MNRL": memory(cz.MNRL, "views"),
    "memory of SupCon": memory(lambda: cz.SupCon(temperature=learnt())),
    "memory of SupCon, in": memory(lambda: cz.SupCon(variant="in")),
    "memory of BalSCL": memory(lambda: cz.BalSCL(CLASSES, D, temperature=learnt())),
    "memory of Contrastive": memory(cz.Contrastive),
    "memory of a row loss": memory(BatchHard, size=20),
    "small memory of a row loss": memory(BatchHard, size=3),
    "memory of a third-party loss": memory(losses.ContrastiveLoss),
    "memory of a mined loss": memory(lambda: losses.TripletMarginLoss(margin=0.3), miner=miner),
}

OF_ZOO = {
    x.name: Loss(functools.partial(x.make, temperature=0.5), x.call, x.views, remembers=len([*x.make().buffers()]) > 0)
    for x in EVERY
}
LOSSES = {
    **OF_ZOO,
    **MEMORIES,
    "NTXent, learnt": Loss(lambda: cz.NTXent(temperature=learnt())),
    "SigLIP, learnt": Loss(lambda: cz.SigLIP(temperature=learnt(), logit_bias=nn.Parameter(torch.tensor([-1.0])))),
    "InfoNCE with negatives": Loss(lambda: cz.InfoNCE(temperature=0.3), views=3),
    "MNRL with owners": Loss(mnrl, views=3, owners=True),
    "WeightedSum of MNRL": Loss(lambda: cz.WeightedSum([mnrl()]), views=3, owners=True),
    "ArcFace, sharded": Loss(arc_face, "labels", sharded=True),
    "WeightedSum of ArcFace, sharded": Loss(lambda **of: cz.WeightedSum([arc_face(**of)]), "labels", sharded=True),
    "WeightedSum of states": Loss(
        lambda: cz.WeightedSum([memory(cz.InfoNCE, size=7).make(), cz.TiCo(D), cz.DINO(D), cz.VICReg()]), remembers=True
    ),
    "WeightedSum of two of a kind": Loss(
        lambda: cz.WeightedSum([cz.NNCLR(7, D), cz.NNCLR(5, D, temperature=0.5)]), views=4, remembers=True
    ),
    "PML triplet with a miner": Loss(lambda: losses.TripletMarginLoss(margin=0.2), "labels", miner=miner),
    "PML proxies": Loss(lambda: losses.ProxyAnchorLoss(CLASSES, D, alpha=4), "labels"),
}
LABELLED: dict[str, Callable[[], Any]] = {
    "SupCon, tensor": lambda: cz.SupCon(temperature=number(0.2)),
    "Held": Held,
    "hides in rows": HidesInRows,
    "hides in compute": HidesInCompute,
    "a parameter after the mean": ScaleAfter,
    "closure": closure,
    "partial": lambda: functools.partial(scaled, scale=2.0, power=torch.tensor(2.0)),
    "an empty bank": lambda: Bank(fills=False),
}
STATEFUL: dict[str, Callable[[], Any]] = {
    "SupCon, annealed": lambda: cz.SupCon(temperature=Annealed()),
    "NormalizedSoftmax, annealed": lambda: cz.NormalizedSoftmax(5, 4, temperature=Annealed()),
    "Triplet, annealed": lambda: cz.Triplet(margin=Annealed()),
    "WeightedSum, annealed": lambda: cz.WeightedSum([cz.SupCon(temperature=Annealed()), cz.Triplet()]),
    "a labelled memory, annealed": lambda: cz.CrossBatchMemory(cz.SupCon(temperature=Annealed()), 16, 4),
    "a bank": Bank,
    "a forward of its own": OwnForward,
    "a call of its own": OwnCall,
    **{kind: functools.partial(with_hook, kind) for kind in HOOKS},
    "a patched forward": lambda: later(cz.SupCon(), forward=lambda z, labels: cz.SupCon()(z - z.mean(0), labels)),
    "a forward of its own in a sum": lambda: cz.WeightedSum([OwnForward(), cz.Triplet()]),
}
"""Labelled losses of user code that moves a state, or sees the embeddings."""
STATEFUL_PAIRS: dict[str, Callable[[], Any]] = {
    "NTXent, annealed": lambda: cz.NTXent(temperature=Annealed()),
    "MNRL, annealed": lambda: cz.MNRL(temperature=Annealed()),
    "Clip, annealed": lambda: cz.Clip(temperature=Annealed()),
    "a sum, counting": lambda: cz.WeightedSum([counting(), cz.Matryoshka(counting(), (1, 4))]),
}
LOSSES |= {name: Loss(make, "labels", user_code=True) for name, make in LABELLED.items()}
LOSSES |= {name: Loss(make, "labels", remembers=True, user_code=True) for name, make in STATEFUL.items()}
LOSSES |= {name: Loss(make, remembers=True, user_code=True) for name, make in STATEFUL_PAIRS.items()}


def global_rows(loss: Loss, total: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(total, D, dtype=torch.float64, generator=generator).to(dtype) for _ in range(loss.towers)]
    if loss.owners:
        is_owned = torch.rand(total, dtype=torch.float32, generator=generator) < 0.7
        return [*rows, torch.arange(total).where(is_owned, -1)]
    # with 0 labels might be row numbers
    return rows if loss.call == "views" else [*rows, torch.randint(1, CLASSES, (total,), generator=generator)]


def _can_ring(name: str) -> bool:
    """Whether it may with the arguments that it brings; a mask is made in the call."""
    loss, made = LOSSES[name], LOSSES[name].make()
    if loss.user_code or loss.owners or name == "SupCon, mask" or not isinstance(made, ZooLoss):
        return False
    return made.stated(global_rows(loss, 2, 0, torch.float64), {}).needs.no_ring is None


RINGS = frozenset(filter(_can_ring, LOSSES))
"""The losses whose candidates may pass from rank to rank."""


def local_rows(loss: Loss, rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    local = [x.split([*shards])[rank].clone() for x in rows]
    if loss.owners:
        local[-1] -= sum(shards[:rank]) * (local[-1] >= 0)
    return local
