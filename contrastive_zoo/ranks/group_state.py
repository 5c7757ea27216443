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
    conversation: tuple[int, int] = (0, -1)  # the handshake that opened the step, and the backward pass that sends
    # by the number of the handshake of a wrapper's first call: how many each rank had made until then, and those it holds
    wrappers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    alive: "WeakValueDictionary[int, Any]" = field(default_factory=WeakValueDictionary)
    reserved: int = 0  # bytes of a payload in the next handshake; equal on all ranks
    idle: int = 0  # how many handshakes in a row had no payload that fits
    on_accelerators: bool | None = None  # whether its backend sends from accelerators only; None until it is read
    host_group: dist.ProcessGroup | None = None  # the same ranks, which send from the CPU; None until it is made
    alone: dist.ProcessGroup | None = None  # this process, the default group in third-party losses; None until then


STATES: "WeakKeyDictionary[dist.ProcessGroup, GroupState]" = WeakKeyDictionary()
"""By group: several wrappers share a group, and a wrapper may be copied, loaded or made anew between two of its calls."""
