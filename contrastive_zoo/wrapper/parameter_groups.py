"""Parameter groups of an optimizer: which parameters decay."""

from typing import Any

from torch import nn

from contrastive_zoo.loss_base.settings import Bounds
from contrastive_zoo.ranks.row_checks import described


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
