"""NCA: a row picks a neighbour by distance, and should pick one of its class."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel
from contrastive_zoo.loss_base.panelwise import PanelLoss, log_sum_exp_where, over_anchors
from contrastive_zoo.world import ALONE, World


@uncompiled
def nca(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Neighbourhood component analysis: −log of the chance that a stochastic neighbour is of the anchor's class.

    With z the rows of all ranks, P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(−‖z_i − z_k‖² / t)  −  log Σ_{p∈P(i)} exp(−‖z_i − z_p‖² / t)

    averaged over the anchors that have a positive, the paper's alternative to the sum of the chances themselves. Equal to
    pytorch-metric-learning's NCALoss with ``softmax_scale=1/t``; there an anchor whose chance underflows is left out.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, in units of squared distance; a tensor is learnt.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"``, mine [n].
        world: who else holds rows.

    Raises:
        ValueError: what any :class:`Loss` refuses.

    Example:
        >>> import torch
        >>> nca(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """
    return over_anchors(
        "NCA", _pick, embeddings, labels, temperature=temperature, normalize=normalize, reduction=reduction, world=world
    )


def _pick(panel: Panel, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = (2 * panel.anchors @ panel.columns.T - panel.columns.square().sum(1)) / temperature  # ‖z_i‖² falls out
    every = log_sum_exp_where(logits, panel.positive | panel.negative)
    return every - log_sum_exp_where(logits, panel.positive), panel.positive.any(1)


class NCA(PanelLoss, function=nca, panel=_pick): ...
