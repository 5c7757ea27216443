"""The class of an invariant, and the comparison of a result with what is expected."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.measurement import Gradients
from contrastive_zoo.testing.trial import TOLERANCE, Trial
from contrastive_zoo.testing.worlds import RankError


class Broken(AssertionError):
    """An invariant is broken by this loss on this batch."""


class NotApplicable(Exception):
    """An invariant does not apply to this loss on this batch; the message says why."""


@dataclass(frozen=True)
class Invariant:
    """A named property of a loss, and a mistake that breaks it."""

    check: Callable[[Trial], None]  # raises Broken, or NotApplicable where the property does not apply
    catches: str  # key of the mistake in the gallery

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def meaning(self) -> str:
        """The docstring of the check function, on one line."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, trial: Trial) -> bool:
        """Test the invariant; return whether it applies."""
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


def require(applies: object, reason: str) -> None:
    """Raise NotApplicable, with the reason, unless a condition holds."""
    if not applies:
        raise NotApplicable(reason)


def first_line(error: RankError) -> str:
    """Return the message of an error without tracebacks."""
    return str(error).partition("\n")[0]


def same_gradients(
    actual: Gradients, expected: Gradients, what: str, source: str = "one process's", tolerance: float = TOLERANCE
) -> None:
    """Raise Broken if a gradient differs; ``source`` says where the expected ones come from."""
    for name, gradient in expected.items():
        close(actual[name], gradient, f"{what} ({name}) is", source, tolerance)


def close(
    actual: Tensor | float, expected: Tensor | float, what: str, source: str, tolerance: float = TOLERANCE
) -> None:
    """Raise Broken if a result differs from the expected one, which ``source`` names, by more than the tolerance."""
    x, y = (torch.as_tensor(each, dtype=torch.float64) for each in (actual, expected))
    if x.shape != y.shape:
        raise Broken(f"{what} of shape {list(x.shape)}; {source}: {list(y.shape)}")
    error = (x - y).abs().max().item() if x.numel() else 0.0
    if not error <= tolerance * max(1.0, y.abs().max().item() if y.numel() else 0.0):
        raise Broken(f"{what} {_short(x)}; {source}: {_short(y)} (difference {error:.2g}{_ratio(x, y)})")


def _short(x: Tensor) -> str:
    return f"{x.item():.6g}" if x.numel() == 1 else f"of norm {x.norm().item():.6g}"


def _ratio(actual: Tensor, expected: Tensor) -> str:
    """Return ratio and cosine of the two as text; empty where one of them is zero."""
    x = Ratio.between(actual.flatten(), expected.flatten())
    if not (actual.any() and expected.any()):
        return ""
    return f", ratio {x.ratio:.3g}" if actual.numel() == 1 else f", ratio {x.norms:.3g}, cosine {x.cosine:.3g}"
