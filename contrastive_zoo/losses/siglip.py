"""SigLIP: a binary classification of every pair of an image and a text."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.implementation import choose_kernels, is_one_call
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.engine.sigmoid import sum_over_sigmoid_pairs
from contrastive_zoo.engine.small_batch import small_batch_siglip, uses_small_batch_path
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem, towers_problem
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_once, prepare_rows, round_to_input_dtype, sample_indices
from contrastive_zoo.loss_base.temperature import LearnableScaleLoss
from contrastive_zoo.world import ALONE, World


@checked
def siglip(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.1,
    logit_bias: float | Tensor = -10.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the binary cross-entropy of all pairs, summed over texts and averaged over images.

    With x, y the unit rows of all ranks, z_ij = 1 for i = j and −1 otherwise,

        loss = −1/N · Σ_i Σ_j log σ( z_ij · (x_i·y_j / t + b) )

    Dense: ``-logsigmoid((2 * eye(N) - 1) * (x @ y.T / t + b)).sum() / N``. Equal to open_clip's ``SigLipLoss`` on one
    process, with logit_scale = 1/t.

    Args:
        images: [n, d], n may differ between ranks.
        texts: [n, d], row i belongs to row i of images.
        temperature: t > 0, dimensionless; a tensor is learnable.
        logit_bias: b; a negative start matches the many negatives. A tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' images (nats per image), ``"sum"``, or ``"none"`` for the local images, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> siglip(torch.eye(2), torch.eye(2), temperature=1.0, logit_bias=0.0)   # log(1 + e⁻¹) + log 2
        tensor(1.0064)

    Source: Zhai et al. 2023, §3.2 and algorithm 1, https://arxiv.org/abs/2303.15343
    """
    settings: Any = {"temperature": temperature, "logit_bias": logit_bias}
    rule, named = "image i belongs to text i", {"images": images, "texts": texts}
    problem = towers_problem(rule, "Pass as many of both.", **named) or bias_problem(logit_bias)
    unsupported = "computes SigLIP with reduction='mean' or 'sum'" if reduction == "none" else None
    kernels = choose_kernels([images, texts], unsupported=unsupported)
    problem = problem or kernels.problem
    (images, texts), (shards, *_), world, own = begin_once(
        "SigLIP", named, problem=problem, normalize=normalize, reduction=reduction, world=world,
        implementation=str(kernels), **settings,
    )  # fmt: skip
    on_kernel = kernels.compute(shards.total, shards.total)
    if not on_kernel and normalize and uses_small_batch_path(images, reduction, world):
        return small_batch_siglip(
            images, texts, temperature=real(temperature), bias=real(logit_bias), reduction=reduction, own=own
        )
    x, y = (prepare_rows(rows, normalize=normalize, world=world) for rows in (images, texts))
    if on_kernel and is_one_call(reduction, world):
        from contrastive_zoo.kernels import sigmoid  # imported here: Triton is optional

        a, b = (x.to(images.dtype) for x in (x, y))
        return sigmoid.siglip(a, b, 1 / real(temperature), real(logit_bias))
    if not is_dense():
        x, y = round_to_input_dtype(x, images, world), round_to_input_dtype(y, texts, world)
        return sum_over_sigmoid_pairs(
            x, y, scale=1 / real(temperature), bias=real(logit_bias), dtype=images.dtype, shards=shards,
            reduction=reduction, world=world, on_kernel=on_kernel,
        )  # fmt: skip
    ids, loss = sample_indices(shards, x), BlockLoss(binary_cross_entropy, **settings)
    return sum_over_anchors(
        loss, x, ids, candidates=y, candidate_ids=ids, shards=shards, reduction=reduction, world=world
    )


def bias_problem(logit_bias: float | Tensor) -> str | None:
    """Return what is wrong with a bias, or None."""
    return number_problem(None, "SigLIP starts at -10.", logit_bias=logit_bias)


class SigLIP(LearnableScaleLoss, function=siglip, check=bias_problem, begins_once=True):
    """Temperature and bias are learnable; the settings are their initial values.

    ``loss.logit_scale``, log(1/t) without a bound, and ``loss.logit_bias`` are open_clip's parameters of these names.

    Raises:
        ValueError: an initial bias that is no finite number.

    Examples:
        >>> SigLIP(temperature=1.0, logit_bias=0.0)(torch.eye(2), torch.eye(2)).detach()   # log(1 + e⁻¹) + log 2
        tensor(1.0064)
    """

    max_scale = math.inf
    supports_ring = True

    def __init__(self, *, logit_bias: float | Tensor = -10.0, **settings: Any) -> None:
        if problem := bias_problem(logit_bias):
            raise ValueError(f"{type(self).__name__}: {problem}")
        if not isinstance(logit_bias, nn.Parameter):  # FSDP shards no parameter of shape []
            logit_bias = nn.Parameter(torch.tensor([float(logit_bias)]))
        super().__init__(logit_bias=logit_bias, **settings)


def binary_cross_entropy(block: AnchorBlock, temperature: Tensor, logit_bias: Tensor) -> Rows:
    """Return −Σ log σ(± logit) over the pairs of each anchor: + for positives, − for negatives."""
    logits = block.anchors @ block.candidates.T / temperature + logit_bias
    pairs = -F.logsigmoid(logits.where(block.positive, -logits)).where(block.positive | block.negative, 0)
    (losses,) = yield (Sum(pairs.sum(1)),)
    return losses, torch.ones_like(block.ids, dtype=torch.bool)
