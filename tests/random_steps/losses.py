"""The losses of the random steps: those of the zoo, users' own and other libraries', with samples to call each with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.testing.measurement import Call
from tests.losses.whole_zoo import EVERY
from tests.random_steps import user_code
from tests.zoo import BatchHard, Entry, fed

D, CLASSES = 4, 5

SETTINGS: dict[str, tuple[Any, ...]] = {
    "partition_mode": ("joint", "per_direction"),
    "symmetric": (False, True),
    "denominator": ("exact", "reference"),
    "duplicates": ("positive", "ignore", "negative"),
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
    member: str = ""  # the path to the member whose setting may change
    wrapper: Callable[[], dict[str, Any]] = dict  # further arguments of DistributedLoss
    third_party: bool = False  # from another library
    remembers: bool = False  # whether it keeps a state from step to step
    sharded: bool = False  # whether each rank keeps its part of the class weights
    user_code: bool = False  # in 64 bits, and its copies are not the same

    @functools.cached_property
    def setting(self) -> tuple[str, tuple[Any, ...]] | None:
        loss = functools.reduce(getattr, filter(None, self.member.split(".")), self.make())
        plain = (name for name, values in SETTINGS.items() if isinstance(getattr(loss, name, None), type(values[0])))
        return next(((f"{self.member}.{name}".lstrip("."), SETTINGS[name]) for name in plain), None)


class MaskedMNRL(cz.MNRL):
    """Ids that meet by chance, of values, and a margin, in all directions."""

    directions = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    false_negative_margin = 0.1
    hardness_mode = "hard_negatives"
    hardness_strength = 2.0

    def inputs(self, queries: Tensor, documents: Tensor, negatives: Tensor, owners: Tensor) -> Inputs:
        ids = (x[:, 0].detach().floor().long() for x in (documents, negatives, 3 * queries))
        return super().inputs(queries, documents, negatives, owners, *ids)


def learnt() -> cz.LearnableTemperature:
    return cz.LearnableTemperature(0.5)


def mnrl(other: str = "doc_to_doc") -> nn.Module:
    return cz.MNRL(temperature=learnt(), directions=("query_to_doc", other))  # type: ignore[arg-type]  # why: a direction


def arc_face(*, whole: bool = True) -> nn.Module:
    return cz.ArcFace(CLASSES, D, scale=4.0, shard_over=None if whole else cz.World.of())


def weighted_sum() -> nn.Module:
    temperature = learnt()
    return cz.WeightedSum([cz.NTXent(temperature=temperature), cz.InfoNCE(temperature=0.5)], weights=[1.0, 0.5])


def tied(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers, many of whose dot products are equal; gradients go through."""
    return z + (z.round() - z).detach(), labels


def pml(name: str, *args: Any, **settings: Any) -> nn.Module:
    from pytorch_metric_learning import losses

    return getattr(losses, name)(*args, **settings)


def miner() -> Any:
    from pytorch_metric_learning import miners

    return miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard")


def moco(queries: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
    """MoCo's loss as in its authors' code: a query's own key against the queue alone."""
    q, k, x = (F.normalize(rows, dim=1) for rows in (queries, keys, negatives))
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ x.T], 1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def memory(loss: Callable[[], Any], size: int = 12, **settings: Any) -> Callable[[], Any]:
    return lambda: cz.CrossBatchMemory(loss(), size, D, **{name: make() for name, make in settings.items()})


def of_memory(loss: Callable[[], Any], call: Call = "labels", size: int = 12, **more: Any) -> Loss:
    third_party = bool(more) or loss is CONTRASTIVE
    return Loss(memory(loss, size, **more), call, member="loss", remembers=True, third_party=third_party)


CONTRASTIVE = functools.partial(pml, "ContrastiveLoss")
MEMORIES: dict[str, Loss] = {
    "CrossBatchMemory": of_memory(lambda: cz.InfoNCE(temperature=learnt(), symmetric=True), "views", 7),
    "MoCo": of_memory(lambda: cz.InfoNCE(temperature=learnt(), in_batch_negatives=False), "views"),
    "MoCo's own": of_memory(lambda: moco, "views", 5),
    "memory of MNRL": of_memory(cz.MNRL, "views"),
    "memory of SupCon": of_memory(lambda: cz.SupCon(temperature=learnt())),
    "memory of SupCon, in": of_memory(lambda: cz.SupCon(variant="in")),
    "memory of SupSigmoid": of_memory(lambda: cz.SupSigmoid(logit_bias=-1.0)),
    "memory of Contrastive": of_memory(cz.Contrastive),
    "memory of a row loss": of_memory(BatchHard, size=20),
    "small memory of a row loss": of_memory(BatchHard, size=3),
    "memory of a third-party loss": of_memory(CONTRASTIVE),
    "memory of a mined loss": of_memory(lambda: pml("TripletMarginLoss", margin=0.3), miner=miner),
}


def of_zoo(entry: Entry) -> Loss:
    make = functools.partial(entry.make, temperature=0.5)
    return Loss(make, entry.call, entry.views, remembers=any(True for _ in make().buffers()))


TIED = fed(cz.Triplet, tied)
OF_ZOO = {x.name: of_zoo(x) for x in EVERY if not x.name.startswith("MNRL")}
OTHERS: dict[str, Loss] = {
    "NTXent, learnt": Loss(lambda: cz.NTXent(temperature=learnt())),
    "SINCERE, learnt": Loss(lambda: cz.SINCERE(temperature=learnt()), "labels"),
    "SigLIP, sum": Loss(lambda: cz.SigLIP(temperature=learnt(), reduction="sum")),
    "SigLIP, learnt": Loss(lambda: cz.SigLIP(temperature=learnt(), logit_bias=nn.Parameter(torch.tensor([-1.0])))),
    "InfoNCE with negatives": Loss(lambda: cz.InfoNCE(temperature=0.3), views=3),
    "MNRL of pairs": Loss(lambda: mnrl("doc_to_query")),
    "MNRL": Loss(mnrl, views=3, owners=True),
    "MNRL, masked": Loss(lambda: MaskedMNRL(temperature=learnt()), views=3, owners=True),
    "WeightedSum of MNRL": Loss(lambda: cz.WeightedSum([mnrl()]), views=3, owners=True, member="losses.0"),
    "Triplet, ties": Loss(lambda: TIED(mining="hard", metric="squared distance", soft=True, normalize=False), "labels"),
    "WeightedSum, shared": Loss(weighted_sum, member="losses.1"),
    "ArcFace, sharded": Loss(arc_face, "labels", sharded=True),
    "WeightedSum of ArcFace, sharded": Loss(
        lambda *, whole=True: cz.WeightedSum([arc_face(whole=whole)]), "labels", member="losses.0", sharded=True
    ),
    "WeightedSum of states": Loss(
        lambda: cz.WeightedSum([memory(cz.InfoNCE, 7)(), cz.TiCo(D), cz.DINO(D), cz.VICReg()]), remembers=True
    ),
    "WeightedSum of two of a kind": Loss(
        lambda: cz.WeightedSum([cz.NNCLR(7, D), cz.NNCLR(5, D, temperature=0.5)]), views=4, remembers=True
    ),
    "PML triplet with a miner": Loss(
        lambda: pml("TripletMarginLoss", margin=0.2), "labels", wrapper=lambda: {"miner": miner()}, third_party=True
    ),
    "PML proxies": Loss(lambda: pml("ProxyAnchorLoss", CLASSES, D, alpha=4), "labels", third_party=True),
}
LOSSES = OF_ZOO | MEMORIES | OTHERS
LOSSES |= {name: Loss(make, "labels", user_code=True) for name, make in user_code.LABELLED.items()}
LOSSES |= {name: Loss(make, user_code=True) for name, make in user_code.PAIRED.items()}
LOSSES |= {name: Loss(make, "labels", remembers=True, user_code=True) for name, make in user_code.STATEFUL.items()}
LOSSES |= {name: Loss(make, remembers=True, user_code=True) for name, make in user_code.STATEFUL_PAIRS.items()}


@functools.cache
def can_ring(name: str) -> bool:
    """Whether it may, and brings no argument that all candidates are needed for."""
    loss = LOSSES[name]
    if loss.third_party or loss.user_code or loss.owners or name == "SupCon, mask":
        return False
    return loss.make().ring_problem() is None


def global_rows(loss: Loss, total: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = loss.views if loss.call == "views" else 1
    rows = [torch.randn(total, D, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count)]
    if loss.owners:
        is_owned = torch.rand(total, dtype=torch.float32, generator=generator) < 0.7
        return [*rows, torch.arange(total).where(is_owned, -1)]
    # with 0 labels might be row numbers
    return rows if loss.call == "views" else [*rows, torch.randint(1, CLASSES, (total,), generator=generator)]


def local_rows(loss: Loss, rows: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    local = [x.split([*shards])[rank].clone() for x in rows]
    if loss.owners:
        local[-1] -= sum(shards[:rank]) * (local[-1] >= 0)
    return local
