"""Tensor and data parallel, a 2 × 2 mesh: ``torchrun --standalone --nproc-per-node 4 -m examples tensor_parallel``."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import contrastive_zoo as cz
from examples.digits import LEARNING_RATE, make_encoder, make_loader, make_loss, run_steps
from examples.setup import Setup, Trained


def train(loss_along: str | None = "dp") -> Trained:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_encoder()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    # processes of one tensor-parallel group hold the same samples: the loss compares along "dp" only
    loss_fn = cz.DistributedLoss(make_loss(), process_group=mesh[loss_along] if loss_along else None)
    parameters = [*model.parameters(), *loss_fn.parameters()]
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9, foreach=False)
    loader = make_loader(mesh["dp"].get_local_rank(), mesh["dp"].size())
    run_steps(lambda images, labels: loss_fn(model(images), labels), optimizer, loader)
    return Trained.of(model, loss_fn)


SETUPS = [
    Setup("mesh of 2 data parallel × 2 tensor parallel", train, processes=4),
    Setup(
        "the loss over all processes of the mesh",
        partial(train, None),
        processes=4,
        mistake="The loss gathers from the default group, in which every sample occurs once per tensor-parallel process.",
        fix='`DistributedLoss(loss, process_group=mesh["dp"])`',
    ),
]
