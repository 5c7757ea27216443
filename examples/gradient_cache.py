"""GradCache within trainers: ``torchrun --standalone --nproc-per-node 2 -m examples gradient_cache``."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.digits import LEARNING_RATE, EncoderWithLoss, make_loader, make_loss, run_steps
from examples.setup import Setup, Trained, one_process

Wrap = Callable[[EncoderWithLoss], nn.Module]
CHUNK, SAMPLES = 4, 124
"""Samples whose activations are held at once, of 15 or 16 of a batch; and those of an epoch."""


def ddp_inside(step: EncoderWithLoss) -> nn.Module:
    step.encoder = cz.GradCache(DistributedDataParallel(step.encoder), CHUNK)
    return step


def ddp_around(step: EncoderWithLoss) -> nn.Module:
    step.encoder = cz.GradCache(step.encoder, CHUNK)
    return DistributedDataParallel(step)


def fsdp_inside(step: EncoderWithLoss) -> nn.Module:
    fully_shard(step.encoder)
    step.encoder = cz.GradCache(step.encoder, CHUNK)
    return step


def fsdp_around(step: EncoderWithLoss) -> nn.Module:
    fully_shard(next(step.encoder.children()))
    step.encoder = cz.GradCache(step.encoder, CHUNK)
    fully_shard(step, ignored_params=set(step.loss_fn.parameters()))
    return step


def train(wrap: Wrap, chunks: int = 1) -> Trained:
    """Train; with several chunks each has a loss of its own, whose gradients are accumulated."""
    dist.init_process_group("gloo")
    step = EncoderWithLoss(cz.DistributedLoss(make_loss()))
    model = wrap(step)
    optimizer = torch.optim.SGD(step.parameters(), LEARNING_RATE, momentum=0.9, foreach=False)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        parts = zip(images.tensor_split(chunks), labels.tensor_split(chunks), strict=True)
        return torch.stack([model(*x) for x in parts]).mean()

    run_steps(loss, optimizer, make_loader(dist.get_rank(), dist.get_world_size(), samples=SAMPLES))
    return Trained.of(step.encoder, step.loss_fn)


def setup(name: str, wrap: Wrap, mistake: str = "", fix: str = "", **how: int) -> Setup:
    reference = partial(one_process, samples=SAMPLES)
    return Setup(name, partial(train, wrap, **how), mistake=mistake, fix=fix, reference=reference, shards="uneven")


SETUPS = [
    setup("DDP inside of GradCache", ddp_inside),
    setup("DDP around GradCache", ddp_around),
    setup("FSDP2 inside of GradCache", fsdp_inside),
    setup(
        "FSDP2 around GradCache", fsdp_around, "FSDP reduces the gradients of one chunk only.",
        "`fully_shard(encoder)`, then `GradCache(encoder, chunk_size)`",
    ),
    setup(
        "a loss for each chunk", DistributedDataParallel, "Samples of other chunks are no negatives.",
        "`GradCache(encoder, chunk_size)`, one loss of all samples", chunks=2,
    ),
]  # fmt: skip
