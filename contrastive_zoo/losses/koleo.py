"""KoLeo: embeddings spread out, measured by the distance of each from its nearest neighbour."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import positive_problem, rows_problem
from contrastive_zoo.loss_base.distances import squared_distances
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows, sample_indices
from contrastive_zoo.world import ALONE, World

_ROUNDING_UNITS = 8
"""Rows that differ by fewer units of rounding count as equal."""


@checked
def koleo(
    embeddings: Float[Tensor, "n d"],
    *,
    eps: float = 1e-8,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute minus the log of the distance to the nearest neighbour, Kozachenko & Leonenko's estimate of the entropy.

    With z the unit rows of all ranks,

        loss_i = −log(min_{j≠i} ‖z_i − z_j‖ + ε)

    A single row has no neighbour and no loss; of neighbours at equal distances the first gets the gradient; equal rows have
    none. It regularises another loss: DINOv2 adds 0.1 times it, on the class tokens of each large crop by itself. DINOv2
    and lightly look for the neighbour on the own process only, and add ε to each coordinate, too.

    Args:
        embeddings: [n, d], n may differ between ranks.
        eps: ε > 0.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> koleo(torch.eye(3))   # −log √2
        tensor(-0.3466)

    Source: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198
    """
    problem = rows_problem("embeddings", embeddings) or _settings_problem(eps)
    settings = {"eps": eps, "normalize": normalize}
    (shards,) = begin(
        "KoLeo", {"embeddings": embeddings}, problem=problem, reduction=reduction, world=world, **settings
    )
    z = prepare_rows(embeddings, normalize=normalize, world=world)
    return sum_over_anchors(
        BlockLoss(_nearest, eps=eps), z, sample_indices(shards, z), shards=shards, reduction=reduction, world=world
    )


def _settings_problem(eps: float) -> str | None:
    return positive_problem(eps=eps)


class KoLeo(Loss, function=koleo, check=_settings_problem): ...


def _nearest(block: AnchorBlock, eps: float) -> tuple[Tensor, Tensor]:
    """Find the neighbour by a matmul; measure its distance by the difference, which keeps the digits of near ones."""
    anchors, candidates = block.anchors, block.candidates
    some = block.negative.any(1)
    if not candidates.shape[0]:
        return anchors.sum(1), some
    squared_distance = squared_distances(anchors.detach(), candidates.detach())
    neighbour = candidates[squared_distance.masked_fill(~block.negative, torch.inf).argmin(1)]
    squared = (anchors - neighbour).square().sum(1)
    rounding = _ROUNDING_UNITS * torch.finfo(squared.dtype).eps
    distinct = some & (squared > rounding**2 * (anchors.detach().square() + neighbour.detach().square()).sum(1))
    distance = squared.where(distinct, 1).sqrt().where(distinct, 0)
    return -(distance.where(some, 1) + eps).log(), some
