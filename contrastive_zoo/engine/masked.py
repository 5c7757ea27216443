"""Reduce the rows of a matrix over the entries that a mask selects: log-sum-exp, maximum, minimum.

Value and gradient are computed by hand, in a third of autograd's passes over the matrix. Comparisons are written as 0 and 1
into floats (``out=``): a CPU converts to and from booleans element by element.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.pairwise import takes_sparse_gradient
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.compiling import Function


def masked_log_sum_exp(
    x: Float[Tensor, "c N"], mask: Bool[Tensor, "c N"], *, empty: float = -torch.inf
) -> Float[Tensor, " c"]:
    """Return log Σ exp of each row's selected, finite entries; ``empty``, without gradient, for a row without any."""
    if not is_dense() and x.shape[1]:  # a maximum of no columns is an error
        return _MaskedLogSumExp.apply(x, mask, empty)
    some = mask.any(1)
    return x.masked_fill(~mask & some[:, None], -torch.inf).logsumexp(1).where(some, empty)


class _MaskedLogSumExp(Function):
    """Compute y with dx = softmax(x) dy. The softmax comes from the forward pass; its maximum is exp(max x − y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, empty: float) -> Tensor:
        selected = _fill_unselected(x, mask, -_fill_value(x))
        largest = selected.amax(1)
        none = largest < -_fill_value(x) / 2
        selected[none] = 0
        softmax = selected.softmax(1)
        ctx.save_for_backward(softmax, none)
        return (largest - softmax.amax(1).log_()).masked_fill_(none, empty)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, none = ctx.saved_tensors
        return softmax * gradient.masked_fill(none, 0)[:, None], None, None


def log1p_sum_exp(x: Float[Tensor, "c N"], mask: Bool[Tensor, "c N"]) -> Float[Tensor, " c"]:
    """Return log(1 + Σ exp x) over the selected entries of each row."""
    return log1p_exp(masked_log_sum_exp(x, mask))


def log1p_exp(x: Float[Tensor, " c"]) -> Float[Tensor, " c"]:
    """Return log(1 + exp x), also of −inf."""
    return torch.logaddexp(x, torch.zeros_like(x))


def masked_max(x: Float[Tensor, "c N"], mask: Bool[Tensor, "c N"], *, first: bool = False) -> Float[Tensor, " c"]:
    """Return each row's largest selected entry, −inf for none; equal ones share the gradient, or the first has all of it."""
    return masked_extreme(x, mask, -1, first)


def masked_min(x: Float[Tensor, "c N"], mask: Bool[Tensor, "c N"], *, first: bool = False) -> Float[Tensor, " c"]:
    """Return the smallest selected entry of each row, as :func:`masked_max`; +inf for a row without any."""
    return masked_extreme(x, mask, 1, first)


def masked_extreme(x: Tensor, mask: Tensor, sign: int, first: bool) -> Tensor:
    """Return the minimum (sign 1) or the maximum (sign −1)."""
    if not x.shape[1]:  # torch has no extreme of nothing
        return x.sum(1) + sign * torch.inf
    if not is_dense():
        return _MaskedExtreme.apply(x, mask, sign, first, takes_sparse_gradient(x))
    some, empty = mask.any(1), sign * torch.inf
    selected = x.where(mask | ~some[:, None], empty)
    if first:
        return (selected.max(1) if sign == -1 else selected.min(1)).values.where(some, empty)
    return (selected.amax(1) if sign == -1 else selected.amin(1)).where(some, empty)


def tie_width(x: Tensor) -> float:
    """Return the difference up to which numbers near 1 count as equal, however a matmul of another shape rounds them."""
    return 64 * torch.finfo(x.dtype).eps


def shared_max(x: Float[Tensor, "c N"], width: Float[Tensor, " c"]) -> Float[Tensor, " c"]:
    """Return the largest number of each row, N > 0; numbers that are at most ``width`` smaller share its gradient."""
    largest = x.detach().amax(1, keepdim=True)
    hit = x.detach() >= largest - width[:, None]
    return x.where(hit, 0).sum(1) / hit.sum(1)


class _MaskedExtreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, sign: int, first: bool, sparse: bool) -> Tensor:
        selected = _fill_unselected(x, mask, sign * _fill_value(x))
        extreme = selected.amax(1) if sign == -1 else selected.amin(1)
        none = sign * extreme > _fill_value(x) / 2
        hit = torch.eq(selected, extreme[:, None], out=selected)
        ties = hit.sum(1)
        if first and int(ties.amax()) > 1:
            hit = torch.zeros_like(hit).scatter_(1, hit.argmax(1, keepdim=True), 1)
            ties = hit.sum(1)
        ctx.save_for_backward(none, ties, *(_hit_positions(hit, ties, none) if sparse else [hit]))
        ctx.shape = x.shape
        return extreme.masked_fill_(none, sign * torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        none, ties, *hits = ctx.saved_tensors
        share = (gradient / ties).masked_fill(none, 0)
        if len(hits) == 1:
            return hits[0] * share[:, None], None, None, None, None
        i, j = hits
        dx = torch.sparse_coo_tensor(torch.stack([i, j]), share[i], ctx.shape, check_invariants=False)
        return dx, None, None, None, None


def _hit_positions(hit: Tensor, ties: Tensor, none: Tensor) -> list[Tensor]:
    """Return row and column indices of the ones in a matrix of 0 and 1, without those of rows that are ``none``."""
    # the usual case: one hit per row, whose column index a matmul computes exactly
    if int(ties.amax()) == 1 and hit.shape[1] < 1 / torch.finfo(hit.dtype).eps:
        i = (~none).nonzero()[:, 0]
        return [i, (hit @ torch.arange(hit.shape[1], dtype=hit.dtype, device=hit.device))[i].long()]
    return list(hit.masked_fill_(none[:, None], 0).nonzero().unbind(1))


def _fill_unselected(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """Return x with its unselected entries at about ``value``, which no finite x comes near."""
    if not devices.on_cpu(x):
        return x.where(mask, value)
    unselected = torch.empty_like(x).copy_((~mask).view(torch.uint8))
    return torch.add(x, unselected, alpha=value, out=unselected)


def _fill_value(x: Tensor) -> float:
    return torch.finfo(x.dtype).max / 4


def any_in_row(mask: Bool[Tensor, "c N"]) -> Bool[Tensor, " c"]:
    """Return ``mask.any(1)``, faster on a CPU."""
    return mask.view(torch.uint8).amax(1).bool() if mask.shape[1] else mask.any(1)


def masked_indices(
    mask: Bool[Tensor, "c N"], most: int | None = None
) -> tuple[Int[Tensor, "c k"], Bool[Tensor, "c k"]]:
    """Return the selected columns of each row, padded to the longest row or to ``most``, and which are no padding."""
    if most is None and devices.on_cpu(mask):
        rows, columns = mask.nonzero().unbind(1)
        counts = rows.bincount(minlength=len(mask))
        present = torch.arange(int(counts.max()) if len(rows) else 0, device=mask.device) < counts[:, None]
        return columns.new_zeros(present.shape).masked_scatter_(present, columns), present
    position = mask.cumsum(1, dtype=torch.int32)
    if most is None:  # the one number that the host waits for
        most = int(position[:, -1].amax()) if mask.numel() else 0
    present = torch.arange(most, device=mask.device) < position[:, -1:]
    # entries that are not selected are written to a column that is cut off
    slot = (position - 1).where(mask, most).long()
    padded, index = slot.new_zeros(len(mask), most + 1), torch.arange(mask.shape[1], device=mask.device)
    return padded.scatter_(1, slot, index.expand_as(slot))[:, :most], present
