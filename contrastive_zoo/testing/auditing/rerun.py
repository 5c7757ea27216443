"""Run a training again in one process, with the batches of all ranks, from the state of rank 0."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.auditing.records import (
    ModuleCall,
    Record,
    concatenated,
    digests,
    padded_lengths,
    reordered,
    tensors_of,
    token_length,
)
from contrastive_zoo.testing.evidence import noisy
from contrastive_zoo.testing.messages import replaced


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
            samples = [[step.samples for step in x.steps] for x in self.records]
            self.records = [x for i, x in enumerate(self.records) if samples[i] not in samples[:i]]
        self.draws = ShardedDraws()
        self.has_draws = any(step.draws for x in self.records for step in x.steps)
        self.noise = None if setting.noise is None else torch.Generator().manual_seed(setting.noise)
        self.lengths = iter(self.first.lengths)  # of the loaders on rank 0, on which schedules depend

    def batches(self, loader: int) -> Iterator[Any]:
        """Yield the batches of all ranks, together, of the epoch that a loader begins."""
        epochs = [x.loaders[loader] if loader < len(x.loaders) else [] for x in self.records]
        first = [x.steps[0].calls[0].samples if x.steps and x.steps[0].calls else [] for x in self.records]
        sliced_later = any(x != first[0] for x in first)  # ranks with equal batches give other samples to their modules
        for index in range(max(map(len, epochs))):
            parts, states = zip(*(x[index] for x in epochs if index < len(x)), strict=True)
            leaves = [tensors_of(x) for x in parts]
            equal = bool(leaves[0]) and all(
                len(x) == len(leaves[0]) and all(map(torch.equal, x, leaves[0])) for x in leaves
            )
            whole = len(parts) == len(epochs) > 1 and equal and sliced_later
            lengths = padded_lengths(leaves)
            batch = parts[0] if whole else concatenated(parts, lengths)
            if leaves[0] and not whole:
                sizes = [len(x[0]) if x[0].ndim else 0 for x in leaves]
                order = self._order(leaves, sizes)
                batch = reordered(batch, order)
                places, starts = order.argsort(), torch.tensor([0, *sizes]).cumsum(0)
                if len(parts) == len(epochs):
                    self.draws.rows = [places[start : start + n] for start, n in zip(starts, sizes, strict=False)]
                    self.draws.lengths = {n: x for x, n in lengths.items() if len(set(x)) > 1}
                    self.draws.assign(states)
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

    def configure(self, step: int, index: int, optimizer: Optimizer) -> None:
        """Give the groups of an optimizer the settings that they had on rank 0; a script may scale lr with W."""
        of_step = self.first.steps[step].settings if step < len(self.first.steps) else {}
        for group, settings in zip(optimizer.param_groups, of_step.get(index, ()), strict=False):
            group.update(settings)
        if step == 0 and index < len(self.first.optimizers):
            if self.first.optimizers[index]["state"]:
                optimizer.load_state_dict(copy.deepcopy(self.first.optimizers[index]))  # it takes tensors as they are
            else:
                optimizer.state.clear()

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
            self._report("the script splits a batch, into other parts in one process than on the ranks")
        if any(call.draws for call in calls):
            if all(call.draws for call in calls):
                self.draws.assign([call.draws[0] for call in calls if call.draws])
            else:
                self._report("some ranks draw random numbers where others do not")
        return args, kwargs

    def _report(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _calls(self, step: int, index: int) -> list[ModuleCall]:
        calls = [x.steps[step].calls if step < len(x.steps) else [] for x in self.records]
        return [x[index] for x in calls if index < len(x)]

    def leave(self, step: int, index: int) -> None:
        """Compare the ranks' states of random numbers after a call with the recorded ones."""
        after = [call.draws[1] for call in self._calls(step, index) if call.draws]
        is_lost = len(after) == len(self.records) and not all(map(torch.equal, after, self.draws.states))
        if is_lost or self.draws.is_ambiguous:
            self._report("the random numbers of the ranks cannot be assigned to samples of one process")

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
                leaves[i] = concatenated(parts, padded_lengths([[y] for y in parts])).to(x.device)
        return tree_unflatten(leaves, tree_structure((args, kwargs)))

    @contextmanager
    def world_of_one(self) -> Iterator[None]:
        """Make every process group one of one rank, and every mesh one of one rank; draw from the ranks' states."""
        with ExitStack() as stack:
            watched: list[tuple[Any, str, Callable[..., Any]]] = [(World, "of", _of_this_process)]
            if dist.is_available():
                watched += [(dist, "init_process_group", _join_alone)]
                watched += [(dist, "new_group", lambda original, *args, **kwargs: dist.group.WORLD)]
                watched += [(x, "init_device_mesh", _mesh_of_one) for x in (dist, dist.device_mesh)]
                watched += [(DistributedDataParallel, "forward", _without_live_group)]
            if self.setting.by_shard:
                watched += [(nn.functional, "batch_norm", self._batch_norm)]
            for home, name, function in watched:
                stack.enter_context(replaced(home, name, function))
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


def _mesh_of_one(original: Any, device_type: str, mesh_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    return original(device_type, (1,) * len(mesh_shape), *args, **kwargs)


def _of_this_process(original: Any, process_group: Any = None, caller: str = "") -> World:
    """Return the world of one process in place of that of a group which a loss holds since before the rerun."""
    return original(None, caller)


def _without_live_group(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module of a DDP that was wrapped before the rerun, in the group of all ranks."""
    return original(ddp, *args, **kwargs) if ddp.process_group.size() == 1 else ddp.module(*args, **kwargs)


class ShardedDraws(TorchDispatchMode):
    """Draw what belongs to samples, as the masks of dropout, for the samples of each rank from the state of that rank.

    A draw belongs to samples if one of its dimensions is that of the batch, or the first is a multiple. The ranks' states
    go with that of torch: where a checkpoint or a cache of gradients sets an earlier one again, theirs are set again, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        self.rows: list[Tensor] = []  # of each rank, the indices of its samples in the batch
        self.lengths: dict[int, tuple[int, ...]] = {}  # of each rank's tokens where they differ, by their padded length
        self.is_ambiguous = False  # whether several dimensions of a draw may be that of the samples
        self.states_at: dict[bytes, list[Tensor]] = {}  # the ranks' states at a state of torch

    def assign(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)
        self.states_at[_present()] = self.states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        if not is_draw or not self.states or not self.rows or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.states = self.states_at.get(_present(), self.states)
        result = func(*args, **kwargs)
        after = torch.get_rng_state()
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.ndim]
        states = []
        for rank, state in enumerate(self.states):
            torch.set_rng_state(state)
            if tensors and self._batch_dimension(tensors[0].shape) >= 0:
                self._draw(func, args, kwargs, tensors, self._region(rank, tensors[0].shape))
            else:  # a number of the whole batch: that of rank 0
                copied, named = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
                drawn = func(*copied, **named)
                for x, y in zip(tensors if rank == 0 else [], tree_leaves(drawn), strict=False):
                    x.copy_(y)
            states.append(torch.get_rng_state())
        torch.set_rng_state(after)
        self.assign(states)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], region: tuple[Any, ...]) -> None:
        """Overwrite a rank's region of what was drawn with what that rank draws."""
        shape = tensors[0].shape
        part = tensors[0][region]

        def of_rank(x: Any) -> Any:
            if isinstance(x, Tensor):
                return _in_order(x[region], x) if x.shape == shape else x
            return list(part.shape) if isinstance(x, list | tuple) and list(x) == list(shape) else x

        # sizes are sequences, which a tree would take apart
        drawn = func(*map(of_rank, args), **{key: of_rank(x) for key, x in kwargs.items()})
        for x, y in zip(tensors, (z for z in tree_leaves(drawn) if isinstance(z, Tensor)), strict=False):
            if x.shape == shape:
                x[region] = y

    def _region(self, rank: int, shape: torch.Size) -> tuple[Any, ...]:
        """Return the indices of a rank's samples, and for each further dimension what is no padding of their tokens."""
        batch, total = self._batch_dimension(shape), sum(map(len, self.rows))
        each = shape[batch] // total  # elements for each sample
        inner = torch.arange(each)
        if longest := next((n for n in self.lengths if each % n == 0), 0):
            inner = inner.view(longest, -1)[: self.lengths[longest][rank]].flatten()
        samples = (self.rows[rank][:, None] * each + inner).flatten()
        others = [slice(self.lengths[n][rank] if n in self.lengths else n) for n in shape]
        return *others[:batch], samples, *others[batch + 1 :]

    def _batch_dimension(self, shape: torch.Size) -> int:
        """Return the dimension of the samples: one of their number, or the first, if that is a multiple; else -1."""
        total = sum(map(len, self.rows))
        exact = [i for i, n in enumerate(shape) if n == total]
        is_multiple = total > 0 and shape[0] > 0 and shape[0] % total == 0
        self.is_ambiguous |= len(exact) > 1 or (is_multiple and exact[:1] not in ([], [0]))
        return exact[0] if exact else 0 if is_multiple else -1


def _in_order(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor whose elements lie in memory in the order of another one, in which random numbers are drawn."""
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda i: (-strides[i], i))
    inverse = [order.index(i) for i in range(like.ndim)]
    return x.permute(order).contiguous().permute(inverse)


def _present() -> bytes:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
