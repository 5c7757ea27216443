"""Tuplet margin: all negatives of an anchor against each positive, with an angle to spare."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.losses.base import Loss, begin, labelled_problem, prepared
from contrastive_zoo.losses.panelwise import Panelwise
from contrastive_zoo.losses.sincere import Average, average_problem, each_positive
from contrastive_zoo.world import ALONE, World


def tuplet_margin(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1 / 64,
    margin: float = 5.73,
    average: Average = "pairs",
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Softmax over tuples of a positive and all negatives, on angles.

    With θ_ij the angle between rows i and j of all ranks, P(i) the other rows with i's label, N(i) those with another,

        loss = mean_{i, p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((cos θ_in − cos(θ_ip − β)) / t) )

    Equal to pytorch-metric-learning's TupletMarginLoss with ``scale=1/t``, also where θ_ip = 0, whose gradient there is
    infinite and here zero.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless, the paper's 1/s; a tensor is learnt.
        margin: β in degrees, 0 to 180.
        average: ``"pairs"`` (i, p) weigh alike, or ``"anchors"``.
        reduction: ``"mean"`` over all ranks' pairs or anchors, ``"sum"`` of them, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per pair or anchor, the same on every rank; 0 if no anchor has a positive; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not integers or not one per row, a temperature that is not positive, a
            margin out of range, an unknown average, NaN or infinite rows, ranks that bring different widths or dtypes,
            or no rows at all.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # log(1 + exp(0 − cos 60°))
        >>> tuplet_margin(z, torch.tensor([0, 0, 1]), temperature=1.0, margin=60.0)
        tensor(0.4741)

    Source: Yu and Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/
    Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """
    named = {"embeddings": embeddings} | ({} if labels is None else {"labels": labels})
    problem = labelled_problem(embeddings, labels) or average_problem(average)
    if not 0 <= margin <= 180:
        problem = f"margin is an angle of 0 to 180 degrees, got {margin}. The paper's 0.1 rad is 5.73."
    settings: dict[str, Any] = {"temperature": temperature, "margin": margin, "average": average}
    shards, *_ = begin("TupletMargin", named, problem=problem, reduction=reduction, world=world, **settings)
    assert labels is not None  # begin has refused it
    z = prepared(embeddings, normalize=True)
    return sum_over_anchors(Panelwise(_tuples, **settings), z, labels, shards=shards, reduction=reduction, world=world)


class TupletMargin(Loss):
    """:func:`tuplet_margin` with its settings kept."""

    function = staticmethod(tuplet_margin)


def _tuples(panel: Panel, temperature: Tensor, margin: float, average: Average) -> tuple[Tensor, Tensor]:
    cos, beta = panel.anchors @ panel.columns.T, math.radians(margin)
    sine2 = 1 - cos.square()
    sine = sine2.clamp(min=torch.finfo(cos.dtype).tiny).sqrt().where(sine2 > torch.finfo(cos.dtype).eps, 0)
    slack = cos * math.cos(beta) + sine * math.sin(beta)  # cos(θ − β)
    return each_positive(slack / temperature, cos / temperature, panel, average)
