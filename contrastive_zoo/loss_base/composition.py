"""Add losses: a weight for each term, and one statement and one gather of the embeddings for all terms."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Part, is_embedding
from contrastive_zoo.engine.cost import Entry, Member
from contrastive_zoo.engine.implementation import NO_KERNELS
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.loss_base.state import state_kept_on_error
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.row_checks import described, instance_problem


class Composition(Loss):
    """Return ``Σ weight · term`` over :meth:`terms`, each of which computes from a view of one batch.

    Embeddings that one term gathers, and those that any rank can derive from them (a prefix, normalised ones), are not
    gathered again for other terms. Gradients are communicated for each term.
    """

    shown: ClassVar[tuple[str, ...]] = ("weights",)  # names of the attributes that the representation shows

    def __init__(self, losses: Sequence[Loss], count: int, weights: Sequence[float] | None) -> None:
        name = type(self).__name__
        if classes := [problem for loss in losses if (problem := instance_problem(loss))]:
            raise ValueError(f"{name}: {classes[0]}")
        if third_party := [type(loss).__name__ for loss in losses if not isinstance(loss, Loss)]:
            raise ValueError(
                f"{name}: losses are this library's, got {third_party[0]}. Give a loss from elsewhere its own "
                "DistributedLoss and add the values."
            )
        arguments = [1.0] * count if weights is None else weights
        listed = isinstance(arguments, (list, tuple)) and all(isinstance(x, (int, float)) for x in arguments)
        if not listed or not len(losses) or len(arguments) != count:
            raise ValueError(f"{name}: one weight for each of {count} terms, got {described(weights)}.")
        super().__init__(check_finite=all(loss.check_finite for loss in losses))
        self.weights = tuple(map(float, arguments))
        if problem := self.settings_problem():
            raise ValueError(f"{name}: {problem}")

    def settings_problem(self) -> str | None:
        """Return what is wrong with the weights, or None; the losses check their own settings."""
        weights = self.__dict__.get("weights", ())
        return super().settings_problem() or (
            None if all(map(is_number, weights)) else f"weights must be finite, got {weights}."
        )

    def members(self) -> Sequence[Loss]:
        """Return the losses that are added, each once."""
        raise NotImplementedError(f"{type(self).__name__} must define members().")

    def entries(self, stated: CallInputs) -> list[Entry]:
        parts = enumerate(zip(self.members(), stated.inputs.parts, strict=True))
        return [member_entries(index, loss, part, stated) for index, (loss, part) in parts]

    def terms(self, batch: Batch) -> list[Tensor]:
        raise NotImplementedError(f"{type(self).__name__} must define terms(batch).")

    def stated(
        self, args: Sequence[Any], named: Mapping[str, Any], known: dict[Callable[..., Inputs], Inputs] | None = None
    ) -> CallInputs:
        known = {} if known is None else known
        name = type(self).__name__
        if problem := self.settings_problem():
            return CallInputs(name, Inputs({}), problem=problem)
        args, named = _distinct(*devices.to_device_of_embeddings(args, named))
        return merged(name, [_member_stated(loss, args, named, known) for loss in self.members()])

    def compute(self, batch: Batch) -> Float[Tensor, "..."]:
        with state_kept_on_error(self):  # a term may raise after an earlier one has moved its state
            values = self.terms(batch.with_shared_rows())
        return torch.stack([w * value for w, value in zip(self.weights, values, strict=True)]).sum(0)

    def index_arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
        """Return those of the members, each tensor once: with a hook, the sum itself sees all ranks' embeddings."""
        of_members = [x for loss in self.members() for x in loss.index_arguments(args, named)]
        return [x for nth, x in enumerate(of_members) if not any(x[1] is y[1] for y in of_members[:nth])]

    engine = "sum"

    def ring_problem(self) -> str | None:
        problems = ((loss, loss.ring_problem()) for loss in self.members())
        return next((f"{type(loss).__name__}: {problem}" for loss, problem in problems if problem), None)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)


def _distinct(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with a view in place of a tensor that occurs again: every rank then merges the same ones."""
    arguments = [*args, *named.values()]
    for index, x in enumerate(arguments):
        if isinstance(x, Tensor) and any(x is y for y in arguments[:index]):
            arguments[index] = x.view_as(x)
    return arguments[: len(args)], dict(zip(named, arguments[len(args) :], strict=True))


def merged(name: str, members: Sequence[CallInputs]) -> CallInputs:
    """Return the statement of a sum of losses: each tensor once, and how each member finds its own."""
    rows: dict[str, Tensor] = {}
    parts: list[Part] = []
    compared: dict[str, object] = {}
    for index, stated in enumerate(members):
        names = {}
        for row_name, x in stated.inputs.rows.items():
            known = next((key for key, y in rows.items() if y is x), None)
            names[row_name] = known or (row_name if row_name not in rows else f"{row_name} of loss {index}")
            rows[names[row_name]] = x
        parts.append(Part(names, stated.inputs.parts, stated.inputs.host, stated.name))
        compared |= {f"{stated.name} {index}: {key}": x for key, x in stated.compared.items()}
    bad = next((x for x in members if x.problem is not None), None)
    inputs = Inputs(
        rows,
        values=[rule for x in members for rule in x.inputs.values],
        local=any(x.inputs.local for x in members),
        whole=any(x.inputs.whole for x in members),
        parts=parts,
    )
    settings = SimpleNamespace(members=[x.settings for x in members])
    problem = None if bad is None else bad.problem
    kernels = next((x.kernels for x in members if x.kernels is not NO_KERNELS), NO_KERNELS)
    of_members = [_renamed(x.needs, part.names) for x, part in zip(members, parts, strict=True)]
    needs = Needs(
        "sum",
        whole=next((x.whole for x in of_members if x.whole), None),
        split=next((x.split for x in of_members if x.split), None),
        no_ring=next((x.no_ring for x in of_members if x.no_ring), None),
        no_kernel=None,
        members=of_members,
    )
    return CallInputs(name if bad is None else bad.name, inputs, settings, compared, problem, kernels, needs)


def _renamed(needs: Needs, names: Mapping[str, str]) -> Needs:
    """Return the needs of a member with the names that its tensors have in the sum."""
    anchors, candidates = ([names[name] for name in of] for of in (needs.anchors, needs.candidates))
    members = [_renamed(of, names) for of in needs.members]
    return needs._replace(anchors=anchors, candidates=candidates, members=members)


def _member_stated(
    loss: Loss, args: Sequence[Any], named: Mapping[str, Any], known: dict[Callable[..., Inputs], Inputs]
) -> CallInputs:
    """Return a member's statement; one whose ``forward`` is its own, or that has hooks, states its arguments as they are."""
    if loss.is_plain:
        return loss.stated(args, named, known)
    arguments = {f"argument {index}": x for index, x in enumerate(args)} | dict(named)
    rows = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in arguments.items() if name not in rows}
    host = {"arguments": [*arguments][: len(args)], "named": [*named], "others": others}
    indices = bool(loss.index_arguments(args, named))
    inputs = Inputs(rows, local=indices, whole=True, host=host)
    return CallInputs(
        type(loss).__name__, inputs, needs=Loss.needs(loss, inputs)._replace(engine="other", no_kernel=None)
    )


def member_entries(index: int, loss: Loss, part: Part, stated: CallInputs, width: int | None = None) -> Member:
    """Return what a member of a sum calls, given its view of the statement, or of a prefix of the features."""
    rows = {name: stated.inputs.rows[merged] for name, merged in part.names.items()}
    rows = {name: x[..., :width] if is_embedding(x) else x for name, x in rows.items()}
    if not loss.is_plain:
        return Member(index, part.names, [], width)
    inputs = Inputs(rows, parts=part.parts, host=part.host)
    of_member = CallInputs(part.name, inputs, stated.settings.members[index], needs=loss.needs(inputs))
    return Member(index, part.names, loss.entries(of_member), width)


def member_value(loss: Loss, batch: Batch) -> Tensor:
    """Return the value of a member of a sum, given its view of the batch."""
    if loss.is_plain:
        return loss.compute(batch)
    arguments = {**batch.host["others"], **batch.rows}
    return loss(
        *(arguments[name] for name in batch.host["arguments"]),
        **{name: arguments[name] for name in batch.host["named"]},
    )
