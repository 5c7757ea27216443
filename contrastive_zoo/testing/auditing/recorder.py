"""Record the steps of a training through torch's own hooks; the user's objects are not changed."""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.ranks.compat import in_backward
from contrastive_zoo.ranks.randomness import random_states
from contrastive_zoo.testing.auditing.records import CallKind, LossCall, ModuleCall, Record, Step, digests, snapshot
from contrastive_zoo.testing.auditing.rerun import Replacement, Rerun
from contrastive_zoo.testing.auditing.tensors import Tensors, held, sketch, unit_of_rounding, whole
from contrastive_zoo.testing.messages import replaced
from contrastive_zoo.wrapper.distributed import DistributedLoss

THIRD_PARTY_LOSSES = (  # modules whose classes are losses
    *("pytorch_metric_learning.losses", "pytorch_metric_learning.utils.distributed"),
    *("pytorch_metric_learning.distributed", "sentence_transformers.losses"),
    *("sentence_transformers.sentence_transformer.losses", "sentence_transformers.sparse_encoder.losses"),
    "contrastive_zoo.adapters.sentence_transformers",
)
CLIPPING = ("clip_grad_norm_", "clip_grad_value_")  # of torch.nn.utils; trainers call these, too
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # arguments by place
STOCHASTIC_DEPTHS = ("DropPath", "StochasticDepth")  # ends of the names of classes that skip samples at random
# A backward pass that starts with a larger gradient was scaled by the GradScaler that scaled last
LARGEST_WEIGHT = 64.0


class Recorder:
    """Record the first steps of a training in this process, which is a rank, or runs again with the batches of all."""

    def __init__(
        self,
        losses: Iterable[str],
        steps: int,
        on_finish: Callable[[], None] = lambda: None,
        needs_group: bool = True,
        rerun: Rerun | None = None,
    ) -> None:
        self.steps, self.on_finish, self.needs_group, self.rerun = steps, on_finish, needs_group, rerun
        self.loss_names = set(losses)
        self._are_losses: dict[nn.Module, bool] = {}
        self.record, self.step = Record(), Step()
        self.tensors = Tensors(self.record, None if rerun is None else rerun.restore, self._is_loss)
        self.loaders: list[DataLoader[Any]] = []  # of each epoch that a loader began
        self.finished = False
        self._running: set[int] = set()  # of these epochs
        self._yielded: set[int] = set()  # since the last step, those whose batches go together, as of zipped loaders
        self._is_apart = False  # whether the next batch goes with none before, which were those of a validation
        self._scale: float | None = None  # of the GradScaler that scaled last
        self._filled: set[Tensor] = set()  # parameters with a gradient after the last backward pass
        self._in_call = self._in_loss = self._stepped = self._in_step = self._had_gradients = False
        self._hooks = ExitStack()

    def start(self) -> None:
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        homes = (torch.nn.utils, torch.nn.utils.clip_grad)
        watched: list[Replacement] = [
            *([] if self.rerun is None else self.rerun.replacements()),
            *((home, name, self._on_clip) for name in CLIPPING for home in homes),
            (nn.Module, "_call_impl", self._on_call),
            (torch.autograd, "backward", self._on_backward),
            (DataLoader, "__iter__", self._on_loader),
            (DataLoader, "__len__", self._on_length),
            *((nn.functional, name, self._on_dropout) for name in DROPOUTS),
            (nn.functional, "scaled_dot_product_attention", self._on_attention),
            (torch.amp.GradScaler, "scale", self._on_scale),
            (ShardedGradScaler, "scale", self._on_scale),
        ]
        for home, name, function in watched:
            self._hooks.enter_context(replaced(home, name, function))

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> Record:
        """Remove the hooks, close the last step and return the record."""
        if self._stepped and not self.finished:
            self._close_step()
        elif self.step.losses and not self.finished:  # the script raised within a step
            self.record.steps.append(self.step)
        self._hooks.close()
        self.record.loaders = [x if i in self.record.trained_on else [] for i, x in enumerate(self.record.loaders)]
        if self.rerun is not None:
            self.record.problem, self.record.takes_all = self.rerun.problem, self.rerun.takes_all
            self.record.is_unsure = self.rerun.is_unsure
        return self.record

    def _has_group(self) -> bool:
        """Return whether the script has initialised torch.distributed, or need not; a rerun skips what the ranks did."""
        if dist.is_initialized():
            self.record.initialized = True
        skipped = 0 if self.rerun is None else self.rerun.first.skipped
        return self.record.initialized or (not self.needs_group and self.record.skipped >= skipped)

    def _on_loader(self, original: Any, loader: DataLoader[Any]) -> Iterator[Any]:
        """Record the batches of a loader; in a rerun, yield those of all ranks, unless they were those of a validation."""
        if not self._has_group() or not torch.is_grad_enabled() or self.finished:
            return original(loader)
        index = len(self.loaders)
        self.loaders.append(loader)
        self.record.loaders.append([])
        if self.rerun is None or index not in self.rerun.first.trained_on:
            return self._watched(original(loader), index)
        return self._watched(self.rerun.batches(index), index)

    def _watched(self, batches: Iterator[Any], index: int) -> Iterator[Any]:
        recorded = self.record.loaders[index]
        self._running.add(index)
        try:
            for batch in batches:
                if not self.finished:
                    self._yielded = (set() if self._is_apart else self._yielded & self._running) | {index}
                    self._is_apart = False
                    recorded += [(snapshot(batch), random_states())] if self.rerun is None else []
                yield batch
        finally:
            self._running.remove(index)
            if self._running:  # this one was that of a validation
                self._yielded = {*self._running}
                recorded[:] = recorded if index in self.record.trained_on else []

    def _on_length(self, original: Any, loader: DataLoader[Any]) -> int:
        length: int = original(loader)
        if self.rerun is not None:
            return next(self.rerun.lengths, length)
        self.record.lengths.append(length)
        return length

    def _is_loss(self, module: nn.Module) -> bool:
        if module not in self._are_losses:
            is_known = isinstance(module, Loss | DistributedLoss)
            of_library = any(cls.__module__.startswith(THIRD_PARTY_LOSSES) for cls in type(module).__mro__)
            classes = [(cls.__module__, cls.__qualname__) for cls in type(module).__mro__]
            named = {name for x, cls in classes for name in (cls, f"{x}:{cls}")} & self.loss_names
            # the script itself is a module of another name, under which the user may name its classes
            named |= {x for x in self.loss_names if ("__main__", x.rpartition(":")[2]) in classes}
            self.record.unknown_losses -= named
            self._are_losses[module] = is_known or of_library or bool(named)
        return self._are_losses[module]

    def _on_dropout(self, original: Any, input: Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Tensor:
        """Leave dropout out, on the ranks and in one process, because each rank draws masks of its own."""
        is_training = kwargs.get("training", (*args, True)[0])
        return original(input, self._without_dropout(is_training * p), *args, **kwargs)

    def _on_attention(self, original: Any, *args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(OF_ATTENTION, args, strict=False)) | kwargs
        return original(**arguments | {"dropout_p": self._without_dropout(arguments.get("dropout_p", 0.0))})

    def _without_dropout(self, p: float) -> float:
        self.step.has_dropout |= not self.finished and p > 0
        return p if self.finished else 0.0

    def _on_call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.finished and type(module).__name__.endswith(STOCHASTIC_DEPTHS):
            self.step.has_dropout |= module.training
            return args[0]
        if self.finished or torch.compiler.is_compiling() or in_backward():
            return original(module, *args, **kwargs)
        return (self._call_inside if self._in_call else self._call)(original, module, args, kwargs)

    def _call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record a call by the script itself; without gradient it begins no step, and after one it is a validation."""
        has_gradient = torch.is_grad_enabled()
        if not self._has_group() or not (has_gradient or self._yielded or not self.loaders):
            return original(module, *args, **kwargs)
        if has_gradient and self._stepped:
            self._close_step()
        if self.finished:
            return original(module, *args, **kwargs)
        if has_gradient and self._had_gradients and not (self._in_step or self.tensors.have_gradients()):
            # cleared without a step, as after an overflow of a GradScaler
            self.step, self._had_gradients = Step(), False
        if not self.step.calls:
            self.step.epoch = len(self.loaders)
        self.tensors.remember(module)
        if self.record.problem:
            self._finish()
            return original(module, *args, **kwargs)
        self._is_apart |= not has_gradient
        call, args, kwargs = self._enter_module("calls" if has_gradient else "calls_without_gradient", args, kwargs)
        before = random_states()
        self._in_call = True
        try:
            return self._call_inside(original, module, args, kwargs, is_inner=False)
        finally:
            self._in_call = False
            if not all(map(torch.equal, before, random_states())):
                call.drew_from = before

    def _enter_module(self, kind: CallKind, args: Any, kwargs: Any) -> tuple[ModuleCall, Any, Any]:
        """Record the arguments of a call that are data; in a rerun, return those of all ranks."""
        calls, call = getattr(self.step, kind), ModuleCall()
        if self.rerun is None:
            leaves = tree_leaves((args, kwargs))
            if not _need_gradient(leaves):
                call.samples = digests(leaves)
            is_input = [isinstance(x, Tensor) and not (x.requires_grad or hasattr(x, "device_mesh")) for x in leaves]
            outer = [x for x in (*self.step.calls[-1:], *self.step.inner_calls) if x.samples == call.samples != []]
            copied = next((x.arguments for x in outer if len(x.arguments) == len(leaves)), None)  # not again
            call.arguments = copied or [snapshot(x) if y else None for x, y in zip(leaves, is_input, strict=True)]
        else:
            args, kwargs = self.rerun.enter(len(self.record.steps), kind, len(calls), args, kwargs)
        calls.append(call)
        return call, args, kwargs

    def _call_inside(self, original: Any, module: nn.Module, args: Any, kwargs: Any, is_inner: bool = True) -> Any:
        if not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        if self._in_loss or not self._is_loss(module):
            leaves = tree_leaves((args, kwargs))
            has_data = any(isinstance(x, Tensor) for x in leaves) and not _need_gradient(leaves)
            if is_inner and not self._in_loss and has_data:
                _, args, kwargs = self._enter_module("inner_calls", args, kwargs)
            output = original(module, *args, **kwargs)
            self._look_at_precision(args, kwargs, output)
            return output
        self._look_at_precision(args, kwargs)
        if (name := _name_of_loss(module)) not in self.record.losses:
            self.record.losses.append(name)
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim)
        call = LossCall(getattr(module, "grad_reduction", None), len(next(tensors, ())))
        self.step.losses.append(call)
        self._in_loss = True
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._in_loss = False
        scalars = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad)
        if (value := next(scalars, None)) is None:
            self.step.losses.remove(call)
            return output
        call.value = float(value.detach())
        if value is output:
            # a copy, whose hook runs before those of the loss: a loss with cached embeddings runs its encoder in one
            output = value = value.clone()
        value.register_hook(functools.partial(self._on_factor, call, self.step))
        return output

    def _look_at_precision(self, *tree: Any) -> None:
        if self.rerun is None:
            tensors = (x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad)
            self.step.low = max([self.step.low, *map(unit_of_rounding, tensors)])

    def _on_factor(self, call: LossCall, step: Step, gradient: Tensor) -> None:
        call.factor, call.backward = float(gradient), step.backwards
        if abs(call.factor) > LARGEST_WEIGHT:
            call.factor /= self._scale or 1.0

    def _on_scale(self, original: Any, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self._scale = scaler.get_scale() if scaler.is_enabled() else None
        return scaled

    def _on_backward(self, original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if not in_backward() and self.step.calls and not self.finished:  # not a pass within a pass
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self.step.roots += [float(x.detach()) for x in roots if x.ndim == 0]
            self._look_at_cleared()
            self.record.trained_on |= self._yielded
            self.step.backwards += 1
        original(tensors, grad_tensors, *args, **kwargs)
        self._had_gradients, self._filled = self.tensors.have_gradients(), self._with_gradient()

    def _with_gradient(self) -> set[Tensor]:
        return {x for x in self.tensors.parameters() if x.grad is not None and bool(x.grad.any())}

    def _look_at_cleared(self) -> None:
        """Look, when a backward pass starts, for gradients of earlier ones, and for those that were cleared since."""
        filled = self._with_gradient()
        if not self.step.backwards:
            self.step.stale = {name: sketch(x) for name, _, x in self.tensors.gradients(filled)}
            return
        for name in (self.tensors.names[x] for x in self._filled - filled):
            self.step.cleared[name] = self.step.backwards
            self.step.stale.pop(name, None)

    def _on_clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.finished or math.inf in [*args[:1], kwargs.get("max_norm")]:  # Hugging Face's Trainer measures the norm
            return original(listed, *args, **kwargs)
        self._look_at_gradients(listed)
        self.step.clips.append(float((*args, *kwargs.values())[0]))
        return original(listed, *args, **kwargs)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at the gradients now; those of a closure, in which Lightning runs forward and backward, after it."""
        if not self._has_group():
            self.record.skipped += 1
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self._look_at_step(optimizer)
        if not (self.finished or self._in_step):
            self._enter(optimizer, len(self.record.steps) + self._stepped)  # the closure begins a step

        def watched() -> Any:
            value = closure()
            self._look_at_step(optimizer)
            return value

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": watched})

    def _look_at_gradients(self, tensors: Iterable[Tensor]) -> None:
        known = self.tensors.parameters()
        for name, _, gradient in self.tensors.gradients([x for x in tensors if x in known]):
            if name not in self.step.gradients:
                self.step.gradients[name] = sketch(gradient)
                self.step.low = max(self.step.low, unit_of_rounding(gradient))

    def _look_at_step(self, optimizer: Optimizer) -> None:
        """Record what the optimizer receives, and its state before its first step."""
        if self.finished or self._in_step or not self.step.backwards:
            return
        self._in_step = True  # an optimizer of parts of the parameters may run another one
        index = self._enter(optimizer, len(self.record.steps))
        settings = [{key: x for key, x in y.items() if key != "params"} for y in optimizer.param_groups]
        self.step.settings[index] = copy.deepcopy(settings)
        self._look_at_gradients([*self.tensors.parameters()])
        self.step.optimized |= {self.tensors.names[x] for x in held(optimizer)}
        decaying = (x for group in optimizer.param_groups if group.get("weight_decay") for x in group["params"])
        self.step.decayed |= {self.tensors.names[x] for x in decaying if x.ndim < 2}
        for name, x, gradient in self.tensors.gradients(held(optimizer)):
            value = whole(x, self.tensors.groups.get(x))
            self.step.moved[name] = -sketch(value, gradient)
            self.step.norms[name] = float(gradient.norm()), float(self.step.moved[name].norm())
            self.step.received[name] = sketch(gradient) if self.step.clips else self.step.gradients[name]

    def _enter(self, optimizer: Optimizer, step: int) -> int:
        """Number an optimizer; record its state before its first step, or restore its state and settings in a rerun."""
        if is_new := optimizer not in self.tensors.optimizers:
            self.tensors.optimizers.append(optimizer)
        index = self.tensors.optimizers.index(optimizer)
        if self.rerun is not None:
            self.rerun.configure(step, index, optimizer, is_new)
        elif is_new and (not dist.is_initialized() or dist.get_rank() == 0):
            self.record.optimizers.append({"state": {}})
            with suppress(RuntimeError):  # a state that is split over ranks, as that of ZeroRedundancyOptimizer
                self.record.optimizers[-1] = snapshot(optimizer.state_dict())
        return index

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not self._in_step or optimizer not in self.tensors.optimizers or self.finished:
            return
        for name, x, gradient in self.tensors.gradients(held(optimizer)):
            if name in self.step.moved:
                self.step.moved[name] += sketch(whole(x, self.tensors.groups.get(x)), gradient)
        self._in_step, self._stepped, self._yielded = False, True, set()

    def _close_step(self) -> None:
        for index, module in enumerate(self.tensors.modules):
            for name, _, x in self.tensors.of(index, module):
                self.step.after.setdefault(name, sketch(whole(x, self.tensors.groups.get(x))))
        self._stepped = self._had_gradients = False
        self.record.steps.append(self.step)
        self.step = Step()
        self.record.finished += 1
        if self.record.finished == self.steps:
            self._finish()

    def _finish(self) -> None:
        self.finished = True
        self.on_finish()


def _need_gradient(leaves: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


def _name_of_loss(module: nn.Module) -> str:
    inner = getattr(module, "loss", None) if isinstance(module, DistributedLoss) else None
    inner_name = "" if inner is None else f"({getattr(inner, '__name__', type(inner).__name__)})"
    return f"{type(module).__name__}{inner_name}"
