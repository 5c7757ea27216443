"""Accelerate: ``torchrun --standalone --nproc-per-node 2 -m examples accelerate_loop``."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, ShardedBatches, make_dataset, make_encoder, make_loss
from examples.setup import Setup, Trained, one_process


def every_step(loader: DataLoader[Any], steps: int) -> Iterator[list[Tensor]]:
    """Yield this rank's batches, then empty ones: with ``even_batches=False`` ranks hold different numbers of batches."""
    batch: list[Tensor] = []
    for _, found in zip_longest(range(steps), loader):
        batch = [x[:0] for x in batch] if found is None else found
        yield batch


def global_loss(z: Tensor, labels: Tensor, loss_fn: nn.Module, accelerator: Accelerator) -> Tensor:
    return loss_fn(z, labels)


def train(
    samples: int = 125, *, accumulate: int = 1, even_batches: bool = False, compute: Callable[..., Tensor] = global_loss
) -> Trained:
    # the last batch comes at a different step on each rank, so it must not decide when DDP reduces gradients
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_with_dataloader=False)
    config = DataLoaderConfiguration(even_batches=even_batches)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dataloader_config=config)
    encoder, loss_fn = make_encoder(), make_loss() if compute is gathered_first else cz.DistributedLoss(make_loss())
    optimizer = torch.optim.SGD([*encoder.parameters(), *loss_fn.parameters()], LEARNING_RATE, momentum=0.9)
    # the batches of single ranks, which Accelerate hands out in turn: 30 samples a step on any number of processes
    batches = ShardedBatches(samples, 30 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(
        encoder, optimizer, DataLoader(make_dataset(samples), batch_sampler=batches)
    )
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for images, labels in every_step(loader, -(-samples // 30)):
            with accelerator.accumulate(model):
                loss = compute(model(images), labels, loss_fn, accelerator)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return Trained.of(encoder, loss_fn)


def gathered_first(z: Tensor, labels: Tensor, loss_fn: nn.Module, accelerator: Accelerator) -> Tensor:
    """Compute the loss of ``accelerator.gather(z)``, which carries no gradient, with the local embeddings put back."""
    gathered, start = accelerator.gather(z.detach()), accelerator.process_index * len(z)
    live = torch.cat([gathered[:start], z, gathered[start + len(z) :]])
    return loss_fn(live, accelerator.gather(labels))


one = partial(one_process, batch_size=30)
SETUPS = [
    Setup("even_batches=False, empty last batch on rank 1", train, reference=one),
    Setup("the same, accumulation of 5 batches", partial(train, accumulate=5), reference=partial(one, accumulate=5)),
    Setup("even shards", partial(train, 120), reference=partial(one, samples=120), shards="even"),
    Setup(
        "the default even_batches=True", partial(train, even_batches=True), reference=one,
        mistake="the last batch is padded with repeated samples", fix="even_batches=False and every_step",
    ),
    Setup(
        "accelerator.gather before the loss", partial(train, 120, compute=gathered_first), shards="even",
        reference=partial(one, samples=120), mistake="gather carries no gradient: encoder / W",
        fix="DistributedLoss(loss)(z, labels)",
    ),
]  # fmt: skip
