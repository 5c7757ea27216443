"""The comparison of a case under DistributedLoss with the same case on one process."""

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.testing.measurement import Encoder
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.distributed import DistributedLoss
from tools.pml_matrix.cases import SPLITS, Case, Splits, all_splits
from tools.pml_matrix.constructors import SAMPLES, WIDTH


@dataclass
class Found:
    """The results of a case in all steps: tensors by name, or the error that it raised."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None


Wrap = Callable[..., Any]


def on_ranks(case: Case, shards: Sequence[int], grad_reduction: str, wrap: Wrap = DistributedLoss) -> Found:
    """Run the steps on the local shards and reduce gradients as the trainer does; runs on every rank."""

    def call(loss: nn.Module, miner: nn.Module | None) -> Callable[..., Any]:
        if miner is None or case.mined == "inside":
            return wrap(loss, miner=miner, grad_reduction=grad_reduction)
        return _mined_outside(wrap(loss, grad_reduction=grad_reduction), DistributedMiner(miner))

    def reduced(of_encoder: Tensor) -> Tensor:
        dist.all_reduce(of_encoder)
        return of_encoder / len(shards) if grad_reduction == "mean" else of_encoder

    start = sum(shards[: dist.get_rank()])
    local = slice(start, start + shards[dist.get_rank()])
    # another seed on each rank, which must not change the result
    found = _run_steps(case, call, local, seed=100 + dist.get_rank())
    if found.error is None:
        found.tensors["encoder"] = reduced(found.tensors["encoder"])
        if grad_reduction == "sum":  # each rank holds 1/W of the gradient, which the trainer sums
            for name in [name for name in found.tensors if name.startswith("parameter ")]:
                found.tensors[name] = len(shards) * found.tensors[name]
    return found


def on_one_process(case: Case) -> Found:
    """Run the steps of the loss without wrapper on all samples: the expected result."""

    def call(loss: nn.Module, miner: nn.Module | None) -> Callable[..., Any]:
        return loss if miner is None else _mined_outside(loss, miner)

    return _run_steps(case, call, slice(0, SAMPLES), seed=100)


def _mined_outside(loss: Callable[..., Any], miner: Callable[..., Any]) -> Callable[..., Any]:
    def call(**arguments: Tensor) -> Any:
        return loss(**arguments, indices_tuple=miner(*arguments.values()))

    return call


def _run_steps(case: Case, call: Callable[..., Callable[..., Any]], local: slice, *, seed: int) -> Found:
    tensors: dict[str, Tensor] = {}
    try:
        loss, miner = case.construct()
        loss_fn = call(loss, miner)
        encoder = Encoder(WIDTH)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for step in range(case.steps):
            arguments = {name: x[local] for name, x in case.arguments(step).items()}
            arguments = {name: encoder(x) if x.is_floating_point() else x for name, x in arguments.items()}
            values = [x for x in tree_leaves(loss_fn(**arguments)) if isinstance(x, Tensor)]
            for index, value in enumerate(values):
                tensors[f"value {index} of step {step}"] = value.detach().double()
            differentiable = [value.sum() for value in values if value.requires_grad]
            if differentiable:
                torch.stack(differentiable).sum().backward()
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {error}")
    tensors["encoder"] = _gradient(encoder.weight)
    tensors |= {f"parameter {name}": _gradient(x) for name, x in loss.named_parameters()}
    tensors |= {f"buffer {name}": x.detach().double() for name, x in loss.named_buffers()}
    return Found(tensors)


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.clone()


def difference(found: Found, expected: Found, tolerance: float) -> str | None:
    """Return in words how two results differ; None if they are equal."""
    if found.error != expected.error:
        return f"raises {found.error}" if found.error else f"one process raises {expected.error}"
    if found.tensors.keys() != expected.tensors.keys():
        return f"differs in {sorted(found.tensors.keys() ^ expected.tensors.keys())}"
    for name, x in expected.tensors.items():
        y = found.tensors[name]
        if x.shape != y.shape:
            return f"{name} has shape {list(y.shape)} instead of {list(x.shape)}"
        if not torch.equal(x.isnan(), y.isnan()):
            return f"{name} has NaN at other elements"
        error = (x - y).abs().nan_to_num().amax().item() if x.numel() else 0.0
        if error > tolerance * max(1.0, x.abs().nan_to_num().amax().item() if x.numel() else 0.0):
            return f"{name} differs by {error:.1e}"
    return None


Verdict = tuple[str | None, str | None]
"""The error of the loss on one process, and the difference on several; None if there is none."""


def compare_all(of_size: Sequence[tuple[Case, tuple[int, ...]]], wrap: Wrap = DistributedLoss) -> list[Verdict]:
    """Compare each case and split with one process; runs on every rank."""
    expected: dict[Case, Found] = {}
    verdicts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about deprecated calls of torch and NumPy
        for case, shards in of_size:
            if case not in expected:
                expected[case] = on_one_process(case)
            # uneven shards are tested with a trainer that sums gradients
            trainer = "sum" if len(set(shards)) > 1 and min(shards) > 0 else "mean"
            different = difference(on_ranks(case, shards, trainer, wrap), expected[case], case.tolerance)
            verdicts.append((expected[case].error, different))
    return verdicts


@dataclass(frozen=True)
class Row:
    """A case and its comparisons.

    Args:
        case: the case.
        unsupported: why there is no such case, or the error on one process, which every rank must then raise too.
        verdicts: for each split, the difference on some rank; None if there is none.
    """

    case: Case
    unsupported: str | None
    verdicts: dict[tuple[int, ...], str | None]

    @property
    def wrong(self) -> dict[tuple[int, ...], str]:
        """Return the splits on which the result differs from one process, with the difference."""
        return {shards: why for shards, why in self.verdicts.items() if why is not None}


def measure(
    worlds: Worlds, selected: Iterable[Case], splits: Splits = all_splits, wrap: Wrap = DistributedLoss
) -> list[Row]:
    """Compare all cases on their splits, in one job per world size."""
    chosen = list(selected)
    keys = [(case, shards) for case in chosen if case.inapplicable is None for shards in splits(case)]
    unsupported: dict[Case, str | None] = {case: case.inapplicable for case in chosen}
    verdicts: dict[Case, dict[tuple[int, ...], str | None]] = {case: {} for case in chosen}
    for size in SPLITS:
        of_size = [(case, shards) for case, shards in keys if len(shards) == size]
        by_rank = worlds.run(size, compare_all, of_size, wrap, timeout=60.0 + len(of_size)) if of_size else []
        for (case, shards), *found in zip(of_size, *by_rank, strict=True):
            unsupported[case] = found[0][0]
            verdicts[case][shards] = next((f"rank {rank}: {why}" for rank, (_, why) in enumerate(found) if why), None)
    return [Row(case, unsupported[case], verdicts[case]) for case in chosen]
