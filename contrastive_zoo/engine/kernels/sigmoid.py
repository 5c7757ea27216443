"""Compute SigLIP's loss in Triton: losses and gradients in one sweep, since no pair's gradient depends on another pair."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from contrastive_zoo.engine.kernels.blocks import Operand, as_scalar, check_inputs, precision_of, write_scaled
from contrastive_zoo.engine.kernels.sigmoid_pairs import add_pairs
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.ranks.compiling import Function


def siglip(
    a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor, bias: float | Tensor
) -> Float[Tensor, ""]:
    """Return ``softplus(-y * (scale * a @ b.T + bias)).sum() / n``, y = 1 for pairs i = j and −1 for others.

    Rows are float32, bfloat16 or float16 of any strides, d at most 4,096. A scale or bias that is a tensor gets a gradient.
    The result has float32, in nats per row of a.

    Raises:
        ValueError: another shape or dtype, or rows on different devices.
    """
    check_inputs("siglip", a, b)
    return _Sigmoid.apply(a, b, as_scalar(scale, a), as_scalar(bias, a), torch.is_grad_enabled())


class _Sigmoid(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, learns: bool) -> Tensor:
        """Compute the loss and its gradients.

        ``learns``: whether gradients may be needed; a leaf has ``requires_grad`` under ``no_grad``, too.
        """
        learns &= any(ctx.needs_input_grad)
        precision = precision_of(a)
        left, right = (Operand.of(x, precision) for x in (a, b))
        sums = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (a, b)] if learns else None
        totals = torch.zeros(2, dtype=torch.float32, device=a.device)
        add_pairs(left, right, scale, bias, totals, sums, precision=precision, first=True)
        loss, dbias = (totals / len(a)).unbind()
        ctx.save_for_backward(a, b, scale, *(sums or (None, None)), dbias)
        return loss.clone()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, sums_a, sums_b, dbias = ctx.saved_tensors
        factor = g / len(a)
        da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))
        dots = torch.empty(max(len(a), len(b)), dtype=torch.float32, device=a.device)
        write_scaled(sums_b, Operand.of(b, "ieee"), scale, factor, db, dots, slice(None))
        write_scaled(sums_a, Operand.of(a, "ieee"), scale, factor, da, dots, slice(None))
        return da, db, dots[: len(a)].sum(), g * dbias, None
