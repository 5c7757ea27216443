"""SwAV: predict the cluster of one view of a sample from another view, with clusters of equal size."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.collectives import replicated
from contrastive_zoo.devices import state_problem
from contrastive_zoo.engine.classes import draw_weights
from contrastive_zoo.engine.precision import at_least_float32, matmul
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.sinkhorn import balanced_assignment
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import is_number, positive_problem, views_problem
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.sizes import of_size
from contrastive_zoo.world import ALONE, World


@checked
def swav(
    *views: Float[Tensor, "n d"],
    prototypes: Float[Tensor, "K d"],
    temperature: float | Tensor = 0.1,
    epsilon: float = 0.05,
    iterations: int = 3,
    code_views: int = 2,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the loss of swapped predictions of cluster assignments.

    With z the unit rows of view v, c the unit prototypes, and q the balanced assignment of view u's rows of all ranks,

        loss_i = − mean over u ≤ code_views and v ≠ u of Σ_k q^u_ik log softmax_k(z^v_i·c / t)

    The codes q carry no gradient. They come from Sinkhorn's iterations on exp(z·c / ε), K numbers an iteration and rank.

    Args:
        views: two or more of [n, d], the full-size crops first; n may differ between ranks.
        prototypes: [K, d], equal on every rank. The authors and lightly normalise the parameter itself before a step;
            here the loss normalises it, so its gradient is orthogonal to it.
        temperature: t > 0, dimensionless; a tensor is learnable.
        epsilon: ε > 0, the temperature of the assignments.
        iterations: number of Sinkhorn iterations, 0 … 10,000; 0 is a softmax.
        code_views: number of first views that give codes; the other views only predict.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: fewer than two views, views of different shape, prototypes of another width, settings out of range,
            NaN or infinite rows, widths or dtypes that differ between ranks, or no rows on any rank.

    Examples:
        >>> eye = torch.eye(2)
        >>> swav(eye, eye, prototypes=eye, temperature=1.0)   # codes are one-hot: log(e + 1) − 1
        tensor(0.3133)

    Source: Caron et al. 2020, eqs. 2-5, https://arxiv.org/abs/2006.09882
    """
    begin(
        "SwAV",
        {f"view {index}": view for index, view in enumerate(views)},
        problem=views_problem(views) or _problem(views, prototypes, epsilon, iterations, code_views),
        temperature=temperature,
        reduction=reduction,
        sinkhorn=(list(prototypes.shape), epsilon, iterations, code_views),
        world=world,
    )
    scale = logit_scale(temperature, world)
    z = prepare_rows(torch.cat(views), normalize=True, world=world)
    unit = F.normalize(at_least_float32(replicated(prototypes, process_group=world)), dim=1).to(z.dtype)
    scores = matmul(z, unit.T).unflatten(0, (len(views), -1))  # view, row, cluster
    codes = [
        balanced_assignment(x, epsilon=real(epsilon), iterations=iterations, world=world)
        for x in scores.detach()[:code_views]
    ]
    predicted = (scale * scores).log_softmax(2)
    losses = [-(q * predicted[v]).sum(1) for u, q in enumerate(codes) for v in range(len(views)) if v != u]
    return reduce_anchors(torch.stack(losses).mean(0), reduction=reduction, world=world)


def _settings_problem(epsilon: float, iterations: int, code_views: int, views: int | None = None) -> str | None:
    counts = is_number(iterations, low=0, high=_MOST_ITERATIONS, whole=True)
    if not (counts and is_number(code_views, low=1, high=views, whole=True)):
        most = "" if views is None else f" <= {views}"
        return f"0 <= iterations <= {_MOST_ITERATIONS} and 1 <= code_views{most}, got {iterations} and {code_views}."
    return positive_problem(epsilon=epsilon)


_MOST_ITERATIONS = 10_000
"""Sinkhorn's iterations converge linearly, and each is a message: the authors have 3."""


class SwAV(ConstructingLoss, function=swav, check=_settings_problem):
    """``loss.prototypes`` is the parameter, drawn standard normal.

    Args:
        num_prototypes: K.
        embedding_size: d.

    Raises:
        ValueError: a number of prototypes or an embedding_size below 1, or above what memory holds.

    Examples:
        >>> loss = SwAV(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"prototypes": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2)).detach()   # codes are one-hot: log(e + 1) − 1
        tensor(0.3133)
    """

    made = ("prototypes",)

    def __init__(self, num_prototypes: int, embedding_size: int, **settings: Any) -> None:
        if not (is_number(num_prototypes, low=1, whole=True) and is_number(embedding_size, low=1, whole=True)):
            raise ValueError(f"SwAV: there are prototypes and features, got {num_prototypes} and {embedding_size}.")
        num_prototypes, embedding_size = int(num_prototypes), int(embedding_size)
        draw = partial(draw_weights, num_prototypes, embedding_size, local=slice(0, num_prototypes))
        drawn = of_size("SwAV", draw, num_prototypes=num_prototypes, embedding_size=embedding_size)
        super().__init__(prototypes=nn.Parameter(drawn), **settings)
        self.num_prototypes, self.embedding_size = num_prototypes, embedding_size


def _problem(
    views: tuple[Tensor, ...], prototypes: Tensor, epsilon: float, iterations: int, code_views: int
) -> str | None:
    if prototypes.ndim != 2 or prototypes.shape[1] != views[0].shape[1] or not prototypes.is_floating_point():
        return f"prototypes are [clusters, d] with d={views[0].shape[1]} as views, got {kind(prototypes)}."
    problem = state_problem("prototypes", prototypes, views[0])
    return problem or _settings_problem(epsilon, iterations, code_views, views=len(views))
