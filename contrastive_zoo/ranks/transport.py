"""Messages between ranks, without gradient: the building blocks of the differentiable collectives."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.ranks.compat import reduce_scatter_single
from contrastive_zoo.ranks.devices import DIFFERENTIABLE, on_cpu
from contrastive_zoo.ranks.world import Shards, World

SumOrMean = Literal["sum", "mean"]
Reduction = Literal["sum", "mean", "max", "min"]

OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def flat_bytes(rows: Tensor) -> Tensor:
    """The bytes of a tensor of any dtype, [bytes]: what every backend can send."""
    flat = rows.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # reshape() keeps that of a column, and 0 of one expanded number; view() refuses it
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def as_bytes(rows: Tensor) -> Tensor:
    """[n, …] of any dtype as [n, bytes of a row]."""
    return flat_bytes(rows).view(len(rows), row_bytes(rows))


def row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.dtype.itemsize


def from_bytes(data: Tensor, like: Tensor) -> Tensor:
    """Return what :func:`as_bytes` packed, in the dtype and trailing shape of ``like``."""
    return data.reshape(-1).view(like.dtype).view(len(data), *like.shape[1:])


def sendable(x: Tensor, world: World) -> Tensor:
    """Return x where the backend sends it from: NCCL does not send labels and temperatures that were left on the CPU."""
    return x.to(world.device) if world.on_accelerators and x.is_cpu else x


def gather_rows(rows: Tensor, shards: Shards, world: World) -> Tensor:
    """Return the rows of all ranks in rank order."""
    return start_gather(rows, shards, world)()


def start_gather(rows: Tensor, shards: Shards, world: World) -> Callable[[], Tensor]:
    """Start to gather the rows of all ranks; the returned function waits for them."""
    if world.size == 1:
        return lambda: rows
    local = as_bytes(sendable(rows, world))
    largest = max(shards.sizes)
    if len(local) < largest:
        local = torch.cat([local, local.new_zeros(largest - len(local), local.shape[1])])
    wait = world.start_gather(local)

    def finish() -> Tensor:
        joined = wait().flatten(0, 1)
        if min(shards.sizes) < largest:  # without what fills the smaller shards up
            joined = torch.cat([x[:size] for x, size in zip(joined.split(largest), shards.sizes, strict=True)])
        return from_bytes(joined, rows).to(rows.device)

    return finish


def scatters_sums(shards: Shards, world: World) -> bool:
    """Return whether :func:`reduce_scatter_rows` uses the backend's own reduce-scatter."""
    return world.on_accelerators and len(set(shards.sizes)) == 1


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of at least 32 bits in which backends and torch add up numbers of this one."""
    least = torch.complex64 if dtype.is_complex else torch.float32 if dtype.is_floating_point else torch.int32
    return least if dtype.itemsize < least.itemsize else dtype if dtype.is_signed else torch.int64


def reduce_scatter_rows(rows: Tensor, shards: Shards, world: World, *, over: int = 1) -> Tensor:
    """Return this rank's slice of the sum of all ranks' [N, …] divided by ``over``, both in at least 32 bits."""
    if world.size == 1:
        return rows
    wide = _summed_in(rows.dtype)
    if scatters_sums(shards, world):
        wide_rows = sendable(rows, world).to(wide).contiguous()
        total = wide_rows.new_empty(shards.size, *rows.shape[1:])
        begin = functools.partial(reduce_scatter_single, total, wide_rows, group=world.group)
        world.start("a reduce-scatter", begin, polled=total.is_cpu)()
    else:  # as many bytes; gloo's reduce-scatter is an all-reduce internally, of twice as many
        parts = exchange_rows(rows, shards.sizes, [shards.size] * world.size, world)
        # torch cannot add up some short numbers; of embeddings' dtypes it makes no copy
        parts = parts if parts.dtype in DIFFERENTIABLE else parts.to(wide)
        total = parts.view(world.size, shards.size, *rows.shape[1:]).sum(0, dtype=wide)
    return (total if over == 1 else total / over).to(rows)


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], world: World) -> Tensor:
    """Send ``send[r]`` of these rows to rank r, and return ``receive[r]`` rows from each rank r, in rank order."""
    if world.size == 1:
        return rows
    local = as_bytes(sendable(rows, world))
    received = local.new_empty(sum(receive), local.shape[1])
    begin = functools.partial(dist.all_to_all_single, received, local, list(receive), list(send), world.group)
    world.start("an exchange of rows", functools.partial(begin, async_op=local.is_cpu), polled=local.is_cpu)()
    return from_bytes(received, rows).to(rows.device)


def broadcast_in_place(x: Tensor, src: int, world: World) -> None:
    sent = sendable(x, world)
    begin = functools.partial(dist.broadcast, sent, group=world.group, group_src=src, async_op=sent.is_cpu)
    world.start("a broadcast", begin, polled=sent.is_cpu)()
    if sent is not x:
        x.copy_(sent)


def reduced_everywhere(x: Tensor, op: Reduction, world: World) -> Tensor:
    """Return the all-reduced x, without gradient; short numbers are reduced in 32 bits, and a mean has floats.

    A small one is summed in rank order, to the same bits on every rank.
    """
    if world.size == 1:
        return x
    wide = sendable(x.detach(), world).to(_summed_in(x.dtype), copy=True).contiguous()
    if world.sends_directly(wide) and not world.on_accelerators:
        across = {"max": torch.amax, "min": torch.amin}.get(op, torch.sum)
        wide.copy_(across(world.start_gather(wide, "an all-reduce")(), 0))
    else:
        begin = functools.partial(dist.all_reduce, wide, OPS[op], world.group, async_op=wide.is_cpu)
        world.start("an all-reduce", begin, polled=wide.is_cpu)()
    if op == "mean":
        wide = wide / world.size
    return wide.to(x.device, x.dtype)


def unpacked(payload: Tensor, rows: Sequence[Tensor], shards: Sequence[Shards]) -> list[Tensor]:
    """The rows of all ranks from their payloads, [W, bytes], the :func:`flat_bytes` of ``rows`` on every rank."""
    result: list[Tensor] = []
    # NumPy cuts them in a fraction of torch's time: of a small step, that counts
    parts = payload.numpy()
    starts = [0] * len(parts)
    for x, of in zip(rows, shards, strict=True):
        width, cut = x.shape[1:].numel() * x.dtype.itemsize, []
        for rank, size in enumerate(of.sizes):
            start, starts[rank] = starts[rank], starts[rank] + size * width
            cut.append(parts[rank][start : starts[rank]])
        # joined, since a wider dtype needs bytes that begin at a multiple of its size
        joined = np.concatenate(cut)
        # no bytes have stride 0 in NumPy, which cannot be viewed as another dtype
        flat = torch.from_numpy(joined).view(x.dtype) if joined.size else x.new_empty(0)
        result.append(flat.view(of.total, *x.shape[1:]))
    return result


def payload_of(rows: Iterable[Tensor], world: World) -> list[Tensor] | None:
    """Return tensors as bytes that may follow a handshake's header; None if two backends send them."""
    is_one_backend = not world.on_accelerators and all(map(on_cpu, rows))
    return [flat_bytes(x.detach()) for x in rows] if is_one_backend else None
