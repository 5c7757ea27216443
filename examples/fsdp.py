"""FSDP2, fully_shard: ``torchrun --standalone --nproc-per-node 2 -m examples fsdp``."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

import contrastive_zoo as cz
from examples.digits import LEARNING_RATE, EncoderWithLoss, make_loader, make_loss, run_steps
from examples.setup import Setup, Trained


def encoder_alone(step: EncoderWithLoss) -> None:
    fully_shard(step.encoder)  # each process keeps all loss parameters


def loss_ignored(step: EncoderWithLoss) -> None:
    fully_shard(step, ignored_params=set(step.loss_fn.parameters()))


def loss_sharded(step: EncoderWithLoss) -> None:
    fully_shard(step.encoder)
    fully_shard(step)  # the rest: loss parameters, of shape [1] and [10, 16]


def loss_sharded_summed(step: EncoderWithLoss) -> None:
    loss_sharded(step)
    for module in step.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def train(shard: Callable[[EncoderWithLoss], None], grad_reduction: Literal["mean", "sum"] = "mean") -> Trained:
    dist.init_process_group("gloo")
    step = EncoderWithLoss(cz.DistributedLoss(make_loss(), grad_reduction=grad_reduction))
    shard(step)
    optimizer = torch.optim.SGD(step.parameters(), LEARNING_RATE, momentum=0.9, foreach=False)
    run_steps(step, optimizer, make_loader(dist.get_rank(), dist.get_world_size()))
    return Trained.of(step.encoder, step.loss_fn)


SUM = '`DistributedLoss(loss, grad_reduction="sum")`, loss parameters sharded'
SETUPS = [
    Setup("the encoder sharded, the loss outside", partial(train, encoder_alone)),
    Setup("the loss inside, its parameters ignored", partial(train, loss_ignored)),
    Setup("the loss inside, its parameters sharded", partial(train, loss_sharded)),
    Setup("the same, gradients summed", partial(train, loss_sharded_summed, "sum")),
    Setup("divide factor 1", partial(train, loss_sharded_summed), mistake="FSDP sums all gradients.", fix=SUM),
]
