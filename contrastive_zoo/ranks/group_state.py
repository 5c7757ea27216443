"""What this process keeps of a process group from call to call: nothing that a caller holds lives as long as the group."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist


@dataclass
class GroupState:
    """What this process knows of one process group."""

    handshakes: int = 0  # how many have been begun; equal on all ranks, since a handshake involves all of them
    messages: int = 0  # how many that are polled have been begun since; equal on all ranks
    gathers: int = 0  # how many gathers in log₂ W rounds have been begun; equal on all ranks
    failed_at: int = -1  # the number of handshakes at which this rank itself failed last
    lost: str | None = None  # why the group cannot be used any more
    # the handshake that opened the step whose messages are sent, and the backward pass that sends them
    conversation: tuple[int, int] = (0, -1)
    # by the number of the handshake of its first call, how many wrappers each rank had made until this one
    wrappers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # wrappers that this rank holds, by the same number
    alive: "WeakValueDictionary[int, Any]" = field(default_factory=WeakValueDictionary)
    # bytes that the next handshake reserves for a payload; equal on all ranks, since a handshake involves all of them
    reserved: int = 0
    idle: int = 0  # how many handshakes in a row had no payload that fits
    # whether its backend sends tensors on accelerators only; None until it is first read
    on_accelerators: bool | None = None
    # the same ranks in a group that sends from the CPU; None if there is none
    host_group: dist.ProcessGroup | None = None
    has_looked_for_host_group: bool = False  # whether it is known if there is one
    # this process alone, which is the default group in third-party losses; None until the first one runs
    alone: dist.ProcessGroup | None = None


STATES: "WeakKeyDictionary[dist.ProcessGroup, GroupState]" = WeakKeyDictionary()
"""By group: several wrappers share a group, and a wrapper may be copied, loaded or made anew between two of its calls."""
