"""Lifted structure: each positive pair against all negatives of both of its rows."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.distances import distances
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.world import ALONE, World


@checked
def lifted_structure(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute a squared hinge on positive pairs, with a soft minimum of both rows' distances to negatives as margin.

    With D_ij the distance of unit rows, over all ordered positive pairs (i, p) of the rows of all ranks,

        loss = mean_{i, p∈P(i)} ½ max(0, D_ip − pos_margin + log Σ_{k∈{i,p}} Σ_{n∈N(k)} exp(neg_margin − D_kn))²

    Two sweeps: the first computes a log-sum-exp over negatives for each row, which the second gathers with the row.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        pos_margin: distance.
        neg_margin: distance; the paper's margin, with pos_margin 0.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over positive pairs (0 without any), ``"sum"``, or ``"none"`` for the local rows' sums, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> lifted_structure(z, torch.tensor([0, 0, 1]), neg_margin=3.0)   # (log(e + e))² / 2
        tensor(1.4334)

    Source: Song et al. 2016, eq. 4, https://arxiv.org/abs/1511.06452
    """
    z, ids, shards = begin_labelled(
        "LiftedStructure", embeddings, labels, normalize=normalize, reduction=reduction, world=world,
        problem=_settings_problem(pos_margin, neg_margin), margins=(pos_margin, neg_margin),
    )  # fmt: skip
    loss = BlockLoss(_negative_sums, margin=neg_margin)
    crowding = sum_over_anchors(loss, z, ids, shards=shards, world=world, reduction="none")
    z, loss = torch.cat([z, crowding[:, None]], 1), BlockLoss(_pairs, margin=pos_margin)
    return sum_over_anchors(loss, z, ids, shards=shards, world=world, reduction=reduction)


def _settings_problem(pos_margin: float, neg_margin: float) -> str | None:
    return number_problem(pos_margin=pos_margin, neg_margin=neg_margin)


class LiftedStructure(Loss, function=lifted_structure, check=_settings_problem):
    supports_ring = True


def _negative_sums(block: AnchorBlock, margin: float) -> Rows:
    logits = margin - distances(block.anchors, block.candidates)
    crowding, valid = yield LogSumExp(logits, block.negative, empty=0.0), AnyOf(block.negative.any(1))
    return crowding, valid


def _pairs(block: AnchorBlock, margin: float) -> Rows:
    distance = distances(block.anchors[:, :-1], block.candidates[:, :-1])
    crowding = torch.logaddexp(block.anchors[:, -1:], block.candidates[:, -1])
    hinges = (distance - margin + crowding).relu().square().where(block.positive, 0)
    losses, pairs, has_negative = yield (
        Sum(hinges.sum(1)),
        Sum(block.positive.sum(1)),
        AnyOf(block.negative.any(1)),
    )
    return losses / 2, pairs.where(has_negative, 0)
