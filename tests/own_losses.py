"""Every loss of this library with the arguments of a call: those of the catalogue, memories, and sums."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE
from tests.zoo import BatchHard
from tools.vectors.cases import CASES, LABELLED, SPLITS, TOWERS, VIEWS, WIDTH, Case, of_entry

SIZE = 20


@dataclass(frozen=True)
class OwnLoss:
    make: Callable[[], Loss]
    kinds: Mapping[str, str]

    def arguments(self, rank: int = 0, world_size: int = 1, draw: int = 0) -> dict[str, Tensor]:
        """Return a shard of one batch on one or two ranks; shards are uneven, and another ``draw`` has other numbers."""
        whole = Case("own losses", "", dict(self.kinds)).arguments(draw)
        splits = {name: SPLITS[len(of)][2 if world_size == 2 else 0] for name, of in whole.items()}
        shards = {name: torch.from_numpy(of).split(splits[name])[rank].clone() for name, of in whole.items()}
        return {name: x.requires_grad_() if x.is_floating_point() else x for name, x in shards.items()}


def made(case: Case) -> Loss:
    """Return the loss of a case; each has parameters of its own."""
    return getattr(cz, case.loss)(**copy.deepcopy(case.settings))


def memory(loss: Callable[[], Any]) -> Callable[[], Loss]:
    return lambda: cz.CrossBatchMemory(loss(), SIZE, WIDTH, dtype=torch.float64)


def squares(embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor) -> Tensor:
    return (embeddings.sum(0) - ref_emb.sum(0)).square().sum()


_DRAWING = (of_entry(entry) for entry in CATALOGUE.values() if entry.draws)
OF_CATALOGUE = {case.name: OwnLoss(partial(made, case), case.kinds) for case in (*CASES.values(), *_DRAWING)}
MEMORIES = {
    "memory of InfoNCE": OwnLoss(memory(cz.InfoNCE), TOWERS),
    "memory of MNRL": OwnLoss(memory(cz.MNRL), TOWERS),
    "memory of SupCon": OwnLoss(memory(cz.SupCon), LABELLED),
    "memory of a row loss": OwnLoss(memory(BatchHard), LABELLED),
    "memory of a third-party loss": OwnLoss(memory(lambda: squares), LABELLED),
}
SUMS = {
    "sum of NTXent and Clip": OwnLoss(lambda: cz.WeightedSum([cz.NTXent(), cz.Clip()]), VIEWS),
    "sum of DINO and a memory": OwnLoss(lambda: cz.WeightedSum([cz.DINO(WIDTH), memory(cz.InfoNCE)()]), TOWERS),
    "prefixes of InfoNCE": OwnLoss(lambda: cz.Matryoshka(cz.InfoNCE(), (2, WIDTH)), TOWERS),
    "sum of sums": OwnLoss(lambda: cz.WeightedSum([cz.Matryoshka(cz.NTXent(), (2, 3)), cz.TiCo(WIDTH)]), VIEWS),
}
OWN_LOSSES = OF_CATALOGUE | MEMORIES | SUMS
