"""A step of a small batch on an accelerator starts few operators; there the host's time for each is the time of the step."""

from pathlib import Path

import pytest
import torch

from contrastive_zoo.engine import implementation
from tests.operators import LOSSES, operators
from tests.simulated import READS

PAGE = Path(__file__).parents[1] / "benchmarks" / "gpu.md"

MOST = {"InfoNCE": (25, 29), "CLIP": (35, 40), "NTXent": (26, 30), "SigLIP": (34, 39)}
"""Operators of a step of DistributedLoss, forward and backward, in float32 and in bfloat16."""

DTYPES = (torch.float32, torch.bfloat16)


def counted(name: str, form: str) -> tuple[int, ...]:
    found = [operators(name, dtype, form) for dtype in DTYPES]
    assert not any(READS.intersection(x) for x in found), "the host reads a value of the device"
    return tuple(map(len, found))


@pytest.mark.parametrize("name", LOSSES)
def test_a_small_batch_starts_few_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
    found = counted(name, "DistributedLoss")
    assert all(x <= most for x, most in zip(found, MOST[name], strict=True)), found
    assert all(x < y for x, y in zip(found, counted(name, "dense"), strict=True))
    assert f"| {' / '.join(map(str, MOST[name]))} |" in PAGE.read_text()
