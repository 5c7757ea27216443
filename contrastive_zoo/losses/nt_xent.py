"""NT-Xent: each view must find its partner among all other views of the global batch."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine import reduce_anchors
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.losses.base import Loss, begin, logit_scale, prepared, views_problem
from contrastive_zoo.world import ALONE, World


def nt_xent(
    *views: Float[Tensor, "n d"],
    temperature: float | Tensor = 0.1,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Normalised-temperature cross-entropy over two or more views.

    With z the unit rows of all views of all ranks and P(i) the other views of row i's sample,

        loss = mean_i [ log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t ]

    For two views this is ``cross_entropy((z @ z.T / t).fill_diagonal_(-inf), partner)``, without the 2N × 2N matrix.

    Args:
        views: two or more of [n, d]; rows of one sample stand at the same index of every view. n may differ between
            ranks.
        temperature: t > 0, dimensionless; a tensor is learnt.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' anchors, ``"sum"``, or ``"none"`` for my anchors, view after view.
        world: who else holds rows.

    Returns:
        Nats per anchor, the same on every rank; [views · n] for ``"none"``.

    Raises:
        ValueError: fewer than two views, views of different shape, a temperature that is not positive, NaN or infinite
            rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> eye = torch.eye(2)
        >>> nt_xent(eye, eye, temperature=1.0)   # log(e + 2) − 1
        tensor(0.5514)

    Source: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709
    """
    named = {f"view {index}": view for index, view in enumerate(views)}
    problem = views_problem(views)
    shards, *_ = begin(
        "NTXent", named, problem=problem, temperature=temperature, reduction=reduction, normalize=normalize, world=world
    )
    scale = logit_scale(temperature, world)
    z = prepared(torch.stack(views), normalize=normalize)
    others = (z.sum(0) - z) / (len(views) - 1)
    positive = scale * (z * others).sum(-1).flatten()
    candidates = self_log_sum_exp(z.flatten(0, 1), scale=scale, shards=shards.times(len(views)), world=world)
    return reduce_anchors(candidates - positive, reduction=reduction, world=world)


class NTXent(Loss):
    """:func:`nt_xent` with its settings kept."""

    function = staticmethod(nt_xent)
