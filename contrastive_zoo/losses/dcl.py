"""Decoupled contrastive learning: the denominator leaves out the positive."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import gather_rows
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem, word_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views, concat_views, sample_indices
from contrastive_zoo.world import ALONE, World

Denominators = Literal["joint", "per_view"]


@checked
def dcl(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.1,
    sigma: float | None = None,
    denominators: Denominators = "joint",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the decoupled contrastive loss of two views, with weighted positives if ``sigma`` is given (DCLW).

    With z the unit rows of both views of all ranks, p(i) the other view of row i, N(i) the rows of other samples and
    w = 1, or, weighted and held constant, w_i = 2 − exp(z_i·z_p / σ) / mean_j exp(z_j·z_p(j) / σ),

        loss = mean_i [ log Σ_{k∈N(i)} exp(z_i·z_k / t)  −  w_i · z_i·z_p / t ]

    Equal to lightly's DCLLoss and DCLWLoss on one process. On several ranks lightly's weights are relative to the local
    batch, these to the global batch. Older releases of lightly add the logarithms of the sums over each view:
    ``denominators="per_view"``.

    Args:
        view1: [n, d], n may differ between ranks.
        view2: [n, d], row i belongs to row i of view1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        sigma: σ > 0, None for no weights.
        denominators: ``"joint"``, one sum over both views, as in the paper; ``"per_view"``, as in older releases of lightly.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a sigma that is not positive, unknown denominators, or what any :class:`Loss` refuses.

    Examples:
        >>> dcl(torch.eye(2), torch.eye(2), temperature=1.0)   # log 2 − 1
        tensor(-0.3069)

    Source: Yeh et al. 2021, §3, https://arxiv.org/abs/2110.06848
    """
    problem = _settings_problem(sigma, denominators)
    (a, b), shards = begin_views(
        "DCL", (view1, view2), problem=problem, temperature=temperature, sigma=sigma, denominators=denominators,
        normalize=normalize, reduction=reduction, world=world,
    )  # fmt: skip
    weight = a.new_ones(len(a))
    if sigma is not None:
        logits = gather_rows((a * b).sum(-1).detach() / sigma, shards, world)
        weight = 2 - shards.total * logits.softmax(0)[shards.local]
    view = torch.arange(2, device=a.device).repeat_interleave(len(a))
    loss = BlockLoss(_decoupled, temperature=temperature, denominators=denominators)
    companions = [(view, view), (weight.repeat(2), view)]
    return sum_over_anchors(
        loss, concat_views([a, b], world), sample_indices(shards, a, views=2), companions=companions, shards=shards.times(2),
        reduction=reduction, world=world,
    )  # fmt: skip


def _settings_problem(sigma: float | None, denominators: str) -> str | None:
    rule, fix = "sigma must be positive", "Leave it None for no weights."
    wrong = None if sigma is None else number_problem(rule, fix, above=0, finite=False, sigma=sigma)
    return wrong or word_problem("denominators", denominators, Denominators)


class DCL(Loss, function=dcl, check=_settings_problem):
    supports_ring = True


class DCLW(DCL, function=dcl, check=_settings_problem):
    """This class has von Mises–Fisher weights on the positives by default: it is :class:`DCL` with ``sigma=0.5``.

    Examples:
        >>> DCLW()(torch.eye(2), torch.eye(2)).equal(DCL(sigma=0.5)(torch.eye(2), torch.eye(2)))
        True
    """

    def __init__(self, *, sigma: float = 0.5, **settings: Any) -> None:
        super().__init__(sigma=sigma, **settings)


def _decoupled(block: AnchorBlock, temperature: Tensor, denominators: Denominators) -> Rows:
    (view, views), (weight, _) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    masks = [block.negative]
    if denominators == "per_view":
        same_view = view[:, None] == views
        masks = [block.negative & same_view, block.negative & ~same_view]
    positive, valid, *negative_terms = yield (
        Sum(logits.where(block.positive, 0).sum(1)),
        AnyOf(block.negative.any(1)),
        *(LogSumExp(logits, mask) for mask in masks),
    )
    return torch.stack(negative_terms).sum(0) - weight * positive, valid
