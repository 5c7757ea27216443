"""The fingerprint of a call: one number of what must be equal on all ranks, and a digest of each argument."""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.ranks.devices import DIFFERENTIABLE, as_real, has_float64, read_later

ONE_ROW, REPEATED, DISTINCT = range(3)
"""What the numbers of an argument are, in the last two bits of its digest: rows that are all the same, as of a collapsed
encoder; integers, single numbers, or numbers that repeat, as masks and targets do; or numbers like those of embeddings."""

_KIND = 3


class Fingerprint(NamedTuple):
    level: float | None = None  # of the numbers that must be equal; None if they are not compared
    digests: Mapping[str, int] = {}  # by argument


def fingerprint(state: Mapping[str, Tensor] | None, rows: Mapping[str, Tensor]) -> Callable[[], Fingerprint]:
    """Start to read the numbers of a loss, None if ranks do not compare them, and of its arguments; the result waits."""
    parts, widths = [], {}
    for name, x in rows.items():
        if x.numel():
            flat = as_real(x) if x.is_complex() else x
            flat = flat if flat.ndim == 2 else flat.reshape(len(x), -1)
            # evenly spaced columns, and rows
            by = max(1, flat.shape[1] // _COLUMNS)
            width = -(-flat.shape[1] // by)
            parts.append(flat.detach()[:: max(1, len(flat) * width // _NUMBERS), ::by])
            widths[name] = width
    of_state = [x for _, x in sorted((state or {}).items(), key=itemgetter(0)) if x.numel()]
    parts += [x.detach() if _is_number(x) else norm_and_sketch(x) for x in of_state]
    lengths = [x.numel() for x in parts]
    read: Callable[[], Any] = list
    if device := next((x.device for x in parts if not x.is_cpu), None):
        dtype = torch.float64 if has_float64(device) else torch.float32
        read = read_later(torch.cat([x.flatten().to(device, dtype) for x in parts]))
    elif parts:
        # NumPy joins few numbers in a fraction of torch's time. It takes copies: torch cannot free memory that NumPy shares
        read = functools.partial(np.concatenate, [x.to(torch.float64, copy=True).numpy().ravel() for x in parts])

    def finished() -> Fingerprint:
        numbers, start, digests = np.asarray(read()), 0, {}
        for (name, width), length in zip(widths.items(), lengths, strict=False):
            is_embedding = rows[name].dtype in DIFFERENTIABLE and width > 1
            digests[name] = _digest(numbers[start : start + length], width, is_embedding)
            start += length
        rest, pairs = iter(numbers[start:].tolist()), list[float]()
        for x in of_state:
            first = next(rest)
            pairs += (abs(first), first * math.sin(1)) if _is_number(x) else (first, next(rest))
        return Fingerprint(None if state is None else level_of(pairs), digests)

    return finished


def _is_number(x: Tensor) -> bool:
    """Return whether it is a temperature or the like, whose norm and sketch the host computes, at every step."""
    return x.numel() == 1 and x.is_floating_point()


_NUMBERS, _COLUMNS = 256, 32  # of an argument, how many a digest is made of at least, and of how many features
_LOOKED_AT = 64  # of these, to see whether numbers repeat


def _digest(numbers: "np.ndarray[Any, Any]", width: int, is_embedding: bool) -> int:
    data, row = numbers.tobytes(), numbers[:width].tobytes()
    some = numbers[:_LOOKED_AT].tolist() if is_embedding else []
    # embeddings of bfloat16 repeat some numbers, and those after a ReLU have many zeros
    is_distinct = is_embedding and len({*some}) > max(3, len(some) // 4)
    is_one_row = data.endswith(row) and data == row * (len(numbers) // width)
    kind = ONE_ROW if is_one_row else DISTINCT if is_distinct else REPEATED
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True) & ~_KIND | kind


def equal_arguments(
    rows: Mapping[str, Tensor], digests: Sequence[Sequence[int]]
) -> tuple[dict[str, int], Sequence[int]]:
    """Return which arguments are equal on all ranks, with what their numbers are, and ranks with the same embeddings."""
    equal = {name: of[0] & _KIND for name, of in zip(rows, digests, strict=True) if of[0] and len({*of}) == 1}
    embeddings = [of for x, of in zip(rows.values(), digests, strict=True) if x.dtype in DIFFERENTIABLE]
    by_rank = [*zip(*embeddings, strict=True)]
    if len({*by_rank}) == len(by_rank):
        return equal, ()
    for of_rank, count in Counter(by_rank).items():
        # a few numbers, as of masks, may be equal by chance on some ranks
        least = REPEATED if count == len(by_rank) else DISTINCT
        if count > 1 and any(x & _KIND >= least for x in of_rank if x):
            return equal, [rank for rank, x in enumerate(by_rank) if x == of_rank]
    return equal, ()


_LEAST = 1e-3  # differences of norms below it count as they are, not as a share
_WIDTH = 2**14
_GOLDEN_RATIO = 0.5 + 1.25**0.5  # its multiples by neighbouring integers have fractions that are far apart


def norm_and_sketch(x: Tensor) -> Tensor:
    """Return [2]: the norm of a tensor, and the product of all of its numbers with a fixed direction."""
    flat = (as_real(x) if x.is_complex() else x).detach().flatten()
    if len(flat) == 1 and not flat.is_floating_point() and has_float64(flat.device):  # a count, compared exactly
        flat = flat.double()
        return torch.cat([flat, flat * (_GOLDEN_RATIO * flat % 1)])
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return torch.stack([vector_norm(flat), _sketch(flat)])


def _sketch(x: Tensor) -> Tensor:
    direction = _direction(x.dtype, x.device)
    if len(x) <= _WIDTH:
        return torch.dot(x, direction[: len(x)])
    whole = len(x) // _WIDTH * _WIDTH
    with torch.autocast(x.device.type, enabled=False):
        products = x[:whole].view(-1, _WIDTH) @ direction
    return _sketch(torch.cat([products, x[whole:]]))


@functools.lru_cache(maxsize=8)
def _direction(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(1, _WIDTH + 1, device=device, dtype=dtype).sin_()


def level_of(pairs: Sequence[float]) -> float:
    """Return one number of norms and sketches, which a share of a tensor's norm changes by about that share."""
    count, level = len(pairs) // 2, 0.0
    for index in range(count):  # with another weight each, two tensors that change places change it, too
        level += (1 + index / count) * _height(*pairs[2 * index : 2 * index + 2])
    return level


def _height(norm: float, sketch: float) -> float:
    return math.log(_LEAST + norm) + sketch / (_LEAST + norm)


def levels_differ(levels: Sequence[float | None], count: int, tolerance: float) -> bool:
    """Return whether the loss of some rank computes with other numbers than rank 0's, of so many tensors."""
    known, bound = [x for x in levels if x is not None], (tolerance * max(1, count)) ** 0.5
    if len(known) < len(levels) or not math.isfinite(sum(known)):
        return False
    return any(abs(x - known[0]) > bound for x in known)


def state_lines(state: Mapping[str, Tensor]) -> str:
    """Return the norms and sketches by name, from which :func:`state_difference` makes an error."""
    by_name = {name: norm_and_sketch(x).tolist() for name, x in state.items()}
    return "\n".join(f"{name}|{norm!r}|{sketch!r}" for name, (norm, sketch) in by_name.items())


def state_difference(texts: Sequence[str]) -> str:
    """Return which parameter, buffer or setting differs most, given each rank's :func:`state_lines`."""
    lines = ([line.rsplit("|", 2) for line in text.splitlines()] for text in texts)
    first, *others = ({name: (float(norm), float(sketch)) for name, norm, sketch in of_rank} for of_rank in lines)
    differences = [
        (abs(_height(*pair) - _height(*first[name])), rank, name)
        for rank, of_rank in enumerate(others, 1)
        for name, pair in of_rank.items()
        if name in first
    ]
    where = "the loss's parameters, buffers or settings differ between ranks"
    if differences:
        _, rank, name = max(differences)
        here, there = first[name][0], others[rank - 1][name][0]
        norms = f"has norm {here:.9g} on rank 0 and {there:.9g} on rank {rank}"
        if name.startswith("the shared "):
            return (
                f"{name} differs between ranks: it {norms}. Every rank computes with its own: pass the same tensor on "
                "every rank, such as a queue of gathered embeddings, or leave it out of shared if it holds each rank's own "
                "rows. check_equal=False turns this check off."
            )
        where += f": {name} {norms}{'' if here != there else ', but other numbers'}"
    return (
        f"{where}. Call torch.manual_seed(0) on every rank before you construct the loss, or wrap the loss in DDP, "
        "DistributedLoss(DistributedDataParallel(loss)); a module that is a setting must return the same number on every "
        "rank. check_equal=False turns this check off."
    )
