"""SINCERE: each positive competes with the negatives only, never with the anchor's other positives."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel
from contrastive_zoo.loss_base.checks import word_problem
from contrastive_zoo.loss_base.panelwise import Average, PanelLoss, each_positive, over_anchors
from contrastive_zoo.world import ALONE, World


@uncompiled
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

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnt.
        average: ``"anchors"`` that have a positive weigh alike (the authors' code knows no others), or ``"pairs"`` (i, p):
            then it is pytorch-metric-learning's NTXentLoss on labelled rows, in memory linear in N.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' anchors or pairs (nats, 0 without any), ``"sum"``, or ``"none"``, mine [n].
        world: who else holds rows.

    Raises:
        ValueError: an unknown average, or what any :class:`Loss` refuses.

    Example:
        >>> import torch
        >>> sincere(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]), temperature=1.0)   # log(1 + e⁻¹); row 2 has none
        tensor(0.3133)

    Source: Feeney and Hughes 2023, https://arxiv.org/abs/2309.14277
    """
    return over_anchors(
        "SINCERE", _revisited, embeddings, labels, problem=_settings_problem(average), average=average,
        temperature=temperature, normalize=normalize, reduction=reduction, world=world,
    )  # fmt: skip


def _revisited(panel: Panel, temperature: Tensor, average: Average) -> tuple[Tensor, Tensor]:
    return each_positive(panel.anchors @ panel.columns.T / temperature, panel, average)


def _settings_problem(average: str) -> str | None:
    return word_problem("average", average, Average)


class SINCERE(PanelLoss, function=sincere, panel=_revisited, check=_settings_problem): ...
