"""Record the steps of a training through torch's global hooks; the user's objects are not changed."""

import functools
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.ranks.compat import in_backward
from contrastive_zoo.testing.auditing.records import Arguments, Call, Clip, MicroBatch, Record, Step, snapshot
from contrastive_zoo.testing.measurement import remove_hook
from contrastive_zoo.wrapper.distributed import DistributedLoss

THIRD_PARTY_LOSSES = (
    "pytorch_metric_learning.losses",
    "pytorch_metric_learning.utils.distributed",
    "sentence_transformers.losses",
    "sentence_transformers.sentence_transformer.losses",
    "sentence_transformers.sparse_encoder.losses",
    "contrastive_zoo.adapters.sentence_transformers",
)
"""Modules whose classes are losses."""

WRAPPERS = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "LightningModule",
    "_FabricModule",
    "DeepSpeedEngine",
}
"""Classes that only forward their calls to another module, or to the training step that calls it."""

ENCODERS = {"SentenceTransformer", "PreTrainedModel"}
"""Classes of encoders that may be part of a loss: the losses of sentence-transformers hold theirs."""

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
"""The functions of ``torch.nn.utils`` that are watched; trainers call these, too."""

LARGEST_WEIGHT = 64.0
"""A loss whose backward pass starts with a larger gradient is looked up in the GradScalers of the process."""


class Recorder:
    """Record the first steps of a training on this rank.

    A loss is one of this library, of pytorch-metric-learning or of sentence-transformers, or of ``losses``. An encoder is
    a module with trained parameters that contains no loss and wraps no other module. After this number of steps
    ``on_finish`` is called. ``needs_group``: record only once torch.distributed is initialised.
    """

    def __init__(
        self, losses: Sequence[Any], steps: int, on_finish: Callable[[], None] = lambda: None, needs_group: bool = True
    ) -> None:
        self.steps, self.on_finish, self.needs_group = steps, on_finish, needs_group
        self._loss_classes = (Loss, DistributedLoss, *(x for x in losses if isinstance(x, type)))
        self._loss_modules = [x for x in losses if not isinstance(x, type)]
        self._kinds: dict[nn.Module, str] = {}
        self.record, self.step = Record(), Step()
        self.encoders: list[nn.Module] = []
        self.losses: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.loaders: list[DataLoader[Any]] = []
        self.epochs = 0
        self.finished = False
        self._active: tuple[nn.Module, Arguments, Tensor] | None = None
        self._hooks = ExitStack()
        self._nodes: set[Any] = set()  # of the graph, in which the losses of the step end
        self._stepped = False

    def start(self) -> None:
        self._begin = time.monotonic()
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._hooks.callback(remove_hook, handle)
        for name in CLIPPING:
            for home in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._hooks.enter_context(_watched(home, name, functools.partial(self._on_clip, name)))
        self._hooks.enter_context(_watched(torch.autograd, "backward", self._before_backward))
        self._hooks.enter_context(_watched(DataLoader, "__iter__", self._on_loader))

    def stop(self) -> Record:
        """Remove the hooks, close the last step and return the record."""
        self._hooks.close()
        if self._stepped and not self.finished:
            self._close_step()
        elif self.step.micro_batches and not self.finished:  # the script raised within a step
            self.record.steps.append(self.step)
            self.record.groups = self._groups()
        self.record.peak_bytes, self.record.seconds = peak_bytes(), time.monotonic() - self._begin
        return self.record

    def _is_loss(self, module: nn.Module) -> bool:
        if isinstance(module, self._loss_classes) or any(module is x for x in self._loss_modules):
            return True
        return any(cls.__module__.startswith(THIRD_PARTY_LOSSES) for cls in type(module).__mro__)

    def _kind(self, module: nn.Module) -> str:
        """Return whether a module is an ``"encoder"``, a ``"loss"`` or neither; it is looked at once."""
        if module not in self._kinds:
            is_encoder = not _is_a(module, WRAPPERS) and any(x.requires_grad for x in module.parameters())
            contains_loss = any(map(self._is_loss, module.modules()))
            self._kinds[module] = "encoder" if is_encoder and not contains_loss else ""
            if self._is_loss(module):
                self._kinds[module] = "loss"
        return self._kinds[module]

    # --- forward ------------------------------------------------------------------------------------------------------

    def _has_group(self) -> bool:
        """Return whether the script has initialised torch.distributed, or need not."""
        if dist.is_available() and dist.is_initialized():
            self.record.initialized = True
        return self.record.initialized or not self.needs_group

    def _on_loader(self, loader: DataLoader[Any]) -> None:
        """Note that a loader begins an epoch, unless it is that of a validation."""
        if self._has_group() and torch.is_grad_enabled():
            self.epochs += 1
            _add(self.loaders, loader)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._active is not None or self.finished or not torch.is_grad_enabled() or in_backward():
            return
        if not self._has_group() or not (kind := self._kind(module)):
            return
        if self._stepped:
            self._close_step()
            if self.finished:
                return
        if kind == "encoder" and self._has_begun_backward() and not self._gradients():
            self.step = Step()  # gradients were cleared without a step, as a GradScaler does after an overflow
        self._remember(module, kind)
        self._active = (module, Arguments.of(args, {}), torch.get_rng_state())

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if self._active is None or self._active[0] is not module:
            return None
        _, arguments, random_state = self._active
        self._active = None
        *kwargs, output = rest
        raised = not kwargs  # torch passes keyword arguments only if the module has returned
        if not raised:
            named = Arguments.of((), kwargs[0])
            arguments = Arguments(arguments.args, named.kwargs, arguments.trained + named.trained)
        drew = not torch.equal(torch.get_rng_state(), random_state)
        if self._kind(module) == "encoder":
            if not raised:
                index = self.encoders.index(module)
                call = Call(index, arguments, snapshot(output), random_state, drew, _autocast())
                self._micro_batch(new=True).encoders.append(call)
            return None
        scalars = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad)
        value = next(scalars, None)
        if value is None and not raised:
            return None
        call = Call(self.losses.index(module), arguments, snapshot(value), random_state, drew, _autocast())
        self._micro_batch(new=False).losses.append(call)
        if value is None:
            return None
        if value is output:
            # a copy, whose hook runs before those of the loss: a loss with cached embeddings runs its encoder in one
            output = value = value.clone()
        self._nodes.add(value.grad_fn)
        value.register_hook(lambda gradient: self._on_backward(call, gradient))
        return output

    def _micro_batch(self, new: bool) -> MicroBatch:
        """Return the current micro-batch; an encoder begins a new one after a loss, any call after a backward pass."""
        batches = self.step.micro_batches
        is_over = bool(batches) and any(x.factor is not None for x in batches[-1].losses)
        if not batches or is_over or (new and batches[-1].losses):
            batches.append(MicroBatch())
        return batches[-1]

    def _remember(self, module: nn.Module, kind: str) -> None:
        """Number a module at its first call, and copy its state at its first call of a step."""
        known = self.encoders if kind == "encoder" else self.losses
        if _add(known, module) and kind == "loss":
            inner = getattr(module, "loss", None) if isinstance(module, DistributedLoss) else None
            inner_name = "" if inner is None else f"({getattr(inner, '__name__', type(inner).__name__)})"
            self.record.loss_names.append(f"{type(module).__name__}{inner_name}")
            # of a loss of the embeddings that it receives None; not an attribute of the wrapped loss
            self.record.options.append(vars(module).get("grad_reduction"))
        prefix = f"{kind}{known.index(module)}"
        if not any(name.startswith(f"{prefix}.") for name in self.step.state):
            named = [*module.named_parameters(), *module.named_buffers()]
            self.step.state |= {f"{prefix}.{name}": snapshot(x) for name, x in named if not is_sharded(x)}
            self.step.sharded |= {f"{prefix}.{name}" for name, x in named if is_sharded(x)}
            self.step.epoch = self.epochs
            self.step.batch_norms |= any(isinstance(x, _BatchNorm) and x.training for x in module.modules())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters of the encoders, then those of the losses, each once."""
        named: dict[nn.Parameter, str] = {}
        for kind, modules in (("encoder", self.encoders), ("loss", self.losses)):
            for index, module in enumerate(modules):
                for name, parameter in module.named_parameters():
                    named.setdefault(parameter, f"{kind}{index}.{name}")
        return {name: x for x, name in named.items()}

    def _names(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return those tensors that are parameters, by name."""
        names = {x: name for name, x in self.parameters().items()}
        return {names[x]: x for x in tensors if x in names}  # type: ignore[index]  # a tensor that is a key is a parameter

    def _groups(self) -> dict[str, str]:
        """Return for every trained parameter whether it is an encoder's; a loss may contain its encoder."""
        inside = {x for loss in self.losses for y in loss.modules() if _is_a(y, ENCODERS) for x in y.parameters()}
        return {
            name: "encoder" if name.startswith("encoder") or x in inside else "loss"
            for name, x in self.parameters().items()
            if x.requires_grad
        }

    # --- backward and optimizer ---------------------------------------------------------------------------------------

    def _on_backward(self, call: Call, gradient: Tensor) -> None:
        if self.finished:
            return
        call.factor = float(gradient)
        if abs(call.factor) > LARGEST_WEIGHT:
            scalers = [x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler) and x.is_enabled()]
            self.step.scale = scalers[0].get_scale() if scalers else 1.0
        if sum(x.factor is not None for x in self.step.losses) == 1:
            self.step.stale = {name: snapshot(x) for name, x in self._gradients().items() if bool(x.any())}

    def _before_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Note which parameters get a gradient by another way than through a recorded loss."""
        if not in_backward():  # not a pass within a pass, as of a cache of gradients
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self.step.other_terms |= self._names(_other_leaves(roots, self._nodes)).keys()

    def _has_begun_backward(self) -> bool:
        return any(x.factor is not None for x in self.step.losses)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the present gradients of parameters that this rank holds in full."""
        return {name: x.grad for name, x in self.parameters().items() if x.grad is not None and not is_sharded(x)}

    def _on_clip(self, function: str, parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if math.inf not in [*args[:1], kwargs.get("max_norm")]:  # Hugging Face's Trainer measures the norm in this way
            clipped = {name: x.grad for name, x in self._names(listed).items() if x.grad is not None}
            self.step.gradients = {name: snapshot(x) for name, x in clipped.items()} | self.step.gradients
            self.step.clips.append(Clip(function, list(clipped), args, kwargs))
        return (listed, *args), kwargs

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at the gradients now; those of a closure, in which Lightning runs forward and backward, after it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self._look_at_gradients(optimizer)

        def watched() -> Any:
            value = closure()
            self._look_at_gradients(optimizer)
            return value

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, kwargs | {"closure": watched}

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        """Copy what the optimizer receives, and its state before the step."""
        if self.finished or not self._has_begun_backward():
            return
        _add(self.optimizers, optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            index = next(i for i, x in enumerate(self.optimizers) if x is optimizer)
            try:
                self.step.optimizer_states[index] = snapshot(optimizer.state_dict())
            except RuntimeError as error:  # ZeroRedundancyOptimizer, whose state is split over ranks
                self.step.optimizer_problem = f"the state of {type(optimizer).__name__} cannot be read: {error}"
        held = [x for group in optimizer.param_groups for x in group["params"]]
        optimized = self._names(held)
        covered = set(optimized.values())
        self.step.optimized |= optimized.keys()
        self.step.sharded |= {name for name, x in self.parameters().items() if is_sharded(x)}
        self.step.uncovered += sum(x.grad is not None for x in held if x not in covered)
        for name, x in self._gradients().items():
            self.step.gradients.setdefault(name, snapshot(x))
        self._stepped = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stepped and not self.finished:
            self.step.after |= {name: snapshot(x) for name, x in self.parameters().items() if not is_sharded(x)}

    def _close_step(self) -> None:
        self._stepped = False
        self._nodes.clear()
        self.record.steps.append(self.step)
        self.record.groups = self._groups()
        self.record.finished += 1
        self.step = Step()
        if self.record.finished == self.steps:
            self.finished = True
            self.on_finish()


def _add(items: list[Any], x: Any) -> bool:
    """Append an object to a list that does not hold it; return whether it is new."""
    is_new = not any(x is y for y in items)
    if is_new:
        items.append(x)
    return is_new


@contextmanager
def _watched(home: Any, name: str, before: Callable[..., Any]) -> Iterator[None]:
    """Call ``before`` with the arguments of every call of ``home.name``; it may return other ``(args, kwargs)``."""
    original = getattr(home, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(*args, **kwargs) or (args, kwargs)
        return original(*args, **kwargs)

    setattr(home, name, call)
    try:
        yield
    finally:
        setattr(home, name, original)


def _other_leaves(roots: Sequence[Any], losses: set[Any]) -> list[Tensor]:
    """Return the leaves of the graph that are reached without passing a loss; none if no loss is reached at all."""
    pending = [x.grad_fn for x in roots if isinstance(x, Tensor) and x.grad_fn is not None]
    seen: set[Any] = set()
    leaves, reached = [], False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in losses:
            reached = True
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        else:
            pending += [x for x, _ in node.next_functions if x is not None]
    return leaves if reached else []


def _is_a(module: nn.Module, names: set[str]) -> bool:
    """Return whether a module is of a class with one of these names, whose library need not be installed."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def is_sharded(x: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this rank holds a part."""
    return hasattr(x, "device_mesh")


def _autocast() -> tuple[str, bool, torch.dtype]:
    current = torch.accelerator.current_accelerator()
    device = "cpu" if current is None or not torch.is_autocast_enabled(current.type) else current.type
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
