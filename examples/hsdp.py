"""HSDP, replicas of shards on a 2 × 2 mesh: ``torchrun --standalone --nproc-per-node 4 -m examples hsdp``."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import contrastive_zoo as cz
from examples.digits import LEARNING_RATE, SAMPLES, make_encoder, make_loader, make_loss, run_steps
from examples.setup import Setup, Trained, one_process


def train(loss_along: str | None = None, samples: int = SAMPLES) -> Trained:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_encoder()
    fully_shard(model, mesh=mesh)
    # every process of the mesh holds other samples: the loss compares along both dimensions, in the default group
    loss_fn = cz.DistributedLoss(make_loss(), process_group=mesh[loss_along] if loss_along else None)
    parameters = [*model.parameters(), *loss_fn.parameters()]
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9, foreach=False)
    loader = make_loader(dist.get_rank(), dist.get_world_size(), samples=samples)
    run_steps(lambda images, labels: loss_fn(model(images), labels), optimizer, loader)
    return Trained.of(model, loss_fn)


SETUPS = [
    Setup("mesh of 2 replicas × 2 shards", train, processes=4),
    Setup(
        "the loss along one dimension of the mesh",
        partial(train, "shard", samples=155),
        processes=4,
        mistake="The loss gathers from the processes that share a replica; samples of other replicas are no negatives.",
        fix="`DistributedLoss(loss)`, the default group",
        reference=partial(one_process, samples=155),
        shards="uneven",
    ),
]
