"""What has a state is read with weights_only=True; a queue that differs between ranks is noticed."""

import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers

LABELS = torch.tensor([0, 1, 0, 1])


def rows(seed: int = 1) -> Tensor:
    return numbers(4, 3, seed=seed).float()


def trained(module: nn.Module) -> nn.Module:
    takes_labels = isinstance(module, (cz.ArcFace, cz.CrossBatchMemory, cz.Margin))
    module(rows(), LABELS if takes_labels else rows(2))
    return module


def queued() -> nn.Module:
    queue = cz.MemoryQueue(6, 3)
    queue.enqueue(rows(), LABELS)
    return queue


MODULES: dict[str, Callable[[], nn.Module]] = {
    "MemoryQueue": queued,
    "CrossBatchMemory": lambda: trained(cz.CrossBatchMemory(cz.SupCon(), size=6, embedding_size=3)),
    "MomentumEncoder": lambda: cz.MomentumEncoder(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    "DINO": lambda: trained(cz.DINO(3)),
    "TiCo": lambda: trained(cz.TiCo(3)),
    "SwAV": lambda: trained(cz.SwAV(5, 3)),
    "ArcFace": lambda: trained(cz.ArcFace(2, 3)),
    "Margin": lambda: trained(cz.Margin(num_classes=2)),
    "Clip": lambda: cz.Clip(temperature=cz.LearnableTemperature()),
}


@pytest.mark.parametrize("name", MODULES)
def test_weights_only_reads_a_state(name: str) -> None:
    torch.manual_seed(0)
    module, file = MODULES[name](), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = MODULES[name]()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(x, module.state_dict()[key]) for key, x in fresh.state_dict().items())


def test_the_positions_of_samplers_are_plain_numbers() -> None:
    sampler, file = cz.data.GlobalBatchSampler(8, batch_size=2), io.BytesIO()
    torch.save(sampler.state_dict(step=1), file)
    file.seek(0)
    sampler.load_state_dict(torch.load(file, weights_only=True))
    assert sampler.step == 1


def queue_that_differs_on_one_rank() -> str | None:
    queue = cz.MemoryQueue(4, 3)
    queue.enqueue(rows(dist.get_rank())[: 2 - dist.get_rank()])
    if dist.get_rank() == 1:
        queue.embeddings[1, 2] += 1e-3
    # the ring is full after the fourth row, and begins again
    return error_message(lambda: [queue.enqueue(rows()[: 1 - dist.get_rank()]) for _ in range(3)])


def test_a_queue_whose_content_differs_is_noticed(worlds: Worlds) -> None:
    first, second = worlds.run(2, queue_that_differs_on_one_rank)
    assert first == second
    assert first is not None
    assert "its content" in first
