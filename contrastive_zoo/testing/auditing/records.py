"""What one process records of a few training steps, and how one process gets the batches of all ranks."""

import hashlib
import itertools
import pickle
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from contrastive_zoo.ranks.randomness import generators_kept

Sketches = dict[str, Tensor]  # sketches of tensors by the names of these
States = list[Tensor]  # of the random numbers of torch, NumPy and Python


@dataclass
class LossCall:
    """A call of a loss that the audit knows."""

    option: str | None  # grad_reduction of the loss, None if it has none
    samples: int  # length of its first argument
    value: float | None = None  # None if it raised
    factor: float | None = None  # the gradient that the backward pass started with at its value
    backward: int = -1  # number of the backward pass in its step


CallKind = Literal["calls", "calls_without_gradient", "inner_calls"]


@dataclass
class ModuleCall:
    """A call of a module by the script itself, not by another module."""

    samples: list[bytes] = field(default_factory=list)  # a digest of every sample
    arguments: list[Tensor | None] = field(default_factory=list)  # leaves; None for those that need a gradient
    drew_from: "States | None" = None  # the states of random numbers before it, if it drew


@dataclass
class Step:
    """One step of the optimizer, as one process saw it."""

    calls: list[ModuleCall] = field(default_factory=list)
    calls_without_gradient: list[ModuleCall] = field(default_factory=list)  # as those of a teacher
    inner_calls: list[ModuleCall] = field(default_factory=list)  # by other modules, with data: a training_step augments
    losses: list[LossCall] = field(default_factory=list)
    roots: list[float] = field(default_factory=list)  # scalars at which a backward pass starts
    backwards: int = 0  # number of backward passes
    stale: Sketches = field(default_factory=dict)  # gradients before the first backward pass, where not zero
    cleared: dict[str, int] = field(default_factory=dict)  # after how many passes a gradient was cleared again
    gradients: Sketches = field(default_factory=dict)  # before clipping by a function of torch.nn.utils
    received: Sketches = field(default_factory=dict)  # those that the optimizer receives
    moved: Sketches = field(default_factory=dict)  # what is added to each parameter, times the gradient's magnitude
    norms: dict[str, tuple[float, float]] = field(default_factory=dict)  # of the gradient; of it times the parameter
    after: Sketches = field(default_factory=dict)  # parameters, buffers and other tensors of modules, after the step
    optimized: set[str] = field(default_factory=set)  # the parameters that an optimizer holds
    decayed: set[str] = field(default_factory=set)  # those of at most one dimension with weight decay
    settings: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of each optimizer's groups, such as lr
    clips: list[float] = field(default_factory=list)  # limits of the functions of torch.nn.utils that clip
    has_dropout: bool = False  # whether dropout was switched off
    low: float = 0.0  # the unit of rounding where activations or gradients are rounded to 16 bits, otherwise 0
    epoch: int = 0  # how often a DataLoader had been started

    @property
    def samples(self) -> list[bytes]:
        return list(dict.fromkeys(y for x in self.calls for y in x.samples))

    @property
    def batch_size(self) -> int:
        """The samples that the first loss gets; if no loss is known, half of the largest call, as of two views."""
        return self.losses[0].samples if self.losses else max((len(x.samples) for x in self.calls), default=0) // 2

    @property
    def values(self) -> list[float]:
        """The values of the losses; of those that the script starts a backward pass at, if no loss is known."""
        return [float("nan") if x.value is None else x.value for x in self.losses] or self.roots

    @property
    def factor(self) -> float | None:
        """The factor by which the script multiplies the loss, relative to a mean over micro-batches."""
        factor = next((x.factor for x in self._optimized_losses if x.factor), None)
        return None if factor is None else factor * self.micro_batches

    @property
    def micro_batches(self) -> int:
        return len({x.backward for x in self._optimized_losses}) or 1

    @property
    def _optimized_losses(self) -> list[LossCall]:
        """The losses whose gradients the optimizer receives: not those of an attack on the input, which are cleared."""
        first = max((self.cleared.get(name, 0) for name in self.optimized), default=0)
        return [x for x in self.losses if x.factor is not None and x.backward > first]


@dataclass
class Record:
    """What one process recorded; the last fields are what a rerun needs."""

    rank: int = 0
    steps: list[Step] = field(default_factory=list)  # the last may be unfinished if the script raised
    finished: int = 0  # number of finished steps
    error: str = ""  # the exception in which the script ended
    start: Sketches = field(default_factory=dict)  # parameters, buffers and other tensors before their first use
    groups: dict[str, str] = field(default_factory=dict)  # for each trained parameter "encoder" or "loss"
    parameters: set[str] = field(default_factory=set)  # names of all parameters, those that are not trained, too
    eps: float = 0.0  # the unit of rounding of the parameters
    losses: list[str] = field(default_factory=list)  # their classes, in the order of their first calls
    unknown_losses: set[str] = field(default_factory=set)  # names of losses that the user gives, and no module has
    shares_samples: bool = False  # whether ranks may hold the same samples, as those of a tensor-parallel group do
    initialized: bool = False  # whether the script initialised torch.distributed
    samplers: list["Epoch"] = field(default_factory=list)  # what the script's data loaders yield in an epoch
    problem: str = ""  # why a comparison with one process, or with this one, would say nothing
    # the batches of every epoch that a loader began, with the state of torch's random numbers after each
    loaders: list[list[tuple[Any, States]]] = field(default_factory=list)
    trained_on: set[int] = field(default_factory=set)  # of these epochs, those of batches before a backward pass
    lengths: list[int] = field(default_factory=list)  # what ``len`` of the loaders answered
    tensors: dict[str, Tensor] = field(default_factory=dict)  # of modules, before their first use; rank 0 only
    optimizers: list[Any] = field(default_factory=list)  # state of each before its first step; rank 0 only
    is_unsure: bool = False  # of a rerun, whether a call's samples may have two orders that are about as close
    takes_all: bool = False  # of a rerun, whether each rank's modules got all samples of its batches
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


SECONDS, BATCHES = 2.0, 20_000  # limits of the part of an epoch whose indices are listed


class Epoch(NamedTuple):
    """The samples of an epoch of one loader on one rank."""

    batches: list[list[int]]  # indices into the dataset
    complete: bool  # whether these are all batches of the epoch
    size: int  # of the dataset
    sampler: str
    shuffles: bool  # whether set_epoch chooses the order of the samples
    first: str  # digest of the first sample of the dataset, which is the same for ranks with the same dataset
    seed: Any = None  # of the sampler


def listed(loader: DataLoader[Any]) -> Epoch | None:
    """List an epoch of a loader over a dataset with indices, None for another one; of the dataset, one sample is read."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return None
    # batch_size=None: the sampler yields batches or single samples
    of_sampler = (x if isinstance(x, list) else [x] for x in loader.sampler)
    source = of_sampler if loader.batch_sampler is None else iter(loader.batch_sampler)
    batches, end = [], time.monotonic() + SECONDS
    for indices in itertools.islice(source, BATCHES):
        if not all(isinstance(x, int) for x in indices):
            return None
        batches.append(list(indices))
        if time.monotonic() > end:
            break
    complete = next(source, None) is None
    inner: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler: Any = None
    # the innermost one chooses the order of samples; a sampler of this library is its own inner one
    while inner is not None and inner is not sampler:
        sampler, inner = inner, getattr(inner, "batch_sampler", None) or getattr(inner, "sampler", None)
    size, name = len(loader.dataset), type(sampler).__name__
    shuffles = hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True)
    return Epoch(batches, complete, size, name, shuffles, _first_digest(loader.dataset), getattr(sampler, "seed", None))


def _first_digest(dataset: Any) -> str:
    """Return a digest of the first sample, whose augmentation draws the same random numbers on every rank."""
    with generators_kept(None), suppress(Exception):  # a dataset may raise anything, and a sample may not be picklable
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        plain = tree_map(lambda x: x.tolist() if isinstance(x, Tensor) else x, dataset[0])
        return hashlib.sha256(pickle.dumps(plain)).hexdigest()
    return ""


def concatenated(parts: Sequence[Any]) -> Any:
    try:
        return merged(parts)
    except (RuntimeError, TypeError, KeyError) as error:
        raise ValueError(f"the ranks' batches cannot be concatenated: {error}") from error


def merged(parts: Sequence[Any]) -> Any:
    """Concatenate tensors along dimension 0, tokens padded to the longest; join lists; merge mappings by key."""
    first = parts[0]
    if isinstance(first, Tensor):
        lengths = [x.shape[1] for x in parts if x.ndim == 2 and not x.is_floating_point()]
        if len(lengths) == len(parts):
            parts = [torch.nn.functional.pad(x, (0, max(lengths) - x.shape[1])) for x in parts]
        return torch.cat(list(parts)) if first.ndim else first
    if isinstance(first, Mapping):
        return _like(first, [merged([x[key] for x in parts]) for key in first])
    if not isinstance(first, list | tuple):
        return first
    if len({len(x) for x in parts}) == 1 and first and all(map(_holds_samples, first)):
        return _like(first, [merged(x) for x in zip(*parts, strict=True)])
    return type(first)(y for x in parts for y in x)


def _like(batch: Any, children: Sequence[Any]) -> Any:
    """Return a mapping or a sequence as another one, with other elements in its order."""
    if isinstance(batch, Mapping):
        by_key = dict(zip(batch, children, strict=True))
        return by_key if type(batch) is dict else type(batch)(by_key)  # type: ignore[call-arg]  # as that of a dict
    return type(batch)(*children) if hasattr(batch, "_fields") else type(batch)(children)


def _holds_samples(x: Any) -> bool:
    """Return whether an element of a batch holds all samples, as images and labels do, or is one of them, as a sentence."""
    if isinstance(x, Mapping):
        return any(isinstance(y, Tensor) and y.ndim for y in x.values())
    return isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.ndim > 0)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, those of mappings and sequences included, in their order."""
    children = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [batch] if isinstance(batch, Tensor) else [y for x in children for y in tensors_of(x)]


def reordered(batch: Any, order: Tensor) -> Any:
    if isinstance(batch, Tensor):
        return batch[order] if batch.ndim and len(batch) == len(order) else batch
    if isinstance(batch, Mapping):
        return _like(batch, [reordered(x, order) for x in batch.values()])
    if not isinstance(batch, list | tuple):
        return batch
    if not all(map(_holds_samples, batch)) and len(batch) == len(order):
        return type(batch)(batch[i] for i in order.tolist())
    return _like(batch, [reordered(x, order) for x in batch])


def snapshot(x: Any) -> Any:
    """Return a detached copy on the CPU of every tensor in a tree; other values as they are."""
    if type(x) is dict or (isinstance(x, Mapping) and not isinstance(x, dict)):  # a BatchEncoding is no tree for torch
        return _like(x, [snapshot(y) for y in x.values()])
    return tree_map(lambda y: y.detach().to("cpu", copy=True) if isinstance(y, Tensor) else y, x)
