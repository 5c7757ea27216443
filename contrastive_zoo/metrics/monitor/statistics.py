"""The sums of one measurement, added up over ranks by one message, and how embeddings drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.metrics.monitor.pairs import pair_sums, potential_sum
from contrastive_zoo.metrics.monitor.samples import Samples
from contrastive_zoo.ranks.collectives import sum_over_ranks
from contrastive_zoo.ranks.world import World

WIDTH = 64
"""Numbers of a sketch; the estimated distance has a relative standard deviation of √(2 / 64) = 18 %."""


def sketch(module: nn.Module | None) -> Tensor:
    """Return a count sketch of all parameters that are equal on every rank, [WIDTH] in float64.

    Parameter k is added to number k mod WIDTH, with a random sign that is the same on every rank. So the expected squared
    distance of two sketches is that of the parameters, and it is 0 if the parameters are the same bits. Sharded parameters
    are left out: each rank holds other ones.

    Source: Charikar et al. 2002, https://doi.org/10.1016/S0304-3975(03)00400-6
    """
    result = torch.zeros(WIDTH, dtype=torch.float64)
    if module is None:
        return result
    generator = torch.Generator().manual_seed(0)  # its own, so that training draws what it draws without a monitor
    for _, x in LossModules(module).shared_state():
        if not isinstance(x, nn.Parameter) or x.is_meta:
            continue
        flat = nn.functional.pad(x.detach().flatten(), (0, -x.numel() % WIDTH)).view(-1, WIDTH)
        signs = torch.randint(0, 2, (len(flat),), generator=generator).mul_(2).sub_(1).to(flat)
        result += (
            signs.double() @ flat.double() if flat.dtype == torch.float64 else signs.float() @ flat.float()
        ).cpu()
    return result


Totals = Mapping[str, Tensor]
"""Sums over all ranks by name, in float64."""


def totals(samples: Samples, sketches: Mapping[str, Tensor], temperature: float, world: World) -> Totals:
    """Return the sums over all ranks; embeddings are gathered in rounds, and one message adds up all ranks' parts.

    The temperature is that of this rank's loss, NaN if it has none; sketches are those of the same modules on every rank.
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
    result = _pair_part(pairs, samples, world) if pairs else {}
    for name, views in samples.encoders.items():
        rows = torch.cat(list(views))
        result[f"{name} sum"], result[f"{name} moments"] = rows.sum(0), rows.mT @ rows
        potentials = [potential_sum(x, samples.shards[name], world) for x in views]
        result[f"{name} potential"] = torch.stack(potentials).sum()
        result[f"{name} rows"] = like.new_tensor(len(rows))
        result[f"{name} ordered pairs"] = like.new_tensor(
            len(views) * samples.shards[name].size * (samples.shards[name].total - 1)
        )
    return result


def _pair_part(pairs: Sequence[tuple[Tensor, Tensor]], samples: Samples, world: World) -> dict[str, Tensor]:
    """Return this rank's sums over the pairs of views or of encoders."""
    shards = next(iter(samples.shards.values()))
    parts = [pair_sums(a, b, samples.labels, shards, world) for a, b in pairs]
    result = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0] if name != "beaten"}
    result["anchors"] = parts[0]["sums"].new_tensor(len(pairs) * shards.size)
    result["beaten"] = torch.cat([part["beaten"] for part in parts])
    return result


def _added_up(own: Mapping[str, Tensor], world: World) -> Totals:
    """Add up all ranks' parts in one message."""
    if world.size == 1:
        return own
    flat = torch.cat([x.flatten().to(world.device) for x in own.values()])
    summed = sum_over_ranks(flat, gradient="complete", world=world).split([x.numel() for x in own.values()])
    return {name: x.view(part.shape) for (name, part), x in zip(own.items(), summed, strict=True)}
