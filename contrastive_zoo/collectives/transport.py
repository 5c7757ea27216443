"""Bytes of rows between ranks, without gradient: what the differentiable collectives are made of."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo._compat import reduce_scatter_single
from contrastive_zoo.session import Session
from contrastive_zoo.world import Shards, World

Reduction = Literal["sum", "mean", "max", "min"]

OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ACROSS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": torch.sum,
    "mean": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def flat_bytes(rows: Tensor) -> Tensor:
    """The bytes of a tensor of any dtype, [bytes]: what every backend can send."""
    return rows.contiguous().view(-1).view(torch.uint8)


def as_bytes(rows: Tensor) -> Tensor:
    """[n, …] of any dtype as [n, bytes of a row]."""
    return flat_bytes(rows).view(len(rows), _row_bytes(rows))


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.dtype.itemsize


def from_bytes(moved: Tensor, like: Tensor) -> Tensor:
    return moved.view(like.dtype).reshape(len(moved), *like.shape[1:])


def gather_rows(rows: Tensor, shards: Shards, world: World) -> Tensor:
    """The rows of all ranks in rank order; not to be written to where the session has a cache."""
    return start_gather(rows, shards, world)()


def start_gather(rows: Tensor, shards: Shards, world: World) -> Callable[[], Tensor]:
    """Start to gather the rows of all ranks; calling the result waits for them."""
    if world.size == 1:
        return lambda: rows
    cache = world.cache if isinstance(world, Session) else None
    if cache is None:
        return _started(rows, shards, world)
    return lambda: cache.gather(rows, shards, lambda x, of: _started(x, of, world)())


def _started(rows: Tensor, shards: Shards, world: World) -> Callable[[], Tensor]:
    mine = as_bytes(rows)
    highest = max(shards.sizes)
    if len(mine) < highest:
        mine = torch.cat([mine, mine.new_zeros(highest - len(mine), mine.shape[1])])
    wait = world.start_gather(mine)

    def arrived() -> Tensor:
        parts = wait()
        if min(shards.sizes) == highest:
            return from_bytes(parts.flatten(0, 1), rows)
        return from_bytes(torch.cat([x[:size] for x, size in zip(parts, shards.sizes, strict=True)]), rows)

    return arrived


def derived(function: Callable[..., Tensor], *rows: Tensor, world: World) -> Tensor:
    """``function(*rows)``, as many rows as all of ``rows`` together, whose own rows must be of equal number.

    Each rank can repeat it on rows of another, so that a session with a cache need not gather the result.

    Examples:
        >>> derived(lambda x: x[:, :1], torch.tensor([[1, 2], [3, 4]]), world=World()).tolist()
        [[1], [3]]
    """
    cache = world.cache if isinstance(world, Session) else None
    return function(*rows) if cache is None else cache.derive(function, *rows)


def scatters_sums(shards: Shards, world: World) -> bool:
    """Whether :func:`add_up_rows` is the backend's own reduce-scatter."""
    return world.on_accelerators and len(set(shards.sizes)) == 1


def add_up_rows(rows: Tensor, shards: Shards, world: World, *, over: int = 1) -> Tensor:
    """My slice of the sum of everybody's [N, …], divided by ``over`` in at least 32 bits: a mean fits where a sum does not.

    A reduce-scatter where the backend has one of its own and slices are even, as NCCL does: it needs no room for what
    every rank sends. Otherwise an all-to-all and a local sum in rank order: the same bytes, for uneven slices too, and
    half of what gloo's reduce-scatter moves, which is an all-reduce underneath.
    """
    if world.size == 1:
        return rows
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    if scatters_sums(shards, world):
        everybody = rows.to(wide).contiguous()
        mine = everybody.new_empty(shards.size, *rows.shape[1:])
        reduce_scatter_single(mine, everybody, group=world.group)
        return (mine if over == 1 else mine / over).to(rows.dtype)
    parts = exchange_rows(rows, shards.sizes, [shards.size] * world.size, world)
    parts = parts.view(world.size, shards.size, *rows.shape[1:])
    total = parts.sum(0, dtype=wide)
    return (total if over == 1 else total / over).to(rows.dtype)


def extreme_over_ranks(x: Tensor, op: Literal["max", "min"], world: World) -> Tensor:
    """Elementwise extreme, without gradient."""
    return x if world.size == 1 else reduced_everywhere(x, op, world)


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], world: World) -> Tensor:
    """``send[r]`` of my rows to rank r, ``receive[r]`` rows from it, both in rank order."""
    mine = as_bytes(rows)
    got = mine.new_empty(sum(receive), mine.shape[1])
    dist.all_to_all_single(got, mine, list(receive), list(send), group=world.group)
    return from_bytes(got, rows)


def reduced(x: Tensor, op: Reduction, world: World, run: Callable[[Tensor], Any]) -> Tensor:
    """``run`` on a copy of x, 16-bit numbers summed in 32."""
    wide = x.detach().to(torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype, copy=True)
    wide = wide.contiguous()
    run(wide)
    if op == "mean":
        wide = wide / world.size
    return wide.to(x.dtype) if x.is_floating_point() else wide


def reduced_everywhere(x: Tensor, op: Reduction, world: World) -> Tensor:
    """An all-reduce; what is small is gathered and reduced in rank order, so that every rank has the same bits."""

    def run(y: Tensor) -> None:
        if world.sends_directly(y):
            y.copy_(_ACROSS[op](world.start_gather(y)(), 0))
        else:
            dist.all_reduce(y, OPS[op], world.group)

    return reduced(x, op, world, run)


def packed(rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows as the bytes of a handshake's payload.

    Examples:
        >>> packed([torch.tensor([[1], [2]], dtype=torch.uint8)])
        [tensor([1, 2], dtype=torch.uint8)]
    """
    return [flat_bytes(x.detach()) for x in rows]


def unpacked(payload: Tensor, rows: Sequence[Tensor], shards: Sequence[Shards]) -> list[Tensor]:
    """The rows of all ranks from their payloads, [W, bytes], which :func:`packed` made of ``rows`` on every rank."""
    found: list[Tensor] = []
    offsets = [0] * len(payload)
    for x, of in zip(rows, shards, strict=True):
        ends = [start + size * _row_bytes(x) for start, size in zip(offsets, of.sizes, strict=True)]
        # joined, since a wider dtype needs bytes that begin at a multiple of its size
        joined = torch.cat([of_rank[i:j] for of_rank, i, j in zip(payload, offsets, ends, strict=True)])
        found.append(joined.view(x.dtype).view(of.total, *x.shape[1:]))
        offsets = ends
    return found
