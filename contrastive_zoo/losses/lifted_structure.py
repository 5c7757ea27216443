"""Lifted structure: each positive pair against all negatives of both of its rows."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.losses.base import Loss, begin, labelled_problem, prepared
from contrastive_zoo.losses.distances import distances, log_sum_exp
from contrastive_zoo.world import ALONE, World


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
    r"""Squared hinge on positive pairs, whose margin is a soft minimum of both rows' distances to negatives.

    With D_ij the distance of unit rows, over all ordered positive pairs (i, p) of the rows of all ranks,

        loss = mean_{i, p∈P(i)} ½ max(0, D_ip − pos_margin + log Σ_{k∈{i,p}} Σ_{n∈N(k)} exp(neg_margin − D_kn))²

    Two sweeps: a row's crowding by negatives is a number that then travels with it.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        pos_margin: distance.
        neg_margin: distance; the paper's margin, with pos_margin 0.
        normalize: put rows on the unit sphere first; the paper does not.
        reduction: ``"mean"`` over positive pairs, ``"sum"``, or ``"none"`` for the sums over my rows' pairs.
        world: who else holds rows.

    Returns:
        The same on every rank; 0 if there is no positive or no negative pair; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not integers or not one per row, NaN or infinite rows, ranks that bring
            different widths or dtypes, or no rows at all.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> lifted_structure(z, torch.tensor([0, 0, 1]), neg_margin=3.0)   # (log(e + e))² / 2
        tensor(1.4334)

    Source: Song et al. 2016, eq. 4, https://arxiv.org/abs/1511.06452
    """
    named = {"embeddings": embeddings} | ({} if labels is None else {"labels": labels})
    problem = labelled_problem(embeddings, labels)
    shards, *_ = begin("LiftedStructure", named, problem=problem, reduction=reduction, world=world)
    assert labels is not None  # begin has refused it
    z = prepared(embeddings, normalize=normalize)
    crowding = sum_over_anchors(_Crowding(neg_margin), z, labels, shards=shards, world=world, reduction="none")
    z = torch.cat([z, crowding[:, None]], 1)
    return sum_over_anchors(_Pairs(pos_margin), z, labels, shards=shards, world=world, reduction=reduction)


class LiftedStructure(Loss):
    """:func:`lifted_structure` with its settings kept."""

    function = staticmethod(lifted_structure)


class _Crowding(nn.Module):
    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def on_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        near = self.margin - distances(panel.anchors, panel.columns)
        return log_sum_exp(near, panel.negative), panel.negative.any(1)


class _Pairs(nn.Module):
    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def on_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        far = distances(panel.anchors[:, :-1], panel.columns[:, :-1])
        crowding = torch.logaddexp(panel.anchors[:, -1:], panel.columns[:, -1])
        counted = panel.positive & panel.negative.any(1, keepdim=True)
        losses = (far - self.margin + crowding).relu().square().where(counted, 0)
        return losses.sum(1) / 2, counted.sum(1)
