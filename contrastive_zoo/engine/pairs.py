"""InfoNCE of few pairs on one process, from raw rows to losses in one function: where autograd's own steps cost most.

The numbers are those of the losses that call it; :mod:`contrastive_zoo.engine.softmax` takes over where similarities are
many, spread over ranks, or so large that one exponential does not hold them.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.evaluation import few, is_dense, once, shortest
from contrastive_zoo.engine.precision import wide, without_autocast
from contrastive_zoo.world import World

Who = Literal["rows", "rows and columns", "views"]
"""Who looks for its partner: each row among the columns; columns among the rows, too; every view among all views."""


def are_few_pairs(a: Tensor, scale: float | Tensor, who: Who, world: World) -> bool:
    """Whether :func:`few_pairs` is the way, of as many rows as ``a`` on either side, all made unit rows."""
    similarities = (len(a) * (2 if who == "views" else 1)) ** 2
    if world.size > 1 or is_dense() or not len(a) or not few(similarities // 4):
        return False
    return (scale.item() if isinstance(scale, Tensor) else scale) <= 40


@without_autocast
def few_pairs(
    a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], *, scale: float | Tensor, who: Who
) -> Float[Tensor, " m"]:
    """With S = scale · unit(a) unit(b)ᵀ: ``logsumexp(S, 1) - S.diagonal()``, its mean with that of Sᵀ, or NT-Xent's.

    Args:
        a: row i belongs to row i of b.
        b: the other tower, or the other view.
        scale: what similarities are multiplied with, at most 40.
        who: looks for its partner.

    Returns:
        Nats of each row, or of each row of both views.

    Example:
        >>> few_pairs(torch.eye(2), torch.eye(2), scale=1.0, who="rows")   # log(e + 1) − 1
        tensor([0.3133, 0.3133])
        >>> few_pairs(torch.eye(2), torch.eye(2), scale=1.0, who="views")   # log(e + 2) − 1
        tensor([0.5514, 0.5514, 0.5514, 0.5514])
    """
    a, b = wide(a), wide(b)
    return _FewPairs.apply(a, b, torch.as_tensor(scale, dtype=a.dtype, device=a.device), who)


class _FewPairs(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, who: Who) -> Tensor:
        ctx.who, ctx.scale, views = who, scale.item(), who == "views"
        towers = [torch.cat([a, b])] if views else [a, b]
        lengths = [torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in towers]
        units = [x / length.clamp(min=shortest) for x, length in zip(towers, lengths, strict=True)]
        s = torch.mm(units[0] * ctx.scale, units[-1].T)
        positive = s.diagonal(len(a) if views else 0).clone()
        if views:
            s.fill_diagonal_(-torch.inf)
            positive = positive.repeat(2)
        r = s.exp_().sum(1)
        c = s.sum(0) if who == "rows and columns" else None
        ctx.save_for_backward(a, b, scale, s, r, c, *lengths, *units)
        return (r.log() if c is None else (r.log() + c.log()).div_(2)).sub_(positive)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, s, r, c, *others = ctx.saved_tensors
        lengths, units = others[: len(others) // 2], others[len(others) // 2 :]
        n, views, q, k = len(a), ctx.who == "views", units[0], units[-1]
        with torch.no_grad():
            by_row = g / r
            if c is None:
                w = s * (torch.add(by_row[:, None], by_row) if views else by_row[:, None])
            else:
                w = torch.add(by_row[:, None], g / c).mul_(s).div_(2)
            if views:
                of_pair = g[:n] + g[n:]
                w.diagonal(n).sub_(of_pair)
                w.diagonal(-n).sub_(of_pair)
            else:
                w.diagonal().sub_(g)
            pulls = [w @ k] if views else [w @ k, w.T @ q]
            dscale = (q * pulls[0]).sum() / (2 if views else 1)
            dtowers = [
                torch.addcmul(pull, unit, torch.linalg.vecdot(unit, pull).unsqueeze(1).where(x > shortest, 0), value=-1)
                .div_(x.clamp(min=shortest))
                .mul_(ctx.scale)
                for pull, unit, x in zip(pulls, units, lengths, strict=True)
            ]
        gradients = dtowers[0].split(n) if views else dtowers
        return *(once(x, a, b, scale) for x in (*gradients, dscale)), None
