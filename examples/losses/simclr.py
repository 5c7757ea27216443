"""SimCLR: two augmented views of each digit, no labels."""

import torch
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.losses.digits import Result, augmented, batches, encoder, held_out, images, local, result


def train(epochs: int = 60) -> Result:
    """Train on this process, one of several; every rank returns the same."""
    model, (pixels, _) = DistributedDataParallel(encoder()), images()
    loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses, before = [], model.module(held_out())
    for indices, generator in batches(epochs):
        view1, view2 = (local(augmented(pixels[indices], generator)) for _ in range(2))
        z1, z2 = model(torch.cat([view1, view2])).chunk(2)
        loss = loss_fn(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result(losses, before, model.module(held_out()))
