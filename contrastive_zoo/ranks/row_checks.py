"""What is wrong with rows, labels and their values, in words; values on an accelerator are checked in the next call."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.devices import ValueCheck
from contrastive_zoo.ranks.suggestions import first_time, warn_once


def row_kind(tensor: Tensor, *, device: bool = False) -> str:
    """The dtype, the shape of a row and whether it carries a gradient, as text."""
    kind = _kind(tensor.dtype, tensor.shape[1:], tensor.requires_grad and torch.is_grad_enabled())
    return kind if not device or tensor.is_cpu else f"{kind} on {tensor.device.type}"


def described(x: object) -> str:
    """What came in place of something else, in words."""
    if isinstance(x, Tensor):
        layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
        device = " on the meta device" if x.is_meta else ""
        shape = f"[{x.size(0)}, …]" if x.is_nested else list(x.shape)
        return f"{'nested ' * x.is_nested or layout}{str(x.dtype).removeprefix('torch.')} {shape}{device}"
    if isinstance(x, int) and x.bit_length() > 64:  # Python writes no integer of more than 4300 digits
        return f"an integer of {x.bit_length()} bits"
    if isinstance(x, (type(None), bool, int, float, complex, str, bytes, list, tuple, dict)) and len(repr(x)) < 60:
        return repr(x)
    return f"a {type(x).__name__}"


def is_integer(x: object, *, at_least: float = -math.inf, at_most: float = math.inf) -> bool:
    """Return whether x is an integer, Python's or NumPy's, and within bounds."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(at_least <= x <= at_most)


def word_problem(name: str, word: object, words: Any) -> str | None:
    allowed = get_args(words)
    listed = f"one of {', '.join(map(repr, allowed))}" if len(allowed) > 2 else " or ".join(map(repr, allowed))
    return None if isinstance(word, str) and word in allowed else f"{name} is {listed}, got {word!r}."


def flag_problem(**flags: object) -> str | None:
    for name, x in flags.items():
        if not isinstance(x, (bool, np.bool_)):
            return f"{name} is True or False, got {described(x)}."
    return None


def instance_problem(loss: object) -> str | None:
    """Return an error message for a loss class in place of its instance, or None."""
    if not isinstance(loss, type):
        return None
    return f"pass an instance, {loss.__name__}(...), not the class {loss.__name__}."


def tensor_problem(name: str, x: object) -> str | None:
    """What is wrong with what must be a dense tensor of numbers, in words; None if nothing is."""
    if not isinstance(x, Tensor):
        return not_tensor_problem(name, x)
    if hasattr(x, "device_mesh"):  # a DTensor
        # to_local() of a partial sum, or of a part of each row, is another number
        has_rows = all(of.is_replicate() or of.is_shard(0) for of in x.placements)  # type: ignore[attr-defined]
        to_local = f"{name}.to_local() if each rank of the loss holds its own rows, otherwise " if has_rows else ""
        return f"{name} must be a plain tensor, got a DTensor, {described(x)}. Pass {to_local}{name}.full_tensor()."
    if x.dtype in _PLAIN_DTYPES and x.layout is torch.strided and not (x.is_meta or x.is_nested):  # the usual case
        return None
    if x.is_nested:
        return f"{name} must be a dense tensor, got {described(x)}. Pass {name}.to_padded_tensor(0.0)."
    if x.layout is not torch.strided:
        return f"{name} must be a dense tensor, got {described(x)}. Pass {name}.to_dense()."
    if x.is_quantized:
        return f"{name} must hold plain numbers, got quantized {described(x)}. Pass {name}.dequantize()."
    if x.is_meta:
        return f"{name} must hold values, got {described(x)}, which has none."
    if x.is_floating_point() and x.dtype.itemsize == 1:
        return f"{name} must have 16 bits or more, got {described(x)}. Pass {name}.bfloat16()."
    return None


def not_tensor_problem(name: str, x: Any) -> str:
    """Return what is no tensor, and how to make one of it."""
    word, kind = name if name.isidentifier() else "x", type(x).__name__
    holds = [*x[:1]] if isinstance(x, (list, tuple)) else []
    if (isinstance(x, np.ndarray) and x.dtype.kind in "USO") or (holds and isinstance(holds[0], str)):
        of = "an array" if isinstance(x, np.ndarray) else f"a {kind}"
        if "label" not in name:
            return f"{name} must be a tensor, got {of} of str. Pass the embeddings that a model makes of them."
        return f"{name} must be integers, one per row, got {of} of str. Number the classes, the same on every rank."
    if isinstance(x, np.ndarray):
        return f"{name} must be a tensor, got {kind}. Pass torch.from_numpy({word})."
    if holds and isinstance(holds[0], Tensor):
        fix = f"Pass each by itself, loss(*{word}), or torch.stack({word})."
        return f"{name} must be a tensor, got a {kind} of {len(x)}. {fix}"
    if holds:
        return f"{name} must be a tensor, got {kind}. Pass torch.tensor({word})."
    parts = x if isinstance(x, Mapping) else getattr(x, "__dict__", {})
    tensors = {key: len(y.shape) for key, y in parts.items() if isinstance(key, str) and isinstance(y, Tensor)}
    for key, ndim in sorted(tensors.items(), key=lambda item: (item[1] != 2, item[0])):
        part = f"{word}[{key!r}]" if type(x) is dict else f"{word}.{key}"
        fix = part if ndim == 2 else f"its embeddings of samples, such as {part}.mean(1) with a mask of padding"
        return f"{name} must be a tensor, got {kind} of {', '.join(tensors)}. Pass {fix}."
    return f"{name} must be a tensor, got {kind}."


_PLAIN_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)
"""Dtypes of dense tensors in which :func:`tensor_problem` finds nothing wrong; it looks at those of others."""


@functools.lru_cache(maxsize=1024)
def _kind(dtype: torch.dtype, shape: torch.Size, has_gradient: bool) -> str:
    sizes = ", ".join(map(str, shape))
    return f"{str(dtype).removeprefix('torch.')}|[{sizes}]|{' with gradient' if has_gradient else ''}"


def in_one_line(value: object) -> str:
    """A setting as one line of text, without the separator ``|``."""
    return str(value).replace("|", "/").replace("\n", " ")


def array_in_one_line(array: NDArray[np.generic]) -> str:
    """Return the dtype, the shape and a digest of an array that ranks compare without sending it."""
    digest = blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
    return f"{array.dtype} {list(array.shape)}, digest {digest}"


def tolerance(rows: Iterable[Tensor]) -> float:
    """The largest epsilon of the rows' floating-point dtypes; that of float32 if there are none."""
    largest = 0.0
    for x in rows:
        if x.dtype in devices.DIFFERENTIABLE:
            largest = max(largest, torch.finfo(x.dtype).eps)
    return largest or torch.finfo(torch.float32).eps


def first_non_finite(rows: Mapping[str, Tensor], *, optional: bool = True) -> str | None:
    """Which rows hold NaN or infinite values, in words; None if no row does. ``optional``: the caller has check_finite."""
    for name, tensor in rows.items():
        if tensor.dtype not in devices.DIFFERENTIABLE:
            continue
        x = (devices.as_real(tensor) if tensor.is_complex() else tensor).detach()
        # a finite sum proves that all values are finite; an infinite one may have overflowed
        total = x.sum(dtype=torch.float32 if x.dtype.itemsize == 2 else None).item()
        if not (math.isfinite(total) or x.isfinite().all()):
            bad = (~x.isfinite().reshape(len(x), -1)).any(1).nonzero().flatten().tolist()
            some = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
            finite = f"{name}.isfinite()" if tensor.ndim == 1 else f"{name}.isfinite().flatten(1).all(1)"
            fix = "check_finite=False lets them through" if optional else f"leave these rows out: {name}[{finite}]"
            return (
                f"{name}: NaN or infinite values in {len(bad)} of {len(tensor)} rows (row {some}). "
                f"Look for a diverged encoder, a division by a zero norm or an overflow in half precision; {fix}."
            )
    return None


def labels_problem(name: str, labels: Any, rows: int | None = None) -> str | None:
    """The problem of these labels, in words; None if there is none."""
    if problem := tensor_problem(name, labels):
        return problem
    if labels.is_floating_point() or labels.is_complex() or labels.ndim != 1:
        return f"{name} are one integer per row, got {described(labels)}. {_labels_fix(name, labels, rows)}"
    if rows is not None and len(labels) != rows:
        fix = "Pass this rank's own labels with its own rows."
        return f"{name} are one per row, got {len(labels)} for {rows} rows. {fix}"
    return None


def _labels_fix(name: str, labels: Tensor, rows: int | None) -> str:
    """What makes integers, one per row, of these labels."""
    is_whole = not (labels.is_floating_point() or labels.is_complex())
    if is_whole and labels.ndim == 2 and len(labels) == 1 == rows and int(labels.sum()) != 1:
        return BATCH_IN_BATCH
    if labels.numel() == (len(labels) if rows is None and labels.ndim else rows):  # [n, 1], [1, n] or []
        flat = f"{name}.flatten()" if labels.ndim != 1 else name
        return f"Use {flat}." if is_whole else f"Use {flat}.long() if they are whole numbers."
    if labels.ndim == 2:
        return f"Use {name}.argmax(1) if they are one-hot."
    return f"Pass one integer for each row, such as {name}[:, 0]." if labels.ndim > 2 else f"Use {name}.long()."


BATCH_IN_BATCH = "If a batch sampler made it, pass it as DataLoader(dataset, batch_sampler=sampler), not as sampler=."


class ValueRule(NamedTuple):
    """What the values of labels, weights or the like must be, stated without reading them."""

    x: Tensor  # the tensor. Nothing is wrong with an empty one.
    numbers: Callable[[Tensor], Tensor]  # returns a few integers or bools from x, on its device
    # returns what is wrong, given these numbers; None if nothing is. It holds no tensor until the next call.
    problem: Callable[[Sequence[float]], str | None]


def values_problem(rules: Iterable[ValueRule], later: list[ValueCheck] | None, *, waits: bool = True) -> str | None:
    """Return what is wrong with values, in words; ``later``, if any, takes checks on an accelerator unless it ``waits``."""
    for rule in rules:
        if not rule.x.numel():
            continue
        if waits or devices.on_cpu(rule.x):
            if (problem := rule.problem(rule.numbers(rule.x.detach()).flatten().tolist())) is not None:
                return problem
        elif later is not None:
            later.append(ValueCheck(rule.numbers(rule.x.detach()).flatten(), rule.problem))
    return None


def range_rule(x: Tensor, low: int, high: int, rule: str, fix: str = "") -> ValueRule:
    """Return the rule that integers are in low … high, in words, and what to do about others."""

    def problem(numbers: Sequence[float]) -> str | None:
        least, most = map(int, numbers)
        return None if low <= least and most <= high else f"{rule}, got {least} … {most}. {fix}".rstrip()

    return ValueRule(x, lambda x: torch.stack(x.long().aminmax()), problem)


def logits_rule(name: str, rows: Mapping[str, Tensor]) -> ValueRule | None:
    """Return the rule that warns of similarities in place of embeddings, S and Sᵀ or z zᵀ; None without such shapes.

    It is read at the first square batch of a loss's name that a network has computed.
    """
    squares = [x for x in rows.values() if x.grad_fn is not None and x.ndim == 2 and _LEAST <= x.shape[0] == x.shape[1]]
    if not 0 < len(squares) < 3 or not first_time(f"{name} of a square batch"):
        return None
    first, other = squares[0], squares[-1]
    column = other.detach()[:, 0]

    def numbers(first: Tensor) -> Tensor:
        return torch.isclose(first[0], column, rtol=1e-2, atol=0).all() & (first[0].amin() < first[0].amax())

    def warn(is_transposed: Sequence[float]) -> None:
        if is_transposed[0]:
            warn_once(f"{name}: {_LOGITS}")

    return ValueRule(first, numbers, warn)


_LEAST = 8  # by chance, so many numbers of one row are never those of a column

_LOGITS = (
    "the embeddings look like a matrix of similarities, such as image @ text.T and its transpose: row 0 of the first is "
    "column 0 of the last. The loss computes the similarities itself. Pass the embeddings, [n, d]."
)


def safe_index(index: Tensor, stop: int) -> Tensor:
    """Return indices into ``stop`` rows, moved inside on an accelerator: CUDA ends the process at one out of range."""
    return index if devices.on_cpu(index) else index.clamp(0, stop - 1)
