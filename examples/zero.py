"""ZeroRedundancyOptimizer: ``torchrun --standalone --nproc-per-node 2 -m examples zero``."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.digits import make_encoder, make_loader, make_loss, run_steps
from examples.setup import Setup, Trained, one_process


def train() -> Trained:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_encoder())
    loss_fn = cz.DistributedLoss(make_loss())
    parameters = [*model.parameters(), *loss_fn.parameters()]
    # each process keeps Adam's state of some parameters, updates these and sends them to the others
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    run_steps(lambda images, labels: loss_fn(model(images), labels), optimizer, loader)
    return Trained.of(model, loss_fn)


adam = partial(torch.optim.Adam, lr=0.01)
SETUPS = [Setup("Adam, its state sharded", train, reference=partial(one_process, adam))]
