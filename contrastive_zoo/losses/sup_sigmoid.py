"""Supervised sigmoid: a binary classification of every pair of rows as the same class or not."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import sum_over_anchors
from contrastive_zoo.engine.sigmoid import sum_over_sigmoid_pairs
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss, LabelledLoss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_labelled, round_to_input_dtype
from contrastive_zoo.losses.siglip import SigLIP, bias_problem, binary_cross_entropy
from contrastive_zoo.world import ALONE, World


@checked
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
    r"""Compute SigLIP's binary cross-entropy over all pairs of labelled rows.

    With z the unit rows of all ranks, y_ij = 1 for equal labels and −1 otherwise,

        loss = −1/N · Σ_i Σ_{j≠i} log σ( y_ij · (z_i·z_j / t + b) )

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnable.
        logit_bias: b; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # (2 log(1 + e⁻¹) + 4 log 2) / 3
        >>> sup_sigmoid(z, torch.tensor([0, 0, 1]), temperature=1.0, logit_bias=0.0)
        tensor(1.1330)

    Source: Zhai et al. 2023, §3.2, with z_ij from labels, https://arxiv.org/abs/2303.15343
    """
    settings: Any = {"temperature": temperature, "logit_bias": logit_bias}
    z, ids, shards = begin_labelled(
        "SupSigmoid", embeddings, labels, problem=bias_problem(logit_bias), normalize=normalize, reduction=reduction,
        world=world, **settings,
    )  # fmt: skip
    if is_dense():
        loss = BlockLoss(binary_cross_entropy, **settings)
        return sum_over_anchors(loss, z, ids, shards=shards, reduction=reduction, world=world)
    z = round_to_input_dtype(z, embeddings, world)
    return sum_over_sigmoid_pairs(
        z, None, ids, scale=1 / real(temperature), bias=real(logit_bias), dtype=embeddings.dtype, shards=shards,
        reduction=reduction, world=world,
    )  # fmt: skip


class SupSigmoid(SigLIP, LabelledLoss, function=sup_sigmoid, block_function=binary_cross_entropy, check=bias_problem):
    """Temperature and bias are learnable; the settings are their initial values.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # (2 log(1 + e⁻¹) + 4 log 2) / 3
        >>> SupSigmoid(temperature=1.0, logit_bias=0.0)(z, torch.tensor([0, 0, 1])).detach()
        tensor(1.1330)
    """
