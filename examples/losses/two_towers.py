"""CLIP's loss with two towers: the upper and the lower half of a digit, each with an encoder of its own."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.losses.digits import Result, augmented, batches, encoder, held_out, images, local, result


class Towers(nn.Module):
    """Two encoders under one DDP, because a step trains both."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = encoder(32), encoder(32)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.upper(rows[:, :32]), self.lower(rows[:, 32:])


def train(epochs: int = 60) -> Result:
    """Train on this process, one of several; every rank returns the same."""
    model, (pixels, _) = DistributedDataParallel(Towers()), images()
    loss_fn = cz.DistributedLoss(cz.Clip().double())  # it learns its temperature
    optimizer = torch.optim.Adam([*model.parameters(), *loss_fn.parameters()], lr=2e-3)
    losses, before = [], torch.cat(model.module(held_out()), 1)
    for indices, generator in batches(epochs):
        upper, lower = model(local(augmented(pixels[indices], generator)))
        loss = loss_fn(upper, lower)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result(losses, before, torch.cat(model.module(held_out()), 1))
