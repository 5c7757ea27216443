"""Weighted sum: several losses of the same rows, trained together."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.losses.base import Loss
from contrastive_zoo.world import World


class WeightedSum(Loss):
    r"""Several losses of the same rows, added up.

        L = Σ_k w_k · loss_k(rows)

    Each loss gathers what it needs by itself.

    Args:
        losses: losses of this library that are called alike. A temperature, or any other module, may be shared.
        weights: w_k; None is 1 for each, as in pytorch-metric-learning's MultipleLosses.

    Raises:
        ValueError: no losses, a loss from elsewhere, or not as many weights as losses. At the call, on every rank alike:
            whatever a loss refuses.

    Example:
        >>> import contrastive_zoo as cz
        >>> a = torch.eye(2)
        >>> WeightedSum([cz.NTXent(temperature=1.0), cz.InfoNCE(temperature=1.0)], weights=[1.0, 0.5])(a, a)
        tensor(0.7081)

    Source: pytorch-metric-learning's MultipleLosses, https://kevinmusgrave.github.io/pytorch-metric-learning/losses
    """

    def __init__(self, losses: Sequence[Loss], *, weights: Sequence[float] | None = None) -> None:
        chosen = weighed("WeightedSum", losses, len(losses), weights)
        super().__init__(check_finite=all(loss.check_finite for loss in losses))
        self.losses, self.weights = nn.ModuleList(losses), chosen

    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Float[Tensor, "..."]:
        """The weighted sum.

        Args:
            rows: as the losses take them.
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
            named_rows: as the losses take them.
        """
        world = self.local() if world is None else world
        values = [w * loss(*rows, **named_rows, world=world) for loss, w in zip(self.losses, self.weights, strict=True)]
        return torch.stack(values).sum(0)

    def extra_repr(self) -> str:
        return f"weights={self.weights}"


def weighed(caller: str, losses: Sequence[Loss], count: int, weights: Sequence[float] | None) -> tuple[float, ...]:
    """One weight for each of ``count`` terms, 1 unless given.

    Raises:
        ValueError: no losses, one from elsewhere, or another number of weights.

    Example:
        >>> weighed("WeightedSum", [Loss()], 2, None)
        (1.0, 1.0)
    """
    if strangers := [type(loss).__name__ for loss in losses if not isinstance(loss, Loss)]:
        raise ValueError(
            f"{caller}: losses are this library's, got {strangers[0]}. Give a loss from elsewhere its own DistributedLoss "
            "and add the values."
        )
    if not losses or (weights is not None and len(weights) != count):
        raise ValueError(f"{caller}: one weight for each of {count} terms, got {weights}.")
    return tuple([1.0] * count if weights is None else map(float, weights))
