"""What a law is, and how what came is compared with what was expected."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.testing.measurement import Gradients
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError

TOLERANCE = 1e-10
"""Largest difference in float64, relative to the larger of 1 and what is compared with."""


class Broken(AssertionError):  # noqa: N818
    """A law does not hold for this loss on this batch."""


class NotTried(Exception):  # noqa: N818
    """A law says nothing of this loss on this batch, and why."""


@dataclass(frozen=True)
class Law:
    """A named property, and the mistake that breaks it.

    Args:
        check: raises :class:`Broken`, or :class:`NotTried` where it says nothing.
        catches: key of the mistake in the gallery.
    """

    check: Callable[[Trial], None]
    catches: str

    @property
    def name(self) -> str:
        """Its function's name."""
        return self.check.__name__

    @property
    def meaning(self) -> str:
        """Its function's docstring."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, trial: Trial) -> bool:
        """Whether it was tried; that it holds is then known.

        Raises:
            Broken: it does not.
        """
        try:
            self.check(trial)
        except NotTried:
            return False
        return True

    def __str__(self) -> str:
        return self.name


def law(*, catches: str) -> Callable[[Callable[[Trial], None]], Law]:
    """Make a law of a check."""
    return lambda check: Law(check, catches)


def asked_of_losses(trial: Trial) -> None:
    if trial.case.step:
        raise NotTried("asked of losses, not of training steps")


def number(x: float) -> Tensor:
    """In 64 bits whatever the caller's default dtype, or values would be compared in 32."""
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
            f"{what} {_short(found)}; {whose}: {_short(expected)} (off by {error:.2g}{_ratio(found, expected)})"
        )


def _short(x: Tensor) -> str:
    return f"{x.item():.6g}" if x.numel() == 1 else f"of norm {x.norm().item():.6g}"


def _ratio(found: Tensor, expected: Tensor) -> str:
    """How the two are related, where that says something."""
    ours, theirs = found.flatten(), expected.flatten()
    if not (theirs.norm() > 0 and ours.norm() > 0):
        return ""
    if ours.numel() == 1:
        return f", ratio {(ours / theirs).item():.3g}"
    cosine = (ours @ theirs / ours.norm() / theirs.norm()).item()
    return f", ratio {(ours.norm() / theirs.norm()).item():.3g}, cosine {cosine:.3g}"


def first_line(error: RankError) -> str:
    return str(error).partition("\n")[0]
