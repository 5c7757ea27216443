"""MoCo: keys of a momentum encoder, and a queue of earlier keys as negatives."""

import torch
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.losses.cross_batch_memory import CrossBatchMemory
from contrastive_zoo.losses.memory_queue import MomentumEncoder
from examples.losses.digits import Result, augmented, batches, encoder, held_out, images, local, result


def train(epochs: int = 60) -> Result:
    """Train on this process, one of several; every rank returns the same."""
    model, (pixels, _) = DistributedDataParallel(encoder()), images()
    keys = MomentumEncoder(model, momentum=0.99)
    loss_fn = cz.DistributedLoss(CrossBatchMemory(cz.InfoNCE(temperature=0.1), size=1024, embedding_size=32).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, before = [], model.module(held_out())
    for indices, generator in batches(epochs):
        view1, view2 = (local(augmented(pixels[indices], generator)) for _ in range(2))
        loss = loss_fn(model(view1), keys(view2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keys.update(model)
        losses.append(loss.item())
    return result(losses, before, model.module(held_out()))
