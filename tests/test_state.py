"""What has a state checks what it loads, stays as it was if that is wrong, and is read with weights_only=True."""

import io
from collections.abc import Callable
from typing import Any

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


def spoilt_states(state: dict[str, Tensor]) -> list[tuple[str, dict[str, Any]]]:
    """States with one wrong tensor each: NaN, another shape, another kind."""
    found = []
    for name, x in state.items():
        if x.is_floating_point():
            broken = x.clone()
            broken.view(-1)[0] = torch.nan
            found.append((name, {**state, name: broken}))
        found.append((name, {**state, name: torch.cat([x.reshape(-1), x.reshape(-1), x.reshape(-1)])}))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_state_leaves_the_module_as_it_was_and_weights_only_reads_a_right_one(name: str) -> None:
    torch.manual_seed(0)
    module, file = MODULES[name](), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    before = torch.load(file, weights_only=True)
    other = {key: x + 1 if x.is_floating_point() else x for key, x in before.items()}  # loaded in part, it would show
    for key, state in spoilt_states(other):
        with pytest.raises(RuntimeError, match=key.rpartition(".")[2]):
            module.load_state_dict(state)
        changed = [k for k, x in module.state_dict().items() if not torch.equal(x, before[k])]
        of_part = key.rpartition(".")[0]
        assert not [k for k in changed if k.rpartition(".")[0] == of_part], (key, changed)
        if name == "MomentumEncoder":
            assert not changed
        module.load_state_dict(before)
    fresh = MODULES[name]()
    fresh.load_state_dict(before)
    assert all(torch.equal(x, before[key]) for key, x in fresh.state_dict().items())


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
