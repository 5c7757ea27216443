"""The processes of one global batch: rank, size and group, and the small messages in which ranks exchange sizes."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.ranks.compat import all_gather_single, backward_pass, waiting_time
from contrastive_zoo.ranks.messages import Member, lost, started
from contrastive_zoo.ranks.row_checks import is_integer
from contrastive_zoo.ranks.suggestions import warn_once

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Processes: TypeAlias = Union["World", "dist.ProcessGroup", "DeviceMesh", None]
"""A set of processes: a World, a process group or a 1-d device mesh; None is the default group."""


class ProcessGroupAttribute:
    """The attribute ``process_group`` of a class: a copy shares the group, and a file holds in its place what to do."""

    def __get__(self, holder: Any, kind: type | None = None) -> Processes:
        shared = vars(holder).get("process_group") if holder is not None else None
        return None if shared is None else shared.processes

    def __set__(self, holder: Any, processes: Processes) -> None:
        vars(holder)["process_group"] = _Shared(processes)


class _Shared:
    def __init__(self, processes: Any) -> None:
        self.processes = processes

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        group = self.processes.group if isinstance(self.processes, World) else self.processes
        return _Shared, (self.processes if group is None else _NOT_SAVED,)


_NOT_SAVED = "left out of the file, which cannot hold processes: set .process_group of what was loaded"


class Shards(NamedTuple):
    """The split of a global batch over the ranks: ``sizes[r]`` rows on rank r, in rank order.

    Examples:
        >>> shards = Shards((2, 0, 3), rank=2)
        >>> shards.start, shards.size, shards.total
        (2, 3, 5)
    """

    sizes: tuple[int, ...]
    rank: int = 0

    @property
    def size(self) -> int:
        """The number of this rank's rows."""
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """The index of this rank's first row in the global batch."""
        return sum(self.sizes[: self.rank])

    @property
    def total(self) -> int:
        """The number of rows on all ranks."""
        return sum(self.sizes)

    @property
    def local(self) -> slice:
        """This rank's rows as a slice of the global batch."""
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])

    def times(self, factor: int) -> Shards:
        """The split of ``factor`` rows per sample."""
        return Shards(tuple(factor * size for size in self.sizes), self.rank)

    def plus(self, others: Shards) -> Shards:
        """The split of these rows and, after those of each rank, of others."""
        return Shards(tuple(n + m for n, m in zip(self.sizes, others.sizes, strict=True)), self.rank)

    def selected(self, which: Tensor) -> Shards:
        """The split of some of the rows, given which rows of all ranks these are."""
        return Shards(tuple(int(part.sum()) for part in which.split(list(self.sizes))), self.rank)


@dataclass(frozen=True)
class World(Member):
    """The processes that share one global batch, as one of them sees them.

    Without a process group, or in a group of one, it is a world of one process, ``World()``, for which the same code runs.
    Ranks are counted within the group.

    Args:
        rank: this process within the group, 0 … size − 1.
        size: number of processes W.
        group: what torch.distributed calls take as ``group``; None is the default group.
        caller: the loss and the call that send messages, as the errors of messages name them.
        opened: the number of the handshake that opened the step; 0 if none did.

    Raises:
        ValueError: ``rank`` is no integer in 0 … size − 1.

    Examples:
        >>> World.of()
        World(rank=0, size=1, group=None)
    """

    def __post_init__(self) -> None:
        are_integers = type(self.rank) is type(self.size) is int or (is_integer(self.rank) and is_integer(self.size))
        if not (are_integers and 0 <= self.rank < self.size):
            raise ValueError(
                f"World: a rank is an integer in 0 … size − 1, got rank={self.rank!r}, size={self.size!r}. Pass the rank "
                "first: World(1, 4) is the second of four processes."
            )

    @classmethod
    def of(cls, process_group: Processes = None, caller: str = "") -> World:
        """The world of ``process_group`` at the time of the call; a World is returned unchanged.

        Args:
            process_group: a process group, a 1-d DeviceMesh, or None for the default group if there is one.
            caller: the function that sends messages, for their errors.

        Raises:
            ValueError: this process is not in the group, the mesh has more than one dimension, or it is something else.
        """
        if isinstance(process_group, World):
            return process_group
        if process_group is not None and (problem := _group_problem(process_group)) is not None:
            raise ValueError(f"process_group: {problem}")
        default = dist.group.WORLD
        if default is None:
            if process_group is None:
                warn_of_launcher()
            return ONE_PROCESS
        group = process_group
        if group is not None and not isinstance(group, dist.ProcessGroup):
            group = group.get_group()
        members = default if group is None else group
        return World(members.rank(), members.size(), group, caller=caller)

    @cached_property
    def device(self) -> torch.device:
        """The device of tensors that the group's backend sends."""
        return torch.device((self.on_accelerators and torch.accelerator.current_accelerator()) or "cpu")

    @cached_property
    def on_accelerators(self) -> bool:
        """Whether the backend sends tensors on accelerators only, as NCCL does."""
        if self.size == 1:
            return False
        state = self.state
        if state.on_accelerators is None:  # a group keeps its backend
            state.on_accelerators = str(dist.get_backend(self.process_group)) in ("nccl", "xccl", "hccl")
        return state.on_accelerators

    @property
    def host_device(self) -> torch.device:
        """The device of messages of host data: the CPU, if some backend sends from there."""
        return torch.device("cpu") if self._host_group is not None else self.device

    @property
    def _host_group(self) -> dist.ProcessGroup | None:
        """A group of the same ranks that sends tensors on the CPU, created once; None if there is no such backend."""
        group, state = self.process_group, self.state
        if not self.on_accelerators:
            return group
        if state.host_group is None and dist.is_gloo_available():
            ranks, timeout = dist.get_process_group_ranks(group), timedelta(seconds=waiting_time(group))
            try:
                state.host_group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
            except RuntimeError as error:
                raise lost(f"{self.caller}: rank {self.rank}: {_NO_GLOO} The error of gloo: {error}", self) from error
        return state.host_group

    def sends_directly(self, x: Tensor) -> bool:
        """Whether a gather of x on the CPU takes fewer rounds than gloo's ring, because x is small."""
        return x.is_cpu and x.nbytes * self.size <= SMALL_MESSAGE

    def start_gather(
        self, x: Tensor, message: str = "a gather of rows", *, from_host: bool = False, opens: bool = False
    ) -> Callable[[], Tensor]:
        """Start to gather tensors of equal shape, ``from_host`` those on :attr:`host_device`; the result waits for them."""
        if self.size == 1:
            return lambda: x[None]
        group = (self._host_group if from_host else None) or self.process_group
        gathered = x.new_empty(self.size, *x.shape)
        begin: Callable[[], Any]
        if self.sends_directly(x):
            copies = torch.stack([x] * self.size)
            begin = functools.partial(dist.all_to_all_single, gathered, copies, group=group, async_op=True)
        else:
            flat = x.reshape(-1)
            begin = functools.partial(all_gather_single, gathered.view(-1), flat, group=group, async_op=True)
        wait = self.start(message, begin, polled=x.is_cpu, opens=opens)

        def arrived() -> Tensor:
            wait()
            return gathered

        return arrived

    def start(self, message: str, begin: Callable[[], Any], *, polled: bool, opens: bool = False) -> Callable[[], None]:
        """Start a message of all ranks, by ``begin``; the returned function waits for it, and looks for notes if ``polled``.

        In a backward pass, a header precedes a loss's first message, unless it ``opens`` the pass; other losses are refused.
        """
        conversation = self.opened, backward_pass()
        if self.size > 1 and not opens and conversation[1] != -1 and self.state.conversation != conversation:
            self.state.conversation = conversation
            exchange_headers([1, self.opened, *[0] * (len(FIELDS) + NUMBERS - 2)], (), self.state.reserved, self)
        return started(message, begin, self, polled=polled)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The ``numbers`` of all ranks, by rank; every rank passes equally many."""
        if self.size == 1:
            return [list(numbers)]
        local = torch.tensor(numbers, dtype=torch.int64, device=self.host_device)
        return self.start_gather(local, "an exchange of numbers", from_host=True)().tolist()

    def exchange_text(self, text: str) -> list[str]:
        """The ``text`` of all ranks, by rank, sent as UTF-8: nothing is pickled."""
        if self.size == 1:
            return [text]
        local = text.encode()
        lengths = [length for (length,) in self.exchange([len(local)])]
        padded = torch.frombuffer(bytearray(local.ljust(max(lengths) or 1, b"\0")), dtype=torch.uint8)
        rows = self.start_gather(padded.to(self.host_device), "an exchange of numbers", from_host=True)().tolist()
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def shards(self, rows: int | Tensor) -> Shards:
        """The split over all ranks, given this rank's number of rows."""
        count = rows if isinstance(rows, int) else len(rows)
        return Shards(tuple(sizes[0] for sizes in self.exchange([count])), self.rank)


SMALL_MESSAGE = 2**18
"""Bytes that a rank sends directly to all other ranks together; beyond it gloo's ring is as fast (2 and 4 ranks)."""


@functools.cache
def warn_of_launcher() -> None:
    """Warn if a launcher has started this process as one of several: it sets the environment before Python starts."""
    if os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        warn_once(_NO_GROUP.format(os.environ["WORLD_SIZE"]), key="no process group")


_NO_GROUP = (
    "WORLD_SIZE is {}, but this process has no process group and computes alone, so each process would train a model of its "
    "own. Call torch.distributed.init_process_group() first. World() as process_group means this process alone."
)

ONE_PROCESS = World()  # the world of one process


def _group_problem(process_group: object) -> str | None:
    if isinstance(process_group, dist.ProcessGroup):
        return None
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"process {rank} is not in the group it was given. Call the loss only on the group's own processes."
    dimensions = getattr(process_group, "ndim", None)
    if not hasattr(process_group, "get_group") or dimensions is None:
        return (
            f"a process group, a 1-d DeviceMesh, a World or None names the processes, got "
            f"{type(process_group).__name__} {process_group!r}. Pass what torch.distributed.new_group returned."
        )
    if dimensions != 1:
        return (
            f"a device mesh of {dimensions} dimensions does not name one set of processes. "
            "Pass a 1-d mesh, such as mesh['dp'], or flatten the data-parallel dimensions first."
        )
    return None


# What opens a step's handshake, or a loss's part of a backward pass, has the same length on every rank and for both, so that
# a rank in one meets a rank in the other, and all of them hear it.
FIELDS = (
    "backward", "number", "problem", "wrapper", "made", "digest", "level", "same", "capabilities",
    "bytes", "value", "gradient", "sample", "anchor", "other anchor",
)  # fmt: skip
"""Header fields before numbers of arguments, one int64 each. ``number`` counts the group's handshakes: it names a step."""

NUMBERS = 27  # of arguments, their sizes and digests, that fit into a header; further ones take a message of their own

_HEADER = struct.Struct(f"{len(FIELDS) + NUMBERS}q")
HEADER_BYTES = _HEADER.size
_STEP = itemgetter(slice(2))  # what follows a header, and the number of the step

_NO_GLOO = (
    "ranks that compute on accelerators agree through gloo, which cannot connect them. Set GLOO_SOCKET_IFNAME to a network "
    "interface by which each rank reaches the others, such as eth0; `ip address` lists them."
)

_OUT_OF_STEP = (
    "Every rank calls the same losses, and runs their backward passes, in the same order. Usually a rank has left out a "
    "step after an error or an interruption, calls two losses in another order, or runs backward on another loss first."
)


def exchange_headers(
    numbers: Sequence[int], payload: Sequence[Tensor], size: int, world: World
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return all ranks' headers, and from the same message their payloads, [W, size]: zeros for one that does not fit."""
    header = torch.frombuffer(bytearray(_HEADER.pack(*numbers)), dtype=torch.uint8)
    header = header.to(world.host_device) if world.on_accelerators else header
    length = sum(map(Tensor.numel, payload))
    parts, unused = ([header, *payload], size - length) if length <= size else ([header], size)
    if unused:
        parts.append(header.new_zeros(unused))
    sent = torch.cat(parts) if size else header
    received = world.start_gather(sent, "the handshake", from_host=True, opens=True)()
    on_host = (received if received.is_cpu else received[:, : _HEADER.size].cpu()).numpy()
    headers = list(map(_HEADER.unpack_from, on_host))
    if len(set(map(_STEP, headers))) > 1:
        refuse_out_of_step(f"{'the backward pass of ' if numbers[0] else ''}{world.caller}", world)
    return headers, received[:, _HEADER.size :]


def refuse_out_of_step(place: str, world: World) -> None:
    """Raise on all ranks, which are not in one and the same call."""
    places = world.exchange_text(place)
    by_rank = "; ".join(f"rank {rank} is in {where or 'another message'}" for rank, where in enumerate(places))
    raise lost(f"ranks are out of step: {by_rank}. {_OUT_OF_STEP}", world)
