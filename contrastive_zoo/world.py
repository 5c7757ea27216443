"""Who else holds rows: rank, size and group, and the small messages in which ranks tell each other their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo._compat import all_gather_single

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Processes: TypeAlias = Union["World", "dist.ProcessGroup", "DeviceMesh", None]
"""Whatever names a set of processes: a World, a process group, a 1-d device mesh; None is the default group."""


@dataclass(frozen=True)
class Shards:
    """How the rows of the global batch lie over the ranks: ``sizes[r]`` of them on rank r, in rank order.

    Example:
        >>> shards = Shards((2, 0, 3), rank=2)
        >>> shards.start, shards.size, shards.total
        (2, 3, 5)
    """

    sizes: tuple[int, ...]
    rank: int = 0

    @property
    def size(self) -> int:
        """My rows."""
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """Where my rows begin in the global batch."""
        return sum(self.sizes[: self.rank])

    @property
    def total(self) -> int:
        """Everybody's rows."""
        return sum(self.sizes)

    @property
    def mine(self) -> slice:
        """My rows as a slice of the global batch."""
        return slice(self.start, self.start + self.size)

    def times(self, factor: int) -> Shards:
        """The same split when every sample brings ``factor`` rows."""
        return Shards(tuple(factor * size for size in self.sizes), self.rank)


@dataclass(frozen=True)
class World:
    """The processes that share one global batch, seen from one of them.

    With no process group, or a group of one, it is a World of one (:data:`ALONE`), and every line that uses it is the
    same. Ranks are counted within the group.

    Args:
        rank: this process within the group, 0 … size − 1.
        size: number of processes W.
        group: what torch.distributed calls take as ``group``; None is the default group.
        check_finite: whether losses refuse NaN and infinite rows.
        ring: whether softmax losses pass columns from rank to rank, one shard at a time, rather than gather them all.

    Example:
        >>> World.of()
        World(rank=0, size=1, group=None, check_finite=True, ring=False)
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    check_finite: bool = True
    ring: bool = False

    @classmethod
    def of(cls, process_group: Processes = None, *, check_finite: bool = True, ring: bool = False) -> World:
        """The world that ``process_group`` names at this moment; a World is returned as it is.

        Args:
            process_group: a process group, a 1-d DeviceMesh, or None for the default group if there is one.
            check_finite: whether losses refuse NaN and infinite rows.
            ring: whether softmax losses pass columns from rank to rank rather than gather them.

        Raises:
            ValueError: this process is not in the group, or the mesh has more than one dimension.
        """
        if isinstance(process_group, World):
            return process_group
        if not (dist.is_available() and dist.is_initialized()):
            return cls(check_finite=check_finite, ring=ring)
        if process_group is None or isinstance(process_group, dist.ProcessGroup):
            group = process_group
        elif isinstance(process_group, int):  # what torch gives to those who are not in a new group
            raise ValueError(
                f"process_group: process {dist.get_rank()} is not in the group it was given. "
                "Call the loss only on the group's own processes."
            )
        elif process_group.ndim == 1:
            group = process_group.get_group()
        else:
            raise ValueError(
                f"process_group: a device mesh of {process_group.ndim} dimensions does not name one set of processes. "
                "Pass a 1-d mesh, such as mesh['dp'], or flatten the data-parallel dimensions first."
            )
        return cls(dist.get_rank(group), dist.get_world_size(group), group, check_finite, ring)

    @cached_property
    def device(self) -> torch.device:
        """Where the group's messages must lie."""
        return torch.device((self.on_accelerators and torch.accelerator.current_accelerator()) or "cpu")

    @cached_property
    def on_accelerators(self) -> bool:
        """Whether the backend moves what lies on accelerators, and nothing else."""
        return self.size > 1 and str(dist.get_backend(self.group)) in ("nccl", "xccl", "hccl")

    def sends_directly(self, x: Tensor) -> bool:
        """Whether each rank sends x to each other by itself: what is small is there sooner than round gloo's ring.

        Example:
            >>> ALONE.sends_directly(torch.zeros(1))
            False
        """
        small = x.nbytes * self.size <= _SMALL
        return small and self.size > 1 and x.device.type == "cpu" and not self.on_accelerators

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Set everybody's tensors like x on their way; calling the result waits for them, [W, *shape of x].

        Example:
            >>> ALONE.start_gather(torch.tensor([3, 4]))()
            tensor([[3, 4]])
        """
        if self.size == 1:
            return lambda: x[None]
        everybody = x.new_empty(self.size, *x.shape)
        if self.sends_directly(x):
            work = dist.all_to_all_single(
                everybody, x.expand_as(everybody).contiguous(), group=self.group, async_op=True
            )
        else:
            work = all_gather_single(everybody.view(-1), x.reshape(-1), group=self.group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return everybody

        return arrived

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's ``numbers``, by rank; every rank brings as many.

        Example:
            >>> ALONE.exchange([3, 4])
            [[3, 4]]
        """
        if self.size == 1:
            return [list(numbers)]
        return self.start_gather(torch.tensor(numbers, dtype=torch.int64, device=self.device))().tolist()

    def exchange_with(
        self, numbers: Sequence[int], luggage: Sequence[Tensor], room: int
    ) -> tuple[list[list[int]], Tensor]:
        """Everybody's ``numbers``, and in the same message everybody's bytes, [W, room]; room is the same everywhere.

        Of bytes that do not fit none travel; of fewer than fit, zeros follow.

        Example:
            >>> ALONE.exchange_with([3], [torch.tensor([1, 2], dtype=torch.uint8)], 3)
            ([[3]], tensor([[1, 2, 0]], dtype=torch.uint8))
        """
        head = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8).to(self.device)
        size = sum(x.shape[0] for x in luggage)
        fitting, size = (luggage, size) if size <= room else ([], 0)
        mine = torch.cat([head, *fitting, head.new_zeros(room - size)])
        heads, bags = self.start_gather(mine)().split([head.shape[0], room], 1)
        return heads.cpu().reshape(-1).view(torch.int64).view(self.size, -1).tolist(), bags

    def exchange_text(self, text: str) -> list[str]:
        """Everybody's ``text``, by rank, as UTF-8 on the wire: nothing is pickled.

        Example:
            >>> ALONE.exchange_text("ρ")
            ['ρ']
        """
        mine = text.encode()
        lengths = [length for (length,) in self.exchange([len(mine)])]
        if max(lengths) == 0:
            return [""] * self.size
        rows = self.exchange([*mine, *bytes(max(lengths) - len(mine))])
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def shards(self, rows: int | Tensor) -> Shards:
        """How many rows everybody holds, given how many I do.

        Example:
            >>> ALONE.shards(5)
            Shards(sizes=(5,), rank=0)
        """
        count = rows if isinstance(rows, int) else len(rows)
        return Shards(tuple(sizes[0] for sizes in self.exchange([count])), self.rank)


_SMALL = 2**18
"""Bytes that a rank sends to all others together."""

ALONE = World()
"""The world of one process."""
