"""InfoNCE of few pairs on one process, from raw rows to a number and its gradients at once: where steps cost most.

The numbers are those of the losses that call it; :mod:`contrastive_zoo.engine.softmax` takes over where similarities are
many, spread over ranks, or so large that one exponential does not hold them, and where each anchor's loss is asked for.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.dense_mode import few, is_dense
from contrastive_zoo.engine.derivatives import once
from contrastive_zoo.engine.precision import rounded, wide, without_autocast
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.unit_rows import shortest
from contrastive_zoo.world import World

Who = Literal["rows", "rows and columns", "views"]
"""Who looks for its partner: each row among the columns; columns among the rows, too; every view among all views."""


def are_few_pairs(a: Tensor, temperature: float | Tensor, who: Who, reduction: Reduction, world: World) -> bool:
    """Whether :func:`few_pairs` is the way, of as many rows as ``a`` on either side, all made unit rows."""
    similarities = (len(a) * (2 if who == "views" else 1)) ** 2
    if world.size > 1 or is_dense() or not len(a) or not few(similarities // 4) or reduction == "none":
        return False
    return (temperature.item() if isinstance(temperature, Tensor) else temperature) >= 1 / 40


def few_pairs(
    a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], *, temperature: float | Tensor, who: Who, reduction: Reduction
) -> Float[Tensor, ""]:
    """With S = unit(a) unit(b)ᵀ / t: ``logsumexp(S, 1) - S.diagonal()``, its mean with that of Sᵀ, or NT-Xent's.

    Args:
        a: row i belongs to row i of b.
        b: the other tower, or the other view.
        temperature: t, at least 1/40.
        who: looks for its partner.
        reduction: of the rows, or of those of both views: their mean or their sum.

    Returns:
        Nats.

    Example:
        >>> few_pairs(torch.eye(2), torch.eye(2), temperature=1.0, who="rows", reduction="mean")   # log(e + 1) − 1
        tensor(0.3133)
        >>> few_pairs(torch.eye(2), torch.eye(2), temperature=1.0, who="views", reduction="sum")   # 4 (log(e + 2) − 1)
        tensor(2.2058)
    """
    dtype, a, b = a.dtype, wide(a), wide(b)
    log_scale = getattr(
        temperature, "log_scale", None
    )  # where t = exp(−θ) itself is learnt, steps of autograd are spared
    learnt = torch.as_tensor(temperature if log_scale is None else log_scale, dtype=a.dtype, device=a.device).reshape(
        ()
    )
    # 1 / t in the digits of t, as many pairs have it
    t = 1 / temperature.detach().reciprocal().item() if isinstance(temperature, Tensor) else temperature
    rate, learns = t**2 if log_scale is None else -t, torch.is_grad_enabled()
    return _FewPairs.apply(a, b, learnt, t, rate, who, reduction, dtype, learns)


class _FewPairs(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        learnt: Tensor,
        t: float,
        rate: float,
        who: Who,
        reduction: Reduction,
        dtype: torch.dtype,
        learns: bool,
    ) -> Tensor:
        """``learnt`` is t or what it is made of, by whose derivative S has that of −S t / rate.

        ``learns``: whether anybody may ask for gradients; a leaf says that it needs one under ``no_grad``, too.
        """
        n, views = len(a), who == "views"
        rows = torch.cat([a, b])
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        tiny = length.amin().item() <= shortest
        z = rows.div_(length.clamp_(min=shortest) if tiny else length)
        near = rounded(z, dtype)
        q, k = (near, near) if views else (near[:n], near[n:])
        s = torch.mm(q / t, k.T)
        positive = s.diagonal(n if views else 0).clone()
        if views:
            s.fill_diagonal_(-torch.inf)
            positive = positive.repeat(2)
        r = s.exp_().sum(1)
        c = s.sum(0) if who == "rows and columns" else None
        losses = (r.log() if c is None else torch.lerp(r.log(), c.log(), 0.5)).sub_(positive)
        mean, sides = reduction == "mean", 1 if c is None else 2
        if learns and any(ctx.needs_input_grad):
            parts = (len(losses) if mean else 1) * sides  # a row's gradient is one of so many, so is a column's
            by_row = r.reciprocal()
            if views:
                w = torch.add(by_row[:, None], by_row).mul_(s)
                w.diagonal(n).sub_(2)
                w.diagonal(-n).sub_(2)
                pull = w @ near
            else:
                w = s.mul_(by_row[:, None] if c is None else torch.add(by_row[:, None], c.reciprocal()))
                w.diagonal().sub_(sides)
                pull = torch.empty_like(z)
                torch.mm(w, k, out=pull[:n])
                torch.mm(w.T, q, out=pull[n:])
            along = torch.linalg.vecdot(z, pull).unsqueeze(1)
            by_scale = along if near is z else torch.linalg.vecdot(near, pull)
            # a pair stands in two rows
            dlearnt = by_scale.sum() / (-2 * rate * parts) if ctx.needs_input_grad[2] else None
            if tiny:
                along = along.where(length > shortest, 0)
            ctx.save_for_backward(a, b, learnt, pull.addcmul_(z, along, value=-1).div_(length * (t * parts)), dlearnt)
        return losses.mean() if mean else losses.sum(dtype=torch.float64).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, learnt, drows, dlearnt = ctx.saved_tensors
        with torch.no_grad():
            da, db = (drows * g).split(len(a))
            dlearnt = None if dlearnt is None else dlearnt * g
        return *(once(x, a, b, learnt) for x in (da, db, dlearnt)), *[None] * 6
