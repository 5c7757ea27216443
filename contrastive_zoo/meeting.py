"""The one message with which a step begins: everybody's sizes, and agreement that the input is good.

A rank that finds its input bad cannot simply raise: the others would wait for it in the next collective. So every rank
says in a card of fixed length whether it is content, what it brings (a digest) and how many rows; if anybody is not,
all exchange the sentences and all raise the same error.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.world import Shards, World

_SIZES_ON_CARD = 6
_NO_VALUE = struct.unpack("q", struct.pack("d", -0.0))[0]  # no sum of anything is -0.0 once 0.0 is added

Known = dict[tuple[str, tuple[str, ...]], tuple[list[int], list[Shards]]]
"""Of each caller and what it brings: how many rows this rank held, and how they lay over the ranks."""


@dataclass
class Luggage:
    """Bytes that travel along with a meeting's card, in as much room on every rank, and everybody's, [W, room]."""

    mine: Sequence[Tensor]
    room: int
    arrived: Tensor | None = None


@dataclass
class Agreement:
    """What every :func:`meet` of a step compares as well, and what it learns.

    Args:
        settings: that must be the same on every rank.
        known: what ranks told each other before and will not tell again; None is that they always do.
    """

    settings: Mapping[str, object]
    known: Known | None = None
    rows: int = 0
    """That all ranks and arguments had together, labels aside; the most of any meeting."""
    width: int = 0
    """Of the widest."""

    def learn(self, rows: Mapping[str, Tensor], shards: Sequence[Shards]) -> None:
        """How many rows met, and how wide they are."""
        of = [(x, held) for x, held in zip(rows.values(), shards, strict=True) if x.is_floating_point()]
        self.rows = max(self.rows, sum(held.total for _, held in of))
        self.width = max([self.width, *(x.shape[1:].numel() for x, _ in of)])


_AGREEMENT: ContextVar[Agreement | None] = ContextVar("agreement", default=None)


@contextmanager
def agreeing(known: Known | None = None, **settings: object) -> Iterator[Agreement]:
    """Within it every :func:`meet` compares these settings as well, whoever calls it.

    Example:
        >>> with agreeing(grad_reduction="mean"):
        ...     meet("Loss", {"embeddings": torch.ones(3, 2)}, world=World())
        [Shards(sizes=(3,), rank=0)]
    """
    agreement = Agreement(settings, known)
    token = _AGREEMENT.set(agreement)
    try:
        yield agreement
    finally:
        _AGREEMENT.reset(token)


def meet(
    caller: str,
    rows: Mapping[str, Tensor],
    *,
    world: World,
    problem: str | None = None,
    settings: Mapping[str, object] | None = None,
    last_value: float | None = None,
    luggage: Luggage | None = None,
) -> list[Shards]:
    """Agree with all ranks on what is compared, and learn how many rows each of them holds.

    Args:
        caller: name of the loss, first word of any complaint.
        rows: what this rank brings, by name; dimension 0 counts rows.
        world: who takes part.
        problem: what this rank already knows to be wrong with its input.
        settings: numbers and words that must be the same everywhere.
        last_value: what this rank computed in an earlier step, if it must have come out the same everywhere.
        luggage: what travels along; None on every rank or on none.

    Returns:
        For each entry of ``rows``, how it is spread over the ranks.

    Raises:
        ValueError: on every rank alike, if any rank has a problem, brings NaN or infinite rows (unless
            ``world.check_finite`` is off), if ranks bring different kinds of rows or settings, or if their last values
            differ by more than half the digits of the rows' dtype.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> meet("Loss", {"embeddings": torch.ones(3, 2)}, world=ALONE)
        [Shards(sizes=(3,), rank=0)]
    """
    problem = problem or _first_non_finite(rows, world)
    counts = [len(tensor) if tensor.ndim else 1 for tensor in rows.values()]
    if world.size == 1:
        if problem is not None:
            raise ValueError(f"{caller}: {problem}")
        return [Shards((count,)) for count in counts]
    agreement = _AGREEMENT.get() or Agreement({})
    if (shards := _known(agreement.known, caller, rows, counts, problem)) is not None:
        agreement.learn(rows, shards)
        return shards
    signature = "\n".join(
        [f"{name}|{_row_kind(tensor)}" for name, tensor in rows.items()]
        + [f"{name}|{value}" for name, value in {**agreement.settings, **(settings or {})}.items()]
    )
    card = counts[:_SIZES_ON_CARD] + [0] * (_SIZES_ON_CARD - len(counts))
    card = [problem is not None, _digest(signature), _bits(last_value), *card]
    if luggage is None:
        cards = world.exchange(card)
    else:
        cards, luggage.arrived = world.exchange_with(card, luggage.mine, luggage.room)
    if any(card[0] for card in cards):
        raise ValueError(f"{caller}: {_complaints(world.exchange_text(problem or ''))}")
    if len({card[1] for card in cards}) > 1:
        raise ValueError(f"{caller}: {_difference(world.exchange_text(signature))}")
    if difference := _different_values([card[2] for card in cards], rows):
        raise ValueError(f"{caller}: {difference}")
    sizes = [card[3 : 3 + len(counts)] for card in cards]
    if len(counts) > _SIZES_ON_CARD:
        sizes = [mine + rest for mine, rest in zip(sizes, world.exchange(counts[_SIZES_ON_CARD:]), strict=True)]
    shards = [Shards(by_rank, world.rank) for by_rank in zip(*sizes, strict=True)]
    agreement.learn(rows, shards)
    if agreement.known is not None:
        agreement.known[caller, tuple(rows)] = counts, shards
    return shards


def _known(
    known: Known | None, caller: str, rows: Mapping[str, Tensor], counts: list[int], problem: str | None
) -> list[Shards] | None:
    """How rows lie, if ranks have told each other and need not again; None if they have not.

    Raises:
        ValueError: a problem, or another number of rows than before; on this rank alone, since nobody is asked.
    """
    if known is None or (caller, tuple(rows)) not in known:
        return None
    before, shards = known[caller, tuple(rows)]
    if problem is None and before != counts:
        problem = (
            f"static_shapes=True, but this rank brought {counts} rows of {', '.join(rows)} after {before}. "
            "Drop the last incomplete batch, or leave static_shapes out."
        )
    if problem is not None:
        raise ValueError(f"{caller}: {problem}")
    return shards


def refuse(caller: str, problem: str, *, world: World) -> None:
    """Take part in the others' :func:`meet` only to say why this rank cannot, so that all of them raise.

    Raises:
        ValueError: always, on every rank.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> refuse("Loss", "labels are missing.", world=ALONE)
        Traceback (most recent call last):
        ...
        ValueError: Loss: labels are missing.
    """
    meet(caller, {}, world=world, problem=problem)


def kind(tensor: Tensor) -> str:
    """Dtype and shape as complaints write them.

    Example:
        >>> kind(torch.ones(2, 3))
        'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _row_kind(tensor: Tensor) -> str:
    grad = " with gradient" if tensor.requires_grad and torch.is_grad_enabled() else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape[1:])}|{grad}"


def _bits(value: float | None) -> int:
    return _NO_VALUE if value is None else struct.unpack("q", struct.pack("d", value + 0.0))[0]


def _different_values(bits: Sequence[int], rows: Mapping[str, Tensor]) -> str | None:
    """In which last values ranks differ, in words; None if they do not, or if some rank has none."""
    if _NO_VALUE in bits:
        return None
    values = [struct.unpack("d", struct.pack("q", x))[0] for x in bits]
    precisions = [torch.finfo(x.dtype).eps for x in rows.values() if x.is_floating_point()]
    eps = max(precisions, default=torch.finfo(torch.float32).eps)
    for rank, value in enumerate(values):
        both_nan = math.isnan(value) and math.isnan(values[0])
        if not both_nan and not math.isclose(value, values[0], rel_tol=eps**0.5, abs_tol=eps):
            return (
                f"its last value came out differently on two ranks that computed it from the same rows: rank 0 found "
                f"{values[0]:g}, rank {rank} found {value:g}. If the loss has parameters, build it under the same seed "
                "on every rank or wrap it in DDP. If it draws from a generator of its own, seed that alike (torch's, "
                "NumPy's and Python's global ones are shared already). If its operations are not deterministic, call "
                "torch.use_deterministic_algorithms(True). check_equal=False turns this check off."
            )
    return None


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _all_finite(x: Tensor) -> bool:
    """A sum is finite only if all its terms are; where it is not, it may have overflowed."""
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()
    return math.isfinite(total) or bool(x.isfinite().all())


def _first_non_finite(rows: Mapping[str, Tensor], world: World) -> str | None:
    if not world.check_finite:
        return None
    for name, tensor in rows.items():
        if tensor.is_floating_point() and not _all_finite(tensor.detach()):
            bad = (~torch.isfinite(tensor.detach().reshape(len(tensor), -1))).any(1).nonzero().flatten().tolist()
            some = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
            return (
                f"{name} hold NaN or infinite values in {len(bad)} of {len(tensor)} rows (row {some}). "
                "Look for a diverged encoder, a division by a zero norm or an overflow in half precision; "
                "check_finite=False lets them through."
            )
    return None


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
