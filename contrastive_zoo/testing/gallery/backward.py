"""Recipes with an error in a hand-written backward pass."""

from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.testing.gallery.recipe import dense_sup_con, recipe
from contrastive_zoo.wrapper.distributed import DistributedLoss


class _IgnoresGradOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0]


@recipe("ignored grad_output", mistake="ignored grad_output", call="labels")
def _() -> Any:
    """an autograd.Function that returns its gradient without grad_output"""
    return DistributedLoss(lambda embeddings, labels: _IgnoresGradOutput.apply(embeddings))


class _RescalesGradient(torch.autograd.Function):
    """The identity; the backward pass multiplies the gradient by √(B/τ), with the local batch size B."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float) -> Tensor:
        ctx.factor = (len(z) / temperature) ** 0.5
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * dy, None


@recipe("gradient × √(B/τ)", mistake="rescaled by batch size", call="labels")
def _() -> Any:
    """a memory-efficient loss whose backward rescales the gradient by √(B/τ), with the local batch size B"""
    loss = DistributedLoss(dense_sup_con)
    return lambda embeddings, labels: loss(_RescalesGradient.apply(embeddings, 0.5), labels)


class _SavesOnClass(torch.autograd.Function):
    saved: Tensor

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        _SavesOnClass.saved = z.detach()
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy * _SavesOnClass.saved


@recipe("overwritten tensors", mistake="overwritten tensors", call="labels")
def _() -> Any:
    """an autograd.Function that stores tensors for the backward pass on the class"""
    return DistributedLoss(lambda embeddings, labels: _SavesOnClass.apply(embeddings))
