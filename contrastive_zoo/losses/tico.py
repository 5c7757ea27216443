"""TiCo: equal views, and embeddings away from the directions that past embeddings filled."""

from typing import Annotated

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import second_moments
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.numbers import move_towards, of_size
from contrastive_zoo.loss_base.settings import Bounds, Momentum, Number, field
from contrastive_zoo.ranks.row_checks import described, views_problem


class TiCo(TwoViewLoss):
    r"""Compute transformation invariance and covariance contrast.

    With a, b the unit rows of the two views of all ranks and M the moving average of past second moments,

        C = β M + (1 − β)/N Σ_i a_i a_iᵀ
        loss = mean_i [ 1 − a_i·b_i  +  ρ a_iᵀ C a_i ]

    C has no gradient. Equal to lightly's TiCoLoss. Its memory is one d × d matrix, no queue of negatives.

    M is the buffer ``covariance``, which starts at 0. In training mode each call uses the buffer and then stores C in it:
    it is equal on every rank, and equal to that of one process.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d], usually of a momentum encoder; rows of one sample stand at the same index.

    Args:
        embedding_size: d.
        beta: β, 0 … 1.
        rho: ρ.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an embedding_size below 1 or above what memory holds, a β outside 0 … 1, a ρ that is not finite, a
            covariance of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> TiCo(2, beta=0.5, rho=1.0)(eye, eye)   # 0 + ½ · ½
        tensor(0.2500)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2206.10698
    """

    embedding_size: Annotated[int, Bounds("embedding_size is at least 1", low=1, whole=True)] = field(kw_only=False)
    beta: Momentum = 0.9
    rho: Number = 8.0

    covariance: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.embedding_size = int(self.embedding_size)
        zeros = of_size(type(self).__name__, lambda: torch.zeros(size, size), embedding_size=size)
        self.covariance = nn.Buffer(zeros)

    def inputs(self, view1: Tensor, view2: Tensor) -> Inputs:
        problem = views_problem((view1, view2))
        if problem is None and self.covariance.shape != 2 * view1.shape[-1:]:
            got = f"got {described(self.covariance)} for views {described(view1)}"
            fix = f"Construct TiCo(embedding_size={view1.shape[-1]})."
            problem = f"the covariance is as wide as embeddings, {got}. {fix}"
        return Inputs({"view 0": view1, "view 1": view2}, problem)

    def compute(self, batch: Batch) -> Tensor:
        beta = batch.settings.beta
        a, b = (batch.prepared(x, normalize=True) for x in batch.rows.values())
        moments = second_moments(batch, a, a) / batch.total
        contrast = beta * self.covariance.to(moments) + (1 - beta) * moments.detach()
        loss = batch.reduce(1 - (a * b).sum(1)) + batch.settings.rho * (moments * contrast).sum()
        if self.training:
            with torch.no_grad():
                move_towards(self.covariance, moments, 1 - beta)
        return loss
