"""Third-party losses: bare and wrapped on W ranks, and against a memory, as one batch; what cannot be right is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners, reducers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.losses import references
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.invariants import CONTRACT
from contrastive_zoo.testing.measurement import Call, Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, error_message, later, numbers
from tests.zoo import dense_clip
from tools.pml_matrix import AROUND_ANOTHER, BUILT, WIDTH, parts


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


@pytest.mark.parametrize(("call", "shards", "reduction"), [("views", (3, 5), "mean"), ("labels", (2, 0, 4), "sum")])
def test_a_loss_may_change_its_rows_in_place_and_a_trainer_its_value(call, shards, reduction, worlds: Worlds) -> None:
    def centred(x: Tensor, y: Tensor) -> Tensor:
        for rows in (x, y)[: 1 + y.is_floating_point()]:
            rows -= rows.mean(0)
            rows[:, 0] = 0.0
        return (x * y.view(len(y), -1)).square().mean() + x.exp().mean()

    def halved() -> Callable[..., Tensor]:
        loss_fn = wrap(centred, grad_reduction=reduction)
        return lambda *rows: loss_fn(*rows).div_(2)

    trial = Trial(Case(halved, call, reduction), GlobalBatch(shards, d=4, seed=0), worlds)
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


EARLIER, LATER, CLASSES = 7, 5, 3
WITHOUT_MEMORY = {*AROUND_ANOTHER, "MultipleLosses"}  # they take no references
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in parts(losses) if name not in WITHOUT_MEMORY),
    ("TripletMarginLoss", {"swap": True}),
    ("TripletMarginLoss", {"smooth_loss": True}),
    ("CircleLoss", {"gamma": 3.0}),
]


class TermsOfLater(nn.Module):
    """A reducer: the sum of those terms whose anchor is one of ``anchors``, of all sub-losses."""

    def __init__(self, anchors: Tensor) -> None:
        super().__init__()
        self.anchors = anchors

    def forward(self, of_names: Any, embeddings: Tensor, labels: Tensor) -> Tensor:
        total = embeddings.sum() * 0
        for of in of_names.values():
            kind, terms = of["reduction_type"], of["losses"]
            if kind != "already_reduced" and isinstance(terms, Tensor):
                anchors = of["indices"] if kind == "element" else of["indices"][0]
                terms = terms.flatten()[torch.isin(anchors, self.anchors)].sum()
            total = total + terms
        return total


def made(name: str, settings: dict[str, Any], anchors: Tensor) -> nn.Module:
    torch.manual_seed(7)
    loss: nn.Module = BUILT.get(name, getattr(losses, name))(**settings).double()
    loss.reducer = TermsOfLater(anchors)
    return loss


def batches(seed: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (EARLIER + LATER,), generator=torch.Generator().manual_seed(seed))
    return numbers(EARLIER + LATER, WIDTH, seed=seed), labels


def in_memory(loss: Any, rows: Tensor, labels: Tensor) -> Tensor:
    memory = cz.CrossBatchMemory(loss, 20, WIDTH, dtype=torch.float64)
    memory.memory.enqueue(rows[:EARLIER], labels[:EARLIER])
    return memory(rows[EARLIER:], labels[EARLIER:])


def by_brute_force(name: str, settings: dict[str, Any], rows: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the whole memory as one batch, of the anchors in its last slots."""
    anchors = torch.arange(EARLIER, EARLIER + LATER)
    same, other = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    late = (torch.arange(len(labels)) >= EARLIER)[:, None]
    pairs = (*(same & other & late).nonzero(as_tuple=True), *(~same & late).nonzero(as_tuple=True))
    # its indices are weights of samples, and not which pairs there are
    return made(name, settings, anchors)(rows, labels, None if name == "NCALoss" else pairs)


def is_right(name: str, settings: dict[str, Any]) -> bool:
    try:
        for rows, labels in map(batches, range(4)):
            found = in_memory(made(name, settings, torch.arange(LATER)), rows, labels)
            torch.testing.assert_close(found, by_brute_force(name, settings, rows, labels), rtol=1e-10, atol=1e-10)
    except (IndexError, ValueError, AssertionError):  # errors of the library itself
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_a_loss_in_a_memory_is_refused_if_and_only_if_it_is_wrong(name, settings, monkeypatch) -> None:
    refusal = error_message(lambda: cz.CrossBatchMemory(made(name, settings, torch.arange(LATER)), 20, WIDTH))
    assert refusal is None or refusal.startswith(f"CrossBatchMemory: {name}: ")
    monkeypatch.setattr(references, "_LIBRARY", "no library")  # so that nothing is refused
    assert (refusal is None) == is_right(name, settings)


@pytest.mark.parametrize("kind", [losses.ContrastiveLoss, losses.NTXentLoss, losses.MultiSimilarityLoss])
def test_a_reducer_of_a_square_matrix_is_refused_with_losses_of_pairs(kind: Any) -> None:
    rows, labels = batches(0)
    loss = kind(reducer=reducers.PerAnchorReducer())
    if kind is losses.MultiSimilarityLoss:
        total = in_memory(made("MultiSimilarityLoss", {}, torch.arange(LATER)), rows, labels)
        close(in_memory(loss, rows, labels), total / LATER)
    else:
        with pytest.raises(ValueError, match="PerAnchorReducer counts as many references as anchors"):
            in_memory(loss, rows, labels)


class WithoutSwap(losses.TripletMarginLoss):
    def compute_loss(self, *args: Any) -> Any:
        self.swap = False
        return super().compute_loss(*args)


def test_a_subclass_with_a_formula_of_its_own_is_not_refused() -> None:
    assert in_memory(WithoutSwap(swap=True), *batches(0)) == in_memory(losses.TripletMarginLoss(), *batches(0))


def of_catalogue(name: str) -> torch.nn.Module:
    entry = CATALOGUE[name]
    torch.manual_seed(0)  # class weights are drawn
    settings = {key: WIDTH if key == "embedding_size" else x for key, x in entry.settings.items()}
    return entry.loss(**settings).double()


def memory_of(name: str) -> cz.CrossBatchMemory:
    return cz.CrossBatchMemory(of_catalogue(name), 20, WIDTH, dtype=torch.float64)


OWN = [name for name in CATALOGUE if error_message(lambda name=name: memory_of(name)) is None]
COMPARED = [name for name in OWN if memory_of(name).memory_input == "candidates"]


@pytest.mark.parametrize("name", COMPARED)
def test_losses_of_this_library_in_a_memory_are_those_of_one_batch(name: str) -> None:
    assert len(OWN) > 20
    for seed in range(4):
        rows, labels = batches(seed)
        loss = later(of_catalogue(name), reduction="none")
        close(in_memory(loss, rows, labels), loss(rows, labels)[EARLIER:])
