"""Supervised sigmoid: every pair of rows is asked whether it is of one class."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import sum_over_anchors
from contrastive_zoo.losses.base import begin, labelled_problem, prepared
from contrastive_zoo.losses.panelwise import Panelwise
from contrastive_zoo.losses.siglip import SigLIP, bias_settings, yes_or_no
from contrastive_zoo.world import ALONE, World


def sup_sigmoid(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    logit_bias: float | Tensor = -10.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""SigLIP's binary cross-entropy over all pairs of labelled rows.

    With z the unit rows of all ranks, y_ij = 1 for equal labels and −1 otherwise,

        loss = −1/N · Σ_i Σ_{j≠i} log σ( y_ij · (z_i·z_j / t + b) )

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnt.
        logit_bias: b; a tensor is learnt.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per row, the same on every rank; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not integers or not one per row, a temperature that is not positive, a bias
            that is not finite, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # (2 log(1 + e⁻¹) + 4 log 2) / 3
        >>> sup_sigmoid(z, torch.tensor([0, 0, 1]), temperature=1.0, logit_bias=0.0)
        tensor(1.1330)

    Source: Zhai et al. 2023, §3.2, with z_ij from labels, https://arxiv.org/abs/2303.15343
    """
    settings: dict[str, Any] = bias_settings(logit_bias) | {"normalize": normalize}
    problem = labelled_problem(embeddings, labels) or settings.pop("problem", None)
    named = {"embeddings": embeddings} | ({} if labels is None else {"labels": labels})
    shards, *_ = begin(
        "SupSigmoid", named, problem=problem, temperature=temperature, reduction=reduction, world=world, **settings
    )
    assert labels is not None  # begin has refused it
    loss = Panelwise(yes_or_no, temperature=temperature, logit_bias=logit_bias)
    z = prepared(embeddings, normalize=normalize)
    return sum_over_anchors(loss, z, labels, shards=shards, reduction=reduction, world=world)


class SupSigmoid(SigLIP):
    """:func:`sup_sigmoid` with its settings kept; temperature and bias are learnt from the given ones on."""

    function = staticmethod(sup_sigmoid)
