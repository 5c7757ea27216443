"""Compute log-sum-exps of similarities over rows and over columns, in tiles: the core of InfoNCE, NT-Xent and SupCon.

With A the rows and B the columns of all ranks, S = scale · A Bᵀ, R and C the log-sum-exps of rows and columns that leave
out the partner p of each row, and incoming gradients g, h, f of R, C and S_ip, the backward pass needs only

    G_ij = g_i exp(S_ij − R_i) + h_j exp(S_ij − C_j) for j ≠ p      G_ip = f_i
    dA = scale · G B        dB = scale · Gᵀ A        dscale = Σ_i ⟨A_i, (G B)_i⟩

With one tower S = Sᵀ and C = R, so the tiles on and above the diagonal suffice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.plan import Arithmetic
from contrastive_zoo.engine.precision import matmul, matmul_rounding, without_autocast
from contrastive_zoo.engine.softmax_arithmetic import LOG2E, ShiftedSums, log_sum_exp, shift_window, statistics
from contrastive_zoo.engine.softmax_sweep import Partners, Pass, SoftmaxSweep, gradient_buffer
from contrastive_zoo.engine.tiling import CachedLogits
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.adjoints import all_gathered
from contrastive_zoo.ranks.compiling import Function, differentiable_once
from contrastive_zoo.ranks.world import Shards, World

Scale = float | Tensor


@without_autocast
def log_sum_exps(
    rows: Float[Tensor, "n d"],
    columns: Float[Tensor, "m d"] | None = None,
    *,
    scale: Scale,
    row_shards: Shards,
    column_shards: Shards | None = None,
    columnwise: bool = True,
    unit_norm: bool = False,
    factors: Sequence[Tensor] | None = None,
    partners: Partners = Partners(),  # noqa: B008  # it is immutable
    excluded: Int[Tensor, " n"] | None = None,
    world: World,
    arithmetic: Arithmetic,
    gathered: Tensor | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"] | None, list[Float[Tensor, " k"]]]:
    """Return log-sum-exps of local rows and of local columns over all but their partners, and the logits of partners.

    Two towers without partners: ``logsumexp(scale * A @ B.T, dim)`` of local rows (dim 1) and of local columns (dim 0, None
    unless ``columnwise``). One tower, columns None: ``logsumexp((scale * A @ A.T).fill_diagonal_(-inf), 1)``, and None. Each
    rank's gradient of the scale comes from its local rows. ``partners``, of which kernels take one offset at most, and
    ``excluded`` are those of :class:`SoftmaxSweep`. With ``unit_norm`` norms are at most 1, and products of ``factors``,
    which matmuls take in place of inputs of 16 bits, are divided by their norms. ``gathered`` are the columns of all ranks.
    """
    kind = SoftmaxSweep
    if arithmetic == "kernel":
        from contrastive_zoo.engine.softmax_kernels import KernelSweep  # imported here: Triton is optional

        kind = KernelSweep
    sweep = kind(
        row_shards=row_shards, column_shards=column_shards or row_shards, world=world, unit_norm=unit_norm,
        factors=None if factors is None else (factors[0], factors[-1]), partners=partners, one_tower=columns is None,
        columnwise=columnwise, excluded=excluded,
    )  # fmt: skip
    columns = rows if columns is None else columns
    if arithmetic == "plain":
        return _of_whole_matrix(sweep, rows, columns, scale)
    scale = scale.to(rows) if isinstance(scale, Tensor) else scale
    r, c, *positives = _LogSumExp.apply(sweep, rows, columns, scale, gathered)
    return r, c, positives


def _of_whole_matrix(
    sweep: SoftmaxSweep, rows: Tensor, columns: Tensor, scale: Scale
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Compute the definition, with plain autograd."""
    s = matmul(scale * rows, all_gathered(columns, sweep.column_shards, "partial", sweep.world).T)
    left_out, c = torch.zeros_like(s, dtype=torch.bool), None
    local = left_out[:, sweep.column_shards.local]
    sweep.partners.fill(local, True, slice(0, len(rows)), slice(0, len(columns)), mirrored=sweep.one_tower)
    if sweep.one_tower:
        local.fill_diagonal_(True)
    if sweep.excluded is not None:
        left_out.scatter_(1, sweep.excluded[:, None], True)
    if sweep.columnwise and not sweep.one_tower:
        transposed = matmul(scale * columns, all_gathered(rows, sweep.row_shards, "partial", sweep.world).T)
        of_columns = torch.zeros_like(transposed, dtype=torch.bool)
        of_columns[:, sweep.row_shards.local] = local.T
        c = log_sum_exp(transposed.masked_fill(of_columns, -torch.inf), 1)
    r = log_sum_exp(s.masked_fill(left_out, -torch.inf), 1)
    return r, c, [scale * x for x in sweep.partners.products(rows, columns)]


class _LogSumExp(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, sweep: SoftmaxSweep, rows: Tensor, columns: Tensor, scale: Scale, gathered: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.sweep, inputs = sweep, (rows, columns)
        # a number is a factor of the matmul; reading it from an accelerator would wait for all that is queued there
        ctx.scale = scale.item() if isinstance(scale, Tensor) and devices.on_cpu(scale) else scale
        exchange = sweep.exchange(columns, gathered)
        largest = sweep.largest_logit(rows, columns, ctx.scale)
        rows = sweep.row_factors(rows)
        # neither a logit up to the largest nor a sum of many overflows
        shifted = [] if largest is None else [ShiftedSums(LOG2E * max(0.0, largest - shift_window(rows.dtype)[1]))]
        for ctx.arithmetic in (*shifted, sweep.exact_sums):
            tiles: list[Tensor | None] = []  # frees the tiles that lost precision before others are made
            ctx.cached = CachedLogits(learns=sweep.learns and any(ctx.needs_input_grad))
            with matmul_rounding(sweep.dtype, rows.device.type):
                r, c, tiles = sweep.sums(Pass(ctx.arithmetic, rows, exchange, ctx.scale), ctx.cached)
            if largest is not None and not sweep.lost_precision(r, c, largest, scale):
                break
        ctx.products = sweep.partners.products(*inputs)
        ctx.save_for_backward(*inputs, scale if isinstance(scale, Tensor) else None, r, c, exchange.gathered, *tiles)
        of_rows = ctx.arithmetic.log(r)
        positives = [x.to(of_rows.dtype) * ctx.scale for x in ctx.products]
        return of_rows, None if c is None else ctx.arithmetic.log(c), *positives

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor | None, *dpositives: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, scale, r, c, gathered, *tiles = ctx.saved_tensors
        sweep = ctx.sweep
        with torch.no_grad(), matmul_rounding(sweep.dtype, rows.device.type):
            row_statistics = statistics(r, g)
            column_statistics = row_statistics if sweep.one_tower else None
            if c is not None and h is not None:
                column_statistics = statistics(c, h)
            exchange = sweep.exchange(columns, gathered)
            local = exchange.blocks[0]
            drows = gradient_buffer(rows, local)
            dcolumns = drows if sweep.one_tower else None
            if ctx.needs_input_grad[2] and not sweep.one_tower:
                dcolumns = gradient_buffer(columns, local)
            factor = 1.0 if isinstance(ctx.scale, Tensor) else ctx.scale
            of_partners = [x.to(rows.dtype) * factor for x in dpositives]
            products = rows.new_zeros(())
            for x, y in zip(of_partners, ctx.products, strict=True):
                products += torch.dot(x, y)
            arguments = Pass(ctx.arithmetic, sweep.row_factors(rows), exchange, ctx.scale)
            parts = sweep.gradients(arguments, row_statistics, column_statistics, drows, dcolumns, products, tiles)
            sweep.complete(exchange, dcolumns, parts)
            ctx.cached.release()
            sweep.partners.add_gradients(of_partners, rows, columns, drows, dcolumns)
            dscale = sweep.dscale(rows, drows, products) if ctx.needs_input_grad[3] else None
            if not isinstance(ctx.scale, Tensor):
                dscale = None if dscale is None else dscale / ctx.scale
            else:  # which gradients lack so far
                drows *= scale
                if dcolumns is not None and dcolumns is not drows:
                    dcolumns *= scale
        gradients = (drows, None if sweep.one_tower else dcolumns, dscale)
        inputs = [x for x in (rows, columns, scale) if x is not None]
        return None, *(differentiable_once(x, *inputs) for x in gradients), None
