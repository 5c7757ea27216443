"""Validation batches of the Lightning example, and its training on one process."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from examples.digits import make_dataset, make_encoder, make_loss
from examples.setup import Trained, one_process


def validation_loader(rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    batches = [batch.tensor_split(world_size)[rank].tolist() for batch in torch.arange(125).split(31)]
    return DataLoader(make_dataset(), sampler=batches, batch_size=None)


def reference(**settings: Any) -> tuple[Trained, Trained]:
    before, after = one_process(**settings)
    return with_validation_loss(before), with_validation_loss(after)


def with_validation_loss(trained: Trained) -> Trained:
    """Place the validation loss after the parameters of the loss."""
    encoder, loss_fn = make_encoder(), make_loss()
    torch.nn.utils.vector_to_parameters(torch.cat([x.flatten() for x in trained.encoder]), encoder.parameters())
    torch.nn.utils.vector_to_parameters(torch.cat([x.flatten() for x in trained.loss]), loss_fn.parameters())
    losses = [loss_fn(encoder(images), labels) for images, labels in validation_loader()]
    return Trained(trained.encoder, [*trained.loss, torch.stack(losses).mean().detach()])
