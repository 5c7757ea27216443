"""Weighted sum: several losses of the same embeddings, trained together."""

from collections.abc import Sequence

from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.composition import Composition, member_value
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.ranks.row_checks import described


class WeightedSum(Composition):
    r"""Add the weighted values of several losses of the same embeddings.

        L = Σ_k w_k · loss_k(rows)

    Embeddings are gathered once for all losses. (Tensors that a loss first concatenates, such as the hard negatives of
    :class:`MNRL` and :class:`GIST`, are gathered by that loss.)

    Args:
        losses: losses of this library with the same call form. A temperature, or any other module, may be shared.
        weights: w_k; None is 1 for each, as in pytorch-metric-learning's MultipleLosses.

    Raises:
        ValueError: no losses, a third-party loss or a class in place of its instance, or not one finite weight per loss. At
            the call, on every rank: what any of the losses refuses.

    Examples:
        >>> import torch
        >>> import contrastive_zoo as cz
        >>> a = torch.eye(2)
        >>> WeightedSum([cz.NTXent(temperature=1.0), cz.InfoNCE(temperature=1.0)], weights=[1.0, 0.5])(a, a)
        tensor(0.7081)

    Source: pytorch-metric-learning's MultipleLosses, https://kevinmusgrave.github.io/pytorch-metric-learning/losses
    """

    def __init__(self, losses: Sequence[Loss], *, weights: Sequence[float] | None = None) -> None:
        if not isinstance(losses, (Sequence, nn.ModuleList)):
            raise ValueError(f"WeightedSum: losses are a list of losses, got {described(losses)}.")
        super().__init__(losses, len(losses), weights)
        self.losses = nn.ModuleList(losses)

    def members(self) -> Sequence[Loss]:
        return [*self.losses]

    def terms(self, batch: Batch) -> list[Tensor]:
        return [member_value(loss, batch.member(index)) for index, loss in enumerate(self.members())]
