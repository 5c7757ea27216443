"""DistributedDataParallel, started by torchrun: ``torchrun --standalone --nproc-per-node 2 -m examples.ddp``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, main


def train() -> Trained:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_encoder())
    loss_fn = cz.DistributedLoss(make_loss())
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], LEARNING_RATE, momentum=0.9)
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss_fn(model(images), labels).backward()
            optimizer.step()
    return Trained.of(model, loss_fn)


SETUPS = [Setup("DDP", train)]

if __name__ == "__main__":
    main(SETUPS)
