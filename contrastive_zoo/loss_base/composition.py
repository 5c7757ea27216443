"""What sums of losses share: a weight for each term, and rows that travel once for all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.loss_base.checks import instance_problem, is_number
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.world import World


class Composition(Loss):
    """``Σ weight · value`` over what :meth:`values` gives; all gather rows under one roof.

    A row that one value has gathered, or from which it can be made again on any rank (a prefix, a normalised one), does not
    travel for the others. Gradients do, for each value by itself.

    Args:
        losses: of this library.
        count: of terms.
        weights: of them; None is 1 for each.

    Raises:
        ValueError: no losses, one from elsewhere or a class in place of its instance, another number of weights, or
            weights that are not finite.

    Example:
        >>> Composition([Loss()], 2, None).weights
        (1.0, 1.0)
    """

    shown: ClassVar[tuple[str, ...]] = ("weights",)
    """Names of what its representation tells."""

    def __init__(self, losses: Sequence[Loss], count: int, weights: Sequence[float] | None) -> None:
        name = type(self).__name__
        if classes := [problem for loss in losses if (problem := instance_problem(loss))]:
            raise ValueError(f"{name}: {classes[0]}")
        if strangers := [type(loss).__name__ for loss in losses if not isinstance(loss, Loss)]:
            raise ValueError(
                f"{name}: losses are this library's, got {strangers[0]}. Give a loss from elsewhere its own "
                "DistributedLoss and add the values."
            )
        if not losses or (weights is not None and len(weights) != count):
            raise ValueError(f"{name}: one weight for each of {count} terms, got {weights}.")
        super().__init__(check_finite=all(loss.check_finite for loss in losses))
        self.weights = tuple([1.0] * count if weights is None else map(float, weights))
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        """What is wrong with the weights, in words; the losses speak for themselves."""
        return None if all(map(is_number, self.weights)) else f"weights must be finite, got {self.weights}."

    def terms(
        self, rows: Sequence[Tensor], named_rows: Mapping[str, Tensor], world: World
    ) -> list[Callable[[], Tensor]]:
        """What computes each term.

        Raises:
            NotImplementedError: this is the method to write.
        """
        raise NotImplementedError(f"{type(self).__name__} must define terms(rows, named_rows, world).")

    def members(self) -> list[Loss]:
        """The losses that are added up."""
        return [x for x in self.modules() if isinstance(x, Loss) and x is not self]

    def can_be_replicated(self, *rows: Any, **named_rows: Any) -> bool:
        return all(loss.can_be_replicated(*rows, **named_rows) for loss in self.members())

    def can_ring(self) -> bool:
        return all(loss.can_ring() for loss in self.members())

    @uncompiled
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Float[Tensor, "..."]:
        """The weighted sum.

        Args:
            rows: as the losses take them.
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
            named_rows: as the losses take them.
        """
        outer = Session.of(self.local() if world is None else world)
        if problem := self.settings_problem():
            refuse(type(self).__name__, problem, world=outer)
        session = outer.with_cache()
        terms = self.terms(rows, named_rows, session)
        session.declare(type(self).__name__, terms)
        values = [term() for term in terms]
        if session is not outer and session.cache is not None:
            session.cache.clear()
        return torch.stack([w * value for w, value in zip(self.weights, values, strict=True)]).sum(0)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)
