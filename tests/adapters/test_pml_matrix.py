"""All of pytorch-metric-learning on several processes is what it is on one, where DistributedLoss changes no call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.adapters.test_peer_losses import times_size
from tests.helpers import EVERY_CASE, numbers
from tools.comparison import Batch, Compared, Run, measure, train
from tools.pml_matrix import (
    BASES,
    CLASSES,
    LABELS,
    OF_ITS_BATCH,
    SAMPLES,
    SPLITS,
    WIDTH,
    Case,
    all_runs,
    cases,
    parts,
    some_runs,
)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),
]  # the library's own, about how it calls torch and NumPy

Rows = Sequence[tuple[Case, Mapping[Run, Compared]]]
WHOLE = {"TripletMarginLoss", "ProxyAnchorLoss"}


def drawn(case: Case) -> bool:
    """Whether a case is tested: each loss by itself and inside another, all of two, and a sixteenth of the others."""
    return EVERY_CASE or case.miner is None or case.loss in WHOLE or crc32(str(case).encode()) % 16 == 0


def verdict(case: Case, compared: Mapping[Run, Compared]) -> tuple[str, str]:
    """Return "✗" and what differs, "–" and why the library has no such case on one process, or "✓"."""
    for run, of in compared.items():
        if wrong := of.wrong(case.tolerance):
            return "✗", f"{case}, shards {list(run.steps[0])}: {wrong}"
    unsupported = case.inapplicable or next((x.unsupported for x in compared.values() if x.unsupported), None)
    return ("✓", "") if unsupported is None else ("–", " ".join(unsupported.split())[:160])


def wrong(rows: Rows) -> list[str]:
    return [why for mark, why in (verdict(*row) for row in rows) if mark == "✗"]


@pytest.fixture(scope="module")
def rows(worlds: Worlds) -> Rows:
    return measure(worlds, filter(drawn, cases()), all_runs if EVERY_CASE else some_runs)


def test_all_cases_equal_one_process(rows: Rows) -> None:
    assert wrong(rows) == []


def test_every_export_is_compared(rows: Rows) -> None:
    """Every loss by itself, every part with some loss; in a search on every split."""
    marks = {case: verdict(case, compared)[0] for case, compared in rows}
    for loss in parts(losses):
        assert marks[Case(loss)] == "✓", f"how is {loss} built? say so in BUILT, or in BASES that it is no loss"
        assert [run.steps[0] for run in all_runs(Case(loss))] == list(SPLITS)
    compared = [case for case, mark in marks.items() if mark == "✓"]
    assert {case.miner for case in compared} - {None} == set(parts(miners))
    inside = {*losses.CrossBatchMemory.supported_losses(), *losses.SelfSupervisedLoss.supported_losses()}
    assert {case.inner for case in compared} - {None} == inside
    assert {case.loss for case in compared if case.references} >= {"TripletMarginLoss", "NTXentLoss"}
    assert {case.loss for case in compared if case.mined == "outside"} >= {"TripletMarginLoss", "ProxyAnchorLoss"}
    assert set(BASES) <= {*vars(losses), *vars(miners)}


@pytest.mark.parametrize("loss", parts(losses))
def test_every_loss_has_a_comparison(loss: str) -> None:
    found = train(Case(loss), all_runs(Case(loss))[0])
    assert found["value 0"].abs() > 1e-6
    assert all(x.abs().max() > 1e-9 for name, x in found.items() if name.startswith(("encoder", "parameter")))


class Masked(Case):
    def arguments(self, batch: Batch) -> dict[str, Tensor]:
        return super().arguments(batch) | {"enqueue_mask": batch.local(torch.arange(batch.total) % 3 > 0)}


def test_the_enqueue_mask_is_gathered(worlds: Worlds) -> None:
    assert wrong(measure(worlds, [Masked("CrossBatchMemory")], all_runs)) == []


def test_a_new_export_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewLoss(losses.ContrastiveLoss):
        def __init__(self, needs_to_be_told: int) -> None:
            super().__init__()

    monkeypatch.setattr(losses, "NewLoss", NewLoss, raising=False)
    assert "NewLoss" in parts(losses)
    assert "needs_to_be_told" in train(Case("NewLoss"), Run(((12,),)))


def test_a_wrapper_that_counts_w_times_is_caught(worlds: Worlds) -> None:
    """A loss without a wrapper is caught in tests/adapters/test_peer_losses.py."""
    for case in (Case("ContrastiveLoss"), Case("ProxyAnchorLoss"), Case("CrossBatchMemory")):
        assert wrong(measure(worlds, [case], some_runs, times_size)), case


def embeddings(seed: int = 0, n: int = SAMPLES) -> Tensor:
    return numbers(n, WIDTH, seed=seed).requires_grad_()


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "embeddings and labels": lambda: ((embeddings(), LABELS), {}),
    "by name": lambda: ((), {"labels": LABELS, "embeddings": embeddings()}),
    "one tensor": lambda: ((embeddings(),), {}),
    "two views": lambda: ((embeddings(0), embeddings(1)), {}),
    "a reference by name": lambda: ((embeddings(),), {"ref_emb": embeddings(1)}),
    "reference rows": lambda: ((embeddings(), LABELS, None, embeddings(1), LABELS.flip(0)), {}),
    "indices": lambda: ((embeddings(), LABELS, tuple(torch.tensor([[0, 1], [1, 2], [8, 9]]))), {}),
    "a mask": lambda: ((embeddings(), LABELS), {"enqueue_mask": torch.arange(SAMPLES) % 2 == 0}),
    "nothing": lambda: ((), {}),
    "labels missing": lambda: ((embeddings(), None), {}),
    "an argument that does not exist": lambda: ((embeddings(), LABELS), {"lables": LABELS}),
    "too many arguments": lambda: ((embeddings(), *[LABELS] * 9), {}),
    "too few labels": lambda: ((embeddings(), LABELS[:-1]), {}),
    "labels as a list": lambda: ((embeddings(), LABELS.tolist()), {}),
    "no rows": lambda: ((embeddings(n=0), LABELS[:0]), {}),
}


def outcome(loss: Callable[..., Any], name: str) -> Any:
    args, kwargs = CALLS[name]()
    torch.manual_seed(5)
    try:
        value = loss(*args, **kwargs)
        learnt = [x.sum() for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]
        if learnt:
            torch.stack(learnt).sum().backward()
    except Exception as error:
        return type(error), str(error)
    given = [x.grad for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
    weights = [x.grad for x in loss.parameters()] if isinstance(loss, nn.Module) else []
    buffers = [x.clone() for x in loss.buffers()] if isinstance(loss, nn.Module) else []
    return value, given, weights, buffers


def same(found: Any, expected: Any) -> bool:
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    return len(ours) == len(theirs) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) and x.dtype == y.dtype and torch.equal(x.isnan(), y.isnan())
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and (x == y if not isinstance(x, nn.Module) else True)
        for x, y in zip(ours, theirs, strict=True)
    )


def noticed(loss: str, grad_reduction: str, calls: Iterable[str] = CALLS) -> list[str]:
    def wrapped() -> nn.Module:
        return cz.DistributedLoss(Case(loss).construct()[0], grad_reduction=grad_reduction)

    return [
        f"{name}: {found} instead of {expected}"
        for name in calls
        if not (loss in OF_ITS_BATCH and "reference" in name)
        and not same(found := outcome(wrapped(), name), expected := outcome(Case(loss).construct()[0], name))
    ]


@pytest.mark.parametrize("loss", parts(losses))
def test_every_call_is_equal_without_a_process_group(loss: str) -> None:
    assert noticed(loss, "mean") == []


def test_a_wrapper_that_changes_a_call_is_detected() -> None:
    assert not same(
        outcome(lambda *a, **k: 2 * losses.ContrastiveLoss()(*a, **k), "by name"),
        outcome(losses.ContrastiveLoss(), "by name"),
    )
    assert not same(outcome(losses.NTXentLoss(), "nothing"), outcome(losses.SupConLoss(), "too many arguments"))
    assert not same([torch.tensor(1.0)], [torch.tensor(torch.nan)])


def test_attributes_of_a_loss_inside_ddp_are_read_too(worlds: Worlds) -> None:
    def job() -> float:
        ddp = nn.parallel.DistributedDataParallel(losses.NormalizedSoftmaxLoss(CLASSES, WIDTH, temperature=0.25))
        return cz.DistributedLoss(ddp).temperature

    assert worlds.run(1, job) == [0.25]
