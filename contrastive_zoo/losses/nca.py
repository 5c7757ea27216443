"""NCA: a row picks a neighbour by distance, and should pick one of its class."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.losses.base import Loss, begin, labelled_problem, prepared
from contrastive_zoo.losses.panelwise import Panelwise, log_sum_exp_where
from contrastive_zoo.world import ALONE, World


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

    averaged over the anchors that have a positive. Equal to pytorch-metric-learning's NCALoss with
    ``softmax_scale=1/t``, but an anchor whose chance underflows there, and is left out, counts here. The paper maximises
    the sum of the chances themselves, and names the logarithm as the alternative, its eq. 6.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, in units of squared distance; a tensor is learnt.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' anchors with a positive, ``"sum"``, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per anchor, the same on every rank; 0 if no anchor has a positive; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not integers or not one per row, a temperature that is not positive, NaN or
            infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> nca(z, torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, eq. 3 and 6, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """
    named = {"embeddings": embeddings} | ({} if labels is None else {"labels": labels})
    problem = labelled_problem(embeddings, labels)
    shards, *_ = begin(
        "NCA", named, problem=problem, temperature=temperature, reduction=reduction, normalize=normalize, world=world
    )
    assert labels is not None  # begin has refused it
    z = prepared(embeddings, normalize=normalize)
    loss = Panelwise(_neighbours, temperature=temperature)
    return sum_over_anchors(loss, z, labels, shards=shards, reduction=reduction, world=world)


class NCA(Loss):
    """:func:`nca` with its settings kept."""

    function = staticmethod(nca)


def _neighbours(panel: Panel, temperature: Tensor) -> tuple[Tensor, Tensor]:
    # the anchor's own square falls out of the difference
    logits = (2 * panel.anchors @ panel.columns.T - panel.columns.square().sum(1)) / temperature
    every = log_sum_exp_where(logits, panel.positive | panel.negative)
    return every - log_sum_exp_where(logits, panel.positive), panel.positive.any(1)
