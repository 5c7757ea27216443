"""A loss of pytorch-metric-learning against a memory is the loss of the memory as one batch, or is refused."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, reducers
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.losses import references
from contrastive_zoo.testing.catalogue import CATALOGUE
from tests.helpers import close, error_message, later, numbers
from tools.pml_matrix import AROUND_ANOTHER, BUILT, WIDTH, parts

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
