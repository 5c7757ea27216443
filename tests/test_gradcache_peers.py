"""GradCache with libraries that are not in every environment: stages of ZeRO by DeepSpeed, adapters by peft."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import PathFinder
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.wrapper.chunked_encoder import ChunkedEncoder
from tests.helpers import close, distance, drawn, local_shard, numbers
from tests.test_gradcache_trainers import (
    CHUNK,
    FSDP,
    IN,
    OPTIONS,
    OUT,
    STEPS,
    DDPInside,
    Options,
    Trainer,
    batch,
    on_one_process,
    optimizer_of,
    train,
)
from tests.test_operators import Operators
from tools.pages import ROOT

pytestmark = pytest.mark.trainers

PEERS = str(ROOT / ".venv" / "trainers")
SHARDS = (5, 2)


def needed(package: str, command: str) -> None:
    if PathFinder.find_spec(package, [*sys.path, PEERS]) is None:
        pytest.skip(f"{package} is not installed; `make {command}` installs it")


@contextmanager
def deepspeed_engine(step: nn.Module, stage: int, accumulate: int = 1) -> Iterator[Any]:
    """Run the body with the engine of this rank; gloo sends, and nothing is compiled."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    of_launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {**of_launcher, "DS_ACCELERATOR": "cpu"}):
        import deepspeed

        deepspeed.ops.__compatible_ops__.clear()
        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": 0.0,
            # parameters of any size are partitioned
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        yield deepspeed.initialize(model=step, optimizer=optimizer_of(step), config=config)[0]


def train_with_zero(stage: int, options: Options) -> tuple[list[Tensor], list[int]]:
    step = Trainer.cached(options.encoders()).float()  # DeepSpeed takes no float64
    messages = []
    with deepspeed_engine(step, stage, options.accumulate) as engine:
        for index in range(STEPS):
            torch.manual_seed(10 * index + dist.get_rank())
            for micro_step in range(options.accumulate):
                loss = engine(*(local_shard(x, SHARDS).float() for x in batch(index, micro_step, sum(SHARDS))))
                with Operators() as found:
                    engine.backward(loss)
                messages.append(sum("reduce" in x for x in found.names))
                engine.step()
        import deepspeed

        with deepspeed.zero.GatheredParameters([*step.parameters()], enabled=stage == 3):
            return [x.detach().clone() for x in step.parameters()], messages


@pytest.mark.parametrize(("stage", "options"), drawn([1, 2, 3], OPTIONS, one_in=2))
def test_a_training_with_zero_ends_as_on_one_process(stage: int, options: str, worlds: Worlds) -> None:
    needed("deepspeed", "test-trainers")
    expected = on_one_process(OPTIONS[options], SHARDS)
    accumulate = OPTIONS[options].accumulate
    # stages 2 and 3 hold no gradients of all parameters between batches, so they reduce those of each batch
    of_step = [int(stage > 1)] * (accumulate - 1) + [1]
    for found, messages in worlds.run(2, train_with_zero, stage, OPTIONS[options]):
        assert max(distance(x, y) for x, y in zip(found, expected, strict=True)) < 1e-6
        assert messages == of_step * STEPS


def test_zero_3_needs_gradients_that_are_held(worlds: Worlds) -> None:
    needed("deepspeed", "test-trainers")

    def job() -> None:
        with mock.patch.object(ChunkedEncoder, "_held", return_value=nullcontext()):
            train_with_zero(3, Options())

    with pytest.raises(RankError, match=r"params_in_bucket[\s\S]*AssertionError"):  # one parameter, several gradients
        worlds.run(2, job)


class Encoded(nn.Module):
    def __init__(self, encoder: nn.Module, calls: int) -> None:
        super().__init__()
        self.encoder, self.calls = cz.GradCache(encoder, CHUNK), calls

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.encoder(x) for _ in range(self.calls)).square().sum()


class PerChunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(IN, OUT) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + (self.layers[1](x) if len(x) == CHUNK else 0)


def refusal_of_zero_3(step: nn.Module) -> str:
    with deepspeed_engine(step, stage=3) as engine:
        try:
            engine.backward(engine(numbers(CHUNK + 1, IN, seed=0).float()))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "calls", "text"),
    [
        (lambda: nn.Linear(IN, OUT), 2, "Encode all samples by one call"),
        (PerChunk, 1, "that the last chunk does not use"),
    ],
)
def test_zero_3_says_what_it_would_reduce_in_part(make: Any, calls: int, text: str, worlds: Worlds) -> None:
    needed("deepspeed", "test-trainers")
    found = worlds.run(2, lambda: refusal_of_zero_3(Encoded(make(), calls)))
    assert all(text in of_rank for of_rank in found)


class Text(nn.Module):
    """A transformer of random weights; words are made of numbers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
        config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, attn_implementation="eager")
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(x.mul(4).abs().long().clamp(max=15)).last_hidden_state.mean(1)


def adapted(options: Options) -> nn.Module:
    sys.path.append(PEERS)
    try:
        from peft import LoraConfig, get_peft_model
    finally:
        sys.path.remove(PEERS)
    config = LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.2, init_lora_weights=False)
    return get_peft_model(Text(), config)


@pytest.mark.parametrize("trainer", [x for (x,) in drawn([DDPInside, FSDP], one_in=2)])
def test_adapters_of_peft_end_as_on_one_process(trainer: type[Trainer], worlds: Worlds) -> None:
    needed("peft", "test")
    options = Options(accumulate=2, encoder=adapted)
    expected = on_one_process(options, SHARDS)
    for found in worlds.run(2, train, trainer, options, SHARDS):
        for x, y in zip(found, expected, strict=True):
            close(x, y)
