"""Lightning Fabric: ``torchrun --standalone --nproc-per-node 2 -m examples.fabric``."""

from functools import partial

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, main, one_process


def train(*, accumulate: int = 1, gather_first: bool = False, loss_in_setup: bool = False) -> Trained:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="64-true")
    fabric.launch()
    encoder, loss_fn = make_encoder(), make_loss() if gather_first else cz.DistributedLoss(make_loss())
    optimizer = torch.optim.SGD([*encoder.parameters(), *loss_fn.parameters()], LEARNING_RATE, momentum=0.9)
    model, optimizer = fabric.setup(encoder, optimizer)
    criterion = fabric.setup_module(loss_fn) if loss_in_setup else loss_fn  # both are exact
    samples, batch_size = (120, 30) if gather_first else (125, 31)
    loader = make_loader(fabric.global_rank, fabric.world_size, samples=samples, batch_size=batch_size)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            last = (i + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                z = model(images)
                loss = loss_of_gathered(fabric, z, labels, loss_fn) if gather_first else criterion(z, labels)
                fabric.backward(loss / accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return Trained.of(encoder, loss_fn)


def loss_of_gathered(fabric: Fabric, z: Tensor, labels: Tensor, loss_fn: nn.Module) -> Tensor:
    """Compute the loss of gathered embeddings; ``all_gather`` returns [W, n, d]."""
    return loss_fn(fabric.all_gather(z, sync_grads=True).flatten(0, 1), fabric.all_gather(labels).flatten())


SETUPS = [
    Setup("the loss beside the model", train),
    Setup("the loss set up by Fabric", partial(train, loss_in_setup=True)),
    Setup("accumulation of 5 batches", partial(train, accumulate=5), reference=partial(one_process, accumulate=5)),
    Setup(
        "fabric.all_gather before the loss", partial(train, gather_first=True), shards="even",
        reference=partial(one_process, samples=120, batch_size=30), mistake="gathered before the loss",
        fix="DistributedLoss(loss)(z, labels)",
    ),
]  # fmt: skip

if __name__ == "__main__":
    main(SETUPS)
