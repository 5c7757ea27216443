"""Steps of losses on a GPU: a captured step is the step, so the host waits for nothing. They are skipped without one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import plan
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from tests.simulated import value_and_gradients
from tests.test_accelerator import LOSSES, may_read
from tests.zoo import Entry

DEVICE = "cuda"
WARM_UP = 3
FEWEST_CLASSES = 64

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ENTRIES = [x for x in LOSSES if not may_read(str(x))]
SMALL = {"NTXent", "InfoNCE", "CLIP", "Clip", "SigLIP"}

CASES = [(x, -1) for x in ENTRIES] + [(x, 2**16) for x in ENTRIES if str(x) in SMALL]
"""Every loss, without small batches: kernels where there are some. Then losses of :data:`SMALL` as they are used."""


def on_device(entry: Entry) -> tuple[nn.Module, list[Tensor]]:
    rows = whole_batch(entry.case(), GlobalBatch((600,), d=16, labels="mixed", seed=5))
    loss = cz.DistributedLoss(entry.case(temperature=0.3).make().loss, check_finite=False)
    rows = [x.float() if x.is_floating_point() else x.where(x < FEWEST_CLASSES, x % FEWEST_CLASSES) for x in rows]
    return loss.float().to(DEVICE), [x.to(DEVICE) for x in rows]


def captured(step: Callable[[], list[Any]]) -> tuple[list[Any], Callable[[], None]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return found, graph.replay


@pytest.mark.parametrize(("entry", "elements"), CASES, ids=str)
def test_a_captured_step_is_the_step(entry: Entry, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALL_ON_ACCELERATORS", elements)
    loss, rows = on_device(entry)
    twin = copy.deepcopy(loss)
    for _ in range(WARM_UP):
        value_and_gradients(twin, rows)
    found, replay = captured(lambda: value_and_gradients(loss, rows))
    for scale in (1.0, 1.5):
        for x in rows:
            if x.is_floating_point():
                x.mul_(scale).add_(0.1)
        replay()
        torch.testing.assert_close(found, value_and_gradients(twin, rows), rtol=1e-4, atol=1e-5)
