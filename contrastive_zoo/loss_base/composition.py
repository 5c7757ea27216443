"""Add losses: a weight for each term, and one gather of the embeddings for all terms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import traced_as
from contrastive_zoo.loss_base.checks import instance_problem, is_number
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.kept_state import state_kept_on_error
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.row_checks import described
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.world import World


class Composition(Loss):
    """Return ``Σ weight · term`` over :meth:`terms`, which share one cache of gathered embeddings.

    Embeddings that one term gathers, and those that any rank can derive from them (a prefix, normalised ones), are not
    gathered again for other terms. Gradients are communicated for each term.

    Args:
        losses: losses of this library.
        count: number of terms.
        weights: weights of the terms; None is 1 for each.

    Raises:
        ValueError: no losses, a third-party loss, a class in place of its instance, a wrong number of weights, or
            weights that are not finite.

    Examples:
        >>> Composition([Loss()], 2, None).weights
        (1.0, 1.0)
    """

    shown: ClassVar[tuple[str, ...]] = ("weights",)
    """Names of the attributes that the representation shows."""

    def __init__(self, losses: Sequence[Loss], count: int, weights: Sequence[float] | None) -> None:
        name = type(self).__name__
        if classes := [problem for loss in losses if (problem := instance_problem(loss))]:
            raise ValueError(f"{name}: {classes[0]}")
        if third_party := [type(loss).__name__ for loss in losses if not isinstance(loss, Loss)]:
            raise ValueError(
                f"{name}: losses are this library's, got {third_party[0]}. Give a loss from elsewhere its own "
                "DistributedLoss and add the values."
            )
        given = [1.0] * count if weights is None else weights
        listed = isinstance(given, (list, tuple)) and all(isinstance(x, (int, float)) for x in given)
        if not listed or not len(losses) or len(given) != count:
            raise ValueError(f"{name}: one weight for each of {count} terms, got {described(weights)}.")
        super().__init__(check_finite=all(loss.check_finite for loss in losses))
        self.weights = tuple(map(float, given))
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        """Return what is wrong with the weights, or None; the losses check their own settings."""
        return None if all(map(is_number, self.weights)) else f"weights must be finite, got {self.weights}."

    def terms(
        self, rows: Sequence[Tensor], named_rows: Mapping[str, Tensor], world: World
    ) -> list[Callable[[], Tensor]]:
        """Return a function for each term, which computes it.

        Raises:
            NotImplementedError: a subclass does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define terms(rows, named_rows, world).")

    def members(self) -> list[Loss]:
        """Return the losses that are added."""
        return [x for x in self.modules() if isinstance(x, Loss) and x is not self]

    def can_be_replicated(self, *rows: Any, **named_rows: Any) -> bool:
        return all(loss.can_be_replicated(*rows, **named_rows) for loss in self.members())

    def ragged_dims(self) -> Mapping[str, int]:
        dims: dict[str, int] = {}
        for loss in self.members():
            if not isinstance(loss, Composition):
                names = loss.tensor_arguments()
                for name, dim in loss.ragged_dims().items():
                    dims |= {f"rows[{names.index(name)}]": dim, f"named_rows['{name}']": dim}
        return dims

    def can_ring(self) -> bool:
        return all(loss.can_ring() for loss in self.members())

    def ring_problem(self) -> str | None:
        problems = ((loss, loss.ring_problem()) for loss in self.members())
        return next((f"{type(loss).__name__}: {problem}" for loss, problem in problems if problem), None)

    @traced_as(GraphModule.traced_forward)
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Float[Tensor, "..."]:
        """Return the weighted sum.

        Args:
            rows: arguments of the losses.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
            named_rows: the same arguments by name.
        """
        outer = Session.of(self.local() if world is None else world)
        if problem := self.settings_problem():
            refuse(type(self).__name__, problem, world=outer)
        session = outer.with_cache()
        terms = self.terms(rows, named_rows, session)
        session.declare(type(self).__name__, terms)
        with state_kept_on_error(self):  # a term may raise after an earlier one has moved its state
            values = [term() for term in terms]
        if session is not outer and session.cache is not None:
            session.cache.clear()
        return torch.stack([w * value for w, value in zip(self.weights, values, strict=True)]).sum(0)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)
