"""What one rank records of a few training steps: calls of encoders and losses, gradients, parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


@dataclass
class Arguments:
    """The arguments of a call, flattened, detached and copied to the CPU.

    Attributes:
        leaves: tensors and other values.
        trained: for each leaf, whether it required a gradient.
        template: ``(args, kwargs)`` with the index of each leaf in its place.
    """

    leaves: list[Any]
    trained: list[bool]
    template: tuple[Any, Any]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Arguments:
        """Copy the arguments of a call.

        Examples:
            >>> found = Arguments.of((torch.ones(2, requires_grad=True),), {"labels": [3]})
            >>> found.trained, found.rebuild([1, 2])
            ([True, False], ((1,), {'labels': [2]}))
        """
        leaves, spec = tree_flatten((args, kwargs))
        trained = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        return cls([snapshot(x) for x in leaves], trained, tree_unflatten(range(len(leaves)), spec))

    def with_keywords(self, kwargs: dict[str, Any]) -> Arguments:
        """Add keyword arguments to positional ones."""
        if not kwargs:
            return self
        named = Arguments.of((), kwargs)
        places = tree_map(lambda i: i + len(self.leaves), named.template[1])
        template = (self.template[0], places)
        return Arguments([*self.leaves, *named.leaves], [*self.trained, *named.trained], template)

    def rebuild(self, leaves: list[Any]) -> tuple[Any, Any]:
        """Return ``(args, kwargs)`` with other leaves."""
        args, kwargs = tree_map(lambda i: leaves[i], self.template)
        return args, kwargs


@dataclass
class Call:
    """A forward call of an encoder or of a loss.

    Attributes:
        module: index among the encoders, or among the losses, in the order of their first calls.
        arguments: what it was called with.
        output: of an encoder, its output; of a loss, its value, None if it raised.
        random_state: torch's random state before the call.
        drew: whether the call drew random numbers.
        autocast: device type, whether autocast was enabled, and its dtype.
        factor: of a loss, the gradient that the backward pass started with at its value; None before.
    """

    module: int
    arguments: Arguments
    output: Any
    random_state: Tensor
    drew: bool
    autocast: tuple[str, bool, torch.dtype]
    factor: float | None = None


@dataclass
class MicroBatch:
    """The calls of encoders that lead to a loss, and the calls of losses."""

    encoders: list[Call] = field(default_factory=list)
    losses: list[Call] = field(default_factory=list)


@dataclass
class Clip:
    """A call of a function of ``torch.nn.utils`` that clips gradients.

    Attributes:
        function: its name.
        names: the clipped parameters.
        arguments: the other arguments.
    """

    function: str
    names: list[str]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Step:
    """One step of the optimizer, as one rank saw it. Parameters have names such as ``encoder0.weight``.

    Attributes:
        micro_batches: one, or several with gradient accumulation.
        state: parameters and buffers before the step.
        stale: gradients at the start of the first backward pass, where they are not zero.
        gradients: those that the optimizer received, before clipping.
        after: parameters after the step.
        optimized: names of the parameters that an optimizer holds.
        optimizer_states: ``state_dict`` of each optimizer before the step, by its index; rank 0 only.
        optimizer_problem: why the state of an optimizer is not known; empty if it is.
        clips: how gradients were clipped.
        scale: factor of a GradScaler.
        sharded: names of the parameters of which this rank holds a part (FSDP).
        uncovered: shapes of optimized parameters that belong to no recorded encoder or loss.
        other_terms: names of the parameters that get a gradient from another term than the recorded losses.
        batch_norms: names of BatchNorm modules in training mode.
        epoch: how often a DataLoader had been started.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    stale: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    optimized: set[str] = field(default_factory=set)
    optimizer_states: dict[int, Any] = field(default_factory=dict)
    optimizer_problem: str = ""
    clips: list[Clip] = field(default_factory=list)
    scale: float = 1.0
    sharded: set[str] = field(default_factory=set)
    uncovered: list[tuple[int, ...]] = field(default_factory=list)
    other_terms: set[str] = field(default_factory=set)
    batch_norms: list[str] = field(default_factory=list)
    epoch: int = 0

    @property
    def losses(self) -> list[Call]:
        """All calls of losses, in order."""
        return [call for micro in self.micro_batches for call in micro.losses]


@dataclass
class Record:
    """What one rank recorded.

    Attributes:
        rank: of the process.
        steps: the recorded steps; the last may be unfinished if the script raised.
        finished: the number of finished steps.
        error: the exception in which the script ended.
        parameters: for each trained parameter, whether it belongs to an ``"encoder"`` or to a ``"loss"``.
        loss_names: class of each loss.
        options: ``grad_reduction`` of each loss that is distributed, None for others.
        initialized: whether the script initialised torch.distributed.
        samplers: what the script's data loaders yield in an epoch.
        peak_bytes: peak resident memory of the process before the steps are compared.
        seconds: duration of the script.
    """

    rank: int = 0
    steps: list[Step] = field(default_factory=list)
    finished: int = 0
    error: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    loss_names: list[str] = field(default_factory=list)
    options: list[str | None] = field(default_factory=list)
    initialized: bool = False
    samplers: list[Any] = field(default_factory=list)
    peak_bytes: int = 0
    seconds: float = 0.0


def snapshot(x: Any) -> Any:
    """Return a detached copy on the CPU of every tensor in a tree; other values as they are.

    Examples:
        >>> snapshot({"x": torch.ones(1, requires_grad=True), "y": 2})
        {'x': tensor([1.]), 'y': 2}
    """
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, x)
