"""Third-party losses: what a trainer on W ranks makes of them bare and wrapped; one that gathers is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import CONTRACT
from contrastive_zoo.testing.measurement import Call, Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.zoo import dense_clip


def attraction(z: Tensor, y: Tensor) -> Tensor:
    """Embeddings of a class towards each other, all away from each other."""
    squared = (z[:, None] - z).square().sum(2)
    return squared[y[:, None] == y].mean() + torch.exp(-squared).mean()


class WithScale(nn.Module):
    """A model's logit scale, passed to CLIP's loss as a temperature at each call."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.loss = loss

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.loss(view1, view2, (-self.log_scale).exp())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss = (z - self.centre).square().sum(1).mean()
        self.centre.lerp_(z.detach().mean(0), 0.1)
        return loss


Make = Callable[[], Any]
RECIPES: list[tuple[str, Make, Make, Call]] = [
    ("a plain function", lambda: attraction, lambda: cz.DistributedLoss(attraction), "labels"),
    ("a moving centre", Centred, lambda: cz.DistributedLoss(Centred()), "labels"),
    ("a scale from outside", lambda: WithScale(dense_clip), lambda: WithScale(cz.DistributedLoss(dense_clip)), "views"),
]
"""Losses bare and wrapped."""

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "third-party-losses.md"


def percent(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    x, y = (torch.cat([z.double().flatten() for z in of.values()]) for of in (found, expected))
    return f"{100 * (x - y).norm() / y.norm():.0f} %"


def row(name: str, make: Make, call: Call, worlds: Worlds) -> str:
    """Return what the page states for two processes with two and six samples: value (mean over ranks), gradients, state."""
    on = Trial(Case(make, call), GlobalBatch((2, 6), d=2, seed=3), worlds)
    alone, (first, second) = on.on_one_process(), on.on_ranks()
    value, expected = torch.tensor((first.value + second.value) / 2), torch.tensor(alone.value)
    cells = [percent({"": value}, {"": expected}), percent(on.reduced("encoder"), alone.encoder)]
    cells.append(percent(on.reduced("parameters"), alone.parameters) if alone.parameters else "–")
    is_same = all(torch.equal(x, second.state[key]) for key, x in first.state.items())
    cells.append(("the same" if is_same else "differs") if alone.state else "–")
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize(("name", "before", "after", "call"), RECIPES)
def test_the_page_states_the_measured_errors(name: str, before: Make, after: Make, call: Call, worlds: Worlds) -> None:
    assert row(name, before, call, worlds) in PAGE.read_text(encoding="utf-8").splitlines()
    numbers_after = row(name, after, call, worlds).split("|")[2:-1]
    assert {x.strip() for x in numbers_after} <= {"0 %", "–", "the same"}


wrap, mining = cz.DistributedLoss, cz.data.DistributedMiner
triplets, contrastive, hardest = losses.TripletMarginLoss(), losses.ContrastiveLoss(), miners.BatchHardMiner()
several, theirs, their_mining = losses.MultipleLosses, DistributedLossWrapper, DistributedMinerWrapper
queue = losses.CrossBatchMemory(contrastive, 4)
queue.loss = wrap(contrastive)
# it moved
OF_VERSION_3 = type("DistributedLossWrapper", (nn.Module,), {"__module__": "pytorch_metric_learning.distributed"})
REFUSED: dict[str, Callable[[], Any]] = {
    r"loss\.losses\.1 is a DistributedLoss": lambda: wrap(several([triplets, wrap(contrastive)])),
    r"loss\.losses\.a is a DistributedLossWrapper": lambda: wrap(several({"a": theirs(triplets)})),
    r"loss\.miners\.0 is a DistributedMiner.*the bare miner": lambda: wrap(several([triplets], [mining(hardest)])),
    r"loss\.loss is a DistributedLoss": lambda: wrap(queue),
    "loss is a DistributedLossWrapper": lambda: wrap(theirs(triplets)),
    r"loss is a DistributedLossWrapper\b": lambda: wrap(OF_VERSION_3()),
    "miner is a DistributedMinerWrapper.*the bare miner": lambda: wrap(triplets, miner=their_mining(hardest)),
    "miner is a DistributedMiner": lambda: wrap(triplets, miner=mining(hardest)),
    "a miner is an instance, got the class BatchHardMiner": lambda: wrap(triplets, miner=miners.BatchHardMiner),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrapper_is_refused_with_its_place(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


@pytest.mark.parametrize("wrapper", [wrap, theirs])
def test_a_wrapper_that_torch_does_not_know_as_a_part_sees_one_process(wrapper: Any, worlds: Worlds) -> None:
    def inside() -> Any:
        if dist.get_world_size() == 1:
            return wrap(losses.ContrastiveLoss(), miner=miners.BatchHardMiner())
        inner, miner = wrapper(losses.ContrastiveLoss()), their_mining(miners.BatchHardMiner())
        return wrap(lambda z, labels, indices_tuple: inner(z, labels, indices_tuple), miner=lambda *rows: miner(*rows))

    trial = Trial(Case(inside), GlobalBatch((3, 5), d=4, seed=0), worlds)
    for invariant in CONTRACT:
        invariant(trial)


def test_a_bound_method_of_a_trainer_is_no_inner_wrapper() -> None:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = wrap(triplets)
            self.second = wrap(self.of_rows)
            self.third = wrap(lambda z, labels: self.of_rows(z, labels))

        def of_rows(self, z: Tensor, labels: Tensor) -> Tensor:
            return z.square().sum()

    assert Trainer().third(torch.eye(2), torch.arange(2)) == 2
