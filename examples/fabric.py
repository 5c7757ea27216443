"""Lightning Fabric: ``torchrun --standalone --nproc-per-node 2 -m examples fabric``."""

from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, one_process


def train(*, accumulate: int = 1, gather: bool | None = None, loss_in_setup: bool = False) -> Trained:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="64-true")
    fabric.launch()
    encoder, loss_fn = make_encoder(), make_loss() if gather is not None else cz.DistributedLoss(make_loss())
    torch.set_default_dtype(torch.float64)  # Fabric casts the output of the model to it
    optimizer = torch.optim.SGD([*encoder.parameters(), *loss_fn.parameters()], LEARNING_RATE, momentum=0.9)
    model, optimizer = fabric.setup(encoder, optimizer)
    criterion = fabric.setup_module(loss_fn) if loss_in_setup else loss_fn  # both are exact
    samples, batch_size = (125, 31) if gather is None else (120, 30)
    loader = make_loader(fabric.global_rank, fabric.world_size, samples=samples, batch_size=batch_size)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            last = (i + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                z = model(images)
                if gather is not None:  # all ranks compute the whole loss; all_gather returns [W, n, d]
                    all_gather: Any = fabric.all_gather
                    z, labels = all_gather(z, sync_grads=gather).flatten(0, 1), all_gather(labels).flatten()
                loss = criterion(z, labels)
                fabric.backward(loss / accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return Trained.of(encoder, loss_fn)


even = partial(one_process, samples=120, batch_size=30)
SETUPS = [
    Setup("the loss beside the model", train),
    Setup("the loss set up by Fabric", partial(train, loss_in_setup=True)),
    Setup("accumulation of 5 batches", partial(train, accumulate=5), reference=partial(one_process, accumulate=5)),
    Setup(
        "all_gather(z, sync_grads=True), then the whole loss", partial(train, gather=True), shards="even", reference=even,
    ),
    Setup(
        "all_gather(z), then the whole loss", partial(train, gather=False), shards="even", reference=even,
        mistake="sync_grads=False: gathered without gradient, the encoder is not trained",
        fix="DistributedLoss(loss)(z, labels)",
    ),
]  # fmt: skip
