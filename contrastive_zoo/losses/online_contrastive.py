"""Online contrastive loss: the contrastive loss of annotated pairs, of which only the hard ones count."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Number, Reduction
from contrastive_zoo.ranks.row_checks import labels_problem, range_rule, towers_problem


class OnlineContrastive(Loss):
    r"""Compute the contrastive loss of the positive pairs and negative pairs that overlap in distance.

    With D_i = 1 − q_i·k_i of unit rows, and positives y_i = 1 and negatives y_i = 0 of all ranks,

        loss = Σ_{i: y_i = 1, D_i > min_{y_j = 0} D_j} D_i²  +  Σ_{i: y_i = 0, D_i < max_{y_j = 1} D_j} max(0, margin − D_i)²

    If there are only positives or only negatives, their mean distance takes the place of the extreme of the other kind.
    Equal to sentence-transformers' OnlineContrastiveLoss.

    Called as ``loss(queries, keys, labels)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d], row i forms a pair with row i of queries.
    - labels: y, [n], 1 for a positive pair and 0 for a negative one.

    Args:
        margin: cosine distance beyond which negatives have no loss.
        reduction: ``"sum"``, as the original, ``"mean"`` over the hard pairs of all ranks, or ``"none"`` for the local
            pairs, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels other than 0 and 1, a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.6, 0.8]])
        >>> OnlineContrastive()(q, k, torch.tensor([1, 0]))   # distances 0.4 and 0.2 overlap: 0.4² + 0.3²
        tensor(0.2500)

    Source: sentence-transformers, https://sbert.net/docs/package_reference/sentence_transformer/losses.html, after
    Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """

    margin: Number = 0.5
    reduction: Reduction = "sum"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], labels: Int[Tensor, " n"]) -> Inputs:
        problem = towers_problem("row i is one pair", "Pass as many keys as queries.", queries=queries, keys=keys)
        problem = problem or labels_problem("labels", labels, len(queries))
        rows = {"queries": queries, "keys": keys, "labels": labels}
        return Inputs(rows, problem, values=[range_rule(labels, 0, 1, _other_labels)])

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.prepared(batch.rows[name], normalize=True) for name in ("queries", "keys"))
        distance = 1 - (q * k).sum(1)
        positive = batch.rows["labels"] == 1
        farthest, nearest = _thresholds(batch, distance.detach(), positive)
        hard = distance.detach().gt(nearest).where(positive, distance.detach() < farthest)
        losses = distance.where(positive, (batch.settings.margin - distance).relu()).square()
        return batch.reduce(losses, hard, reduction=self.reduction)


def _thresholds(batch: Batch, distance: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest distance of all ranks' positives and the smallest of their negatives, as the loss uses them."""
    ends = [distance.where(positive, -torch.inf), (-distance).where(~positive, -torch.inf)]
    lowest = distance.new_full((1,), -torch.inf)
    local = torch.stack([torch.cat([x, lowest]).max() for x in ends])
    farthest, nearest = batch.maximum(local).unbind()
    nearest = -nearest
    total, count = batch.sum(
        torch.stack([distance.sum(), distance.new_full((), len(distance))]), gradient="complete"
    ).unbind()
    mean = total / count
    return farthest.where(farthest.isfinite(), mean), nearest.where(nearest.isfinite(), mean)


def _other_labels(least: int, most: int) -> str:
    return f"labels are 1 for a positive pair and 0 for a negative one, got {least} … {most}."
