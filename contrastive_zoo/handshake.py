"""The handshake that opens a step: one message in which every rank says what it brings, before anything depends on it.

A rank cannot know what another rank holds, believes or has configured. Hence every decision that changes a rank's
sequence of messages, or which function it computes, is a function of values that all ranks have received, and they
receive them here. The header has the same length on every rank, whatever that rank believes. A payload of rows follows
it, of as many bytes as the group's previous handshakes have settled: that number belongs to the process group, of which
every handshake involves all ranks, so it is equal on all of them by construction.

What must be equal and is not, and what any rank finds wrong with its input, becomes the same ValueError on every rank.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.world import Shards, World

PAYLOAD_LIMIT = 2**20
"""Bytes of one rank's rows that may follow the header; more would be copied once more than need be."""

_SIZES = 16
"""Sizes that fit into a header; further ones take a message of their own."""

_IDLE = 8
"""Handshakes without a payload after which the group no longer reserves bytes for one."""

_NO_VALUE = struct.unpack("q", struct.pack("d", -0.0))[0]  # no sum of anything is -0.0 once 0.0 is added

_NAMES = (
    "problem", "digest", "last value", "norm", "projection", "fingerprint", "same", "replicable", "draws", "bytes",
)  # fmt: skip
"""Header fields before the sizes, one int64 each."""


@dataclass
class Statement:
    """What this rank brings to a handshake.

    Args:
        caller: name of the loss, first word of any error.
        compared: by name, what must be the same on every rank, in words.
        sizes: numbers of samples; as many numbers on every rank that brings the same ``compared``.
        problem: what this rank knows to be wrong with its input; None if nothing is.
        last_value: what it computed in an earlier step, if that must have come out the same everywhere.
        norm: of its learnt parameters and buffers, if their turn has come, and ``projection`` on a fixed direction.
        parameters: the norm of each of them, for the error.
        fingerprint: of its rows, if they must not be those of every other rank; 0 if they may.
        same: which arguments are one tensor, as a number other than 0; 0 if a rank without rows cannot tell.
        tolerance: relative, of values and parameters.
        replicable: whether this rank can compute the loss from the rows of all ranks.
        draws: whether it knows that the loss draws random numbers or changes its buffers as it is computed.
        small: whether a batch of these shards is sooner computed by every rank than shared.
        payload: rows that may follow the header, as bytes; None where they cannot.
    """

    caller: str
    compared: Mapping[str, str] = field(default_factory=dict)
    sizes: Sequence[int] = ()
    problem: str | None = None
    last_value: float | None = None
    norm: float | None = None
    projection: float | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    fingerprint: int = 0
    same: int = 0
    tolerance: float = torch.finfo(torch.float32).eps
    replicable: bool = False
    draws: bool = False
    small: Callable[[Sequence[Shards]], bool] = lambda shards: False
    payload: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Agreed:
    """What all ranks have received.

    Args:
        shards: of each of the statement's sizes.
        replicate: whether every rank computes the loss from the rows of all ranks.
        same: which arguments are one tensor; 0 if no rank could tell.
        payload: [W, bytes] of all ranks, if every rank's fitted.
    """

    shards: list[Shards]
    replicate: bool = False
    same: int = 0
    payload: Tensor | None = None


@dataclass
class _Reserved:
    """Bytes that a group's next handshake reserves for the payload."""

    size: int = 0
    idle: int = 0

    def learn(self, needed: int) -> None:
        """Take in how many bytes the rank with the most rows had; 0 if there was no payload."""
        if 0 < needed <= PAYLOAD_LIMIT:
            self.size, self.idle = needed, 0
        else:
            self.idle += 1
            self.size = self.size if self.idle < _IDLE else 0


_reserved: "WeakKeyDictionary[dist.ProcessGroup, _Reserved]" = WeakKeyDictionary()


def shake_hands(statement: Statement, world: World) -> Agreed:
    """Exchange statements with all ranks.

    Raises:
        ValueError: on every rank alike, if any rank has a problem; if what they compare differs; if a value or the
            parameters differ by more than half the digits of their dtype; or if all ranks hold the same rows.

    Examples:
        >>> shake_hands(Statement("Loss", sizes=[3]), World())
        Agreed(shards=[Shards(sizes=(3,), rank=0)], replicate=False, same=0, payload=None)
    """
    mine = statement
    if world.size == 1:
        if mine.problem is not None:
            raise ValueError(f"{mine.caller}: {mine.problem}")
        return Agreed([Shards((size,)) for size in mine.sizes])
    text = "\n".join(f"{name}|{value}" for name, value in mine.compared.items())
    sizes = list(mine.sizes[:_SIZES])
    needed = sum(x.nbytes for x in mine.payload or ())
    header = [
        mine.problem is not None,
        _digest(text),
        *map(_bits, (mine.last_value, mine.norm, mine.projection)),
        mine.fingerprint,
        mine.same,
        mine.replicable,
        mine.draws,
        needed if mine.payload is not None else -1,
        *sizes,
        *[0] * (_SIZES - len(sizes)),
    ]
    reserved = _reserved.setdefault(world.process_group, _Reserved())
    headers, payload = _exchange(header, mine.payload or (), reserved.size, world)
    found = {name: [x[index] for x in headers] for index, name in enumerate(_NAMES)}
    if any(found["problem"]):
        callers, problems = _exchange_text(mine.caller if mine.problem else "", mine.problem or "", world)
        raise ValueError(f"{next(filter(None, callers))}: {_complaints(problems)}")
    if len(set(found["digest"])) > 1:
        callers, texts = _exchange_text(mine.caller, text, world)
        raise ValueError(f"{callers[0]}: {_difference(texts)}")
    by_rank = [x[len(_NAMES) :][: len(mine.sizes)] for x in headers]
    if len(mine.sizes) > _SIZES:
        further = world.exchange(mine.sizes[_SIZES:])
        by_rank = [first + rest for first, rest in zip(by_rank, further, strict=True)]
    if difference := _different_values(found["last value"], mine.tolerance):
        raise ValueError(f"{mine.caller}: {difference}")
    if _different_parameters(found["norm"], found["projection"], mine.tolerance):
        norms = world.exchange_text("\n".join(f"{name}|{x:.9g}" for name, x in mine.parameters.items()))
        raise ValueError(f"{mine.caller}: {_drifted(norms)}")
    if 0 not in found["fingerprint"] and len(set(found["fingerprint"])) == 1:
        raise ValueError(f"{mine.caller}: {_GATHERED_ALREADY}")
    same = {x for x in found["same"] if x}
    if len(same) > 1:
        raise ValueError(f"{mine.caller}: {_ONE_TENSOR}")
    shards = [Shards(of, world.rank) for of in zip(*by_rank, strict=True)]
    replicate = all(found["replicable"]) and (any(found["draws"]) or mine.small(shards))
    needed = max(found["bytes"]) if replicate and min(found["bytes"]) >= 0 else 0
    fits = 0 < needed <= reserved.size
    reserved.learn(needed)
    return Agreed(shards, replicate, next(iter(same), 0), payload if fits else None)


def _exchange(
    numbers: Sequence[int], payload: Sequence[Tensor], size: int, world: World
) -> tuple[list[list[int]], Tensor]:
    """All ranks' numbers, and in the same message all ranks' payload, [W, size]: zeros for one that does not fit."""
    packed = struct.pack(f"{len(numbers)}q", *numbers)
    header = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(world.host_device)
    length = sum(len(x) for x in payload)
    fitting, length = (payload, length) if length <= size else ((), 0)
    message = torch.cat([header, *fitting, header.new_zeros(size - length)])
    received = world.start_host_gather(message)()
    headers = received[:, : len(header)].cpu().numpy()
    return [list(struct.unpack(f"{len(numbers)}q", x.tobytes())) for x in headers], received[:, len(header) :]


def _exchange_text(caller: str, text: str, world: World) -> tuple[list[str], list[str]]:
    """All ranks' callers, which may differ, and their texts: every rank raises in the same words."""
    parts = [x.partition("\n") for x in world.exchange_text(f"{caller}\n{text}")]
    return [x[0] for x in parts], [x[2] for x in parts]


def _bits(value: float | None) -> int:
    return _NO_VALUE if value is None else struct.unpack("q", struct.pack("d", value + 0.0))[0]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _different_values(bits: Sequence[int], tolerance: float) -> str | None:
    """In which last values ranks differ, in words; None if they do not, or if some rank has none."""
    values = _numbers(bits)
    if values is None:
        return None
    for rank, value in enumerate(values):
        both_nan = math.isnan(value) and math.isnan(values[0])
        if not both_nan and not math.isclose(value, values[0], rel_tol=tolerance**0.5, abs_tol=tolerance):
            return (
                f"its last value came out differently on two ranks that computed it from the same rows: rank 0 found "
                f"{values[0]:g}, rank {rank} found {value:g}. If the loss has parameters, build it under the same seed "
                "on every rank or wrap it in DDP. If it draws from a generator of its own, seed that alike (torch's, "
                "NumPy's and Python's global ones are shared already). If its operations are not deterministic, call "
                "torch.use_deterministic_algorithms(True). check_equal=False turns this check off."
            )
    return None


def _different_parameters(norms: Sequence[int], projections: Sequence[int], tolerance: float) -> bool:
    """Whether some rank's parameters are others than rank 0's; not if some rank has not summed them up."""
    by_norm, by_projection = _numbers(norms), _numbers(projections)
    if by_norm is None or by_projection is None:
        return False
    bound = tolerance**0.5 * abs(by_norm[0])
    alike = all(abs(x - numbers[0]) <= bound for numbers in (by_norm, by_projection) for x in numbers)
    return not alike and math.isfinite(sum(by_norm))


def _drifted(norms: Sequence[str]) -> str:
    """Which parameter differs, from each rank's norm of each."""
    by_rank = [dict(line.split("|", 1) for line in text.splitlines()) for text in norms]
    pairs = [(rank, name) for name in by_rank[0] for rank in range(1, len(by_rank))]
    differ = [(rank, name) for rank, name in pairs if by_rank[rank].get(name) != by_rank[0][name]]
    where = "the loss's parameters or buffers differ between ranks"
    if differ:
        rank, name = differ[0]
        where += f": {name} has norm {by_rank[0][name]} on rank 0 and {by_rank[rank].get(name)} on rank {rank}"
    return (
        f"{where}. Build the loss under the same seed on every rank, pass broadcast_parameters=True to start from rank "
        "0's, or wrap the loss in DDP. check_equal=False turns this check off."
    )


_ONE_TENSOR = (
    "ranks disagree on which arguments are one tensor: some rank passed the same tensor twice where another passed two. "
    "A loss may compare a tensor with itself in another way than with a copy: pass the arguments alike on every rank."
)

_GATHERED_ALREADY = (
    "every rank brought the very same embeddings. If they were gathered before (Lightning's all_gather, "
    "accelerator.gather, torch.distributed), pass this rank's own embeddings: DistributedLoss gathers by itself, and "
    "would count every sample once for each rank. If every rank reads the same data, give each its own shard, such as by "
    "a DistributedSampler. check_distinct=False accepts equal embeddings."
)


def _numbers(bits: Sequence[int]) -> list[float] | None:
    """The numbers that all ranks have sent; None if some rank has sent none."""
    return None if _NO_VALUE in bits else [struct.unpack("d", struct.pack("q", x))[0] for x in bits]


def _complaints(texts: list[str]) -> str:
    """What the ranks complain of; who does is said only where there are several."""
    found = [(rank, text) for rank, text in enumerate(texts) if text]
    if len({text for _, text in found}) == 1 and len(found) == len(texts):
        return found[0][1]
    return " ".join(f"rank {rank}: {text}" for rank, text in found)


def _difference(signatures: list[str]) -> str:
    """The first thing in which some rank differs from rank 0, in words."""
    lines = [dict(line.split("|", 1) for line in text.splitlines()) for text in signatures]
    names = list(dict.fromkeys(name for by_name in lines for name in by_name))
    for name in names:
        found = [by_name.get(name) for by_name in lines]
        other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
        if other is None:
            continue
        ours, theirs = found[0], found[other]
        if ours is None or theirs is None:
            has, lacks = (other, 0) if ours is None else (0, other)
            return (
                f"ranks disagree on what they bring: rank {has} brought {name}, rank {lacks} brought none. "
                f"Pass {name} on every rank or on none."
            )
        if "|" not in ours or "|" not in theirs:
            ours, theirs = (text.replace("|", " ").strip() for text in (ours, theirs))
            return (
                f"ranks disagree on {name}: rank 0 has {ours}, rank {other} has {theirs}. "
                "It must be the same on every rank."
            )
        for what, a, b in zip(("dtype", "width", "gradient"), ours.split("|"), theirs.split("|"), strict=True):
            if a != b:
                return f"{_MEND[what].format(name=name, ours=_width(a), theirs=_width(b), other=other)}"
    raise AssertionError(f"digests differ, signatures do not: {signatures}")


_MEND = {
    "dtype": "ranks disagree on the dtype of {name}: rank 0 brought {ours}, rank {other} brought {theirs}. "
    "Every rank must run under the same precision.",
    "width": "ranks disagree on the width of {name}: rank 0 brought {ours}, rank {other} brought {theirs}. "
    "Rows are as wide on every rank: use the same encoder head.",
    "gradient": "ranks disagree on whether {name} carry a gradient: rank 0 brought rows{ours}, rank {other} rows"
    "{theirs}. A rank without samples must still run the encoder on its empty batch, or its backward pass "
    "would leave the others waiting.",
}


def _width(text: str) -> str:
    """``[128]`` as ``d=128``; anything else as it is, nothing as its absence."""
    if text.startswith("[") and text.count(",") == 0:
        return f"d={text.strip('[]')}" if text != "[]" else "one number a row"
    return text or " without gradient"


def kind(tensor: Tensor) -> str:
    """Dtype and shape as complaints write them.

    Example:
        >>> kind(torch.ones(2, 3))
        'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def refuse_empty(caller: str, shards: Shards) -> None:
    """Say that nobody brought a row; every rank knows it.

    Raises:
        ValueError: the global batch is empty.

    Example:
        >>> refuse_empty("Loss", Shards((0, 3)))
    """
    if shards.total == 0:
        raise ValueError(
            f"{caller}: the global batch is empty, no rank brought a row. "
            "A rank may come with none, but not all of them; skip the step on every rank alike."
        )
