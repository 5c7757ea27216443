"""Run a training again in one process, with the batches of all ranks, from the state of rank 0."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.auditing.merging import (
    NotComparable,
    merged,
    padded_lengths,
    reordered,
    tensors_of,
    token_length,
)
from contrastive_zoo.testing.auditing.randomness import ShardedDraws
from contrastive_zoo.testing.auditing.records import ModuleCall, Record, digests
from contrastive_zoo.testing.auditing.zero import assign, is_in_pieces
from contrastive_zoo.testing.evidence import noisy
from contrastive_zoo.testing.loss_calls import replaced


class Setting(NamedTuple):
    """How a training runs again."""

    ranks: tuple[int, ...] = ()  # whose batches it gets; all
    noise: int | None = None  # seed of changes of up to half a unit of rounding of the parameters at the start
    unit: float = 0.0  # that unit of rounding; that of the parameters' type
    by_shard: bool = False  # whether a BatchNorm takes the statistics of each rank's samples


class Rerun:
    """Give one process what the ranks had: batches, state, settings of optimizers, random numbers."""

    def __init__(self, records: Sequence[Record], setting: Setting) -> None:
        self.first, self.setting, self.problem = records[0], setting, ""
        ranks = setting.ranks or range(len(records))
        self.records = [records[rank] for rank in ranks]
        if self.first.shares_samples:  # tensor parallel ranks hold the same samples, which count once
            distinct = [i for i, x in enumerate(self.records) if not any(_same(x, y) for y in self.records[:i])]
            self.records = [self.records[i] for i in distinct]
        self.draws = ShardedDraws()
        self.has_draws = any(step.draws for x in self.records for step in x.steps)
        self.noise = None if setting.noise is None else torch.Generator().manual_seed(setting.noise)
        self._lengths = iter(self.first.lengths)

    # --- batches ------------------------------------------------------------------------------------------------------

    def batches(self, loader: int) -> Iterator[Any]:
        """Yield the batches of all ranks, together, of the epoch that a loader begins."""
        epochs = [x.loaders[loader] if loader < len(x.loaders) else [] for x in self.records]
        states = [x.states[loader] if loader < len(x.loaders) else [] for x in self.records]
        for index in range(max(map(len, epochs))):
            parts = [x[index] for x in epochs if index < len(x)]
            whole = len(parts) == len(epochs) > 1 and _equal(parts) and self._is_sliced_later()
            leaves = [tensors_of(x) for x in parts]
            lengths = padded_lengths(leaves)
            batch = parts[0] if whole else self._merged(parts, lengths)
            if leaves[0] and not whole:
                sizes = [len(x[0]) if x[0].ndim else 0 for x in leaves]
                order = self._order(leaves, sizes)
                batch = reordered(batch, order)
                places, starts = order.argsort(), torch.tensor([0, *sizes]).cumsum(0)
                if len(parts) == len(epochs):
                    self.draws.rows = [places[start : start + n] for start, n in zip(starts, sizes, strict=False)]
                    self.draws.lengths = {n: x for x, n in lengths.items() if len(set(x)) > 1}
                    self.draws.assign([x[index] for x in states])
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

    def length(self, otherwise: int) -> int:
        """Return what rank 0 got as the length of a loader at this call of ``len``, on which schedules depend."""
        return next(self._lengths, otherwise)

    def _merged(self, parts: Sequence[Any], lengths: Mapping[tuple[int, ...], int]) -> Any:
        try:
            return merged(parts, lengths)
        except (RuntimeError, TypeError, KeyError) as error:
            raise NotComparable(f"the ranks' batches cannot be concatenated: {error}") from error

    def _is_sliced_later(self) -> bool:
        """Return whether ranks with equal batches give different samples to their modules."""
        first = [x.steps[0].calls[0].samples if x.steps and x.steps[0].calls else [] for x in self.records]
        return any(x != first[0] for x in first)

    # --- state --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, name: str, x: Tensor) -> None:
        """Give a tensor of a module the value that it had on rank 0 before its first use."""
        recorded = self.first.tensors.get(name)
        target = x.to_local() if hasattr(x, "to_local") else x
        if recorded is None or recorded.numel() != getattr(x, "ds_numel", target.numel()):
            return
        value = recorded
        if self.noise is not None and isinstance(x, nn.Parameter) and x.is_floating_point():
            value = noisy(value, self.noise, self.setting.unit or torch.finfo(x.dtype).eps)
        if is_in_pieces(x) or hasattr(x, "ds_id"):
            assign(x, value)
        else:
            target.copy_(value.view_as(target))

    def configure(self, step: int, index: int, optimizer: Optimizer) -> None:
        """Give the groups of an optimizer the settings that they had on rank 0; a script may scale lr with W."""
        of_step = self.first.steps[step].settings if step < len(self.first.steps) else {}
        for group, settings in zip(optimizer.param_groups, of_step.get(index, ()), strict=False):
            group.update(settings)
        if step == 0 and index < len(self.first.optimizers):
            if not isinstance(optimizer, Optimizer):
                return  # one of ZeRO: its state begins as that of the ranks, whose pieces it has not
            if self.first.optimizers[index]["state"]:
                optimizer.load_state_dict(copy.deepcopy(self.first.optimizers[index]))  # it takes tensors as they are
            else:
                optimizer.state.clear()

    # --- calls --------------------------------------------------------------------------------------------------------

    def enter(self, step: int, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the script's call of a module; set the ranks' random numbers."""
        if len(calls := self._calls(step, index)) < len(self.records):
            return args, kwargs
        if all(call.arguments is not None for call in calls):
            args, kwargs = self._substituted(calls, args, kwargs)
        columns = zip(map(token_length, tree_leaves((args, kwargs))), *(call.lengths for call in calls), strict=False)
        differing = {n: tuple(x) for n, *x in columns if len(set(x)) > 1}
        self.draws.lengths = differing or self.draws.lengths
        order: dict[bytes, list[int]] = {}
        for position, sample in enumerate(digests(tree_leaves((args, kwargs)))):
            order.setdefault(sample, []).append(position)
        rows = [[order[x].pop(0) for x in call.samples if order.get(x)] for call in calls]
        if [len(x) for x in rows] == [len(call.samples) for call in calls] and any(rows):
            self.draws.rows = [torch.tensor(x, dtype=torch.long) for x in rows]
        elif order and order.keys() <= {y for x in self.records for y in x.steps[step].samples}:
            self.problem = (
                self.problem or "the script splits a batch, into other parts in one process than on the ranks"
            )
        if any(call.draws for call in calls):
            if all(call.draws for call in calls):
                self.draws.assign([call.draws.before for call in calls if call.draws])
            else:
                self.problem = self.problem or "some ranks draw random numbers where others do not"
        return args, kwargs

    def _calls(self, step: int, index: int) -> list[ModuleCall]:
        """Return the ranks' calls of a module, of those that made it."""
        calls = [x.steps[step].calls if step < len(x.steps) else [] for x in self.records]
        return [x[index] for x in calls if index < len(x)]

    def leave(self, step: int, index: int) -> None:
        """Compare the ranks' states of random numbers after a call with the recorded ones."""
        after = [call.draws.after for call in self._calls(step, index) if call.draws]
        is_lost = len(after) == len(self.records) and not all(map(torch.equal, after, self.draws.states))
        if is_lost or self.draws.is_ambiguous:
            self.problem = (
                self.problem or "the random numbers of the ranks cannot be assigned to samples of one process"
            )

    def _substituted(self, calls: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace arguments without gradient that are a rank's samples by those of all ranks."""
        leaves = tree_leaves((args, kwargs))
        columns = list(zip(*(call.arguments for call in calls), strict=False))
        if len(columns) != len(leaves):
            return args, kwargs
        sizes = next(([len(y) for y in x] for x in columns if all(isinstance(y, Tensor) and y.ndim for y in x)), [])
        for i, (x, parts) in enumerate(zip(leaves, columns, strict=True)):
            is_recorded = isinstance(x, Tensor) and all(isinstance(y, Tensor) and y.ndim for y in parts)
            if is_recorded and [len(y) for y in parts] == sizes and not x.requires_grad and len(x) != sum(sizes):
                leaves[i] = self._merged(parts, padded_lengths([[y] for y in parts])).to(x.device)
        result: tuple[Any, Any] = tree_unflatten(leaves, tree_structure((args, kwargs)))
        return result

    # --- hooks --------------------------------------------------------------------------------------------------------

    @contextmanager
    def world_of_one(self) -> Iterator[None]:
        """Make every process group one of one rank, and every mesh one of one rank; draw from the ranks' states."""
        with ExitStack() as stack:
            if dist.is_available():
                for name, function in (("init_process_group", _join_alone), ("new_group", _no_new_group)):
                    stack.enter_context(replaced(dist, name, function))
                stack.enter_context(replaced(dist, "init_device_mesh", _mesh_of_one))
                stack.enter_context(replaced(dist.device_mesh, "init_device_mesh", _mesh_of_one))
                stack.enter_context(replaced(DistributedDataParallel, "forward", _without_live_group))
            stack.enter_context(replaced(World, "of", _of_this_process))
            if self.setting.by_shard:
                stack.enter_context(replaced(nn.functional, "batch_norm", self._batch_norm))
            if self.has_draws:
                stack.enter_context(self.draws)
            yield

    def _batch_norm(self, original: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if sum(map(len, self.draws.rows)) != len(x):
            return original(x, *args, **kwargs)
        parts = [original(x[rows], *args, **kwargs) for rows in self.draws.rows]
        return torch.cat(parts)[torch.cat(self.draws.rows).argsort()]


def _join_alone(original: Any, *args: Any, **kwargs: Any) -> Any:
    if dist.is_initialized():  # a rerun within a process of a group
        return None
    return original(*args, **kwargs | {key: i for i, key in enumerate(("rank", "world_size")) if key in kwargs})


def _no_new_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    return dist.group.WORLD


def _mesh_of_one(original: Any, device_type: str, mesh_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    return original(device_type, (1,) * len(mesh_shape), *args, **kwargs)


def _of_this_process(original: Any, process_group: Any = None, caller: str = "") -> World:
    """Return the world of one process in place of that of a group which a loss holds since before the rerun."""
    world: World = original(None, caller)
    return world


def _without_live_group(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module of a DDP that was wrapped before the rerun, in the group of all ranks."""
    return original(ddp, *args, **kwargs) if ddp.process_group.size() == 1 else ddp.module(*args, **kwargs)


def _equal(batches: Sequence[Any]) -> bool:
    first, *others = map(tensors_of, batches)
    return bool(first) and all(len(x) == len(first) and all(map(torch.equal, x, first)) for x in others)


def _same(x: Record, y: Record) -> bool:
    first, second = ([[call.samples for call in step.calls] for step in each.steps] for each in (x, y))
    return first == second
