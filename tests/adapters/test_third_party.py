"""Losses of other kinds, as their authors write them: what a trainer on W ranks makes of them bare, and behind one line."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Call, Case, Trial
from contrastive_zoo.testing.worlds import Worlds


def attraction(z: Tensor, y: Tensor) -> Tensor:
    """Embeddings of a class towards each other, all away from each other."""
    squared = (z[:, None] - z).square().sum(2)
    return squared[y[:, None] == y].mean() + torch.exp(-squared).mean()


def nt_xent(view1: Tensor, view2: Tensor) -> Tensor:
    """Chen et al. 2020, eq. 1, averaged over both views."""
    z = F.normalize(torch.cat([view1, view2]), dim=1)
    logits = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(view1)))


def clip(image: Tensor, text: Tensor, logit_scale: Tensor) -> Tensor:
    """Radford et al. 2021, fig. 3; the scale is the model's."""
    logits = logit_scale * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


class WithScale(nn.Module):
    """A model's logit scale, passed to the loss at each call."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.loss = loss

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.loss(view1, view2, self.log_scale.exp())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss = (z - self.centre).square().sum(1).mean()
        self.centre.lerp_(z.detach().mean(0), 0.1)
        return loss


def local_rows(view1: Tensor, view2: Tensor) -> Tensor:
    """Compare local anchors with all ranks' embeddings, gathered with gradient, as lightly and open_clip do."""
    z, others = (
        torch.cat([view1, view2]),
        torch.cat([cz.collectives.all_gather(view1), cz.collectives.all_gather(view2)]),
    )
    n, total, start = len(view1), len(others) // 2, cz.World.of().shards(view1).start if dist.is_initialized() else 0
    rows = torch.cat([torch.arange(n), total + torch.arange(n)]) + start
    logits = F.normalize(z, dim=1) @ F.normalize(others, dim=1).T / 0.5
    logits = logits.scatter(1, rows[:, None], -torch.inf)
    return F.cross_entropy(logits, (rows + total) % (2 * total))


@dataclass(frozen=True)
class Recipe:
    name: str
    before: Callable[[], Any]
    after: Callable[[], Any]
    call: Call = "labels"

    def __str__(self) -> str:
        return self.name


RECIPES = [
    Recipe("a plain function", lambda: attraction, lambda: cz.DistributedLoss(attraction)),
    Recipe("a moving centre", Centred, lambda: cz.DistributedLoss(Centred())),
    Recipe("a formula of two views", lambda: local_rows, lambda: cz.DistributedLoss(nt_xent), "views"),
    Recipe(
        "a formula of gathered views",
        lambda: nt_xent,
        lambda: lambda view1, view2: nt_xent(cz.collectives.all_gather(view1), cz.collectives.all_gather(view2)),
        "views",
    ),
    Recipe("a scale from outside", lambda: WithScale(clip), lambda: WithScale(cz.DistributedLoss(clip)), "views"),
]


PAGE = Path(__file__).parents[2] / "docs" / "pages" / "third-party-losses.md"


def percent(found: Tensor, expected: Tensor) -> str:
    return f"{100 * (found - expected).norm() / expected.norm():.0f} %"


def row(recipe: Recipe, make: Callable[[], Any], worlds: Worlds) -> str:
    """Return what the page states for two processes with two and six samples: value (mean over ranks), gradients, state."""
    on = Trial(Case(make, recipe.call), GlobalBatch((2, 6), d=2, seed=3), worlds)
    alone, by_rank = on.on_one_process(), on.on_ranks()

    def flat(found: dict[str, Tensor]) -> Tensor:
        return torch.cat([x.double().flatten() for x in found.values()])

    cells = [percent(torch.tensor(sum(x.value for x in by_rank) / 2), torch.tensor(alone.value))]
    cells.append(percent(flat(on.reduced("encoder")), flat(alone.encoder)))
    cells.append(percent(flat(on.reduced("parameters")), flat(alone.parameters)) if alone.parameters else "–")
    cells.append(
        "–"
        if not alone.state
        else "the same"
        if torch.equal(flat(by_rank[0].state), flat(by_rank[1].state))
        else "differs"
    )
    return f"| {recipe.name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_page_states_the_measured_errors(recipe: Recipe, worlds: Worlds) -> None:
    assert row(recipe, recipe.before, worlds) in PAGE.read_text(encoding="utf-8").splitlines()
    numbers_after = row(recipe, recipe.after, worlds).split("|")[2:-1]
    assert {x.strip() for x in numbers_after} <= {"0 %", "–", "the same"}
