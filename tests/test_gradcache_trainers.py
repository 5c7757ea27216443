"""GradCache under each trainer: a training in chunks ends with the parameters of one process that holds all activations."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, as_torchrun, drawn, local_shard, numbers, split
from tests.test_gradcache import IN, D, in_chunks, same
from tests.test_operators import Operators

pytestmark = pytest.mark.trainers

MIDDLE, CHUNK, STEPS = 6, 2, 3


class LowRank(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    """A layer with dropout, activations that are recomputed, and a buffer that DDP sends. It takes no empty batch."""

    def __init__(self, layer: nn.Module, dropout: float, recomputed: bool) -> None:
        super().__init__()
        self.layer, self.dropout, self.recomputed = layer, nn.Dropout(dropout), recomputed
        self.register_buffer("scale", torch.ones(()))

    def activations(self, x: Tensor) -> Tensor:
        assert len(x) > 0
        return self.dropout(torch.tanh(self.layer(x) * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.activations, x, use_reentrant=False) if self.recomputed else self.activations(x)


class Options(NamedTuple):
    layer: Callable[[int, int], nn.Module] = nn.Linear
    dropout: float = 0.0
    recomputed: bool = False
    towers: int = 1
    accumulate: int = 1

    def encoders(self) -> list[nn.Module]:
        result = []
        for seed in range(self.towers):
            torch.manual_seed(seed)
            blocks = [Block(self.layer(i, MIDDLE), self.dropout, self.recomputed) for i in (IN, MIDDLE)]
            result.append(nn.Sequential(*blocks, nn.Linear(MIDDLE, D)).double())
        return result


OPTIONS = {
    "plain": Options(),
    "dropout, recomputed activations": Options(dropout=0.3, recomputed=True, accumulate=2),
    "two towers": Options(towers=2),
    "adapters": Options(layer=LowRank, accumulate=2),
    "all": Options(LowRank, dropout=0.3, recomputed=True, towers=2, accumulate=2),
}


def embed(encoders: Sequence[Any], queries: Tensor, keys: Tensor, negatives: Tensor) -> Sequence[Tensor]:
    """Queries by the first encoder; keys and hard negatives by the last one. An encoder is called once."""
    if len(encoders) == 1:
        return encoders[0](torch.cat([queries, keys, negatives])).chunk(3)
    return encoders[0](queries), *encoders[1](torch.cat([keys, negatives])).chunk(2)


class Step(nn.Module):
    def __init__(self, encoders: Iterable[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.loss_fn = cz.DistributedLoss(cz.InfoNCE(temperature=cz.LearnableTemperature(0.5)).double())

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss_fn(*embed(self.encoders, *inputs))


def batch(step: int, micro_step: int, n: int) -> list[Tensor]:
    return [numbers(n, IN, seed=100 * step + 10 * micro_step + part) for part in range(3)]


def optimizer_of(step: nn.Module) -> torch.optim.Optimizer:
    trained = [x for x in step.parameters() if x.requires_grad]
    return torch.optim.SGD(trained, 0.5, momentum=0.9, foreach=False)


def on_one_process(options: Options, shards: Sequence[int]) -> list[Tensor]:
    """Hold all activations; ranks need not agree on the size of a chunk."""
    step = Step(options.encoders())
    optimizer = optimizer_of(step)
    for index in range(STEPS):
        generators = [torch.manual_seed(10 * index + rank).get_state() for rank in range(len(shards))]
        for micro_step in range(options.accumulate):
            embeddings = []
            by_rank = [split(x, shards) for x in batch(index, micro_step, sum(shards))]
            for rank, state in enumerate(generators):
                torch.set_rng_state(state)
                encoders = [in_chunks(x, CHUNK + rank) for x in step.encoders]
                embeddings.append(embed(encoders, *(x[rank] for x in by_rank)))
                generators[rank] = torch.get_rng_state()
            loss = step.loss_fn(*map(torch.cat, zip(*embeddings, strict=True)))
            (loss / options.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*step.parameters(), step.eval()(*batch(index, micro_step, sum(shards)))]


class Trainer:
    tolerance = EXACT

    def __init__(self, options: Options) -> None:
        self.step: nn.Module = DistributedDataParallel(self.cached(options.encoders()))

    @staticmethod
    def cached(encoders: Iterable[nn.Module]) -> Step:
        return Step(cz.GradCache(x, CHUNK + dist.get_rank()) for x in encoders)

    def backward(self, inputs: list[Tensor], share: float) -> None:
        (share * self.step(*inputs)).backward()

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step, whose gradients are there."""
        optimizer.step()
        optimizer.zero_grad()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.step.modules():
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            yield


class DDPInside(Trainer):
    def __init__(self, options: Options) -> None:
        self.step = self.cached(map(DistributedDataParallel, options.encoders()))


class ByHand(Trainer):
    """No trainer: the gradients of the encoders are averaged before a step."""

    def __init__(self, options: Options) -> None:
        self.step = self.cached(options.encoders())

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        cz.average_gradients(self.step.encoders)
        super().finish(optimizer)


class FSDP(Trainer):
    def __init__(self, options: Options) -> None:
        encoders = options.encoders()
        for module in (x for encoder in encoders for x in (*encoder, encoder)):
            fully_shard(module, mesh=self.mesh())
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
        self.step = self.cached(encoders)

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (dist.get_world_size(),))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        for is_reduced in (False, True):
            for module in self.step.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(is_reduced, recurse=False)
            if not is_reduced:
                yield


class HSDP(FSDP):
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


class Zero1(Trainer):
    """A stage of DeepSpeed's ZeRO, whose engine owns the backward pass; gloo sends, and nothing is compiled."""

    stage, tolerance = 1, 1e-6  # DeepSpeed takes no float64

    def __init__(self, options: Options) -> None:
        as_torchrun()
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__.clear()
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.accumulate,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # by default gradients longer than 1 are shortened
        }
        self.step = self.cached(options.encoders()).float()
        self.engine, *_ = deepspeed.initialize(model=self.step, optimizer=optimizer_of(self.step), config=config)

    def backward(self, inputs: list[Tensor], share: float) -> None:
        self.engine.backward(self.engine(*(x.float() for x in inputs)))
        self.engine.step()

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """The engine has done it."""


class Zero2(Zero1):
    stage = 2


def train(trainer: type[Trainer], options: Options, shards: Sequence[int]) -> list[Tensor]:
    training = trainer(options)
    optimizer = optimizer_of(training.step)
    for index in range(STEPS):
        torch.manual_seed(10 * index + dist.get_rank())
        for micro_step in range(options.accumulate):
            inputs = [local_shard(x, shards) for x in batch(index, micro_step, sum(shards))]
            with training.accumulating() if micro_step + 1 < options.accumulate else nullcontext():
                training.backward(inputs, 1 / options.accumulate)
        training.finish(optimizer)
    parameters = (x.full_tensor() if isinstance(x, DTensor) else x for x in training.step.parameters())
    with torch.no_grad():  # a validation: of FSDP each chunk sends messages there, too
        value = training.step.eval()(*(x.to(next(training.step.parameters()).dtype) for x in inputs))
        return [x.double() for x in (*parameters, value)]


TRAINERS: list[type[Trainer]] = [Trainer, DDPInside, ByHand, FSDP, HSDP]
SHARDS = {"plain": (0, 5), "adapters": (2, 0, 5), "two towers": (5, 0)}
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="`make test-trainers` installs deepspeed")
ZERO = [pytest.param(x, marks=needs_deepspeed) for x in (Zero1, Zero2)]
CASES = [
    *drawn(TRAINERS, OPTIONS, one_in=3),
    *(pytest.param(*case, marks=needs_deepspeed) for case in drawn([Zero1, Zero2], OPTIONS, one_in=2)),
]


@pytest.mark.parametrize(("trainer", "options"), CASES)
def test_a_training_ends_as_on_one_process(trainer: type[Trainer], options: str, worlds: Worlds) -> None:
    shards = (5, 3, 0, 2) if trainer is HSDP else SHARDS.get(options, (5, 2))
    expected = on_one_process(OPTIONS[options], shards)
    for found in worlds.run(len(shards), train, trainer, OPTIONS[options], shards, timeout=100):
        same(found, expected, trainer.tolerance)


def reductions(trainer: type[Trainer], chunks: int) -> Counter[str]:
    training = trainer(Options())
    for module in training.step.modules():
        if isinstance(module, cz.GradCache):
            module.chunk_size = -(-12 // chunks)
    with Operators() as found:
        training.backward([local_shard(x, (4, 4)) for x in batch(0, 0, 8)], 1.0)
    return Counter(x for x in found.names if "reduce" in x)


@pytest.mark.parametrize("trainer", [Trainer, DDPInside, FSDP, *ZERO])
def test_gradients_are_reduced_as_often_as_with_one_chunk(trainer: type[Trainer], worlds: Worlds) -> None:
    once, often = (worlds.run(2, reductions, trainer, chunks) for chunks in (1, 4))
    assert sum(once[0].values()) > 0
    assert often == once
