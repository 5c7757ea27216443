"""Weighted sum: several losses of the same rows, trained together."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from contrastive_zoo.loss_base.composition import Composition
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import World


class WeightedSum(Composition):
    r"""Several losses of the same rows, added up.

        L = Σ_k w_k · loss_k(rows)

    Each row travels once, however many losses compare it. (What is concatenated with other rows first, as the hard
    negatives of :class:`MNRL` and :class:`GIST` are, travels by itself.)

    Args:
        losses: losses of this library that are called alike. A temperature, or any other module, may be shared.
        weights: w_k; None is 1 for each, as in pytorch-metric-learning's MultipleLosses.

    Raises:
        ValueError: no losses, a loss from elsewhere or a class in place of its instance, or not as many finite weights as
            losses. At the call, on every rank alike: whatever a loss refuses.

    Example:
        >>> import torch
        >>> import contrastive_zoo as cz
        >>> a = torch.eye(2)
        >>> WeightedSum([cz.NTXent(temperature=1.0), cz.InfoNCE(temperature=1.0)], weights=[1.0, 0.5])(a, a)
        tensor(0.7081)

    Source: pytorch-metric-learning's MultipleLosses, https://kevinmusgrave.github.io/pytorch-metric-learning/losses
    """

    def __init__(self, losses: Sequence[Loss], *, weights: Sequence[float] | None = None) -> None:
        super().__init__(losses, len(losses), weights)
        self.losses = nn.ModuleList(losses)

    def terms(
        self, rows: Sequence[Tensor], named_rows: Mapping[str, Tensor], world: World
    ) -> list[Callable[[], Tensor]]:
        return [partial(loss, *rows, **named_rows, world=world) for loss in self.losses]
