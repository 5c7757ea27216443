"""Invariants of monitored figures, their direct formulas, and monitors with mistakes that the invariants catch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_zoo.metrics.monitor.monitor import Monitor
from contrastive_zoo.ranks.transport import reduced_everywhere
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards, World
from contrastive_zoo.testing.invariant import TOLERANCE, Broken, invariant
from contrastive_zoo.testing.worlds import Worlds

_RESOLUTION = 2**-11
"""Largest difference of a quantile: half the width of a bin."""


@dataclass(frozen=True)
class MonitorTrial:
    """A loss on one global batch, watched by the monitor under test.

    ``attach`` returns the monitor of a DistributedLoss, ``make_loss`` the loss; ``rows`` are the arguments of all ranks.
    """

    attach: Callable[[Any], Any]
    make_loss: Callable[[], Any]
    rows: Sequence[Tensor]
    shards: Sequence[int]
    worlds: Worlds

    def watched(self, *, shards: Sequence[int] | None = None, attach: bool = True) -> list[Any]:
        """Return each rank's figures, and its value, next random numbers and gradients."""
        shards = list(self.shards if shards is None else shards)
        each = list(zip(*(x.split(shards) for x in self.rows), strict=True))
        return self.worlds.run(len(shards), _watched, self.attach if attach else None, self.make_loss, each=each)


def _watched(
    attach: Callable[[Any], Any] | None, make_loss: Callable[[], Any], *rows: Tensor
) -> tuple[dict[str, float], list[Tensor]]:
    torch.manual_seed(0)
    torch.set_default_dtype(next(x.dtype for x in rows if x.is_floating_point()))
    loss_fn = make_loss()
    monitor = None if attach is None else attach(loss_fn)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in rows]
    value = loss_fn(*leaves)
    random = torch.rand(3)
    value.backward()
    gradients = [x.grad for x in leaves if x.grad is not None]
    return {} if monitor is None else monitor.latest, [value.detach(), random, *gradients]


@invariant(catches="local batch")
def monitor_same_for_every_split(trial: MonitorTrial) -> None:
    """Every rank finds the figures that one process finds: counts and quantiles the same bits, others up to rounding."""
    ((expected, _),) = trial.watched(shards=[sum(trial.shards)])
    for rank, (figures, _) in enumerate(trial.watched()):
        _compare(figures, expected, f"on rank {rank}", "one process", resolution=0.0)


@invariant(catches="mean of ranks")
def monitor_equals_direct_formulas(trial: MonitorTrial) -> None:
    """The figures are those of plain formulas on the global batch; quantiles up to half a bin."""
    expected = direct_figures(*trial.rows)
    for rank, (figures, _) in enumerate(trial.watched()):
        of_direct = {name: figures.get(name, math.nan) for name in expected}
        _compare(of_direct, expected, f"on rank {rank}", "direct formula", resolution=_RESOLUTION)


@invariant(catches="draws random numbers")
def monitor_leaves_the_loss_unchanged(trial: MonitorTrial) -> None:
    """Value, gradients and the next random numbers are the same bits with and without the monitor."""
    for rank, ((_, found), (_, expected)) in enumerate(zip(trial.watched(), trial.watched(attach=False), strict=True)):
        if not all(map(torch.equal, found, expected)):
            raise Broken(f"value, gradients or random numbers of rank {rank} differ from those without a monitor")


MONITOR_INVARIANTS = (monitor_same_for_every_split, monitor_equals_direct_formulas, monitor_leaves_the_loss_unchanged)
"""All invariants of a monitor."""


def _compare(
    found: Mapping[str, float], expected: Mapping[str, float], where: str, source: str, *, resolution: float
) -> None:
    if found.keys() != expected.keys():
        raise Broken(f"figures {where} are {list(found)}; {source}: {list(expected)}")
    for name, x in expected.items():
        exact = "_q" in name or name.startswith(("top1", "anchors", "likely"))
        bound = resolution + 1e-12 if resolution and "_q" in name else 0.0 if exact else TOLERANCE * max(1.0, abs(x))
        if not (abs(found[name] - x) <= bound or (math.isnan(x) and math.isnan(found[name]))):
            raise Broken(f"{name} {where} is {found[name]!r}; {source}: {x!r}")


def direct_figures(
    first: Tensor, second: Tensor, *, quantiles: Sequence[float] = (0.05, 0.5, 0.95)
) -> dict[str, float]:
    """Return figures by plain formulas of embeddings [N, d], and of labels [N] or the other view or encoder [N, d]."""
    a = F.normalize(first.double(), dim=1)
    itself = torch.eye(len(a), dtype=torch.bool)
    if second.is_floating_point():
        b, positive, negative = F.normalize(second.double(), dim=1), itself, ~itself
    else:
        b, alike = a, second[:, None] == second
        positive, negative = alike & ~itself, ~alike
    s, found = a @ b.T, dict[str, float]()
    for kind, mask in (("positive", positive), ("negative", negative)):
        found[f"{kind}_similarity"] = s[mask].mean().item()
        for q in quantiles:
            kth = s[mask].sort().values[math.ceil(round(q * int(mask.sum()), 9)) - 1 : None] if mask.any() else s[mask]
            found[f"{kind}_similarity_q{100 * q:g}"] = kth[0].item() if len(kth) else math.nan
    for name, scores, is_positive, is_negative in (
        ("top1_forward", s, positive, negative),
        ("top1_backward", s.T, positive.T, negative.T),
    ):
        best, worst = (scores.masked_fill(~mask, -math.inf).amax(1) for mask in (is_positive, is_negative))
        found[name] = (best > worst)[is_positive.any(1)].double().mean().item()
    found["anchors_without_positive"] = (~positive.any(1)).double().mean().item()
    found["alignment"] = (a[:, None] - b[None]).square().sum(-1)[positive].mean().item()
    return found


class LocalBatch(Monitor):
    """Measures each rank's own embeddings."""

    def observe(self, loss: Any, rows: Mapping[str, Tensor], shards: Sequence[Shards], world: World) -> None:
        super().observe(loss, rows, [Shards((len(x),)) for x in rows.values()], ONE_PROCESS)


class MeanOfRanks(LocalBatch):
    """Averages the figures that each rank finds among its own embeddings."""

    def observe(self, loss: Any, rows: Mapping[str, Tensor], shards: Sequence[Shards], world: World) -> None:
        super().observe(loss, rows, shards, world)
        means = reduced_everywhere(torch.tensor([*super().latest.values()]), "mean", world)
        self.mean = dict(zip(super().latest, means, strict=True))

    @property
    def latest(self) -> dict[str, float]:
        found: Mapping[str, Any] = getattr(self, "mean", super().latest)
        return {name: float(x) for name, x in found.items()}


class DrawsRandomNumbers(Monitor):
    """Draws the signs of its sketches from torch's global generator."""

    def observe(self, loss: Any, rows: Mapping[str, Tensor], shards: Sequence[Shards], world: World) -> None:
        super().observe(loss, rows, shards, world)
        torch.randint(0, 2, (64,))


MISTAKES: dict[str, Callable[[Any], Monitor]] = {
    "local batch": LocalBatch,
    "mean of ranks": MeanOfRanks,
    "draws random numbers": DrawsRandomNumbers,
}
"""By the name that invariants use."""
