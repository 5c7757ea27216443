"""Numbers as settings: checks in words, conversions, and tensors of their size."""

import math
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.row_checks import described, tensor_problem


def real(x: Any) -> Any:
    """Return a tensor of shape [1] as [], a Python or NumPy number as float, and anything else unchanged.

    A parameter of shape [1] would change dtype and shape of the loss by promotion. A NumPy float32 number would reduce
    the precision of results that are computed from it.

    Examples:
        >>> real(torch.ones(1)), real(torch.ones(2)), real(1), real("mean")
        (tensor(1.), tensor([1., 1.]), 1.0, 'mean')
    """
    if isinstance(x, Tensor):
        return x.reshape(()) if x.shape == (1,) else x
    is_number = isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool)
    return float(x) if is_number else x


def move_towards(state: Tensor, target: Tensor, share: float | Tensor) -> None:
    """Move ``state`` in place by a share of the way to ``target``; a share that is a tensor may have any dtype.

    Examples:
        >>> centre = torch.zeros(1)
        >>> move_towards(centre, torch.ones(1), torch.tensor([0.25], dtype=torch.float64))
        >>> centre
        tensor([0.2500])
    """
    state.lerp_(target.to(state), real(share).to(state) if isinstance(share, Tensor) else share)


def widen_numbers(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Reshape saved parameters of shape [] to [1] in ``state_dict``: earlier versions saved [], which FSDP cannot shard."""
    for name, parameter in module.named_parameters(recurse=False):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.ndim == 0 and parameter.shape == (1,):
            state_dict[prefix + name] = saved.reshape(1)


def word_problem(name: str, word: object, words: Any, *, one_of: bool = False) -> str | None:
    """Return what is wrong with a word that must be one of a Literal, or None.

    Examples:
        >>> from typing import Literal
        >>> word_problem("variant", "both", Literal["out", "in"])
        "variant is 'out' or 'in', got 'both'."
        >>> word_problem("variant", "both", Literal["out", "in"], one_of=True)
        "variant is one of 'out', 'in', got 'both'."
    """
    allowed = get_args(words)
    listed = f"one of {', '.join(map(repr, allowed))}" if one_of else " or ".join(map(repr, allowed))
    return None if isinstance(word, str) and word in allowed else f"{name} is {listed}, got {word!r}."


def is_number(
    x: object,
    *,
    above: float | None = None,
    below: float | None = None,
    low: float | None = None,
    high: float | None = None,
    finite: bool = True,
    whole: bool = False,
    several: bool = False,
) -> bool:
    """Return whether x is a number within bounds: Python's, NumPy's, or that of a tensor. NaN never is.

    Losses are computed in float32 or wider: a number is one that float32 holds, as it does the inverse of a positive one.

    Args:
        x: the object to check. A parameter on the meta device holds no numbers yet and passes; no other tensor there ever
            will hold any. A tensor on an accelerator passes, too: reading it would wait for all that is queued there.
        above: exclusive lower bound.
        below: exclusive upper bound.
        low: inclusive lower bound.
        high: inclusive upper bound.
        finite: whether infinities are refused.
        whole: whether the numbers must be integers.
        several: whether a tensor may hold any number of them.

    Examples:
        >>> is_number(1, above=0, high=1), is_number(torch.nan), is_number("1")
        (True, False, False)
    """
    values = [x]
    if isinstance(x, Tensor):
        if x.is_meta:
            return not whole and isinstance(x, nn.Parameter)
        if x.numel() != 1 and not several:
            return False
        values = _values(x) if devices.on_cpu(x) else []
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    return all(
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and not math.isnan(value)
        and _fits(value, positive=above == 0)
        and (math.isfinite(value) or not finite)
        and (above is None or value > above)
        and (below is None or value < below)
        and (low is None or value >= low)
        and (high is None or value <= high)
        for value in values
    )


def number_problem(rule: str | None = None, fix: str = "", /, **settings: Any) -> str | None:
    """Return what is wrong with settings that must be numbers within bounds, or None.

    Args:
        rule: the expectation, as a sentence without a full stop; None derives it from name and bounds.
        fix: a sentence that names the fix.
        settings: numbers by name, and the bounds of :func:`is_number` by name.

    Examples:
        >>> number_problem(low=0, high=1, weight=2.0)
        'weight must be from 0 to 1, got 2.0.'
        >>> number_problem("margin is an angle in degrees", "The paper has 5.73.", low=0, margin=torch.nan)
        'margin is an angle in degrees, got nan. The paper has 5.73.'
        >>> number_problem(above=0, scale=1e200)
        'scale must be within the range of float32, 1.2e-38 … 3.4e+38, got 1e+200.'
    """
    bounds = {name: settings.pop(name) for name in _BOUNDS if name in settings}
    for name, value in settings.items():
        if not is_number(value, **bounds):
            if isinstance(value, Tensor) and (wrong := tensor_problem(name, value)) is not None:
                return wrong
            plain = isinstance(value, (float, np.floating)) and math.isfinite(value)
            fits = not plain or _fits(value, positive=bounds.get("above") == 0 and value > 0)
            expected = rule or f"{name} must be {_expected(**bounds)}"
            return f"{expected if fits else f'{name} must be {_FLOAT32}'}, got {_shown(value)}. {fix}".rstrip()
    return None


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_FLOAT32 = f"within the range of float32, {_SMALLEST:.2g} … {_LARGEST:.2g}"


def _fits(x: Any, *, positive: bool) -> bool:
    """Return whether 64 bits hold an integer, and float32 holds any other number and the inverse of a positive one."""
    if isinstance(x, int):
        return -(2**63) < x < 2**63
    x = float(x)  # NumPy compares in x's own precision
    return not math.isfinite(x) or (abs(x) <= _LARGEST and not (positive and x < _SMALLEST))


def holds_numbers(x: Tensor) -> bool:
    """Return whether a tensor's values may be settings: real, dense, and of 16 bits or more, since −3 is 253 in uint8.

    Examples:
        >>> holds_numbers(torch.tensor(3)), holds_numbers(torch.tensor(3, dtype=torch.uint8))
        (True, False)
    """
    return tensor_problem("", x) is None and not x.is_complex() and x.dtype.itemsize > 1


def _values(x: Tensor) -> list[object]:
    """Return the least and the largest number of a tensor; the tensor itself, which is no number, where it holds none."""
    if not holds_numbers(x):
        return [x]
    # bounds hold for all numbers if they hold for the least and the largest, which are NaN if any number is
    return [x.item()] if x.numel() == 1 else [y.item() for y in x.detach().aminmax()] if x.numel() else []


def _shown(x: object) -> str:
    """Return a number, or the numbers of a small tensor, as errors write them."""
    plain = isinstance(x, Tensor) and x.numel() <= 8 and holds_numbers(x)
    return str(x.tolist()) if isinstance(x, Tensor) and plain else str(x) if isinstance(x, float) else described(x)


_BOUNDS = ("above", "below", "low", "high", "finite", "whole", "several")


def _expected(
    above: float | None = None,
    below: float | None = None,
    low: float | None = None,
    high: float | None = None,
    finite: bool = True,
    whole: bool = False,
    several: bool = False,
) -> str:
    """Return a description of bounds."""
    if low is not None and high is not None:
        return f"from {low} to {high}"
    size = ["positive"] if above == 0 else [] if low is None else [f"at least {low}"]
    return " and ".join([*size, "an integer" if whole else "finite" if finite else "a number"])


def flag_problem(**flags: object) -> str | None:
    """Return what is wrong with settings that must be True or False, or None.

    Examples:
        >>> flag_problem(soft="yes")
        "soft is True or False, got 'yes'."
    """
    wrong = [
        f"{name} is True or False, got {described(x)}."
        for name, x in flags.items()
        if not isinstance(x, (bool, np.bool_))
    ]
    return wrong[0] if wrong else None


def instance_problem(loss: object) -> str | None:
    """Return an error message for a loss class in place of its instance, or None.

    Examples:
        >>> from contrastive_zoo.loss_base.temperature import LearnableTemperature
        >>> instance_problem(LearnableTemperature)
        'pass an instance, LearnableTemperature(...), not the class LearnableTemperature.'
    """
    if not isinstance(loss, type):
        return None
    return f"pass an instance, {loss.__name__}(...), not the class {loss.__name__}."


T = TypeVar("T")


def of_size(caller: str, make: Callable[[], T], **sizes: int) -> T:
    """Return ``make()``, a tensor or an array whose shape consists of these settings.

    Raises:
        ValueError: it cannot be made, for lack of memory. The errors of torch and NumPy name no setting.

    Examples:
        >>> import torch
        >>> of_size("Loss", lambda: torch.zeros(2**62, 3), embedding_size=2**62)
        Traceback (most recent call last):
        ...
        ValueError: Loss: nothing can be made of embedding_size=4611686018427387904 (...). Pass smaller sizes.
    """
    try:
        return make()
    except (RuntimeError, MemoryError, ValueError) as error:
        arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
        reason = f"{error}".partition("\n")[0][:120] or type(error).__name__
        raise ValueError(f"{caller}: nothing can be made of {arguments} ({reason}). Pass smaller sizes.") from error
