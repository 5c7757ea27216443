"""The class of an invariant, and the comparison of what was found with what was expected."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.testing.measurement import Gradients
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError

TOLERANCE = 1e-10
"""Largest allowed difference in float64, relative to the larger of 1 and the largest expected element."""


class Broken(AssertionError):  # noqa: N818
    """An invariant is broken by this loss on this batch."""


class NotApplicable(Exception):  # noqa: N818
    """An invariant does not apply to this loss on this batch; the message says why."""


@dataclass(frozen=True)
class Invariant:
    """A named property of a loss, and a mistake that breaks it.

    Args:
        check: raises :class:`Broken`, or :class:`NotApplicable` where the property does not apply.
        catches: key of the mistake in the gallery.
    """

    check: Callable[[Trial], None]
    catches: str

    @property
    def name(self) -> str:
        """The name of the check function."""
        return self.check.__name__

    @property
    def meaning(self) -> str:
        """The docstring of the check function, on one line."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, trial: Trial) -> bool:
        """Test the invariant; return whether it applies.

        Raises:
            Broken: the invariant does not hold.
        """
        try:
            self.check(trial)
        except NotApplicable:
            return False
        return True

    def __str__(self) -> str:
        return self.name


def invariant(*, catches: str) -> Callable[[Callable[[Trial], None]], Invariant]:
    """Turn a check function into an :class:`Invariant`."""
    return lambda check: Invariant(check, catches)


def require_loss(trial: Trial) -> None:
    if trial.case.step:
        raise NotApplicable("applies to losses, not to training steps")


def number(x: float) -> Tensor:
    """Return x as a float64 tensor; the caller's default dtype may be float32, which would lose digits."""
    return torch.tensor(x, dtype=torch.float64)


def same_gradients(found: Gradients, expected: Gradients, what: str, whose: str = "one process's") -> None:
    for name, theirs in expected.items():
        close(found[name], theirs, f"{what} ({name}) is", whose)


def close(found: Tensor, expected: Tensor, what: str, whose: str) -> None:
    if found.shape != expected.shape:
        raise Broken(f"{what} of shape {list(found.shape)}; {whose}: {list(expected.shape)}")
    found, expected = found.double(), expected.double()
    error = (found - expected).abs().max().item() if found.numel() else 0.0
    if not error <= TOLERANCE * max(1.0, expected.abs().max().item() if expected.numel() else 0.0):
        raise Broken(
            f"{what} {_short(found)}; {whose}: {_short(expected)} (difference {error:.2g}{_ratio(found, expected)})"
        )


def _short(x: Tensor) -> str:
    return f"{x.item():.6g}" if x.numel() == 1 else f"of norm {x.norm().item():.6g}"


def _ratio(found: Tensor, expected: Tensor) -> str:
    """Return ratio and cosine of the two as text; empty where one of them is zero."""
    ours, theirs = found.flatten(), expected.flatten()
    if not (theirs.norm() > 0 and ours.norm() > 0):
        return ""
    if ours.numel() == 1:
        return f", ratio {(ours / theirs).item():.3g}"
    cosine = (ours @ theirs / ours.norm() / theirs.norm()).item()
    return f", ratio {(ours.norm() / theirs.norm()).item():.3g}, cosine {cosine:.3g}"


def first_line(error: RankError) -> str:
    return str(error).partition("\n")[0]
