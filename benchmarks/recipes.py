"""Largest errors in float64 of open_clip's and lightly's losses under DistributedLoss, against one process.

python benchmarks/recipes.py

Needs the two libraries, not what they depend on (pip install --no-deps open_clip_torch lightly): each loss is read from
its file, past the packages' imports of torchvision.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from suite.cases import peer
from suite.harness import Absent
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Case
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import Worlds

SPLITS = [(7,), (3, 4), (0, 7), (1, 6, 4), (5, 0, 5), (2, 3, 0, 4), (4, 4, 4, 4)]


class WithScale(nn.Module):
    """Hold the parameters of open_clip's model and call its losses with them."""

    def __init__(self, loss: Callable[..., Tensor], *, bias: bool) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.tensor(-2.0)) if bias else None
        self.loss = loss

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        scales = [self.log_scale.exp()] + ([] if self.bias is None else [self.bias])
        return self.loss(*(nn.functional.normalize(x, dim=1) for x in (image, text)), *scales)


def ntxent(trainer: str) -> Any:
    loss = peer("lightly", "lightly.loss.ntx_ent_loss").NTXentLoss(gather_distributed=False)
    return cz.DistributedLoss(loss, grad_reduction=trainer)


def open_clip(name: str, trainer: str) -> Any:
    loss = cz.DistributedLoss(getattr(peer("open_clip", "open_clip.loss"), name)(), grad_reduction=trainer)
    return WithScale(loss, bias=name == "SigLipLoss")


def errors(case: Case, worlds: Worlds) -> list[float]:
    worst = [0.0, 0.0, 0.0]
    for seed, shards in enumerate(SPLITS):
        trial = Trial(case, GlobalBatch(shards, d=3, seed=seed), worlds)
        alone, by_rank = trial.on_one_process(), trial.on_ranks()
        values = torch.tensor([x.value for x in by_rank], dtype=torch.float64)
        of_trial = [error(values, torch.full_like(values, alone.value))]
        for kind in ("encoder", "parameters"):
            reduced = trial.reduced(kind)
            of_trial.append(max((error(reduced[name], x) for name, x in getattr(alone, kind).items()), default=0.0))
        worst = list(map(max, worst, of_trial))
    return worst


def error(measured: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the larger of 1 and the largest expected element."""
    return ((measured - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def main() -> None:
    try:
        peer("open_clip", "open_clip.loss")
        peer("lightly", "lightly.loss.ntx_ent_loss")
    except Absent as absent:
        sys.exit(f"{absent}: pip install --no-deps open_clip_torch lightly")
    table = Table("loss", "trainer", "value", "encoder gradient", "parameter gradient", box=None)
    makers = {
        "open_clip ClipLoss": partial(open_clip, "ClipLoss"),
        "open_clip SigLipLoss": partial(open_clip, "SigLipLoss"),
        "lightly NTXentLoss": ntxent,
    }
    with Worlds() as worlds:
        for name, make in makers.items():
            for trainer in ("mean", "sum"):
                case = Case(partial(make, trainer), call="views", grad_reduction=trainer, name=name)
                table.add_row(name, trainer, *(f"{error:.1e}" for error in errors(case, worlds)))
    Console().print(table)


if __name__ == "__main__":
    main()
