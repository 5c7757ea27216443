"""Every loss of the catalogue with the arguments of a call."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE
from tools.vectors.cases import CASES, SPLITS, Case, of_entry


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


_DRAWING = (of_entry(entry) for entry in CATALOGUE.values() if entry.draws)
OF_CATALOGUE = {  # each loss has parameters of its own
    case.name: OwnLoss(lambda case=case: getattr(cz, case.loss)(**copy.deepcopy(case.settings)), case.kinds)
    for case in (*CASES.values(), *_DRAWING)
}
