"""The header that opens what ranks say to each other: a step's handshake, or a loss's part of a backward pass.

It has the same length on every rank and for both, so that a rank in one meets a rank in the other, and all of them hear it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from contrastive_zoo.ranks.compat import backward_pass
from contrastive_zoo.ranks.group_state import state_of
from contrastive_zoo.ranks.messages import Member, lost


class Group(Member, Protocol):
    """The ranks as a header needs them; a World is one."""

    @property
    def opened(self) -> int: ...
    @property
    def on_accelerators(self) -> bool: ...
    @property
    def host_device(self) -> torch.device: ...
    def start_host_gather(self, x: Tensor, message: str = ..., *, opens: bool = ...) -> Callable[[], Tensor]: ...
    def exchange_text(self, text: str) -> list[str]: ...


FIELDS = (
    "backward", "number", "problem", "asks", "wrapper", "made", "digest", "last value", "level", "projection", "fingerprint",
    "same", "replicable", "draws", "bytes",
)  # fmt: skip
"""Header fields before the sizes, one int64 each. ``number`` counts the group's handshakes: it names a step."""

SIZES = 16
"""Sizes that fit into a header; further ones take a message of their own."""

_HEADER = struct.Struct(f"{len(FIELDS) + SIZES}q")

_OUT_OF_STEP = (
    "Every rank calls the same losses, and runs their backward passes, in the same order. Usually a rank has left out a "
    "step after an error or an interruption, calls two losses in another order, or runs backward on another loss first."
)


def exchange_headers(
    numbers: Sequence[int], payload: Sequence[Tensor], size: int, world: Group
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return all ranks' headers, and from the same message their payloads, [W, size]: zeros for one that does not fit.

    Raises:
        CommunicationError: on every rank alike, they are in different steps, or some in a backward pass.
    """
    header = torch.frombuffer(bytearray(_HEADER.pack(*numbers)), dtype=torch.uint8)
    header = header.to(world.host_device) if world.on_accelerators else header
    length = sum([x.numel() for x in payload])
    parts = [header, *payload] if length <= size else [header]
    if (unused := size - (length if length <= size else 0)) > 0:
        parts.append(header.new_zeros(unused))
    received = world.start_host_gather(torch.cat(parts) if len(parts) > 1 else header, "the handshake", opens=True)()
    on_host = (received if received.is_cpu else received[:, : _HEADER.size].cpu()).numpy()
    headers = [_HEADER.unpack_from(x) for x in on_host]
    if any(x[:2] != headers[0][:2] for x in headers):
        refuse_out_of_step(f"{'the backward pass of ' if numbers[0] else ''}{world.caller}", world)
    return headers, received[:, _HEADER.size :]


def refuse_out_of_step(place: str, world: Group) -> None:
    """Raise on all ranks, which are not in one and the same call.

    Raises:
        CommunicationError: always; it says where each rank is.
    """
    places = world.exchange_text(place)
    by_rank = "; ".join(f"rank {rank} is in {where or 'another message'}" for rank, where in enumerate(places))
    raise lost(f"ranks are out of step: {by_rank}. {_OUT_OF_STEP}", world)


def open_backward(world: Group) -> None:
    """Meet the other ranks before the first message of a loss in a backward pass; the next ones of the same loss do not.

    Raises:
        CommunicationError: on every rank alike, they run the backward passes of different losses or steps.
    """
    state, conversation = state_of(world.process_group), (world.opened, backward_pass())
    if conversation[1] == -1 or state.conversation == conversation:
        return
    state.conversation = conversation
    numbers = [1, world.opened, *[0] * (len(FIELDS) + SIZES - 2)]
    exchange_headers(numbers, (), state.reserved.size, world)
