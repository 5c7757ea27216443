"""SwAV: predict the cluster of one view of a sample from another view, with clusters of equal size."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.classes import draw_weights
from contrastive_zoo.engine.precision import at_least_float32, matmul
from contrastive_zoo.engine.statistics import balanced_assignment
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.numbers import of_size
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature, field
from contrastive_zoo.ranks.devices import state_problem
from contrastive_zoo.ranks.row_checks import described

_MOST_ITERATIONS = 10_000
"""Sinkhorn's iterations converge linearly, and each is a message: the authors have 3."""
_Size = Annotated[int, Bounds("there are prototypes and features", low=1, whole=True)]


class SwAV(ViewLoss):
    r"""Compute the loss of swapped predictions of cluster assignments.

    Called as ``loss(view1, view2, …)``, two or more of [n, d], the full-size crops first.
    With z the unit rows of view v, c the unit prototypes, and q the balanced assignment of view u's rows of all ranks,

        loss_i = − mean over u ≤ code_views and v ≠ u of Σ_k q^u_ik log softmax_k(z^v_i·c / t)

    The codes q carry no gradient. They come from Sinkhorn's iterations on exp(z·c / ε), K numbers an iteration and rank.

    ``loss.prototypes``, [K, d], is the parameter, drawn standard normal. The authors and lightly normalise the parameter
    itself before a step; here the loss normalises it, so its gradient is orthogonal to it.

    Args:
        num_prototypes: K.
        embedding_size: d.
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        epsilon: ε > 0, the temperature of the assignments.
        iterations: number of Sinkhorn iterations, 0 … 10,000; 0 is a softmax.
        code_views: number of first views that give codes; the other views only predict.

    Raises:
        ValueError: sizes above what memory holds, prototypes of another width, or more code_views than views.

    Examples:
        >>> loss = SwAV(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"prototypes": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2)).detach()   # codes are one-hot: log(e + 1) − 1
        tensor(0.3133)

    Source: Caron et al. 2020, eqs. 2-5, https://arxiv.org/abs/2006.09882
    """

    num_prototypes: _Size = field(kw_only=False)
    embedding_size: _Size = field(kw_only=False)
    temperature: Temperature = 0.1
    epsilon: Annotated[float, Bounds(above=0, constant=True)] = 0.05
    iterations: Annotated[
        int, Bounds(f"0 <= iterations <= {_MOST_ITERATIONS}", low=0, high=_MOST_ITERATIONS, whole=True)
    ] = 3
    code_views: Annotated[int, Bounds("1 <= code_views", low=1, whole=True)] = 2
    reduction: Reduction = "mean"

    prototypes: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        self.num_prototypes, self.embedding_size = int(self.num_prototypes), int(self.embedding_size)
        sizes = {"num_prototypes": self.num_prototypes, "embedding_size": self.embedding_size}
        draw = partial(draw_weights, *sizes.values(), local=slice(0, self.num_prototypes))
        self.prototypes = nn.Parameter(of_size(type(self).__name__, draw, **sizes))

    def inputs(self, *views: Tensor) -> Inputs:
        stated = super().inputs(*views)
        compared = {"prototypes": list(self.prototypes.shape)}
        return replace(stated, problem=stated.problem or self._problem(views), compared=compared)

    def compute(self, batch: Batch) -> Tensor:
        settings, views = batch.settings, len(batch.rows)
        scale = batch.scale(settings.temperature)
        z = batch.prepared(torch.cat([*batch.rows.values()]), normalize=True)
        unit = F.normalize(at_least_float32(batch.shared(self.prototypes)), dim=1).to(z.dtype)
        scores = matmul(z, unit.T).unflatten(0, (views, -1))  # view, row, cluster
        codes = [
            balanced_assignment(batch, x, epsilon=settings.epsilon, iterations=settings.iterations)
            for x in scores.detach()[: settings.code_views]
        ]
        predicted = (scale * scores).log_softmax(2)
        losses = [-(q * predicted[v]).sum(1) for u, q in enumerate(codes) for v in range(views) if v != u]
        return batch.reduce(torch.stack(losses).mean(0), reduction=self.reduction)

    def _problem(self, views: tuple[Tensor, ...]) -> str | None:
        prototypes, d = self.prototypes, views[0].shape[1]
        if prototypes.ndim != 2 or prototypes.shape[1] != d or not prototypes.is_floating_point():
            return f"prototypes are [clusters, d] with d={d} as views, got {described(prototypes)}."
        if self.code_views > len(views):
            return f"1 <= code_views <= {len(views)}, got {self.code_views}."
        return state_problem("prototypes", prototypes, views[0])
