"""All of pytorch-metric-learning on several processes is what it is on one, where DistributedLoss changes no call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.adapters.test_peer_losses import times_size
from tests.helpers import EVERY_CASE, numbers
from tools import pml_matrix
from tools.comparison import Batch, Compared, Run, measure, train
from tools.pml_matrix import LABELS, SAMPLES, WIDTH, Case, all_runs, parts, some_runs

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the library's own, about torch and NumPy

Rows = Sequence[tuple[Case, Mapping[Run, Compared]]]
WHOLE = {"TripletMarginLoss", "ProxyAnchorLoss"}


def drawn(case: Case) -> bool:
    """Whether a case is tested: each loss by itself and inside another, all of two, and a sixteenth of the others."""
    return EVERY_CASE or case.miner is None or case.loss in WHOLE or crc32(str(case).encode()) % 16 == 0


def wrong(rows: Rows) -> list[str]:
    differs = ((case, run, of.wrong(case.tolerance)) for case, compared in rows for run, of in compared.items())
    return [f"{case}, shards {list(run.steps[0])}: {why}" for case, run, why in differs if why]


def test_all_cases_equal_one_process_and_every_export_is_among_them(worlds: Worlds) -> None:
    """Every loss by itself, every part with some loss; in a search on every split."""
    rows = measure(worlds, filter(drawn, pml_matrix.cases()), all_runs if EVERY_CASE else some_runs)
    assert wrong(rows) == []
    compared = [case for case, of in rows if not (case.inapplicable or any(x.unsupported for x in of.values()))]
    for loss in parts(losses):
        assert Case(loss) in compared, f"how is {loss} built? say so in BUILT, or in BASES that it is no loss"
        assert [run.steps[0] for run in all_runs(Case(loss))] == list(pml_matrix.SPLITS)
    assert {case.miner for case in compared} - {None} == set(parts(miners))
    inside = {*losses.CrossBatchMemory.supported_losses(), *losses.SelfSupervisedLoss.supported_losses()}
    assert {case.inner for case in compared} - {None} == inside
    assert {case.loss for case in compared if case.references} >= {"TripletMarginLoss", "NTXentLoss"}
    assert {case.loss for case in compared if case.mined == "outside"} >= {"TripletMarginLoss", "ProxyAnchorLoss"}
    assert set(pml_matrix.BASES) <= {*vars(losses), *vars(miners)}


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


def outcome(loss: Callable[..., Any], name: str) -> str:
    """Return all that a call returns, raises and leaves behind, with all digits."""
    args, kwargs = CALLS[name]()
    torch.manual_seed(5)
    try:
        value = loss(*args, **kwargs)
        learnt = [x.sum() for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]
        if learnt:
            torch.stack(learnt).sum().backward()
    except Exception as error:
        return repr(error)
    given = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
    weights, buffers = (loss.parameters(), loss.buffers()) if isinstance(loss, nn.Module) else ((), ())
    found = value, [x.grad for x in (*given, *weights)], [*buffers]
    return repr(tree_map(lambda x: (x.dtype, x.tolist()) if isinstance(x, Tensor) else x, found))


@pytest.mark.parametrize("loss", parts(losses))
def test_every_call_is_equal_without_a_process_group(loss: str) -> None:
    for name in CALLS:
        if not (loss in pml_matrix.OF_ITS_BATCH and "reference" in name):
            wrapped = cz.DistributedLoss(Case(loss).construct()[0])
            assert outcome(wrapped, name) == outcome(Case(loss).construct()[0], name), name


def test_a_wrapper_that_changes_a_call_is_detected() -> None:
    loss = losses.ContrastiveLoss()
    assert outcome(lambda *args, **named: 2 * loss(*args, **named), "by name") != outcome(loss, "by name")
    assert outcome(losses.NTXentLoss(), "nothing") != outcome(losses.SupConLoss(), "too many arguments")


def test_attributes_of_a_loss_inside_ddp_are_read_too(worlds: Worlds) -> None:
    def job() -> float:
        ddp = nn.parallel.DistributedDataParallel(losses.NormalizedSoftmaxLoss(3, WIDTH, temperature=0.25))
        return cz.DistributedLoss(ddp).temperature

    assert worlds.run(1, job) == [0.25]
