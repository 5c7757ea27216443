"""The handshake that opens a step: one message in which every rank states its arguments, settings and problems.

Every decision that changes a rank's messages, or which function it computes, is a function of what all ranks receive here.
"""

import functools
import gc
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import and_, attrgetter, itemgetter, or_

import torch
from torch import Tensor

from contrastive_zoo.ranks.compat import backward_pass
from contrastive_zoo.ranks.differences import SAME_TENSOR_DIFFERS, combined, results_difference, statements_difference
from contrastive_zoo.ranks.fingerprint import levels_differ, state_difference, state_lines
from contrastive_zoo.ranks.messages import begun_handshake
from contrastive_zoo.ranks.row_checks import tolerance
from contrastive_zoo.ranks.world import FIELDS, NUMBERS, Shards, World, exchange_headers, refuse_out_of_step

PAYLOAD_LIMIT = 2**20
"""Bytes of one rank's rows that may follow the header; a larger payload would cost one more copy than a second message."""

_KERNELS, _DRAWS, _SAMPLE, _COMPARES = 1, 2, 4, 8  # bits of a rank's capabilities

RESULTS = FIELDS[-5:]
"""What ranks compare of the previous call: its value, the gradient of the loss's parameters, the loss of a few samples of
all ranks, that of the last anchor of this rank, and that of the last anchor of the next rank that has any."""

_IDLE = 8  # handshakes without a payload after which the group no longer reserves bytes for one


@dataclass
class Statement:
    """What one rank states in a handshake."""

    caller: str  # name of the loss, first word of any error
    compared: Mapping[str, str] = field(default_factory=dict)  # by name, text that must be equal on every rank
    sizes: Sequence[int] = ()  # numbers of samples; ranks with equal ``compared`` state equally many
    problem: str | None = None  # an error in this rank's input; None if there is none
    results: Mapping[str, float] = field(default_factory=dict)  # those of RESULTS that are compared
    results_tolerance: float = torch.finfo(torch.float32).eps  # that of the call that left them
    level: float | None = None  # of everything numeric that the loss computes with; None if it is not compared
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the tensors that it was made of, for the error
    digests: Sequence[int] = ()  # of each argument; 0 where they are not compared
    same: int = 0  # which arguments are one tensor, as a positive number; 0 on a rank without rows, which cannot tell
    tolerance: float = torch.finfo(torch.float32).eps  # the relative tolerance of values and parameters
    kernels: bool = False  # whether Triton kernels can compute the loss on this rank
    draws: bool = False  # whether this rank knows that the loss draws random numbers or changes its buffers
    payload: Sequence[Tensor] | None = None  # rows that may follow the header, as bytes; None where they cannot
    is_sample: bool = False  # whether the payload is the first few rows of each tensor
    compares: bool = False  # whether this rank would compare the loss of a few samples in the next call
    wrapper: int = -1  # the number of the handshake of the wrapper's first call; 0 in that call, −1 without a wrapper
    made: int = 0  # how many wrappers this process has made until this one


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed on, from what each of them has received."""

    shards: list[Shards]  # the split of each of the statement's sizes over the ranks
    draws: bool = False  # whether some rank knows that the loss draws random numbers or changes its buffers
    kernels: Sequence[bool] = (False,)  # by rank, whether Triton kernels can compute the loss there
    same: int = 0  # which arguments are one tensor; 0 if no rank can tell
    digests: Sequence[tuple[int, ...]] = ()  # of each argument, by rank
    payload: Tensor | None = None  # [W, bytes], the payloads of all ranks, if every rank's fits into the reserved bytes
    needed: int = 0  # bytes of the largest payload; 0 if some rank has none
    sample: Tensor | None = None  # [W, bytes], the first few rows of each tensor of all ranks, in place of a payload
    compares: bool = False  # whether all ranks would compare the loss of a few samples in the next call
    number: int = field(default=0, repr=False)  # of this handshake among the group's
    wrapper: int = field(default=-1, repr=False)  # the number of the wrapper's first one; −1 without a wrapper


def shake_hands(statement: Statement, world: World) -> Agreed:
    """Exchange statements with all ranks; a difference or a problem raises the same ValueError on every rank."""
    if world.size == 1:
        if statement.problem is not None:
            raise ValueError(f"{statement.caller}: {statement.problem}")
        return Agreed([Shards((size,)) for size in statement.sizes], kernels=[statement.kernels])
    world = world if world.caller else replace(world, caller=statement.caller)
    lines = [f"{name}|{value}" for name, value in statement.compared.items()]
    lines += [] if statement.wrapper > -1 else [f"the function|{statement.caller}"]
    state = world.state
    reserved, number = state.reserved, begun_handshake(world)
    state.conversation = (number, backward_pass())
    numbers = [*statement.sizes, *statement.digests]
    unused = [0] * (NUMBERS - len(numbers))
    header = [0, number, *_fields(statement, lines), *numbers[:NUMBERS], *unused]
    headers, payload = exchange_headers(header, statement.payload or (), reserved, world)
    received = dict(zip(FIELDS, zip(*headers, strict=True), strict=False))
    if any(received["problem"]):
        caller = statement.caller if statement.problem else ""
        callers, problems = _exchange_text(caller, statement.problem or "", world)
        raise ValueError(f"{next(filter(None, callers))}: {combined(problems)}")
    if len(set(received["digest"])) > 1:  # only then the texts themselves are exchanged
        callers, texts = _exchange_text(statement.caller, "\n".join(lines), world)
        if -1 in received["wrapper"] and len({*callers}) > 1:
            refuse_out_of_step(world.caller, world)
        raise ValueError(f"{callers[0]}: {statements_difference(texts)}")
    identity = _identity(statement, number, received, world)
    by_argument = [*zip(*headers, strict=True)][len(FIELDS) :][: len(numbers)]
    if further := numbers[NUMBERS:]:
        by_argument += zip(*world.exchange(further), strict=True)
    _refuse_differences(statement, received, world)
    sizes, digests = by_argument[: len(statement.sizes)], by_argument[len(statement.sizes) :]
    splits = {of: Shards(of, world.rank) for of in sizes}
    shards = list(map(splits.__getitem__, sizes))
    capabilities = received["capabilities"]
    kernels = [bool(x & _KERNELS) for x in capabilities]
    of_any, of_all = functools.reduce(or_, capabilities), functools.reduce(and_, capabilities)
    largest = max(received["bytes"]) if min(received["bytes"]) >= 0 else 0
    inline = payload if 0 < largest <= reserved else None
    sample = inline if of_all & _SAMPLE else None
    needed, inline = (0, None) if of_any & _SAMPLE else (largest, inline)
    if needed == 0:
        reserve_payload(0, world)
    draws, compares, same = bool(of_any & _DRAWS), bool(of_all & _COMPARES), max(received["same"])
    return Agreed(shards, draws, kernels, same, digests, inline, needed, sample, compares, number, identity)


def reserve_payload(needed: int, world: World) -> None:
    """Reserve bytes behind the group's next headers, by what this step would have needed there; 0 for nothing."""
    state, fits = world.state, 0 < needed <= PAYLOAD_LIMIT
    state.idle = 0 if fits else state.idle + 1
    if fits or state.idle >= _IDLE:
        state.reserved = needed if fits else 0


def _identity(statement: Statement, number: int, received: Mapping[str, Sequence[int]], world: World) -> int:
    """Return the number that all ranks know the wrapper by; refuse different ones, not one made again."""
    state, numbers, made = world.state, {*received["wrapper"]}, received["made"]
    known = numbers - {0}
    if known == {-1} == numbers:
        return -1
    are_different = len(known) > 1
    if not known:  # the first call: two wrappers of equal losses are met in one order on every rank
        call = received["digest"][0]
        orders = [{a > b for a, b in zip(made, other, strict=True)} for of, other in state.first_calls if of == call]
        are_different = any(len(order) > 1 for order in orders)
        state.first_calls.append((call, (*made,)))
    elif 0 in numbers and not are_different:
        if statement.wrapper == 0:
            gc.collect()  # a wrapper that the user has replaced lives on in a reference cycle
        holds_both = statement.wrapper == 0 and max(known) in state.wrappers
        are_different = any(both for (both,) in world.exchange([holds_both]))
    if are_different:
        which = "" if statement.wrapper < 0 else f", which is wrapper number {statement.made} of this process"
        refuse_out_of_step(f"{world.caller}{which}", world)
    return max(known, default=number)


def _fields(statement: Statement, lines: Sequence[str]) -> list[int]:
    payload = -1 if statement.payload is None else sum(map(attrgetter("nbytes"), statement.payload))
    text = "\n".join(sorted(lines))  # dicts may be filled in another order on each rank
    results = {name: _to_bits(value) for name, value in statement.results.items()}
    capabilities = _KERNELS * statement.kernels + _DRAWS * statement.draws + _SAMPLE * statement.is_sample
    return [
        statement.problem is not None,
        statement.wrapper,
        statement.made,
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True),
        _to_bits(statement.level),
        statement.same,
        capabilities + _COMPARES * statement.compares,
        payload,
        *(dict.fromkeys(RESULTS, _NO_VALUE) | results).values(),
    ]


_NO_VALUE = struct.unpack("q", struct.pack("d", -0.0))[0]
"""The bits of a missing number: no sum is -0.0 once 0.0 is added."""


def _to_bits(value: float | None) -> int:
    return _NO_VALUE if value is None else struct.unpack("q", struct.pack("d", value + 0.0))[0]


def _from_bits(bits: Sequence[int]) -> list[float | None]:
    return [None if x == _NO_VALUE else struct.unpack("d", struct.pack("q", x))[0] for x in bits]


def _refuse_differences(statement: Statement, received: Mapping[str, Sequence[int]], world: World) -> None:
    """Raise if results of the previous call, parameters or identical arguments differ between ranks."""
    if len({*zip(*itemgetter(*RESULTS)(received), strict=True)}) > 1:
        results = {name: _from_bits(received[name]) for name in RESULTS}
        if difference := results_difference(results, statement.results_tolerance):
            raise ValueError(f"{statement.caller}: {difference}")
    state = statement.state
    if len({*received["level"]}) > 1:
        bound = max(statement.tolerance, tolerance(state.values()))
        if levels_differ(_from_bits(received["level"]), len(state), bound):
            raise ValueError(f"{statement.caller}: {state_difference(world.exchange_text(state_lines(state)))}")
    if len(set(received["same"]) - {0}) > 1:
        raise ValueError(f"{statement.caller}: {SAME_TENSOR_DIFFERS}")


def _exchange_text(caller: str, text: str, world: World) -> tuple[list[str], list[str]]:
    """The callers and texts of all ranks, from which every rank makes the same error."""
    parts = [x.partition("\n") for x in world.exchange_text(f"{caller}\n{text}")]
    return [x[0] for x in parts], [x[2] for x in parts]


def refuse_empty(caller: str, shards: Shards) -> None:
    if shards.total == 0:
        raise ValueError(
            f"{caller}: the global batch is empty, no rank brought a row. "
            "A rank may bring none, but not all ranks may: skip this step on every rank."
        )
