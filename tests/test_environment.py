"""A third-party loss reads torchrun's environment variables as one process has them; afterwards they are what they were."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ONE = {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # LOCAL_RANK names the device


def environment() -> dict[str, str]:
    return {name: x for name, x in os.environ.items() if name in TORCHRUN}


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Any]) -> Tensor:
        ctx.found = found
        found.append(environment())
        with patch.dict(os.environ):  # writes what it has read
            pass
        with ThreadPoolExecutor(1) as other:
            other.submit(in_one_process, environment, "another", cz.World.of()).result()
        found.append(environment())
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.found.append(environment())
        raise KeyError("after the environment is read")


def environments(*variables: str) -> list[Any]:
    found: list[Any] = []
    group: Any = dist.group.WORLD

    def loss(z: Tensor) -> Tensor:
        value = Reads.apply(z, found)
        with default_group(group):  # as a checkpoint's hooks have it, which call the encoder anew
            found.append(environment())
        return value

    with patch.dict(os.environ, {name: TORCHRUN[name] for name in variables}):
        value = cz.DistributedLoss(loss)(numbers(3, 2, seed=dist.get_rank()).requires_grad_())
        found.append(environment())
        error_message(value.backward, KeyError)
        found.append(environment())
    return found


def test_a_loss_reads_the_environment_of_one_process(worlds: Worlds) -> None:
    for found in worlds.run(2, environments, *TORCHRUN):
        assert found == [ONE, ONE, TORCHRUN, TORCHRUN, ONE, TORCHRUN]


def test_a_loss_reads_no_environment_where_there_is_none(worlds: Worlds) -> None:
    assert worlds.run(2, environments) == [[{}] * 6] * 2
