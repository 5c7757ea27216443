"""The largest error of value, encoder gradient and parameter gradient against one process, in float64: of every loss at a
first step, and of typical losses at steps 1 … 4 of a training whose shard sizes change.

python benchmarks/contract.py
"""

import itertools
from functools import partial
from typing import Any, get_type_hints

import torch
from rich.console import Console
from rich.table import Table

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.trial import Case, Trial
from contrastive_zoo.testing.worlds import Worlds

SPLITS = [(7,), (3, 4), (0, 7), (1, 6, 4), (5, 0, 5), (2, 3, 0, 4), (4, 4, 4, 4)]


TYPICAL = ("nt-xent", "clip", "sup-con", "siglip", "mnrl", "triplet-hard", "proxy-anchor", "arc-face", "vicreg")
STEPS = 4


def wrapped(name: str, trainer: str) -> Any:
    """Construct a loss of the zoo, with a learnable temperature if it has a temperature."""
    loss = CATALOGUE[name].make()
    if isinstance(vars(loss).get("temperature"), float) and "Tensor" in str(get_type_hints(type(loss))["temperature"]):
        loss.temperature = cz.LearnableTemperature(0.2)
    return cz.DistributedLoss(loss, grad_reduction=trainer)


def errors(case: Case, worlds: Worlds) -> list[float]:
    """Return the largest errors of value, encoder and parameter gradient over all splits."""
    worst = [0.0, 0.0, 0.0]
    for seed, shards in enumerate(SPLITS):
        trial = Trial(case, GlobalBatch(shards, d=3, seed=seed), worlds)
        worst = list(map(max, worst, compared(trial, trial.on_ranks(), trial.on_one_process())))
    return worst


def errors_at_steps(case: Case, worlds: Worlds) -> list[list[float]]:
    """Return these errors at each step of a training (even, uneven, one sample per rank, all on rank 0); W = 2 and 3."""
    worst = [[0.0, 0.0, 0.0] for _ in range(STEPS)]
    for shards in ((3, 4), (1, 6, 4)):
        trial = Trial(case, GlobalBatch(shards, d=3, seed=1), worlds)
        ranks, _ = trial.train_on_ranks(trial.training)
        for step, alone in enumerate(trial.train_on_one_process(trial.training)[:STEPS]):
            worst[step] = list(map(max, worst[step], compared(trial, [by_step[step] for by_step in ranks], alone)))
    return worst


def compared(trial: Trial, by_rank: list[Any], alone: Any) -> list[float]:
    """Return the errors of value, encoder and parameter gradient, relative to the larger of 1 and the expected one."""
    values = torch.tensor([found.value for found in by_rank], dtype=torch.float64)
    found = [error(values, torch.full_like(values, alone.value))]
    for what in ("encoder", "parameters"):
        reduced = trial.reduce([getattr(x, what) for x in by_rank])
        found.append(max((error(reduced[name], x) for name, x in getattr(alone, what).items()), default=0.0))
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the larger of 1 and the largest expected element."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def main() -> None:
    """Print a row for each loss and trainer, then one for each typical loss at each step."""
    table = Table("loss", "trainer", "value", "encoder gradient", "parameter gradient", box=None)
    with Worlds() as worlds:
        for name, entry in CATALOGUE.items():
            for trainer in ("mean", "sum") if entry.call != "other" else ():  # which takes more than one batch's rows
                case = Case(partial(wrapped, name, trainer), call=entry.call, grad_reduction=trainer, name=name)
                table.add_row(name, trainer, *(f"{error:.1e}" for error in errors(case, worlds)))
        steps = Table("loss", "trainer", "of", *(f"step {step}" for step in range(1, STEPS + 1)), box=None)
        for name, trainer in itertools.product(TYPICAL, ("mean", "sum")):
            case = Case(partial(wrapped, name, trainer), call=CATALOGUE[name].call, grad_reduction=trainer, name=name)
            found = zip(
                ("value", "encoder", "parameters"), zip(*errors_at_steps(case, worlds), strict=True), strict=True
            )
            for what, by_step in found:
                steps.add_row(name, trainer, what, *(f"{x:.1e}" for x in by_step))
    Console().print(table, "", steps)


if __name__ == "__main__":
    main()
