"""Run a training again in one process, with the batches of all ranks, from the state of rank 0."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from contrastive_zoo.ranks.randomness import restore_random
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.auditing.records import (
    CallKind,
    ModuleCall,
    Record,
    concatenated,
    digests,
    reordered,
    tensors_of,
)
from contrastive_zoo.testing.evidence import noisy

# Ratio of the distances of two orders from which on both are tried: with mixup, whose shares may be almost 0, the closer
# one was wrong in 11 % of 300 draws, all above 0.9; with a tenth of noise the ratio is 0.1
ABOUT_AS_CLOSE = 0.7
Replacement = tuple[Any, str, Callable[..., Any]]  # the arguments of messages.replaced
SAME_BATCHES = "every rank loads the same batches, and trains on all of their samples"
OTHER_PARTS = "the script splits a batch, into other parts in one process than on the ranks"


class Setting(NamedTuple):
    """How a training runs again."""

    ranks: tuple[int, ...] = ()  # whose batches it gets; all
    noise: int | None = None  # seed of changes of up to half a unit of rounding of the parameters at the start
    unit: float = 0.0  # that unit of rounding; that of the parameters' type
    by_shard: bool = False  # whether a BatchNorm takes the statistics of each rank's samples
    by_view: bool | None = None  # whether a call has one view after the other, not one sample; the closer order


class Rerun:
    """Give one process what the ranks had: batches, state, settings of optimizers, random numbers."""

    def __init__(self, records: Sequence[Record], setting: Setting) -> None:
        self.first, self.setting, self.problem = records[0], setting, ""
        ranks = setting.ranks or range(len(records))
        self.records = [records[rank] for rank in ranks]
        if self.first.shares_samples:  # tensor parallel ranks hold the same samples, which count once
            samples = [[step.samples for step in x.steps] for x in self.records]
            self.records = [x for i, x in enumerate(self.records) if samples[i] not in samples[:i]]
        self.rows: list[Tensor] = []  # of each rank, the indices of its samples in the batch
        self.sizes: list[int] = []  # of each rank's batch
        self.size = 0  # of the batch here
        self.has_equal_batches = self.takes_all = False  # whether ranks load the same batches, and take all of each
        self.is_unsure = False  # whether both orders of the views of a call were about as close
        self.noise = None if setting.noise is None else torch.Generator().manual_seed(setting.noise)
        self.lengths = iter(self.first.lengths)  # of the loaders on rank 0, on which schedules depend

    def batches(self, loader: int) -> Iterator[Any]:
        """Yield the batches of all ranks, together, of the epoch that a loader begins."""
        epochs = [x.loaders[loader] if loader < len(x.loaders) else [] for x in self.records]
        samples = [x.steps[0].calls[0].samples if x.steps and x.steps[0].calls else [] for x in self.records]
        # ranks with equal batches give other samples to their modules
        sliced_later = any(x != samples[0] for x in samples)
        for index in range(max(map(len, epochs))):
            parts, states = zip(*(x[index] for x in epochs if index < len(x)), strict=True)
            first, *others = leaves = [tensors_of(x) for x in parts]
            equal = bool(first) and all(len(x) == len(first) and all(map(torch.equal, x, first)) for x in others)
            self.has_equal_batches = whole = len(parts) == len(epochs) > 1 and equal and sliced_later
            batch = parts[0] if whole else concatenated(parts)
            sizes = [len(x[0]) if x and x[0].ndim else 0 for x in leaves]
            self.sizes, self.size = sizes, sizes[0] if whole else sum(sizes)
            if first and not whole:
                order = self._order(leaves, sizes)
                batch, self.rows = reordered(batch, order), list(order.argsort().split(sizes))
            restore_random(states[0])
            yield batch

    def _order(self, leaves: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Tensor:
        """Return the order in which modules use the samples: where a script splits its batch, part after part."""
        calls = []
        for x, tensors in zip(self.records, leaves, strict=False):
            of_rank = [call for step in x.steps for call in step.calls]
            first = {y: i for i, call in reversed([*enumerate(of_rank)]) for y in call.samples}
            used = ([first.get(y) for y in digests([tensor])] for tensor in tensors)
            calls += next((y for y in used if None not in y), [])
        return torch.tensor(calls).argsort(stable=True) if len(calls) == sum(sizes) else torch.arange(sum(sizes))

    @torch.no_grad()
    def restore(self, name: str, x: Tensor) -> None:
        """Give a tensor of a module the value that it had on rank 0 before its first use."""
        value = self.first.tensors.get(name)
        target = x.to_local() if hasattr(x, "to_local") else x
        if value is None or value.numel() != target.numel():
            return
        if self.noise is not None and isinstance(x, nn.Parameter) and x.is_floating_point():
            value = noisy(value, self.noise, self.setting.unit or torch.finfo(x.dtype).eps)
        target.copy_(value.view_as(target))

    def configure(self, step: int, index: int, optimizer: Optimizer, is_new: bool) -> None:
        """Give the groups of an optimizer the settings that they had on rank 0; a script may scale lr with W."""
        of_step = self.first.steps[step].settings if step < len(self.first.steps) else {}
        for group, settings in zip(optimizer.param_groups, of_step.get(index, ()), strict=False):
            group.update(settings)
        if is_new and index < len(self.first.optimizers):
            if self.first.optimizers[index]["state"]:
                optimizer.load_state_dict(copy.deepcopy(self.first.optimizers[index]))  # it takes tensors as they are
            else:
                optimizer.state.clear()

    def enter(self, step: int, kind: CallKind, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the script's call of a module: those of the ranks, where the script makes others."""
        steps = [x.steps[step] for x in self.records if step < len(x.steps)]
        calls: list[list[ModuleCall]] = [getattr(x, kind)[index : index + 1] for x in steps]
        if sum(map(len, calls)) < len(self.records):
            return args, kwargs
        ranks = [call for (call,) in calls]
        if kind == "calls_without_gradient" and all(x.samples == ranks[0].samples for x in ranks[1:]) and ranks[1:]:
            return args, kwargs  # every rank validates the same samples
        leaves, structure = tree_flatten((args, kwargs))
        size = self.size or sum(x.batch_size for x in steps)
        if not any(self.first.loaders):
            leaves = self._of_ranks(ranks, leaves, size, as_long=False)
        samples, recorded = digests(leaves), [y for x in ranks for y in x.samples]
        if kind == "calls" and self.sizes and recorded:  # a rank that takes a part of its batch has fewer samples
            self.takes_all = len(samples) * self.sizes[0] == len(ranks[0].samples) * self.size
            self.problem = self.problem or SAME_BATCHES * (self.has_equal_batches and self.takes_all)
        if recorded and sorted(samples) != sorted(recorded):
            if kind == "calls" and {*samples} <= {y for x in steps for y in x.samples}:
                self.problem = self.problem or OTHER_PARTS
            else:  # as an augmentation in the loop, which draws random numbers
                leaves = self._of_ranks(ranks, leaves, size, as_long=True)
                samples = digests(leaves)
        if kind != "calls":
            return tree_unflatten(leaves, structure)
        order: dict[bytes, list[int]] = {}
        for position, sample in enumerate(samples):
            order.setdefault(sample, []).append(position)
        rows = [[order[x].pop(0) for x in call.samples if order.get(x)] for call in ranks]
        if [len(x) for x in rows] == [len(call.samples) for call in ranks] and any(rows):
            self.rows = [torch.tensor(x, dtype=torch.long) for x in rows]
        if ranks[0].drew_from is not None:
            restore_random(ranks[0].drew_from)
        if any(call.drew_from is not None for call in ranks):
            self.problem = self.problem or "a module draws random numbers, besides those of dropout"
        return tree_unflatten(leaves, structure)

    def _of_ranks(self, calls: Sequence[ModuleCall], leaves: Sequence[Any], size: int, as_long: bool) -> list[Any]:
        """Replace arguments without gradient by those of all ranks, if they are as long as these together, or are not."""
        result, columns = list(leaves), list(zip(*(call.arguments for call in calls), strict=False))
        if len(columns) != len(leaves):
            return result
        sizes = next(([len(y) for y in x] for x in columns if all(y is not None and y.ndim for y in x)), [])
        views = sum(sizes) // size if size else 1
        if not views or any(x % views for x in sizes):
            views = 1
        for i, (x, parts) in enumerate(zip(leaves, columns, strict=True)):
            is_recorded = isinstance(x, Tensor) and all(y is not None and y.ndim for y in parts) and not x.requires_grad
            if is_recorded and [len(y) for y in parts] == sizes and (len(x) == sum(sizes)) == as_long:
                counts = {None: {1, views}, True: {views}, False: {1}}[self.setting.by_view]
                orders = [
                    concatenated([y.chunk(count)[j] for j in range(count) for y in parts]).to(x.device)
                    for count in sorted(counts)
                ]
                distances = [_distance(y, x) for y in orders]
                self.is_unsure |= len(orders) > 1 and min(distances) >= ABOUT_AS_CLOSE * max(distances)
                result[i] = orders[distances.index(min(distances))]
        return result

    def replacements(self) -> list[Replacement]:
        """Return what makes every process group, and every mesh, one of one rank."""
        return [
            # a loss may hold a group of the ranks since before the rerun
            (World, "of", lambda original, process_group=None, caller="": original(None, caller)),
            (dist, "init_process_group", _join_alone),
            (dist, "new_group", lambda original, *args, **kwargs: dist.group.WORLD),
            *((x, "init_device_mesh", _mesh_of_one) for x in (dist, dist.device_mesh)),
            (DistributedDataParallel, "forward", _without_live_group),
            *([(nn.functional, "batch_norm", self._batch_norm)] if self.setting.by_shard else []),
        ]

    def _batch_norm(self, original: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if sum(map(len, self.rows)) != len(x):
            return original(x, *args, **kwargs)
        parts = [original(x[rows], *args, **kwargs) for rows in self.rows]
        return torch.cat(parts)[torch.cat(self.rows).argsort()]


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm()) if x.shape == y.shape else math.inf


def _join_alone(original: Any, *args: Any, **kwargs: Any) -> Any:
    if dist.is_initialized():  # a rerun within a process of a group
        return None
    return original(*args, **kwargs | {key: i for i, key in enumerate(("rank", "world_size")) if key in kwargs})


def _mesh_of_one(original: Any, device_type: str, mesh_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    return original(device_type, (1,) * len(mesh_shape), *args, **kwargs)


def _without_live_group(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module of a DDP that was wrapped before the rerun, in the group of all ranks."""
    return original(ddp, *args, **kwargs) if ddp.process_group.size() == 1 else ddp.module(*args, **kwargs)
