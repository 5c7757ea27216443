"""The handshake that opens a step: one message in which every rank states its arguments, settings and problems.

A rank does not know what another rank holds or has configured. Every decision that changes a rank's sequence of messages,
or which function it computes, is therefore a function of values that all ranks have received, and they receive them here.
The header has the same length on every rank. A payload of rows may follow it; its size was settled by the group's previous
handshakes. That size belongs to the process group: every handshake involves all of its ranks, so it is equal on all of
them by construction.

A difference where ranks must be equal, and a problem that any rank states, raise the same ValueError on every rank.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch
from torch import Tensor

from contrastive_zoo.ranks.differences import (
    GATHERED_BEFORE,
    SAME_TENSOR_DIFFERS,
    combined,
    numbers_differ,
    numbers_difference,
    statements_difference,
    values_difference,
)
from contrastive_zoo.ranks.group_state import state_of
from contrastive_zoo.ranks.messages import completed_handshake
from contrastive_zoo.ranks.world import Shards, World

PAYLOAD_LIMIT = 2**20
"""Bytes of one rank's rows that may follow the header; a larger payload would cost one more copy than a second message."""

_SIZES = 16
"""Sizes that fit into a header; further ones take a message of their own."""

_IDLE = 8
"""Handshakes without a payload after which the group no longer reserves bytes for one."""

_FIELDS = (
    "problem", "digest", "last value", "level", "projection", "fingerprint", "same", "replicable", "draws", "bytes",
)  # fmt: skip
"""Header fields before the sizes, one int64 each."""

_BYTES: Callable[[Tensor], int] = attrgetter("nbytes")

_HEADER = struct.Struct(f"{len(_FIELDS) + _SIZES}q")


@dataclass
class Statement:
    """What one rank states in a handshake.

    Args:
        caller: name of the loss, first word of any error.
        compared: by name, text that must be equal on every rank.
        sizes: numbers of samples; ranks with equal ``compared`` state equally many.
        problem: an error in this rank's input; None if there is none.
        last_value: the value of an earlier step, if it must be equal on every rank.
        level: a number of everything numeric that the loss computes with; None if it is not compared.
        projection: of the same on a fixed direction, at calls that look closely.
        numbers: the tensors that these were made of, for the error.
        fingerprint: a digest of the rows, if they must differ between ranks; otherwise 0.
        same: which arguments are one tensor, as a positive number; 0 on a rank without rows, which cannot tell.
        tolerance: the relative tolerance of values and parameters.
        replicable: whether this rank can compute the loss from the rows of all ranks.
        draws: whether this rank knows that the loss draws random numbers or changes its buffers when it is computed.
        small: whether all of the loss takes every rank less time than its part and the messages, given the shards.
        payload: rows that may follow the header, as bytes; None where they cannot.
    """

    caller: str
    compared: Mapping[str, str] = field(default_factory=dict)
    sizes: Sequence[int] = ()
    problem: str | None = None
    last_value: float | None = None
    level: float | None = None
    projection: float | None = None
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    fingerprint: int = 0
    same: int = 0
    tolerance: float = torch.finfo(torch.float32).eps
    replicable: bool = False
    draws: bool = False
    small: Callable[[Sequence[Shards]], bool] = lambda shards: False
    payload: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed on, from what each of them has received.

    Args:
        shards: the split of each of the statement's sizes over the ranks.
        replicate: whether every rank computes the loss from the rows of all ranks.
        same: which arguments are one tensor; 0 if no rank can tell.
        payload: [W, bytes], the payloads of all ranks, if every rank's fits into the reserved bytes.
    """

    shards: list[Shards]
    replicate: bool = False
    same: int = 0
    payload: Tensor | None = None


def shake_hands(statement: Statement, world: World) -> Agreed:
    """Exchange statements with all ranks.

    Raises:
        ValueError: on every rank alike, if any rank states a problem; if what they compare differs; if a value or the
            parameters differ by more than half the digits of their dtype; or if all ranks hold the same rows.
        CommunicationError: another rank failed, died or is late.

    Examples:
        >>> shake_hands(Statement("Loss", sizes=[3]), World())
        Agreed(shards=[Shards(sizes=(3,), rank=0)], replicate=False, same=0, payload=None)
    """
    if world.size == 1:
        if statement.problem is not None:
            raise ValueError(f"{statement.caller}: {statement.problem}")
        return Agreed([Shards((size,)) for size in statement.sizes])
    world = world if world.caller else replace(world, caller=statement.caller)
    text = "\n".join([f"{name}|{value}" for name, value in statement.compared.items()])
    reserved = state_of(world.process_group).reserved
    headers, payload = _exchange(_header(statement, text), statement.payload or (), reserved.size, world)
    completed_handshake(world)
    received = dict(zip(_FIELDS, zip(*headers, strict=True), strict=False))
    _refuse_problems(statement, received, text, world)
    by_rank = [header[len(_FIELDS) : len(_FIELDS) + len(statement.sizes)] for header in headers]
    if len(statement.sizes) > _SIZES:
        further = world.exchange(statement.sizes[_SIZES:])
        by_rank = [(*first, *rest) for first, rest in zip(by_rank, further, strict=True)]
    _refuse_differences(statement, received, world)
    shards = [Shards(of, world.rank) for of in zip(*by_rank, strict=True)]
    replicate = all(received["replicable"]) and (any(received["draws"]) or statement.small(shards))
    needed = max(received["bytes"]) if replicate and min(received["bytes"]) >= 0 else 0
    fits = 0 < needed <= reserved.size
    reserved.learn(needed, limit=PAYLOAD_LIMIT, patience=_IDLE)
    return Agreed(shards, replicate, max(received["same"]), payload if fits else None)


def _header(statement: Statement, text: str) -> list[int]:
    sizes = [*statement.sizes[:_SIZES]]
    payload = -1 if statement.payload is None else sum(map(_BYTES, statement.payload))
    return [
        statement.problem is not None,
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True),
        *map(to_bits, (statement.last_value, statement.level, statement.projection)),
        statement.fingerprint,
        statement.same,
        statement.replicable,
        statement.draws,
        payload,
        *sizes,
        *[0] * (_SIZES - len(sizes)),
    ]


NO_VALUE = struct.unpack("q", struct.pack("d", -0.0))[0]
"""The bits of a missing number: no sum is -0.0 once 0.0 is added."""


def to_bits(value: float | None) -> int:
    """A number's bits as an int64 of the header.

    Examples:
        >>> from_bits([to_bits(0.5), to_bits(-1.0), to_bits(None)])
        [0.5, -1.0, -0.0]
    """
    return NO_VALUE if value is None else struct.unpack("q", struct.pack("d", value + 0.0))[0]


def from_bits(bits: Sequence[int]) -> list[float]:
    """The numbers that ranks have sent."""
    return [struct.unpack("d", struct.pack("q", x))[0] for x in bits]


def _differ(bits: Sequence[int]) -> bool:
    """Whether all ranks have sent a number, and not all the same one."""
    return NO_VALUE not in bits and len(set(bits)) > 1


def _refuse_problems(statement: Statement, received: Mapping[str, Sequence[int]], text: str, world: World) -> None:
    """Raise if any rank has stated a problem, or if the compared texts differ; only then the texts are exchanged."""
    if any(received["problem"]):
        callers, problems = _exchange_text(
            statement.caller if statement.problem else "", statement.problem or "", world
        )
        raise ValueError(f"{next(filter(None, callers))}: {combined(problems)}")
    if len(set(received["digest"])) > 1:
        callers, texts = _exchange_text(statement.caller, text, world)
        raise ValueError(f"{callers[0]}: {statements_difference(texts)}")


def _refuse_differences(statement: Statement, received: Mapping[str, Sequence[int]], world: World) -> None:
    """Raise if values, parameters or identical arguments differ between ranks, or if rows do not."""
    values, *sums = (received[name] for name in ("last value", "level", "projection"))
    if _differ(values) and (difference := values_difference(from_bits(values), statement.tolerance)):
        raise ValueError(f"{statement.caller}: {difference}")
    if any(_differ(bits) and numbers_differ(from_bits(bits), statement.tolerance) for bits in sums):
        norms = {name: float(x.detach().double().norm()) for name, x in statement.numbers.items()}
        texts = world.exchange_text("\n".join(f"{name}|{x:.9g}" for name, x in norms.items()))
        raise ValueError(f"{statement.caller}: {numbers_difference(texts)}")
    if 0 not in received["fingerprint"] and len(set(received["fingerprint"])) == 1:
        raise ValueError(f"{statement.caller}: {GATHERED_BEFORE}")
    if len(set(received["same"]) - {0}) > 1:
        raise ValueError(f"{statement.caller}: {SAME_TENSOR_DIFFERS}")


def _exchange(
    numbers: Sequence[int], payload: Sequence[Tensor], size: int, world: World
) -> tuple[list[tuple[int, ...]], Tensor]:
    """All ranks' numbers, and in the same message all ranks' payload, [W, size]: zeros for one that does not fit."""
    header = torch.frombuffer(bytearray(_HEADER.pack(*numbers)), dtype=torch.uint8)
    header = header.to(world.host_device) if world.on_accelerators else header
    length = sum([x.numel() for x in payload])
    parts = [header, *payload] if length <= size else [header]
    if (unused := size - (length if length <= size else 0)) > 0:
        parts.append(header.new_zeros(unused))
    received = world.start_host_gather(torch.cat(parts) if len(parts) > 1 else header, "the handshake")()
    headers = (received if received.is_cpu else received[:, : _HEADER.size].cpu()).numpy()
    return [_HEADER.unpack_from(x) for x in headers], received[:, _HEADER.size :]


def _exchange_text(caller: str, text: str, world: World) -> tuple[list[str], list[str]]:
    """The callers and texts of all ranks, from which every rank makes the same error."""
    parts = [x.partition("\n") for x in world.exchange_text(f"{caller}\n{text}")]
    return [x[0] for x in parts], [x[2] for x in parts]


def refuse_empty(caller: str, shards: Shards) -> None:
    """Refuse a global batch without rows.

    Raises:
        ValueError: the global batch is empty.

    Examples:
        >>> refuse_empty("Loss", Shards((0, 3)))
    """
    if shards.total == 0:
        raise ValueError(
            f"{caller}: the global batch is empty, no rank brought a row. "
            "A rank may come with none, but not all of them; skip the step on every rank alike."
        )
