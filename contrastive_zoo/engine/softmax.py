"""Log-sum-exps of similarities, over rows and over columns, in panels: the heart of InfoNCE, NT-Xent and SupCon.

With A the rows and B the columns of all ranks, S = scale · A Bᵀ,

    R_i = log Σ_j exp S_ij          C_j = log Σ_i exp S_ij

and for incoming gradients g, h of R, C the backward pass needs only

    G_ij = g_i exp(S_ij − R_i) + h_j exp(S_ij − C_j)
    dA = scale · G B        dB = scale · Gᵀ A        dscale = Σ_i ⟨A_i, (G B)_i⟩

Each rank sweeps its own rows against everybody's columns. Column statistics are small and all-reduced; dB is summed
back to the columns' owners. With one tower S = Sᵀ, so C = R, and dA already holds both parts: nothing travels back.

A loss is then a formula in these numbers and in a few dot products (positives), written in plain torch.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import add_up_rows, all_gather, extreme_over_ranks, gather_rows, sum_over_ranks
from contrastive_zoo.engine.evaluation import is_dense, once, panels, without_autocast
from contrastive_zoo.world import Shards, World

Scale = float | Tensor


@without_autocast
def self_log_sum_exp(z: Float[Tensor, "n d"], *, scale: Scale, shards: Shards, world: World) -> Float[Tensor, " n"]:
    """``logsumexp((scale * z @ Z.T).fill_diagonal_(-inf), 1)`` for my rows z of all rows Z.

    Args:
        z: my rows.
        scale: what similarities are multiplied with; each rank's gradient is that of its own rows.
        shards: where everybody's rows are.
        world: who holds them.

    Returns:
        R_i; −inf where there is no other row.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> self_log_sum_exp(torch.eye(3), scale=1.0, shards=Shards((3,)), world=ALONE)   # log(e⁰ + e⁰)
        tensor([0.6931, 0.6931, 0.6931])
    """
    scale = torch.as_tensor(scale, dtype=z.dtype, device=z.device)
    if is_dense():
        everybody = all_gather(z, shards=shards, process_group=world)
        own = torch.zeros(len(z), len(everybody), dtype=torch.bool, device=z.device)
        own.diagonal(shards.start).fill_(True)
        return torch.logsumexp((scale * z @ everybody.T).masked_fill(own, -torch.inf), 1)
    return _SelfLogSumExp.apply(z, scale, shards, world)


@without_autocast
def log_sum_exp(
    rows: Float[Tensor, "n d"],
    columns: Float[Tensor, "m d"],
    *,
    scale: Scale,
    row_shards: Shards,
    column_shards: Shards,
    columnwise: bool = True,
    world: World,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"] | None]:
    """``logsumexp(scale * A @ B.T, 1)`` for my rows and ``logsumexp(scale * A @ B.T, 0)`` for my columns.

    Args:
        rows: my rows of A.
        columns: my rows of B.
        scale: what similarities are multiplied with; each rank's gradient is that of its own rows.
        row_shards: where everybody's rows are.
        column_shards: where everybody's columns are.
        columnwise: whether C is wanted.
        world: who holds them.

    Returns:
        R of my rows and C of my columns, both over the global batch; None for a C that is not wanted.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> a, b = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> r, c = log_sum_exp(a, b, scale=1.0, row_shards=Shards((2,)), column_shards=Shards((4,)), world=ALONE)
        >>> r.exp(), c.exp()
        (tensor([4., 4.]), tensor([2., 2., 2., 2.]))
    """
    scale = torch.as_tensor(scale, dtype=rows.dtype, device=rows.device)
    if is_dense():
        every_row = all_gather(rows, shards=row_shards, process_group=world)
        every_column = all_gather(columns, shards=column_shards, process_group=world)
        r = torch.logsumexp(scale * rows @ every_column.T, 1)
        return r, torch.logsumexp(scale * columns @ every_row.T, 1) if columnwise else None
    return _LogSumExp.apply(rows, columns, scale, column_shards, columnwise, world)


class _SelfLogSumExp(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, z: Tensor, scale: Tensor, shards: Shards, world: World) -> Tensor:
        everybody = gather_rows(z, shards, world)
        r = z.new_empty(len(z))
        for panel in panels(len(z), len(everybody), z.dtype):
            s = _similarities(z[panel], everybody, scale)
            s.diagonal(shards.start + panel.start).fill_(-torch.inf)
            r[panel] = torch.logsumexp(s, 1)
        ctx.save_for_backward(z, everybody, scale, r)
        ctx.shards, ctx.world = shards, world
        return r

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, everybody, scale, r = ctx.saved_tensors
        with torch.no_grad():
            statistics = gather_rows(torch.stack([r, g.to(r.dtype)], 1), ctx.shards, ctx.world)
            dz, _ = _pull(z, everybody, scale, (r, g), statistics.unbind(1), own_from=ctx.shards.start)
            dscale = (z * dz).sum() / 2  # each pair stands in its row and in its column
        return once(scale * dz, z, scale), once(dscale, z, scale), None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        column_shards: Shards,
        columnwise: bool,
        world: World,
    ) -> tuple[Tensor, Tensor | None]:
        everybody = gather_rows(columns, column_shards, world)
        r, c = rows.new_empty(len(rows)), None
        top = rows.new_full((len(everybody),), -torch.inf)
        total = torch.zeros_like(top)
        for panel in panels(len(rows), len(everybody), rows.dtype):
            s = _similarities(rows[panel], everybody, scale)
            r[panel] = torch.logsumexp(s, 1)
            if columnwise:
                higher = torch.maximum(top, s.amax(0))
                total = total * (top - higher).exp() + s.sub_(higher).exp_().sum(0)
                top = higher
        if columnwise:
            highest = extreme_over_ranks(top, "max", world)
            total = sum_over_ranks(total * (top - highest).exp(), gradient="partial", world=world)
            c = (highest + total.log())[column_shards.mine]
        ctx.save_for_backward(rows, columns, everybody, scale, r, c)
        ctx.shards, ctx.world = column_shards, world
        return r, c

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, columns, everybody, scale, r, c = ctx.saved_tensors
        with torch.no_grad():
            statistics = None
            if c is not None and h is not None:
                statistics = gather_rows(torch.stack([c, h.to(c.dtype)], 1), ctx.shards, ctx.world).unbind(1)
            drows, dcolumns = _pull(rows, everybody, scale, (r, g), statistics, columns_too=ctx.needs_input_grad[1])
            dscale = (rows * drows).sum()
            if ctx.needs_input_grad[1]:
                dcolumns = add_up_rows(dcolumns, ctx.shards, ctx.world)
        gradients = (scale * drows, scale * dcolumns if ctx.needs_input_grad[1] else None, dscale)
        return *(once(gradient, rows, columns, scale) for gradient in gradients), None, None, None


def _similarities(rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    return (rows @ columns.T).mul_(scale)


@without_autocast
def _pull(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    row_statistics: tuple[Tensor, Tensor],
    column_statistics: tuple[Tensor, ...] | None,
    *,
    own_from: int | None = None,
    columns_too: bool = False,
) -> tuple[Tensor, Tensor]:
    """G B and Gᵀ A, with G made panel by panel from the log-sum-exps and their gradients."""
    r, g = _no_pull_without_pairs(*row_statistics)
    drows, dcolumns = torch.empty_like(rows), torch.zeros_like(columns) if columns_too else columns
    for panel in panels(len(rows), len(columns), rows.dtype):
        s = _similarities(rows[panel], columns, scale)
        if own_from is not None:
            s.diagonal(own_from + panel.start).fill_(-torch.inf)
        pull = (s - r[panel, None]).exp_().mul_(g[panel, None])
        if column_statistics is not None:
            c, h = _no_pull_without_pairs(*column_statistics)
            pull.addcmul_(s.sub_(c).exp_(), h)
        torch.mm(pull, columns, out=drows[panel])
        if columns_too:
            dcolumns.addmm_(pull.T, rows[panel])
    return drows, dcolumns


def _no_pull_without_pairs(log_sum_exp: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """An empty sum has log −inf; +inf in its place makes every weight exp(s − inf) = 0 instead of NaN."""
    return log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf), gradient
