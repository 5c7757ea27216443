"""A step of a small batch on an accelerator starts few operators; there the host's time for each is the time of the step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import contrastive_zoo as cz
from contrastive_zoo.engine import plan
from contrastive_zoo.engine.precision import at_least_float32
from tests.simulated import READS, device

PAGE = Path(__file__).parents[1] / "benchmarks" / "gpu.md"
WIDTH = 8

STARTS_NOTHING = {"alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "squeeze",
                  "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
                  "empty", "empty_like", "new_empty", "new_empty_strided"}  # fmt: skip


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[1]
        self.names += [name] * (name not in STARTS_NOTHING)
        return function(*args, **(kwargs or {}))


def dense_softmaxes(name: str, a: Tensor, b: Tensor, scale: float | Tensor) -> Tensor:
    a, b, n = F.normalize(a, dim=1), F.normalize(b, dim=1), len(a)
    if name == "NTXent":
        z = torch.cat([a, b])
        logits = at_least_float32(scale * z @ z.T).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(2 * n, device=a.device).roll(n))
    logits, own = at_least_float32(scale * a @ b.T), torch.arange(n, device=a.device)
    loss = F.cross_entropy(logits, own)
    return loss if name == "InfoNCE" else (loss + F.cross_entropy(logits.T, own)) / 2


def dense_siglip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = at_least_float32(scale * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T) + bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(a), device=a.device) - 1)).sum() / len(a)


LOSSES: dict[str, Any] = {"InfoNCE": cz.InfoNCE, "CLIP": cz.Clip, "NTXent": cz.NTXent, "SigLIP": cz.SigLIP}


def dense(name: str, a: Tensor, b: Tensor, put: Callable[[Tensor], Tensor]) -> Any:
    """Return the formula, to be called, and the numbers that it learns."""
    learnt = [put(torch.zeros(())).requires_grad_() for _ in LOSSES[name]().parameters()]
    if name == "SigLIP":
        return lambda: dense_siglip(a, b, learnt[0].exp(), learnt[1]), learnt
    return lambda: dense_softmaxes(name, a, b, learnt[0].exp() if learnt else 10.0), learnt


def operators(name: str, dtype: torch.dtype, form: str) -> list[str]:
    with device() as mode:
        a, b = (mode.put(torch.randn(9, WIDTH, dtype=dtype)).requires_grad_() for _ in range(2))
        if form == "dense":
            compute, learnt = dense(name, a, b, mode.put)
        else:
            loss = mode.put(LOSSES[name]())
            if form == "DistributedLoss":
                loss = cz.DistributedLoss(loss, check_finite=False, check_equal=False)
            compute, learnt = lambda: loss(a, b), [*loss.parameters()]
        for _ in range(2):
            with Operators() as found:
                torch.autograd.grad(compute(), [a, b, *learnt])
    return found.names


MOST = {"InfoNCE": (25, 29), "CLIP": (43, 47), "NTXent": (26, 30), "SigLIP": (38, 42)}
"""Operators of a step of DistributedLoss, forward and backward, in float32 and in bfloat16."""


def counted(name: str, form: str, elements: int = 2**16) -> list[int]:
    with patch.object(plan, "SMALL_ON_ACCELERATORS", elements):
        found = [operators(name, dtype, form) for dtype in (torch.float32, torch.bfloat16)]
    if form == "DistributedLoss":  # which is without checks of values here
        assert not any(READS.intersection(x) for x in found), "the host reads a value of the device"
    return [*map(len, found)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_small_batch_starts_few_operators(name: str) -> None:
    found = counted(name, "DistributedLoss")
    assert all(x <= most for x, most in zip(found, MOST[name], strict=True)), found
    assert all(x < y for x, y in zip(found, counted(name, "dense"), strict=True))
    assert f"| {' / '.join(map(str, MOST[name]))} |" in PAGE.read_text()


if __name__ == "__main__":
    print("| loss | dense formula | engine of large batches | small batch | the same in `DistributedLoss` |")
    print("|---|---|---|---|---|")
    for name in LOSSES:
        forms = ("dense", 1), ("loss", -1), ("loss", 2**16), ("DistributedLoss", 2**16)
        cells = [" / ".join(map(str, counted(name, *form))) for form in forms]
        print(f"| {name} | {' | '.join(cells)} |")
