"""What one rank records of a few training steps: calls of encoders and losses, gradients, parameters."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

FACTOR_TOLERANCE = 1e-3
"""Relative difference below which a factor equals an expected one; factors of a reduced precision are powers of two."""


class Arguments(NamedTuple):
    """The arguments of a call, detached and copied to the CPU."""

    args: Any
    kwargs: Any
    trained: list[bool]  # whether a leaf required a gradient

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> "Arguments":
        trained = [isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))]
        return cls(snapshot(args), snapshot(kwargs), trained)

    @property
    def leaves(self) -> list[Any]:
        """Tensors and other values, positional ones first."""
        return tree_leaves((self.args, self.kwargs))

    def rebuild(self, leaves: list[Any]) -> tuple[Any, Any]:
        args, kwargs = tree_unflatten(leaves, tree_structure((self.args, self.kwargs)))
        return args, kwargs


@dataclass
class Call:
    """A forward call of an encoder or of a loss."""

    module: int  # index among the encoders, or among the losses, in the order of their first calls
    arguments: Arguments
    output: Any  # of a loss, its value, None if it raised
    random_state: Tensor  # torch's, before the call
    drew: bool  # whether the call drew random numbers
    autocast: tuple[str, bool, torch.dtype]  # device type, whether it was enabled, and its dtype
    factor: float | None = None  # of a loss, the gradient that the backward pass started with at its value


@dataclass
class MicroBatch:
    """The calls of encoders that lead to a loss, and the calls of losses."""

    encoders: list[Call] = field(default_factory=list)
    losses: list[Call] = field(default_factory=list)


class Clip(NamedTuple):
    """A call of a function of ``torch.nn.utils`` that clips the gradients of the parameters with these names."""

    function: str
    names: list[str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Step:
    """One step of the optimizer, as one rank saw it. Parameters have names such as ``encoder0.weight``."""

    micro_batches: list[MicroBatch] = field(default_factory=list)  # several with gradient accumulation
    state: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers before the step
    stale: dict[str, Tensor] = field(default_factory=dict)  # gradients before the first backward pass, where not zero
    gradients: dict[str, Tensor] = field(default_factory=dict)  # those that the optimizer received, before clipping
    after: dict[str, Tensor] = field(default_factory=dict)  # parameters after the step
    optimized: set[str] = field(default_factory=set)  # the parameters that an optimizer holds
    optimizer_states: dict[int, Any] = field(default_factory=dict)  # state_dict before the step; rank 0 only
    optimizer_problem: str = ""  # why the state of an optimizer is not known
    clips: list[Clip] = field(default_factory=list)
    scale: float = 1.0  # of a GradScaler
    sharded: set[str] = field(default_factory=set)  # the parameters of which this rank holds a part (FSDP)
    uncovered: int = 0  # number of gradients in an optimizer that belong to no recorded encoder or loss
    other_terms: set[str] = field(default_factory=set)  # parameters with a gradient of a term that is no recorded loss
    batch_norms: bool = False  # whether a BatchNorm was in training mode
    epoch: int = 0  # how often a DataLoader had been started

    @property
    def losses(self) -> list[Call]:
        return [call for micro in self.micro_batches for call in micro.losses]

    def factor(self, call: Call) -> float:
        """Return the factor of a loss, relative to a mean over micro-batches: 1 in a right training without weights."""
        return (call.factor or 0.0) / self.scale * len(self.micro_batches)

    def explanation(self, call: Call, world_size: int) -> str | None:
        """Return the mistake that explains the factor of a loss: None for a factor of 1 and for a weight."""
        count = len(self.micro_batches)
        expected = {  # where W equals the number of micro-batches, the simpler explanation comes first
            None: 1.0,
            "accumulation not divided": count,
            "times W": world_size,
            "times W, accumulation not divided": world_size * count,
            "divided by W": 1 / world_size,
        }
        factor = self.factor(call)
        return next((name for name, x in expected.items() if math.isclose(factor, x, rel_tol=FACTOR_TOLERANCE)), None)

    def weight(self, call: Call, world_size: int) -> float:
        """Return the weight that the script gives to a loss: its factor, unless a mistake explains it."""
        return 1.0 if self.explanation(call, world_size) else self.factor(call)


@dataclass
class Record:
    rank: int = 0
    steps: list[Step] = field(default_factory=list)  # the last may be unfinished if the script raised
    finished: int = 0  # number of finished steps
    error: str = ""  # the exception in which the script ended
    groups: dict[str, str] = field(default_factory=dict)  # for each trained parameter "encoder" or "loss"
    loss_names: list[str] = field(default_factory=list)  # class of each loss
    options: list[str | None] = field(default_factory=list)  # grad_reduction of each loss, None if it has none
    initialized: bool = False  # whether the script initialised torch.distributed
    samplers: list[Any] = field(default_factory=list)  # what the script's data loaders yield in an epoch
    peak_bytes: int = 0  # resident memory, before the steps are compared
    seconds: float = 0.0


def snapshot(x: Any) -> Any:
    """Return a detached copy on the CPU of every tensor in a tree; other values as they are."""
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, x)
