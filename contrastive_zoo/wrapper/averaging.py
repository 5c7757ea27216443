"""What a training loop does beside the loss: groups of parameters for an optimizer, and gradients averaged without DDP."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_zoo.loss_base.settings import Bounds
from contrastive_zoo.ranks.adjoints import all_reduced
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.row_checks import described
from contrastive_zoo.ranks.session import agree, refuse
from contrastive_zoo.ranks.transport import reduced_everywhere
from contrastive_zoo.ranks.world import Processes, World

BUCKET_BYTES = 25 * 2**20  # gradients are sent together in messages of about this size, DDP's default


@uncompiled
def average_gradients(module: nn.Module, process_group: Processes = None) -> None:
    """Replace every gradient of ``module`` by its mean over all ranks: what DDP does during the backward pass.

    Call it after ``backward()``, and before gradients are unscaled or clipped and ``optimizer.step()``, on every rank, with
    ``grad_reduction="mean"``, the default of ``DistributedLoss``. A missing gradient counts as zero; where all ranks miss
    it, it stays missing.

    Args:
        module: a module with equal parameters on every rank.
        process_group: the ranks; None is the default group at the time of the call.

    Raises:
        ValueError: the same on every rank: ranks whose modules differ in names, shapes or dtypes of their parameters, an
            argument that is no module, sparse gradients, or parameters that are DTensors, which FSDP reduces itself.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(model)             # one process: nothing to average
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    world = World.of(process_group, "average_gradients")
    if (problem := _module_problem(module)) is not None:
        refuse("average_gradients", problem, world=world)
    named = {name: x for name, x in module.named_parameters() if x.requires_grad}
    parameters, kinds = list(named.values()), {name: described(x) for name, x in named.items()}
    agree("average_gradients", {}, world=world, settings=kinds)
    if world.size == 1 or not parameters:
        return
    with torch.no_grad():
        has = torch.tensor([x.grad is not None for x in parameters], dtype=torch.int32)
        anywhere = all_reduced(has.to(world.device), "sum", "complete", world).tolist()
        for bucket in _buckets([x for x, ranks in zip(parameters, anywhere, strict=True) if ranks]):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
            parts = reduced_everywhere(flat, "mean", world).split([p.numel() for p in bucket])
            for parameter, mean in zip(bucket, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(mean.view_as(parameter))


def _module_problem(module: object) -> str | None:
    if not isinstance(module, nn.Module):
        return f"expects a module, got {type(module).__name__}. Pass the model itself, average_gradients(model)."
    names = [name for name, x in module.named_parameters() if x.requires_grad and hasattr(x, "device_mesh")]
    if names:
        return (
            f"{len(names)} parameters are DTensors ({names[0]}), of which this rank holds a part. FSDP reduces their "
            "gradients itself during backward(): leave average_gradients out. For parameters that are parallel "
            "otherwise, average x.grad.to_local() over the ranks that hold the same part."
        )
    gradients = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    sparse = [name for name, x in gradients.items() if x.layout is not torch.strided]
    return f"the gradient of {sparse[0]} is sparse. Pass nn.Embedding(sparse=False), or use DDP." if sparse else None


def _buckets(parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """Parameters in order, split where dtype or device changes or a message would exceed :data:`BUCKET_BYTES`."""
    buckets: list[list[Tensor]] = []
    for _, alike in itertools.groupby(parameters, key=lambda x: (x.dtype, x.device)):
        size = math.inf
        for parameter in alike:
            if size + parameter.nbytes > BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
    return buckets


def parameter_groups(*modules: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for an optimizer, in which matrices decay, and temperatures, scales and biases do not.

    Weight decay moves a parameter towards 0. A learnt temperature is the logarithm of a scale, which decay moves towards 1:
    in 300 steps of AdamW with a learning rate of 0.01 and a decay of 0.2 a scale of 14.29 becomes 4.30.

        optimizer = torch.optim.AdamW(cz.parameter_groups(model, loss_fn, weight_decay=0.2), lr=1e-3)

    Parameters of two and more dimensions decay, such as weights of layers, class weights and prototypes. Others do not, such
    as temperatures, margins and biases. Those that require no gradient are left out. One that several modules share is there
    once. Call it after ``fully_shard``, which keeps dimensions; a flat parameter of FSDP1 has one dimension.

    Args:
        modules: the model and the loss, with or without ``DistributedLoss``.
        weight_decay: that of the first group, at least 0.

    Raises:
        ValueError: anything but modules, a weight decay below 0, or no parameter to train.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss = cz.Clip(temperature=cz.LearnableTemperature())
        >>> groups = parameter_groups(nn.Linear(2, 3), loss, weight_decay=0.2)
        >>> [(group["weight_decay"], [tuple(x.shape) for x in group["params"]]) for group in groups]
        [(0.2, [(3, 2)]), (0.0, [(3,), (1,)])]
    """
    if bad := [x for x in modules if not isinstance(x, nn.Module)]:
        raise ValueError(f"parameter_groups: the model and the loss are modules, got {described(bad[0])}.")
    if problem := Bounds(low=0).problem("weight_decay", weight_decay):
        raise ValueError(f"parameter_groups: {problem}")
    parameters = [x for x in nn.ModuleList(modules).parameters() if x.requires_grad]
    if not parameters:
        raise ValueError("parameter_groups: no parameter requires a gradient. Pass the model and the loss.")
    groups = (weight_decay, [x for x in parameters if x.ndim > 1]), (0.0, [x for x in parameters if x.ndim < 2])
    return [{"params": of_group, "weight_decay": decay} for decay, of_group in groups if of_group]
