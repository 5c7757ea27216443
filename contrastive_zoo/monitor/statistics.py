"""The sums of one measurement: this rank's part of each, and one message that adds up all ranks' parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.monitor.drift import WIDTH
from contrastive_zoo.monitor.pairs import pair_sums, potential_sum
from contrastive_zoo.monitor.samples import Samples
from contrastive_zoo.world import World

Totals = Mapping[str, Tensor]
"""Sums over all ranks by name, in float64."""


def totals(samples: Samples, sketches: Mapping[str, Tensor], temperature: float, world: World) -> Totals:
    """Return the sums over all ranks; embeddings are gathered in rounds, and one message adds up all ranks' parts.

    Args:
        samples: this rank's embeddings.
        sketches: by name :func:`contrastive_zoo.monitor.drift.sketch` of the same modules on every rank.
        temperature: of this rank's loss; NaN if it has none.
        world: the ranks.
    """
    own = _own_part(next(x for of in samples.encoders.values() for x in of), samples, world)
    for name, numbers in sketches.items():
        of_all = torch.zeros(world.size, WIDTH, dtype=torch.float64)
        of_all[world.rank] = numbers
        own[f"{name} sketch"] = of_all
    own["temperature"] = torch.tensor(temperature / world.size, dtype=torch.float64)
    return _added_up(own, world)


@without_autocast
def _own_part(like: Tensor, samples: Samples, world: World) -> dict[str, Tensor]:
    """Return this rank's part of all sums of embeddings."""
    pairs = samples.pairs()
    found = _pair_part(pairs, samples, world) if pairs else {}
    for name, views in samples.encoders.items():
        rows = torch.cat(list(views))
        found[f"{name} sum"], found[f"{name} moments"] = rows.sum(0), rows.mT @ rows
        potentials = [potential_sum(x, samples.shards[name], world) for x in views]
        found[f"{name} potential"] = torch.stack(potentials).sum()
        found[f"{name} rows"] = like.new_tensor(len(rows))
        found[f"{name} ordered pairs"] = like.new_tensor(
            len(views) * samples.shards[name].size * (samples.shards[name].total - 1)
        )
    return found


def _pair_part(pairs: Sequence[tuple[Tensor, Tensor]], samples: Samples, world: World) -> dict[str, Tensor]:
    """Return this rank's sums over the pairs of views or of encoders."""
    shards = next(iter(samples.shards.values()))
    parts = [pair_sums(a, b, samples.labels, shards, world) for a, b in pairs]
    found = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0] if name != "beaten"}
    found["anchors"] = parts[0]["sums"].new_tensor(len(pairs) * shards.size)
    found["beaten"] = torch.cat([part["beaten"] for part in parts])
    return found


def _added_up(own: Mapping[str, Tensor], world: World) -> Totals:
    """Add up all ranks' parts in one message."""
    if world.size == 1:
        return own
    flat = torch.cat([x.flatten().to(world.device) for x in own.values()])
    summed = sum_over_ranks(flat, gradient="complete", world=world).split([x.numel() for x in own.values()])
    return {name: x.view(part.shape) for (name, part), x in zip(own.items(), summed, strict=True)}
