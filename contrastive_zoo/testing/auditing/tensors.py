"""Names, sketches and copies of the tensors of a training."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastive_zoo.metrics.figures import count_sketch
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.testing.auditing.records import Record, snapshot

# Classes of encoders that may be part of a loss: the losses of sentence-transformers hold theirs
ENCODERS = {"SentenceTransformer", "PreTrainedModel"}
# Names under which wrappers hold their module; one process may do without the wrapper
WRAPPERS = {"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"}
# Begins of names of numbers that are of the loss, though a model holds them, as OpenCLIP's does
OF_LOSSES = ("logit", "log_scale", "temp", "tau")
FEW = 8  # numbers, which may be those of 16 bits by chance
OF_DEEPSPEED = (
    "DeepSpeed keeps gradients in buffers that the audit does not read. Audit the same training with "
    "DistributedDataParallel instead"
)


class Tensors:
    """Name and record tensors at the first call of their module; in a rerun, ``restore`` gives them rank 0's values."""

    def __init__(
        self, record: Record, restore: Callable[[str, Tensor], None] | None, is_loss: Callable[[nn.Module], bool]
    ) -> None:
        self.record, self.restore, self.is_loss = record, restore, is_loss
        self.modules: list[nn.Module] = []  # those that the script calls
        self.optimizers: list[Optimizer] = []
        self.names: dict[Tensor, str] = {}  # of parameters
        self.groups: dict[Tensor, Any] = {}  # of FSDP1, in which a parameter is in pieces

    def remember(self, module: nn.Module) -> None:
        if any(module is x for known in self.modules for x in known.modules()):  # as the module in a wrapper
            return
        self.modules.append(module)
        if any(_is_a(x, {"DeepSpeedEngine"}) for x in module.modules()):
            self.record.problem = OF_DEEPSPEED
            return
        for part in module.modules():
            if type(part).__name__ == "FullyShardedDataParallel":
                self.groups |= dict.fromkeys(part.parameters(), part.process_group)
        index, is_first = len(self.modules) - 1, not dist.is_initialized() or dist.get_rank() == 0
        is_fsdp = any(_is_a(x, {"FSDPModule"}) for x in module.modules())
        inside = [y for x in module.modules() if self.is_loss(x) for y in x.modules() if _is_a(y, ENCODERS)]
        encoders = {x for y in inside for x in y.parameters()}
        of_losses = {x for y in module.modules() if self.is_loss(y) for x in y.parameters()} - encoders
        for name, kind, x in self.of(index, module):
            if x in self.names:
                continue
            if kind == "parameter":
                self.names[x] = name
                self.record.parameters.add(name)
                if x.requires_grad:
                    is_of_loss = x in of_losses or (x.numel() == 1 and name.rpartition(".")[2].startswith(OF_LOSSES))
                    self.record.groups[name] = "loss" if is_of_loss else "encoder"
                if x.is_floating_point():
                    self.record.eps = max(self.record.eps, torch.finfo(x.dtype).eps)
                if hasattr(x, "device_mesh") and (x.device_mesh.ndim > 1 or not is_fsdp):
                    self.record.shares_samples = True
            if self.restore is not None:
                self.restore(name, x)
            value = whole(x, self.groups.get(x))
            self.record.start[name] = sketch(value)
            if is_first and self.restore is None:
                self.record.tensors[name] = snapshot(value)

    def of(self, index: int, module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the name, the kind and each tensor of a module: parameters, buffers and attributes that are no result."""
        for prefix, part in module.named_modules():
            path = ".".join([str(index), *(x for x in prefix.split(".") if x and x not in WRAPPERS)])
            kinds = {"parameter": part._parameters, "buffer": part._buffers, "attribute": vars(part)}
            for kind, tensors in kinds.items():
                for name, x in tensors.items():
                    # FSDP1 holds views of its parameters as attributes
                    is_kept = isinstance(x, Tensor) and (kind != "attribute" or not x.requires_grad)
                    if is_kept and x.grad_fn is None and (kind != "attribute" or x.is_floating_point()):
                        yield f"{path}.{name}", kind, x

    def parameters(self) -> dict[Tensor, str]:
        """Return the names of all parameters; those that are in an optimizer only have names of their place there."""
        for i, optimizer in enumerate(self.optimizers):
            for j, x in enumerate(held(optimizer)):
                if x not in self.names:
                    self.names[x] = f"optimizer{i}.{j}"
                    self.record.groups |= {self.names[x]: "encoder"} if x.requires_grad else {}
        return self.names

    def have_gradients(self) -> bool:
        return any(x.grad is not None for x in self.parameters())

    def gradients(self, tensors: Iterable[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each parameter with a gradient, the parameter, and all of the gradient."""
        for x in tensors:
            local = x.new_zeros(0) if x.grad is None and x in self.groups else x.grad
            gradient = None if local is None else whole(local, self.groups.get(x))
            if gradient is not None and gradient.numel():
                self.record.groups.setdefault(self.names[x], "encoder")  # of a parameter that was frozen at first
                yield self.names[x], x, gradient


def unit_of_rounding(x: Tensor) -> float:
    """Return the unit of rounding of the type of 16 bits that holds the values of a tensor; 0 if none does."""
    if not x.is_floating_point() or hasattr(x, "device_mesh") or (x := x.detach()).count_nonzero() < FEW:
        return 0.0
    halves = (x.dtype,) if x.dtype.itemsize == 2 else (torch.bfloat16, torch.float16)
    return next((torch.finfo(half).eps for half in halves if torch.equal(x.to(half).to(x.dtype), x)), 0.0)


def held(optimizer: Optimizer) -> list[Tensor]:
    return [x for group in optimizer.param_groups for x in group["params"]]


def _is_a(module: nn.Module, names: set[str]) -> bool:
    """Return whether a module is of a class with one of these names, whose library need not be installed."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def sketch(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sketch of a tensor, or of it times the magnitudes of ``weight``; equal signs for all tensors."""
    return count_sketch(x, torch.Generator().manual_seed(0), weight)


def whole(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return all of a tensor of which every rank holds a part, a DTensor or a piece of FSDP1; all ranks call it."""
    x = x.detach()
    if hasattr(x, "full_tensor"):
        gathered: Any = x.full_tensor()
        return gathered.wait() if hasattr(gathered, "wait") else gathered
    if group is None or group.size() == 1:
        return x
    return all_gather(x.reshape(-1), process_group=group)
