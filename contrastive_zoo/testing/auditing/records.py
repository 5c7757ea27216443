"""What one process records of a few training steps: batches, values of losses, sketches of gradients and parameters."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Sketches = dict[str, Tensor]
"""Sketches of tensors by the names of these."""


@dataclass
class LossCall:
    """A call of a loss that the audit knows."""

    module: int  # index among the losses, in the order of their first calls
    samples: int  # length of its first argument
    value: float | None = None  # None if it raised
    factor: float | None = None  # the gradient that the backward pass started with at its value
    backward: int = -1  # number of the backward pass in its step


class Draws(NamedTuple):
    """The state of torch's random numbers before and after a call that drew some."""

    before: Tensor
    after: Tensor


@dataclass
class ModuleCall:
    """A call of a module by the script itself, not by another module."""

    samples: list[bytes]  # a digest of every sample
    lengths: list[int]  # of the token sequences in each leaf, 0 of others
    arguments: list[Any] | None = None  # leaves, where no data loader is recorded
    draws: Draws | None = None


@dataclass
class Step:
    """One step of the optimizer, as one process saw it."""

    calls: list[ModuleCall] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)
    roots: list[float] = field(default_factory=list)  # scalars at which a backward pass starts
    backwards: int = 0  # number of backward passes
    samples: list[bytes] = field(default_factory=list)  # a digest of every sample, each once
    stale: Sketches = field(default_factory=dict)  # gradients before the first backward pass, where not zero
    gradients: Sketches = field(default_factory=dict)  # before clipping by a function of torch.nn.utils
    received: Sketches = field(default_factory=dict)  # those that the optimizer receives
    moved: Sketches = field(default_factory=dict)  # what is added to each parameter, times the gradient's magnitude
    norms: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # of the gradient, and of it times the parameter
    after: Sketches = field(default_factory=dict)  # parameters, buffers and other tensors of modules, after the step
    optimized: set[str] = field(default_factory=set)  # the parameters that an optimizer holds
    settings: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of each optimizer's groups, such as lr
    clips: list[str] = field(default_factory=list)  # names of the functions that clip
    is_scaled: bool = False  # whether a GradScaler scales the loss
    low: float = 0.0  # the unit of rounding of the lowest precision of an autocast
    epoch: int = 0  # how often a DataLoader had been started

    @property
    def draws(self) -> bool:
        """Whether a module drew random numbers."""
        return any(x.draws for x in self.calls)

    @property
    def values(self) -> list[float]:
        """The values of the losses; of those that the script starts a backward pass at, if no loss is known."""
        known = [float("nan") if x.value is None else x.value for x in self.losses]
        return known or self.roots

    @property
    def factor(self) -> float | None:
        """The factor by which the script multiplies the loss, relative to a mean over micro-batches."""
        known = [x.factor for x in self.losses if x.factor]
        return known[0] * self.micro_batches if known else None

    @property
    def micro_batches(self) -> int:
        """The number of backward passes of a loss: more than one with gradient accumulation."""
        return len({x.backward for x in self.losses if x.factor is not None}) or 1


@dataclass
class Record:
    """What one process recorded; the last fields are what a rerun needs."""

    rank: int = 0
    steps: list[Step] = field(default_factory=list)  # the last may be unfinished if the script raised
    finished: int = 0  # number of finished steps
    error: str = ""  # the exception in which the script ended
    start: Sketches = field(default_factory=dict)  # parameters, buffers and other tensors before their first use
    groups: dict[str, str] = field(default_factory=dict)  # for each trained parameter "encoder" or "loss"
    kinds: dict[str, str] = field(default_factory=dict)  # of other tensors "parameter", "buffer" or "attribute"
    eps: float = 0.0  # the unit of rounding of the parameters
    loss_names: list[str] = field(default_factory=list)  # class of each loss
    unknown_losses: set[str] = field(default_factory=set)  # names of losses that the user gives, and no module has
    options: list[str | None] = field(default_factory=list)  # grad_reduction of each loss, None if it has none
    loss_groups: list[tuple[int, ...]] = field(default_factory=list)  # ranks of each loss's process group
    shares_samples: bool = False  # whether ranks may hold the same samples, as those of a tensor-parallel group do
    initialized: bool = False  # whether the script initialised torch.distributed
    samplers: list[Any] = field(default_factory=list)  # what the script's data loaders yield in an epoch
    problem: str = ""  # why a rerun is not what it should be
    unrepeatable: str = ""  # why a step of one process would say nothing
    peak_bytes: int = 0  # resident memory
    seconds: float = 0.0
    loaders: list[list[Any]] = field(default_factory=list)  # the batches of every epoch that a loader began
    states: list[list[Tensor]] = field(default_factory=list)  # of torch's random numbers after each of these
    lengths: list[int] = field(default_factory=list)  # what ``len`` of the loaders answered
    tensors: dict[str, Tensor] = field(default_factory=dict)  # of modules, before their first use; rank 0 only
    optimizers: list[Any] = field(default_factory=list)  # state of each before its first step; rank 0 only
    skipped: int = 0  # steps of optimizers before a process group, as those of a reference on one process


def digests(leaves: Sequence[Any]) -> list[bytes]:
    """Return a digest of every sample of a call: of the tensors that are as long as the first one."""
    tensors = [x.detach() for x in leaves if isinstance(x, Tensor) and x.ndim and not hasattr(x, "device_mesh")]
    per_sample = [x.cpu() for x in tensors if len(x) == len(tensors[0])]
    return [hashlib.blake2b(b"".join(map(_bytes, x)), digest_size=16).digest() for x in zip(*per_sample, strict=True)]


def _bytes(x: Tensor) -> bytes:
    """Return the bytes of a sample; of tokens, without the padding at the end."""
    if x.ndim == 1 and not x.is_floating_point():
        filled = x.nonzero()
        x = x[: int(filled[-1]) + 1] if len(filled) else x[:0]
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
