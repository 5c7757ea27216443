"""Log-sum-exps of similarities, over rows and over columns, in tiles: the heart of InfoNCE, NT-Xent and SupCon.

With A the rows and B the columns of all ranks, S = scale · A Bᵀ,

    R_i = log Σ_j exp S_ij          C_j = log Σ_i exp S_ij          P_i = S_ip of the partner p of i

and for incoming gradients g, h, f of R, C, P the backward pass needs only

    G_ij = g_i exp(S_ij − R_i) + h_j exp(S_ij − C_j) + f_i [j = p]
    dA = scale · G B        dB = scale · Gᵀ A        dscale = Σ_i ⟨A_i, (G B)_i⟩

Two towers: one product S gives R and C, one more in the backward pass (none where S was kept) and two with G: four
products, or three. One tower: S = Sᵀ and C = R, so the tiles on and above the diagonal do: half of that.

Two arithmetics fill the tiles. Shifted by one number u for all, exp(S_ij − u) is a single exponential that serves rows,
columns and both passes: G = exp(S − u) · (g_i exp(u − R_i) + h_j exp(u − C_j)). u is so close to the largest possible
|S| that nothing can overflow; a sum so small that its terms may have been lost tells, and then it is done again with
a maximum of its own for every row and column of a tile.

A loss is a formula in these numbers, written in plain torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import all_gather, extreme_over_ranks, gather_rows
from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.blocks import Block, Gathered, Ring, merge_at_owners, schedule
from contrastive_zoo.engine.dense_mode import few, is_dense
from contrastive_zoo.engine.derivatives import once, saved_tensors_are_hooked
from contrastive_zoo.engine.malloc import keep_freed_memory
from contrastive_zoo.engine.precision import products_of, without_autocast
from contrastive_zoo.engine.similarity_budget import Kept
from contrastive_zoo.engine.tiling import tile_shape, tiles
from contrastive_zoo.session import Session
from contrastive_zoo.world import Shards, World

Scale = float | Tensor


@without_autocast
def self_log_sum_exp(
    z: Float[Tensor, "n d"],
    *,
    scale: Scale,
    unit: bool = False,
    dtype: torch.dtype | None = None,
    partners: Sequence[int] = (),
    shards: Shards,
    world: World,
) -> tuple[Float[Tensor, " n"], list[Float[Tensor, " k"]]]:
    """``logsumexp((scale * z @ Z.T).fill_diagonal_(-inf), 1)`` for my rows z of all rows Z; and partners' similarities.

    Args:
        z: my rows.
        scale: what similarities are multiplied with; each rank's gradient is that of its own rows.
        unit: whether rows are known to be no longer than 1.
        dtype: of the rows as they came. If it has 16 bits they are such numbers, and products round their factors to them.
        partners: how much further than row i its partners are, of the same rank.
        shards: where everybody's rows are.
        world: who holds them.

    Returns:
        R_i, −inf where there is no other row; and for each of ``partners`` ``(scale * z[:-p] * z[p:]).sum(1)``.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> self_log_sum_exp(torch.eye(3), scale=1.0, partners=[2], shards=Shards((3,)), world=ALONE)   # log(e⁰ + e⁰)
        (tensor([0.6931, 0.6931, 0.6931]), [tensor([0.])])
    """
    if is_dense():
        everybody = all_gather(z, shards=shards, process_group=world)
        return _of_others(scale * z @ everybody.T, partners, shards.start)
    if world.size == 1 and few(len(z) ** 2):
        return _of_others(scale * z @ z.T, partners)
    sweep = _Sweep(
        shards, shards, world, True, unit=unit, learnt=isinstance(scale, Tensor), dtype=dtype, partners=partners
    )
    r, _, *positives = _LogSumExp.apply(sweep, z, z, torch.as_tensor(scale, dtype=z.dtype, device=z.device))
    return r, positives


@without_autocast
def log_sum_exp(
    rows: Float[Tensor, "n d"],
    columns: Float[Tensor, "m d"],
    *,
    scale: Scale,
    row_shards: Shards,
    column_shards: Shards,
    columnwise: bool = True,
    unit: bool = False,
    dtype: torch.dtype | None = None,
    partners: Sequence[int] = (),
    pace: int = 1,
    world: World,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"] | None, list[Float[Tensor, " k"]]]:
    """``logsumexp(scale * A @ B.T, 1)`` for my rows and ``logsumexp(scale * A @ B.T, 0)`` for my columns; and partners'.

    Args:
        rows: my rows of A.
        columns: my rows of B.
        scale: what similarities are multiplied with; each rank's gradient is that of its own rows.
        row_shards: where everybody's rows are.
        column_shards: where everybody's columns are.
        columnwise: whether C is wanted.
        unit: whether rows and columns are known to be no longer than 1.
        dtype: of rows and columns as they came. If it has 16 bits they are such numbers, and products round their factors to
            them.
        partners: how much further than column ``pace`` · i the partners of row i are, of the same rank.
        pace: how many columns belong to a row.
        world: who holds them.

    Returns:
        R of my rows and C of my columns, both over the global batch, None for a C that is not wanted; and for each of
        ``partners`` ``(scale * A @ B.T)[:, p::pace].diagonal()`` of my own rows and columns.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> a, b = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> r, c, _ = log_sum_exp(a, b, scale=1.0, row_shards=Shards((2,)), column_shards=Shards((4,)), world=ALONE)
        >>> r.exp(), c.exp()
        (tensor([4., 4.]), tensor([2., 2., 2., 2.]))
    """
    if is_dense():
        every_row = all_gather(rows, shards=row_shards, process_group=world)
        every_column = all_gather(columns, shards=column_shards, process_group=world)
        s = scale * rows @ every_column.T
        c = torch.logsumexp(scale * columns @ every_row.T, 1) if columnwise else None
        return torch.logsumexp(s, 1), c, _diagonals(s[:, column_shards.mine], partners, pace)
    if world.size == 1 and len(rows) and len(columns) and few(len(rows) * len(columns)):
        s = scale * rows @ columns.T
        return torch.logsumexp(s, 1), torch.logsumexp(s, 0) if columnwise else None, _diagonals(s, partners, pace)
    sweep = _Sweep(
        row_shards, column_shards, world, False, columnwise, unit, isinstance(scale, Tensor), dtype, partners, pace
    )
    scale = torch.as_tensor(scale, dtype=rows.dtype, device=rows.device)
    r, c, *positives = _LogSumExp.apply(sweep, rows, columns, scale)
    return r, c, positives


def _of_others(s: Tensor, partners: Sequence[int], start: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Log-sum-exps of rows of similarities without their own, which is ``start`` further; and partners' similarities."""
    own = torch.zeros_like(s, dtype=torch.bool)
    own.diagonal(start).fill_(True)
    return s.masked_fill(own, -torch.inf).logsumexp(1), _diagonals(s[:, start : start + len(s)], partners)


def _diagonals(s: Tensor, partners: Sequence[int], pace: int = 1) -> list[Tensor]:
    return [s[:, step::pace].diagonal() for step in partners]


class _LogSumExp(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, sweep: "_Sweep", rows: Tensor, columns: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
        keep_freed_memory(rows)
        ctx.sweep, ctx.scale = sweep, scale.item()
        travel = sweep.travel(columns)
        largest = ctx.scale * sweep.longest(rows, columns)
        # a checkpoint computes them again in any case, and must find as many tensors saved as the first time
        keep = sweep.learns and any(ctx.needs_input_grad) and not saved_tensors_are_hooked()
        for ctx.arithmetic in (_Shifted.below(largest, rows.dtype), _Exact()):
            tiles: list[Tensor | None] = []  # those that lost digits go before others come
            ctx.kept = Kept() if keep else None
            with products_of(sweep.dtype, rows.device.type):
                r, c, positives, tiles = sweep.sums(ctx.arithmetic, rows, travel, ctx.scale, ctx.kept)
            if isinstance(ctx.arithmetic, _Shifted) and not sweep.has_lost(r, c, largest):
                break
        r, c = ctx.arithmetic.log(r), None if c is None else ctx.arithmetic.log(c)
        ctx.save_for_backward(rows, columns, scale, r, c, travel.everybody, *tiles)
        return r, c, *positives

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor | None, *of_positives: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, scale, r, c, everybody, *tiles = ctx.saved_tensors
        sweep, columns_too = ctx.sweep, ctx.needs_input_grad[2]
        with torch.no_grad(), products_of(sweep.dtype, rows.device.type):
            of_rows = torch.stack([r, g.to(r.dtype)], 1)
            of_columns = of_rows if sweep.one_tower else None
            if c is not None and h is not None:
                of_columns = torch.stack([c, h.to(c.dtype)], 1)
            mine = sweep.blocks[0]
            drows = _for_sums(rows, mine)
            dcolumns = drows if sweep.one_tower else _for_sums(columns, mine) if columns_too else None
            travel = sweep.travel(columns, everybody)
            parts = sweep.pulls(
                ctx.arithmetic, rows, travel, ctx.scale, of_rows, of_columns, of_positives, drows, dcolumns, tiles
            )
            if dcolumns is None:
                for _ in parts:  # nothing to give back, but my rows' pull is taken on the way
                    pass
            else:
                travel.give_back(dcolumns, parts)
            if ctx.kept is not None:
                ctx.kept.release()
            dscale = None
            if ctx.needs_input_grad[3]:  # of one tower a pair stands in two rows
                dscale = torch.dot(rows.flatten(), drows.flatten()) / (2 * scale if sweep.one_tower else scale)
        gradients = (drows, None if sweep.one_tower else dcolumns, dscale)
        return None, *(once(x, rows, columns, scale) for x in gradients)


@dataclass(frozen=True)
class _Sweep:
    """All of this rank's tiles, in the order in which their columns arrive."""

    row_shards: Shards
    column_shards: Shards
    world: World
    one_tower: bool = False
    columnwise: bool = True
    unit: bool = False
    """Whether rows and columns are no longer than 1."""
    learnt: bool = False
    """Whether the scale is; then ranks do not rely on having the very same."""
    dtype: torch.dtype | None = None
    """Of the rows as they came; those of 16 bits travel so, and are multiplied so where that is quicker."""
    partners: Sequence[int] = ()
    """Of row i the columns pace · i + so many of the same rank."""
    pace: int = 1
    learns: bool = field(default_factory=torch.is_grad_enabled)
    """Whether anybody may ask for gradients; a leaf says that it needs one under ``no_grad``, too."""

    @cached_property
    def blocks(self) -> list[Block]:
        return schedule(self.row_shards, self.column_shards, half=self.one_tower)

    def meetings(self, i: slice, j: slice, *, both: bool = False) -> Iterator[tuple[int, slice, int, int]]:
        """Where rows i meet partners among columns j of my own block: which ones, whose, and the place of the first.

        With ``both`` also where the same rows are columns and the partners are rows.
        """
        for number, step in enumerate(self.partners):
            first, last = (-((step - start) // self.pace) for start in (j.start, j.stop))
            of = slice(max(i.start, first), min(i.stop, last))
            if of.start < of.stop:
                row, column = of.start - i.start, step + self.pace * of.start - j.start
                yield number, of, row, column
                if both:
                    yield number, of, column, row

    def line(self, tile: Tensor, of: slice, row: int, column: int) -> Tensor:
        """Of a tile what :meth:`meetings` speaks of."""
        down, right = tile.stride()
        start = tile.storage_offset() + row * down + column * right
        return tile.as_strided((of.stop - of.start,), (down + self.pace * right,), start)

    def travel(self, columns: Tensor, everybody: Tensor | None = None) -> Gathered | Ring:
        if isinstance(self.world, Session) and self.world.options.ring:
            return Ring(columns, self.blocks, self.world, self.dtype)
        return Gathered(columns, self.blocks, self.column_shards, self.world, self.dtype, everybody)

    def longest(self, rows: Tensor, columns: Tensor) -> float:
        """The largest possible dot product, of all ranks' rows."""
        if self.unit:
            return 1.0
        norms = [torch.linalg.vector_norm(x, dim=1).max() if len(x) else x.new_zeros(()) for x in (rows, columns)]
        return extreme_over_ranks(torch.stack(norms), "max", self.world).prod().item()

    def has_lost(self, r: Tensor, c: Tensor | None, largest: float) -> bool:
        """Whether a sum of shifted exponentials is so small that its terms may be gone; the same on every rank."""
        least = _window(r.dtype)[0]
        if (self.unit and not self.learnt and largest <= least) or not self._any_pair():
            return False
        lowest = min(x.min().item() if len(x) else math.inf for x in (r, r if c is None else c))
        found = r.new_tensor(lowest >= math.exp(-least), dtype=torch.float32)
        return not extreme_over_ranks(found, "min", self.world).item()

    def _any_pair(self) -> bool:
        return self.row_shards.total > self.one_tower and self.column_shards.total > 0

    def _room(self, like: Tensor) -> "_Room":
        height, width = tile_shape(like)
        return _Room(like.new_empty(min(height, len(like)) * min(width, max(self.column_shards.sizes))))

    def tiles(
        self, rows: Tensor, travel: Gathered | Ring
    ) -> Iterator[tuple[int, Block, Tensor, Iterator[tuple[slice, slice, bool]]]]:
        """Each block, its columns, and its tiles: of which rows and columns, and whether on the diagonal."""
        for index, (block, columns) in enumerate(zip(self.blocks, travel, strict=True)):
            upper = self.one_tower and index == 0
            cut = tiles(block.rows.stop - block.rows.start, len(columns), rows, upper=upper)
            yield index, block, columns, ((i, j, upper and i == j) for i, j in cut)

    def sums(
        self, arithmetic: "_Arithmetic", rows: Tensor, travel: Gathered | Ring, scale: float, kept: Kept | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor], list[Tensor | None]]:
        """Of my rows over all columns and of my columns over all rows; partners; the tiles, as many as may be kept."""
        room, total, parts = self._room(rows), arithmetic.nothing(len(rows), rows), []
        count = self.column_shards.size
        positives = [rows.new_zeros(max(0, min(len(rows), -((step - count) // self.pace)))) for step in self.partners]
        stored: list[Tensor | None] = []
        for index, block, columns, cut in self.tiles(rows, travel):
            mine, by_row = rows[block.rows], total[block.rows]
            by_column = total if self.one_tower and index == 0 else arithmetic.nothing(len(columns), rows)
            for i, strip in groupby(cut, itemgetter(0)):
                a, of_rows = mine[i], by_row[i]
                for _, j, diagonal in strip:
                    b = columns[j]
                    tile = room.tile(i, j)
                    keep = kept is not None and kept.takes(tile.nbytes)
                    s = _similarities(a, b, scale, torch.empty_like(tile) if keep else tile, diagonal)
                    for number, of, *place in self.meetings(i, j) if index == 0 else ():
                        positives[number][of] = self.line(s, of, *place)
                    arithmetic.enter(s)
                    arithmetic.add(of_rows, s, 1)
                    if self.columnwise and not diagonal:
                        arithmetic.add(by_column[j], s, 0)
                    stored.append(s if keep else None)
            parts.append(by_column)
        if not self.columnwise:
            return total, None, positives, stored
        by_column = merge_at_owners(parts[0], parts[1:], self.blocks[1:], self.world, arithmetic.merge)
        return total, None if self.one_tower else by_column, positives, stored

    def pulls(
        self,
        arithmetic: "_Arithmetic",
        rows: Tensor,
        travel: Gathered | Ring,
        scale: float,
        of_rows: Tensor,
        of_columns: Tensor | None,
        of_positives: Sequence[Tensor],
        drows: Tensor,
        dcolumns: Tensor | None,
        stored: list[Tensor | None],
    ) -> Iterator[Tensor]:
        """G B into ``drows``, Gᵀ A of my own columns into ``dcolumns``; yields that of each other block's columns.

        ``of_rows`` and ``of_columns`` are log-sum-exps and their gradients, [n, 2] and [m, 2]; ``of_positives`` are
        gradients, which all but cancel a partner's weight: added before a product rounds it, the rest keeps its digits.
        """
        room, of_row, of_column = self._room(rows), arithmetic.coefficients(of_rows), None
        if of_columns is not None:
            of_columns = gather_rows(of_columns, self.column_shards, self.world)
            of_column = arithmetic.coefficients(of_columns).split(self.column_shards.sizes)
        out, kept = self._room(rows), iter(stored)
        for index, block, columns, cut in self.tiles(rows, travel):
            mine, row_weights, dmine = rows[block.rows], of_row[block.rows], drows[block.rows]
            column_weights = None if of_column is None else of_column[block.ahead][block.columns]
            pull = dcolumns if index == 0 or dcolumns is None else _for_sums(columns, block)
            for i, strip in groupby(cut, itemgetter(0)):
                a, da, weights_of_rows = mine[i], dmine[i], row_weights[i]
                for _, j, diagonal in strip:
                    b, s = columns[j], next(kept)
                    if s is None:
                        s = _similarities(a, b, scale, room.tile(i, j), diagonal)
                        arithmetic.enter(s)
                    by_column = None if column_weights is None else column_weights[j]
                    weights = arithmetic.weights(s, weights_of_rows, by_column, out.tile(i, j))
                    db = None if pull is None or diagonal else pull[j]
                    for number, of, *place in self.meetings(i, j, both=diagonal) if index == 0 else ():
                        self.line(weights, of, *place).add_(of_positives[number][of])
                    # the first to come writes over what is there
                    da.addmm_(weights, b, beta=0 if index == j.start == 0 else 1, alpha=scale)
                    if db is not None:
                        db.addmm_(weights.T, a, beta=0 if i.start == 0 else 1, alpha=scale)
            if index and pull is not None:
                yield pull


class _Room:
    """Memory for one tile."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.tiles: dict[tuple[int, int], Tensor] = {}

    def tile(self, i: slice, j: slice) -> Tensor:
        """As much of it as these rows and columns take."""
        shape = i.stop - i.start, j.stop - j.start
        if shape not in self.tiles:
            self.tiles[shape] = self.numbers[: math.prod(shape)].view(shape)
        return self.tiles[shape]


def _for_sums(like: Tensor, block: Block) -> Tensor:
    """Where a block's pulls go; zeros if there will be none."""
    some = block.rows.start < block.rows.stop and block.columns.start < block.columns.stop
    return torch.empty_like(like) if some else torch.zeros_like(like)


def _similarities(rows: Tensor, columns: Tensor, scale: float, out: Tensor, diagonal: bool) -> Tensor:
    """Scaled products of rows and columns; −inf for a row and itself."""
    torch.addmm(out, rows, columns.T, beta=0, alpha=scale, out=out)
    return out.fill_diagonal_(-torch.inf) if diagonal else out


@dataclass(frozen=True)
class _Shifted:
    """Sums of exp(s − u)."""

    u: float

    @classmethod
    def below(cls, largest: float, dtype: torch.dtype) -> "_Shifted":
        """With a u so that no similarity up to ``largest`` overflows, nor a sum of many."""
        return cls(max(0.0, largest - _window(dtype)[1]))

    def nothing(self, count: int, like: Tensor) -> Tensor:
        return like.new_zeros(count)

    def enter(self, s: Tensor) -> None:
        (s.sub_(self.u) if self.u else s).exp_()

    def add(self, total: Tensor, e: Tensor, dim: int) -> None:
        total += e.sum(dim)

    def merge(self, total: Tensor, part: Tensor) -> Tensor:
        return total + part

    def log(self, total: Tensor) -> Tensor:
        return total.log() + self.u

    def coefficients(self, statistics: Tensor) -> Tensor:
        log_sum_exp, gradient = _no_pull_without_pairs(statistics)
        return (self.u - log_sum_exp).exp_().mul_(gradient)

    def weights(self, e: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor) -> Tensor:
        if columns is None:
            return torch.mul(e, rows[:, None], out=out)
        return torch.add(rows[:, None], columns, out=out).mul_(e)


class _Exact:
    """Log-sum-exps of s, each with a maximum of its own."""

    def nothing(self, count: int, like: Tensor) -> Tensor:
        return like.new_full((count,), -torch.inf)

    def enter(self, s: Tensor) -> None:
        pass

    def add(self, total: Tensor, s: Tensor, dim: int) -> None:
        torch.logaddexp(total, s.logsumexp(dim), out=total)

    def merge(self, total: Tensor, part: Tensor) -> Tensor:
        return torch.logaddexp(total, part)

    def log(self, total: Tensor) -> Tensor:
        return total

    def coefficients(self, statistics: Tensor) -> Tensor:
        return torch.stack(_no_pull_without_pairs(statistics), 1)

    def weights(self, s: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor) -> Tensor:
        torch.sub(s, rows[:, :1], out=out).exp_().mul_(rows[:, 1:])
        return out if columns is None else out.addcmul_((s - columns[:, 0]).exp_(), columns[:, 1])


_Arithmetic = _Shifted | _Exact


def _window(dtype: torch.dtype) -> tuple[float, float]:
    """How far below u all may lie without a loss, and how far above it without overflow, in nats."""
    span = math.log(torch.finfo(dtype).max)
    return 0.45 * span, 0.6 * span


def _no_pull_without_pairs(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """An empty sum has log −inf; +inf in its place makes every weight exp(s − inf) = 0 instead of NaN."""
    log_sum_exp, gradient = statistics.unbind(1)
    return log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf), gradient
