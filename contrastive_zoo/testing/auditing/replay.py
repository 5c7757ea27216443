"""Repeat a recorded step in one process, with the samples of all ranks: the evidence of what is right."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from contrastive_zoo.testing.auditing.merging import Merge, NotComparable, Outputs, concatenated_outputs
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Call, MicroBatch, Step
from contrastive_zoo.testing.evidence import Ratio

REPETITIONS = 5
"""Repetitions of a step with changes of up to half a unit of rounding, from which the tolerance is derived."""

NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
"""A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding."""


@dataclass
class Repeated:
    """A step in one process."""

    values: list[float] = field(default_factory=list)  # of all calls of losses
    gradients: dict[str, Tensor] = field(default_factory=dict)  # before clipping
    after: dict[str, Tensor] = field(default_factory=dict)  # parameters; empty if an optimizer cannot be repeated
    unlinked: str = ""  # why the gradient of the encoders is not known
    problem: str = ""  # why the step of the optimizer is not known
    is_gathered: bool = False  # whether the loss received rows of other ranks


class OneProcess:
    """Copies of a training's modules and optimizers, without process group and without DDP."""

    def __init__(self, recorder: Recorder) -> None:
        live = recorder.parameters()
        memo = _memo([*recorder.encoders, *recorder.losses])
        try:
            self.encoders, self.losses, self.parameters = copy.deepcopy(
                (recorder.encoders, recorder.losses, live), memo
            )
        except Exception as error:
            raise NotComparable(f"the modules cannot be copied: {type(error).__name__}: {error}") from error
        self.optimizers: list[Optimizer] = []
        self.optimizer_problem = ""
        try:
            self.optimizers = copy.deepcopy(recorder.optimizers, memo)
        except Exception as error:
            self.optimizer_problem = f"the optimizer cannot be copied: {type(error).__name__}"
        self.tensors: dict[str, Tensor] = {}  # parameters and buffers by the names that the recorder gave
        by_kind = {"encoder": (recorder.encoders, self.encoders), "loss": (recorder.losses, self.losses)}
        for kind, (originals, copied) in by_kind.items():
            for index, modules in enumerate(zip(originals, copied, strict=True)):
                # DDP is copied as its module, so that the names of the copy differ
                named = ([*x.named_parameters(), *x.named_buffers()] for x in modules)
                self.tensors |= {f"{kind}{index}.{name}": x for (name, _), (_, x) in zip(*named, strict=True)}
        self.device = next(iter(self.parameters.values())).device if self.parameters else torch.device("cpu")
        for module in (y for x in (*self.encoders, *self.losses) for y in x.modules()):
            for name, value in vars(module).items():
                if _is_group(value):
                    setattr(module, name, None)

    def repeat(
        self, ranks: Sequence[Step], *, by_shard: bool = False, noise: torch.Generator | None = None
    ) -> Repeated:
        """Repeat the step that these ranks recorded.

        Encoders compute all samples together, or ``by_shard`` those of each rank apart, with its random numbers. The noise
        draws changes of up to half a unit of rounding of parameters and embeddings.
        """
        if len({_called_modules(x) for x in ranks}) > 1:
            raise NotComparable("ranks made different calls of encoders and losses in one step")
        result = Repeated()
        if any(x.other_terms for x in ranks):
            result.unlinked = "the script adds other terms to the loss, which are not repeated"
        with _without_process_group(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            self._restore(ranks[0], noise)
            try:
                for micro_batches in zip(*(x.micro_batches for x in ranks), strict=True):
                    self._accumulate(ranks, micro_batches, result, by_shard, noise)
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
                raise NotComparable(f"one process raises {type(error).__name__}: {error}") from error
            result.gradients = {
                name: x.grad.detach().cpu().clone() for name, x in self.parameters.items() if x.grad is not None
            }
            self._optimize(ranks[0], result)
        return result

    def _restore(self, step: Step, noise: torch.Generator | None) -> None:
        with torch.no_grad():
            for name, x in self.tensors.items():
                if name in step.state:
                    x.copy_(step.state[name])
                    if noise is not None and isinstance(x, nn.Parameter):
                        x.copy_(_noisy(x, noise))
        for parameter in self.parameters.values():
            parameter.grad = None

    def _accumulate(
        self,
        ranks: Sequence[Step],
        micro_batches: Sequence[MicroBatch],
        result: Repeated,
        by_shard: bool,
        noise: torch.Generator | None,
    ) -> None:
        recorded, repeated = Outputs(), Outputs()

        def merged(calls: Sequence[Call], receiver: str) -> Merge:
            merge = Merge(calls, recorded, repeated)
            for shape in merge.unlinked:
                result.unlinked = (
                    f"{receiver} received a tensor of shape {list(shape)} that is no selection of rows of an encoder's "
                    "output; what the script computes in between is not repeated"
                )
            return merge

        for calls in zip(*(x.encoders for x in micro_batches), strict=True):
            output = self._encoded(calls, merged(calls, "an encoder"), by_shard)
            if noise is not None:
                output = tree_map(lambda x: _noisy(x, noise) if isinstance(x, Tensor) else x, output)
            recorded.add([x.output for x in calls])
            repeated.add([output])
        total: Any = 0
        for calls in zip(*(x.losses for x in micro_batches), strict=True):
            merge = merged(calls, "a loss")
            result.is_gathered |= merge.is_gathered
            output = self._call(self.losses[calls[0].module], calls[0], merge.of_all_ranks(self.device))
            value = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 0), None)
            if value is None:
                raise NotComparable("in one process the loss returns no scalar")
            result.values.append(float(value.detach()))
            total = total + ranks[0].weight(calls[0], len(ranks)) / len(ranks[0].micro_batches) * value
        if isinstance(total, Tensor):
            total.backward()

    def _encoded(self, calls: Sequence[Call], merge: Merge, by_shard: bool) -> Any:
        module = self.encoders[calls[0].module]
        if not by_shard:
            return self._call(module, calls[0], merge.of_all_ranks(self.device))
        outputs = [self._call(module, call, merge.of_rank(rank, self.device)) for rank, call in enumerate(calls)]
        return concatenated_outputs(outputs)

    def _call(self, module: nn.Module, call: Call, arguments: tuple[Any, Any]) -> Any:
        torch.set_rng_state(call.random_state)
        device, enabled, dtype = call.autocast
        # the steps may be repeated inside the script's autocast, whose cache holds casts of other parameters
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            return module(*arguments[0], **arguments[1])

    def _optimize(self, step: Step, result: Repeated) -> None:
        """Clip gradients and run the optimizers as the script did."""
        result.problem = self.optimizer_problem or step.optimizer_problem
        if result.problem:
            return
        try:
            for clip in step.clips:
                function = getattr(torch.nn.utils, clip.function)
                function([self.parameters[x] for x in clip.names], *clip.args, **clip.kwargs)
            for index, state in step.optimizer_states.items():
                optimizer = self.optimizers[index]
                optimizer.load_state_dict(copy.deepcopy(state))  # it takes tensors as they are
                type(optimizer).step(optimizer)  # a scheduler wraps the method of the object
        except Exception as error:
            result.problem = f"the optimizer's step cannot be repeated: {type(error).__name__}: {error}"
            return
        result.after = {name: x.detach().cpu().clone() for name, x in self.parameters.items()}


class StepEvidence:
    """One step of all ranks, the same step in one process, and repetitions of it."""

    def __init__(
        self, ranks: list[Step], groups: dict[str, str], one_process: OneProcess | None, reason: str = ""
    ) -> None:
        self.ranks, self.world_size, self.groups = ranks, len(ranks), groups
        self.one_process, self.reason = one_process, reason  # why the step is not repeated
        self.together, problem = self._repeated(ranks)  # the encoders on all samples together
        self.reason = reason or ("" if self.truth else problem)
        self.repetitions: list[Repeated] = []  # of the truth, with changes of up to half a unit of rounding
        for seed in range(REPETITIONS if self.truth else 0):
            noise = torch.Generator().manual_seed(seed)
            repeated, _ = self._repeated(ranks, by_shard=self.draws, noise=noise)
            self.repetitions += [] if repeated is None else [repeated]
        if self._has_low_precision and not self.draws and self.by_shard and not ranks[0].batch_norms:
            self.repetitions.append(self.by_shard)  # 16 bits round the gradient of each shard

    def _repeated(self, ranks: list[Step], **settings: Any) -> tuple[Repeated | None, str]:
        """Return the step in one process, or None and why it was not repeated."""
        if self.one_process is None:
            return None, self.reason
        try:
            return self.one_process.repeat(ranks, **settings), ""
        except NotComparable as problem:
            return None, str(problem)

    @cached_property
    def by_shard(self) -> Repeated | None:
        """The step in one process, the encoders on the samples of each rank in turn, with its random numbers."""
        return self._repeated(self.ranks, by_shard=True)[0]

    @cached_property
    def alone(self) -> list[Repeated | None]:
        """The step of each rank in a training of its samples only."""
        return [self._repeated([rank])[0] for rank in self.ranks]

    @property
    def draws(self) -> bool:
        """Whether an encoder drew random numbers, as dropout does: the masks of each rank are then used again."""
        return any(call.drew for step in self.ranks for micro in step.micro_batches for call in micro.encoders)

    @property
    def _has_low_precision(self) -> bool:
        encoders = [call for micro in self.ranks[0].micro_batches for call in micro.encoders]
        return any(call.autocast[1] for call in encoders) or self.eps > 1e-4

    @property
    def truth(self) -> Repeated | None:
        return self.by_shard if self.draws else self.together

    @cached_property
    def eps(self) -> float:
        """The unit of rounding of the parameters."""
        dtypes = [self.ranks[0].state[name].dtype for name in self.groups if name in self.ranks[0].state]
        return max((torch.finfo(x).eps for x in dtypes), default=torch.finfo(torch.float32).eps)

    @property
    def values(self) -> Tensor:
        """The values of the losses on each rank, [W, losses]."""
        values = [[float("nan") if x.output is None else float(x.output) for x in step.losses] for step in self.ranks]
        return torch.tensor(values, dtype=torch.float64)

    def names(self, group: str) -> list[str]:
        return [name for name, x in self.groups.items() if x == group and name in self.ranks[0].state]

    def lacks_terms(self, names: Sequence[str]) -> bool:
        """Return whether these parameters get gradients from terms that are not repeated."""
        return any(name in step.other_terms for step in self.ranks for name in names)

    def is_sharded(self, names: Sequence[str]) -> bool:
        return any(name in step.sharded for step in self.ranks for name in names)

    def flat(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """Return these parameters' tensors as one vector; a missing one counts as zero."""
        like = self.ranks[0].state
        return torch.cat([tensors.get(name, torch.zeros_like(like[name])).flatten().double() for name in names])

    def reference(self, of: str) -> tuple[Tensor, float]:
        """Return the ``"value"`` of one process, or the gradient of a group, and the largest error of a right one."""
        assert self.truth is not None
        names = [] if of == "value" else self.names(of)
        truth, *repeated = [
            self.flat(x.gradients, names) if names else torch.tensor(x.values, dtype=torch.float64)
            for x in (self.truth, *self.repetitions)
        ]
        return truth, self.tolerance(truth, repeated)

    def tolerance(self, expected: Tensor, repeated: Sequence[Tensor]) -> float:
        """Return the largest relative error of a right result, from repetitions of the expected one."""
        noise = max((Ratio.between(x, expected).error for x in repeated), default=0.0)
        return NOISE_FACTOR * noise + ROUNDING_FACTOR * self.eps


def _memo(modules: Sequence[nn.Module]) -> dict[int, Any]:
    """Return what ``deepcopy`` takes as copied: process groups as they are, and the module of every DDP in its place."""
    memo: dict[int, Any] = {}
    members = [y for x in modules for y in x.modules()]
    for module in members:
        memo |= {id(x): x for x in vars(module).values() if _is_group(x)}
    for module in members:
        if isinstance(module, DistributedDataParallel):
            memo[id(module)] = copy.deepcopy(module.module, memo)
    return memo


def _is_group(x: Any) -> bool:
    return isinstance(x, dist.ProcessGroup) or hasattr(x, "get_group")


@contextmanager
def _without_process_group() -> Iterator[None]:
    """Make this process a world of one: torch.distributed is not initialised."""
    if not dist.is_available():
        yield
        return
    group, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group


def _called_modules(step: Step) -> tuple[Any, ...]:
    return tuple(tuple(tuple(x.module for x in y) for y in (z.encoders, z.losses)) for z in step.micro_batches)


def _noisy(x: Tensor, noise: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    change = torch.rand(x.shape, generator=noise, dtype=torch.float64).to(x.device) * 2 - 1
    return (x * (1 + torch.finfo(x.dtype).eps / 2 * change)).to(x.dtype)
