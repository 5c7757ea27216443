"""Compositions: several losses of the same embeddings, or one loss of prefixes; one gather for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch, Part, is_embedding, prefixes
from contrastive_zoo.engine.cost import Entry, Member
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Known, Loss
from contrastive_zoo.loss_base.loss_modules import is_plain
from contrastive_zoo.loss_base.settings import are_numbers, is_number
from contrastive_zoo.loss_base.shapes import call_form, whole_arguments
from contrastive_zoo.loss_base.state import state_kept_on_error
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.row_checks import described, instance_problem


class _Composition(Loss, engine="sum"):
    """Return ``Σ weight · term`` over :meth:`terms`, which share a gather; gradients are communicated for each term."""

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
        listed = isinstance(arguments, Sequence) and all(isinstance(x, (int, float)) for x in arguments)
        if not listed or not len(losses) or len(arguments) != count:
            raise ValueError(f"{name}: one weight for each of {count} terms, got {described(weights)}.")
        super().__init__(check_finite=all(loss.check_finite for loss in losses))
        self.weights = tuple(map(float, arguments))
        if problem := self.settings_problem():
            raise ValueError(f"{name}: {problem}")

    def settings_problem(self) -> str | None:
        """Return what is wrong with the weights, or None; the losses check their own settings."""
        weights = self.__dict__.get("weights", ())
        problem = None if all(map(is_number, weights)) else f"weights must be finite, got {weights}."
        return super().settings_problem() or problem

    def members(self) -> Sequence[Loss]:
        """Return the losses that are added, each once."""
        raise NotImplementedError(f"{type(self).__name__} must define members().")

    def terms(self) -> Iterator[tuple[int, int | None]]:
        """Return of each term the index of its member, and the number of first features that it takes; None is all."""
        return product(range(len(self.members())), self.__dict__.get("dims", (None,)))

    def entries(self, stated: CallInputs) -> list[Entry]:
        members = self.members()
        return [_member_entries(index, members[index], stated, width) for index, width in self.terms()]

    def stated(self, args: Sequence[Any], named: Mapping[str, Any], known: Known | None = None) -> CallInputs:
        known = {} if known is None else known
        name = type(self).__name__
        if problem := self.settings_problem():
            return CallInputs(name, Inputs({}), problem=problem)
        args, named = _distinct(*devices.to_device_of_embeddings(args, named))
        return _merged(name, [_member_stated(loss, args, named, known) for loss in self.members()])

    def compute(self, batch: Batch) -> Float[Tensor, "..."]:
        with state_kept_on_error(self):  # a term may raise after an earlier one has moved its state
            shared, members = batch.with_shared_rows(), self.members()
            values = [_member_value(members[index], shared, index, width) for index, width in self.terms()]
            return batch.failing_together(partial(self._sum, values)) if values[0].ndim else self._sum(values)

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        if len({x.shape for x in values}) > 1:
            names = [type(self.members()[index]).__name__ for index, _ in self.terms()]
            got = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(names, values, strict=True))
            raise ValueError(
                f"{type(self).__name__}: losses of a sum return equally many losses, got {got}. Use "
                "reduction='mean' in each, or call them one by one."
            )
        return torch.stack([w * value for w, value in zip(self.weights, values, strict=True)]).sum(0)

    def has_row_indices(self, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        return any(loss.has_row_indices(args, named) for loss in self.members())

    def ring_problem(self) -> str | None:
        problems = ((loss, loss.ring_problem()) for loss in self.members())
        return next((f"{type(loss).__name__}: {problem}" for loss, problem in problems if problem), None)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={x!r}" for name, x in vars(self).items() if name in ("dims", "weights"))


class WeightedSum(_Composition):
    r"""Add the weighted values of several losses of the same embeddings.

        L = Σ_k w_k · loss_k(embeddings)

    Embeddings are gathered once for all losses.

    Called as its losses are.

    Args:
        losses: losses of this library with the same call form. A temperature, or any other module, may be shared.
        weights: w_k; None is 1 for each, as in pytorch-metric-learning's MultipleLosses.

    Raises:
        ValueError: no losses, a third-party loss or a class in place of its instance, or not one finite weight per loss. At
            the call: members that return different numbers of losses.

    Examples:
        >>> import contrastive_zoo as cz
        >>> a = torch.eye(2)
        >>> WeightedSum([cz.NTXent(temperature=1.0), cz.InfoNCE(temperature=1.0)], weights=[1.0, 0.5])(a, a)
        tensor(0.7081)

    Source: pytorch-metric-learning's MultipleLosses, https://kevinmusgrave.github.io/pytorch-metric-learning/losses
    """

    def __init__(self, losses: Sequence[Loss], *, weights: Sequence[float] | None = None) -> None:
        if not isinstance(losses, (Sequence, nn.ModuleList)):
            raise ValueError(f"WeightedSum: losses are a list of losses, got {described(losses)}.")
        super().__init__(losses, len(losses), weights)
        self.losses = nn.ModuleList(losses)

    def members(self) -> Sequence[Loss]:
        return [*self.losses]


class Matryoshka(_Composition):
    r"""Add the values of ``loss`` on prefixes of the embeddings.

        L = Σ_m c_m · loss(z[:, :m])

    A loss that normalises does so for each prefix. Embeddings are gathered once for all prefixes.
    Only embeddings of the trained model are cut. A teacher's or a guide's embeddings, scores and weights stay whole.

    Called as its loss is. A loss of your own names the last dimension of what stays whole otherwise than that of its first
    embeddings: ``inputs(self, z: Float[Tensor, "n d"], teacher: Float[Tensor, "n e"])``.

    Args:
        loss: a loss of this library, with any call form; its parameters are shared by all prefixes.
        dims: widths m. Include the whole width to train the whole embedding.
        weights: c_m; None is 1 for each, as in the paper and in sentence-transformers' MatryoshkaLoss.

    Raises:
        ValueError: a third-party loss or a class in place of its instance, dims below 1, other than a finite weight for
            each; at the call narrower embeddings.

    Examples:
        >>> import contrastive_zoo as cz
        >>> Matryoshka(cz.InfoNCE(temperature=1.0), (1, 2))(torch.eye(2), torch.eye(2))   # ½ (0.3133 + log 2) + 0.3133
        tensor(0.8165)

    Source: Kusupati et al. 2022, eq. 1, https://arxiv.org/abs/2205.13147
    """

    def __init__(self, loss: Loss, dims: Sequence[int], *, weights: Sequence[float] | None = None) -> None:
        if isinstance(dims, bytes) or not are_numbers(dims, low=1, whole=True):
            raise ValueError(f"Matryoshka: dims are one or more widths of at least 1, got {described(dims)}.")
        super().__init__([loss], len(dims), weights)
        self.loss, self.dims = loss, tuple(dims)

    def members(self) -> Sequence[Loss]:
        return [self.loss]

    def stated(self, args: Sequence[Any], named: Mapping[str, Any], known: Known | None = None) -> CallInputs:
        stated = super().stated(args, named, known)
        if stated.problem is None and (problem := self._prefix_problem(args, named)) is not None:
            return replace(stated, name=type(self).__name__, problem=problem)
        return stated

    def _prefix_problem(self, args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
        """Return why a prefix cannot be cut or compared, such as with class weights of another width, in words, or None."""
        tensors = {**{f"argument {index}": x for index, x in enumerate(args)}, **named}
        whole = _whole_arguments(self.loss)
        wide = {name: x for name, x in tensors.items() if x is not None and is_embedding(x) and name not in whole}
        narrow = [f"{name} {described(x)}" for name, x in wide.items() if x.shape[-1] < max(self.dims)]
        if narrow:
            return f"dims go up to {max(self.dims)}, got {', '.join(narrow)}. Leave out wider dims, or use a wider encoder."
        if isinstance(self.loss, _Composition) or not is_plain(self.loss) or self.loss.has_static_inputs:
            return None
        for m in self.dims:
            cut = {name: x[..., :m] for name, x in wide.items()}
            of_args = [cut.get(f"argument {index}", x) for index, x in enumerate(args)]
            if problem := self.loss.inputs(*of_args, **{name: cut.get(name, x) for name, x in named.items()}).problem:
                return f"{type(self.loss).__name__}, of a prefix of {m}: {problem}"
        return None


def _distinct(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with a view in place of a tensor that occurs again: every rank then merges the same ones."""
    arguments = [*args, *named.values()]
    for index, x in enumerate(arguments):
        if isinstance(x, Tensor) and any(x is y for y in arguments[:index]):
            arguments[index] = x.view_as(x)
    return arguments[: len(args)], dict(zip(named, arguments[len(args) :], strict=True))


def _merged(name: str, members: Sequence[CallInputs]) -> CallInputs:
    """Return the statement of a sum of losses: each tensor once, and how each member finds its own."""
    rows: dict[str, Tensor] = {}
    parts: list[Part] = []
    compared: dict[str, object] = {}
    whole: set[str] = set()
    for index, stated in enumerate(members):
        names = {}
        for row_name, x in stated.inputs.rows.items():
            stays = row_name in stated.whole and is_embedding(x)
            known = next((key for key, y in rows.items() if y is x and (key in whole) == stays), None)
            names[row_name] = known or (row_name if row_name not in rows else f"{row_name} of loss {index}")
            rows[names[row_name]] = x
            whole |= {names[row_name]} if stays else set()
        parts.append(Part(names, stated.inputs.parts, stated.inputs.host, stated.name, stated.whole))
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
    kernels = next((x.kernels for x in members if x.kernels is not CallInputs.kernels), CallInputs.kernels)
    of_members = tuple(_renamed(x.needs, part.names) for x, part in zip(members, parts, strict=True))
    kinds = ("whole", "split", "no_ring")
    reasons: Any = {kind: next(filter(None, (getattr(x, kind) for x in of_members)), None) for kind in kinds}
    needs = Needs("sum", no_kernel=None, members=of_members, **reasons)
    return CallInputs(name if bad is None else bad.name, inputs, settings, compared, problem, kernels, needs, whole)


def _renamed(needs: Needs, names: Mapping[str, str]) -> Needs:
    """Return the needs of a member with the names that its tensors have in the sum."""
    anchors, candidates = (tuple(names[name] for name in of) for of in (needs.anchors, needs.candidates))
    members = tuple(_renamed(of, names) for of in needs.members)
    return needs._replace(anchors=anchors, candidates=candidates, members=members)


def _member_stated(loss: Loss, args: Sequence[Any], named: Mapping[str, Any], known: Known) -> CallInputs:
    """Return a member's statement; one whose ``forward`` is its own, or that has hooks, states its arguments as they are."""
    if is_plain(loss):
        return loss.stated(args, named, known)
    arguments = {f"argument {index}": x for index, x in enumerate(args)} | dict(named)
    rows = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in arguments.items() if name not in rows}
    host = {"arguments": [*arguments][: len(args)], "named": [*named], "others": others}
    inputs = Inputs(rows, local=loss.has_row_indices(args, named), whole=True, host=host)
    names = tuple(rows)
    needs = Loss.needs(loss, inputs)._replace(engine="other", anchors=names, candidates=names, no_kernel=None)
    return CallInputs(type(loss).__name__, inputs, needs=needs, whole=_whole_arguments(loss))


def _whole_arguments(loss: Loss) -> frozenset[str]:
    """Return the arguments that are no embeddings of the trained model, by name and by position."""
    if isinstance(loss, _Composition):
        return frozenset.intersection(*map(_whole_arguments, loss.members()))
    kind: Any = type(loss)
    whole, parameters = whole_arguments(kind), call_form(kind).signature.parameters
    return whole | {f"argument {index}" for index, name in enumerate(parameters) if name in whole}


def _member_entries(index: int, loss: Loss, stated: CallInputs, width: int | None) -> Member:
    """Return what a member calls, given its view of the statement, or of a prefix of the features."""
    part = stated.inputs.parts[index]
    if not is_plain(loss):
        return Member(index, part.names, [], width, part.whole)
    rows = {name: stated.inputs.rows[merged] for name, merged in part.names.items()}
    inputs = Inputs(prefixes(rows, width, part.whole), parts=part.parts, host=part.host)
    of_member = CallInputs(part.name, inputs, stated.settings.members[index], needs=loss.needs(inputs))
    return Member(index, part.names, loss.entries(of_member), width, part.whole)


def _member_value(loss: Loss, batch: Batch, index: int, width: int | None) -> Tensor:
    """Return the value of a member, given its view of the batch, or of a prefix of the features."""
    whole, batch = batch.parts[index].whole, batch.member(index)
    batch = batch if width is None else batch.prefix(width, whole)
    if is_plain(loss):
        return loss.compute(batch)
    arguments = {**batch.host["others"], **batch.rows}
    args, named = ([arguments[name] for name in batch.host[kind]] for kind in ("arguments", "named"))
    return loss(*args, **dict(zip(batch.host["named"], named, strict=True)))
