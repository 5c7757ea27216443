"""Online contrastive loss: the contrastive loss of annotated pairs, of which only the hard ones count."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import extreme_over_ranks, sum_over_ranks
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, towers_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.value_checks import range_problem
from contrastive_zoo.world import ALONE, World


@checked
def online_contrastive(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    *,
    margin: float = 0.5,
    reduction: Reduction = "sum",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the contrastive loss of the positive pairs and negative pairs that overlap in distance.

    With D_i = 1 − q_i·k_i of unit rows, and positives y_i = 1 and negatives y_i = 0 of all ranks,

        loss = Σ_{i: y_i = 1, D_i > min_{y_j = 0} D_j} D_i²  +  Σ_{i: y_i = 0, D_i < max_{y_j = 1} D_j} max(0, margin − D_i)²

    If there are only positives or only negatives, their mean distance takes the place of the extreme of the other kind.
    Equal to sentence-transformers' OnlineContrastiveLoss.

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [n, d], row i forms a pair with row i of queries.
        labels: y, [n], 1 for a positive pair and 0 for a negative one.
        margin: cosine distance beyond which negatives have no loss.
        reduction: ``"sum"``, as the original, ``"mean"`` over the hard pairs of all ranks, or ``"none"`` for the local
            pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels other than 0 and 1, a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.6, 0.8]])
        >>> online_contrastive(q, k, torch.tensor([1, 0]))   # distances 0.4 and 0.2 overlap: 0.4² + 0.3²
        tensor(0.2500)

    Source: sentence-transformers, https://sbert.net/docs/package_reference/sentence_transformer/losses.html, after
    Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """
    problem = _problem(queries, keys, labels, world) or _settings_problem(margin)
    named = {"queries": queries, "keys": keys, "labels": labels}
    begin("OnlineContrastive", named, problem=problem, margin=margin, reduction=reduction, world=world)
    q, k = (prepare_rows(rows, normalize=True, world=world) for rows in (queries, keys))
    distance = 1 - (q * k).sum(1)
    positive = labels == 1
    farthest, nearest = _thresholds(distance.detach(), positive, world)
    hard = distance.detach().gt(nearest).where(positive, distance.detach() < farthest)
    losses = distance.where(positive, (margin - distance).relu()).square()
    return reduce_anchors(losses, hard, reduction=reduction, world=world)


def _settings_problem(margin: float) -> str | None:
    return number_problem(margin=margin)


class OnlineContrastive(Loss, function=online_contrastive, check=_settings_problem): ...


def _thresholds(distance: Tensor, positive: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """Return the largest distance of all ranks' positives and the smallest of their negatives, as the loss uses them."""
    ends = [distance.where(positive, -torch.inf), (-distance).where(~positive, -torch.inf)]
    lowest = distance.new_full((1,), -torch.inf)
    local = torch.stack([torch.cat([x, lowest]).max() for x in ends])
    farthest, nearest = extreme_over_ranks(local, "max", world).unbind()
    nearest = -nearest
    total = torch.stack([distance.sum(), distance.new_full((), len(distance))])
    total, count = sum_over_ranks(total, gradient="complete", world=world)
    mean = total / count
    return farthest.where(farthest.isfinite(), mean), nearest.where(nearest.isfinite(), mean)


def _problem(queries: Tensor, keys: Tensor, labels: Tensor, world: World) -> str | None:
    def problem(least: int, most: int) -> str:
        return f"labels are 1 for a positive pair and 0 for a negative one, got {least} … {most}."

    found = towers_problem("row i is one pair", "Pass as many keys as queries.", queries=queries, keys=keys)
    found = found or labels_problem("labels", labels, len(queries))
    return found or range_problem(labels, 0, 1, problem, world=world)
