"""What this process keeps of a process group from call to call: nothing that a caller holds lives as long as the group."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist


@dataclass
class ReservedBytes:
    """Bytes that a group's next handshake reserves for the payload.

    Args:
        size: the number; equal on all ranks, since a handshake involves all of them.
        idle: how many handshakes in a row had no payload that fits.
    """

    size: int = 0
    idle: int = 0

    def learn(self, needed: int, *, limit: int, patience: int) -> None:
        """Update the size, given the largest payload of this handshake in bytes; 0 if there was none."""
        if 0 < needed <= limit:
            self.size, self.idle = needed, 0
        else:
            self.idle += 1
            self.size = self.size if self.idle < patience else 0


@dataclass
class GroupState:
    """What this process knows of one process group.

    Args:
        has_sent: whether a message of this library has been sent.
        handshakes: how many have been begun; equal on all ranks, since a handshake involves all of them.
        failed_at: the number of handshakes at which this rank itself failed last.
        lost: why the group cannot be used any more.
        conversation: the handshake that opened the step whose messages are sent, and the backward pass that sends them.
        wrappers: by the number of the handshake of its first call, how many wrappers each rank had made until this one.
        alive: wrappers that this rank holds, by the same number.
        reserved: what the next handshake reserves for a payload.
        on_accelerators: whether its backend sends tensors on accelerators only; None until it is first read.
        host_group: the same ranks in a group that sends from the CPU; None if there is none.
        has_looked_for_host_group: whether it is known if there is one.
    """

    has_sent: bool = False
    handshakes: int = 0
    failed_at: int = -1
    lost: str | None = None
    conversation: tuple[int, int] = (0, -1)
    wrappers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    alive: "WeakValueDictionary[int, Any]" = field(default_factory=WeakValueDictionary)
    reserved: ReservedBytes = field(default_factory=ReservedBytes)
    on_accelerators: bool | None = None
    host_group: dist.ProcessGroup | None = None
    has_looked_for_host_group: bool = False


_states: "WeakKeyDictionary[dist.ProcessGroup, GroupState]" = WeakKeyDictionary()
"""By group: several wrappers share a group, and a wrapper may be copied, loaded or made anew between two of its calls."""


def state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a group, a new one at its first use."""
    state = _states.get(group)
    if state is None:
        state = _states[group] = GroupState()
    return state
