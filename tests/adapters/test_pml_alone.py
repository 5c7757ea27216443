"""On one process, with and without a process group, DistributedLoss is transparent for every loss of the library."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers
from tools.pml_matrix import CLASSES, LABELS, OF_ITS_BATCH, SAMPLES, WIDTH, Case, parts

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),
]  # the library's own, about how it calls torch and NumPy


def rows(seed: int = 0, n: int = SAMPLES) -> Tensor:
    return numbers(n, WIDTH, seed=seed).requires_grad_()


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "rows and labels": lambda: ((rows(), LABELS), {}),
    "by name": lambda: ((), {"labels": LABELS, "embeddings": rows()}),
    "one tensor": lambda: ((rows(),), {}),
    "two views": lambda: ((rows(0), rows(1)), {}),
    "a reference by name": lambda: ((rows(),), {"ref_emb": rows(1)}),
    "reference rows": lambda: ((rows(), LABELS, None, rows(1), LABELS.flip(0)), {}),
    "indices": lambda: ((rows(), LABELS, tuple(torch.tensor([[0, 1], [1, 2], [8, 9]]))), {}),
    "a mask": lambda: ((rows(), LABELS), {"enqueue_mask": torch.arange(SAMPLES) % 2 == 0}),
    "nothing": lambda: ((), {}),
    "labels missing": lambda: ((rows(), None), {}),
    "an argument that does not exist": lambda: ((rows(), LABELS), {"lables": LABELS}),
    "too many arguments": lambda: ((rows(), *[LABELS] * 9), {}),
    "too few labels": lambda: ((rows(), LABELS[:-1]), {}),
    "labels as a list": lambda: ((rows(), LABELS.tolist()), {}),
    "no rows": lambda: ((rows(n=0), LABELS[:0]), {}),
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
