"""SINCERE: each positive competes with the negatives only, never with the anchor's other positives."""

from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.losses.base import Loss, begin, labelled_problem, prepared
from contrastive_zoo.losses.panelwise import Panelwise, log_sum_exp_where
from contrastive_zoo.world import ALONE, World

Average = Literal["anchors", "pairs"]


def sincere(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    average: Average = "anchors",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Supervised InfoNCE revisited: the mean over an anchor's positives of their InfoNCE losses.

    With z the unit rows of all ranks, P(i) the other rows with i's label and N(i) those with another,

        loss_i = mean_{p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((z_i·z_n − z_i·z_p) / t) )

    averaged over the anchors that have a positive (the authors' code knows no others); over all pairs (i, p) alike,
    it is pytorch-metric-learning's NTXentLoss on labelled rows, in memory linear in N.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnt.
        average: ``"anchors"`` weigh alike, or ``"pairs"``.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' anchors or pairs, ``"sum"`` of them, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per anchor or pair, the same on every rank; 0 if no anchor has a positive; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not integers or not one per row, a temperature that is not positive, an
            unknown average, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> sincere(z, torch.tensor([0, 0, 1]), temperature=1.0)   # log(1 + e⁻¹); row 2 has no positive
        tensor(0.3133)

    Source: Feeney and Hughes 2023, https://arxiv.org/abs/2309.14277
    """
    named = {"embeddings": embeddings} | ({} if labels is None else {"labels": labels})
    problem = labelled_problem(embeddings, labels) or average_problem(average)
    settings: dict[str, Any] = {"temperature": temperature, "average": average}
    shards, *_ = begin(
        "SINCERE", named, problem=problem, reduction=reduction, normalize=normalize, world=world, **settings
    )
    assert labels is not None  # begin has refused it
    z = prepared(embeddings, normalize=normalize)
    return sum_over_anchors(
        Panelwise(_revisited, **settings), z, labels, shards=shards, reduction=reduction, world=world
    )


class SINCERE(Loss):
    """:func:`sincere` with its settings kept."""

    function = staticmethod(sincere)


def _revisited(panel: Panel, temperature: Tensor, average: Average) -> tuple[Tensor, Tensor]:
    logits = panel.anchors @ panel.columns.T / temperature
    return each_positive(logits, logits, panel, average)


def each_positive(positives: Tensor, negatives: Tensor, panel: Panel, average: Average) -> tuple[Tensor, Tensor]:
    """log(1 + Σ_n exp(negatives_n − positives_p)) of an anchor's positives: their mean, or their sum and number."""
    against = log_sum_exp_where(negatives, panel.negative)
    losses = -F.logsigmoid(positives - against[:, None]).where(panel.positive, 0).sum(1)
    pairs = panel.positive.sum(1)
    return (losses, pairs) if average == "pairs" else (losses / pairs.clamp(min=1), pairs > 0)


def average_problem(average: str) -> str | None:
    """What is wrong with an average, in words; None if nothing is."""
    return None if average in ("anchors", "pairs") else f"average is 'anchors' or 'pairs', got {average!r}."
