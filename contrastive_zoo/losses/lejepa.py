"""LeJEPA: views near the mean of the global views, and embeddings with a standard normal distribution."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.devices import state_problem
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.losses.sigreg import SIGReg, epps_pulley, points_problem
from contrastive_zoo.world import ALONE, World


@checked
def lejepa(
    *views: Float[Tensor, "n d"],
    directions: Float[Tensor, "d m"],
    lambda_: float = 0.05,
    global_views: int = 2,
    num_points: int = 17,
    limit: float = 3.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute SIGReg of each view plus the distance of views from the mean of the global views.

    With z_v the rows of all ranks in view v of V, of d features, and m_i the mean of sample i over the first g views,

        loss = λ mean_v SIGReg(z_v)  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    where :func:`sigreg` takes the same directions in each view. Embeddings are not normalised. Equal to lightly's LeJEPALoss
    on all views.

    Args:
        views: two or more views of the same samples, [n, d] each, the global ones first; n may differ between ranks.
        directions: [d, m], equal on every rank; :class:`LeJEPA` draws them.
        lambda_: λ, 0 … 1.
        global_views: g.
        num_points: as in :func:`sigreg`.
        limit: as in :func:`sigreg`.
        world: the ranks that share the batch.

    Raises:
        ValueError: a λ outside 0 … 1, global_views that are not 1 … V, what :func:`sigreg` or any :class:`Loss` refuses.

    Examples:
        >>> z = torch.ones(2, 1)
        >>> lejepa(z, -z, directions=torch.ones(1, 1), lambda_=0.0)   # 1² from the mean 0
        tensor(1.)

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """
    problem = _settings_problem(lambda_, global_views, num_points, limit)
    if problem is None and global_views > len(views):
        problem = f"the first global_views of the views are global, got {global_views} of {len(views)} views."
    if problem is None and views and (directions.ndim != 2 or directions.shape[:1] != views[0].shape[-1:]):
        problem = f"directions are [d, m], got {kind(directions)} for views {kind(views[0])}."
    if problem is None and views:
        problem = state_problem("directions", directions, views[0])
    settings: Any = {"num_points": num_points, "limit": limit}
    rows, shards = begin_views(
        "LeJEPA", views, normalize=False, problem=problem, lambda_=lambda_, global_views=global_views, world=world,
        directions=list(directions.shape), **settings,
    )  # fmt: skip
    z = torch.stack(rows, 1)
    distances = (z - z[:, :global_views].mean(1, keepdim=True)).square().mean((1, 2))
    normality = torch.stack([epps_pulley(x, directions, shards=shards, world=world, **settings) for x in rows])
    return lambda_ * normality.mean() + (1 - lambda_) * reduce_anchors(distances, world=world)


def _settings_problem(lambda_: float, global_views: int, num_points: int, limit: float) -> str | None:
    return (
        number_problem(low=0, high=1, lambda_=lambda_)
        or number_problem(low=1, whole=True, global_views=global_views)
        or points_problem(num_points)
        or positive_problem(limit=limit)
    )


class LeJEPA(SIGReg, function=lejepa, check=_settings_problem):
    """In training mode each call draws other directions, as :class:`SIGReg` does.

    Examples:
        >>> loss = LeJEPA(1, lambda_=0.0)
        >>> loss(torch.ones(2, 1), -torch.ones(2, 1)), loss.step
        (tensor(1.), tensor(1))
    """
