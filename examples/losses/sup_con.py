"""SupCon: labelled digits; the classes are the positives."""

import torch
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.losses.digits import Result, augmented, batches, encoder, held_out, images, local, result


def train(epochs: int = 60) -> Result:
    """Train on this process, one of several; every rank returns the same."""
    model, (pixels, labels) = DistributedDataParallel(encoder()), images()
    loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.2)).double())
    optimizer = torch.optim.Adam([*model.parameters(), *loss_fn.parameters()], lr=2e-3)
    losses, before = [], model.module(held_out())
    for indices, generator in batches(epochs):
        loss = loss_fn(model(local(augmented(pixels[indices], generator))), local(labels[indices]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result(losses, before, model.module(held_out()))
