"""Recipes with an error in a hand-written backward pass."""

from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.distributed import DistributedLoss
from contrastive_zoo.testing.gallery.recipe import recipe


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
