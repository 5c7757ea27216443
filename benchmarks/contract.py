"""The largest error of value, encoder gradient and parameter gradient against one process, in float64.

python benchmarks/contract.py
"""

from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import contrastive_zoo as cz
from contrastive_zoo.catalogue import CATALOGUE
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.trial import Case, Trial
from contrastive_zoo.testing.worlds import Worlds

SPLITS = [(7,), (3, 4), (0, 7), (1, 6, 4), (5, 0, 5), (2, 3, 0, 4), (4, 4, 4, 4)]


def wrapped(name: str, trainer: str) -> Any:
    """A loss of the zoo, with a learnt temperature where it has one."""
    loss = CATALOGUE[name].make()
    if isinstance(getattr(loss, "temperature", None), float):
        loss.temperature = cz.LearnableTemperature(0.2)
    return cz.DistributedLoss(loss, grad_reduction=trainer)


def errors(case: Case, worlds: Worlds) -> tuple[float, float, float]:
    """The largest over all splits, each relative to the larger of 1 and what it is compared with."""
    worst = [0.0, 0.0, 0.0]
    for seed, shards in enumerate(SPLITS):
        trial = Trial(case, GlobalBatch(shards, d=4, seed=seed), worlds)
        alone = trial.alone()
        values = torch.tensor([found.value for found in trial.together()], dtype=torch.float64)
        pairs = [[(values, torch.full_like(values, alone.value))]]
        for what in ("encoder", "parameters"):
            found, expected = trial.reduced(what), getattr(alone, what)
            pairs.append([(found[name], x) for name, x in expected.items()])
        for index, part in enumerate(pairs):
            for found, expected in part:
                off = ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
                worst[index] = max(worst[index], off)
    return worst[0], worst[1], worst[2]


def main() -> None:
    """Print a row per loss and trainer."""
    table = Table("loss", "trainer", "value", "encoder gradient", "parameter gradient", box=None)
    with Worlds() as worlds:
        for name, species in CATALOGUE.items():
            for trainer in ("mean", "sum"):
                case = Case(partial(wrapped, name, trainer), call=species.call, grad_reduction=trainer, name=name)
                table.add_row(name, trainer, *(f"{error:.1e}" for error in errors(case, worlds)))
    Console().print(table)


if __name__ == "__main__":
    main()
