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
from contrastive_zoo.loss_base.loss import Loss as ZooLoss
from contrastive_zoo.testing.measurement import Call
from tests.losses.whole_zoo import EVERY
from tests.random_steps import user_code
from tests.zoo import BatchHard, Entry

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
    wrapper: Callable[[], dict[str, Any]] = dict  # further arguments of DistributedLoss
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
        for path, module in reversed([*loss.named_modules()]) if isinstance(loss, nn.Module) else ():
            for name, values in SETTINGS.items():
                if isinstance(getattr(module, name, None), type(values[0])):
                    return f"{path}.{name}".lstrip("."), values
        return None


def learnt() -> cz.LearnableTemperature:
    return cz.LearnableTemperature(0.5)


def mnrl() -> nn.Module:
    return cz.MNRL(temperature=learnt(), directions=("query_to_doc", "doc_to_doc"))


def arc_face(*, whole: bool = True) -> nn.Module:
    return cz.ArcFace(CLASSES, D, scale=4.0, shard_over=None if whole else cz.World.of())


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


def memory(loss: Callable[[], Any], call: Call = "labels", size: int = 12, **made: Callable[[], Any]) -> Loss:
    def make() -> nn.Module:
        return cz.CrossBatchMemory(loss(), size, D, **{name: x() for name, x in made.items()})

    return Loss(make, call, remembers=True)


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
    "memory of a third-party loss": memory(lambda: pml("ContrastiveLoss")),
    "memory of a mined loss": memory(lambda: pml("TripletMarginLoss", margin=0.3), miner=miner),
}


def of_zoo(entry: Entry) -> Loss:
    make = functools.partial(entry.make, temperature=0.5)
    return Loss(make, entry.call, entry.views, remembers=any(True for _ in make().buffers()))


OF_ZOO = {x.name: of_zoo(x) for x in EVERY}
OTHERS: dict[str, Loss] = {
    "NTXent, learnt": Loss(lambda: cz.NTXent(temperature=learnt())),
    "SigLIP, learnt": Loss(lambda: cz.SigLIP(temperature=learnt(), logit_bias=nn.Parameter(torch.tensor([-1.0])))),
    "InfoNCE with negatives": Loss(lambda: cz.InfoNCE(temperature=0.3), views=3),
    "MNRL with owners": Loss(mnrl, views=3, owners=True),
    "WeightedSum of MNRL": Loss(lambda: cz.WeightedSum([mnrl()]), views=3, owners=True),
    "ArcFace, sharded": Loss(arc_face, "labels", sharded=True),
    "WeightedSum of ArcFace, sharded": Loss(
        lambda *, whole=True: cz.WeightedSum([arc_face(whole=whole)]), "labels", sharded=True
    ),
    "WeightedSum of states": Loss(
        lambda: cz.WeightedSum([memory(cz.InfoNCE, size=7).make(), cz.TiCo(D), cz.DINO(D), cz.VICReg()]),
        remembers=True,
    ),
    "WeightedSum of two of a kind": Loss(
        lambda: cz.WeightedSum([cz.NNCLR(7, D), cz.NNCLR(5, D, temperature=0.5)]), views=4, remembers=True
    ),
    "PML triplet with a miner": Loss(
        lambda: pml("TripletMarginLoss", margin=0.2), "labels", wrapper=lambda: {"miner": miner()}
    ),
    "PML proxies": Loss(lambda: pml("ProxyAnchorLoss", CLASSES, D, alpha=4), "labels"),
}
LOSSES = OF_ZOO | MEMORIES | OTHERS
for of, more in (
    (user_code.LABELLED, {"call": "labels"}),
    (user_code.STATEFUL, {"call": "labels", "remembers": True}),
    (user_code.STATEFUL_PAIRS, {"remembers": True}),
):
    LOSSES |= {name: Loss(make, user_code=True, **more) for name, make in of.items()}


@functools.cache
def can_ring(name: str) -> bool:
    """Whether it may, and brings no argument that all candidates are needed for."""
    loss = LOSSES[name]
    made, needs_all = loss.make(), loss.user_code or loss.owners or name == "SupCon, mask"
    return not needs_all and isinstance(made, ZooLoss) and made.ring_problem() is None


def global_rows(loss: Loss, total: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(total, D, dtype=torch.float64, generator=generator).to(dtype) for _ in range(loss.towers)]
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
