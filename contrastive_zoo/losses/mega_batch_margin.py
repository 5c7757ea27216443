"""Mega-batch margin: every positive pair within one margin, the hardest negative of the batch beyond another."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.masked import masked_max
from contrastive_zoo.engine.pairwise import dot_products
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views, sample_indices
from contrastive_zoo.world import ALONE, World


@checked
def mega_batch_margin(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    *,
    positive_margin: float = 0.8,
    negative_margin: float = 0.3,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute hinges on each query's own key and on the most similar other key of all ranks.

    With s_ij = q_i·k_j of unit rows,

        loss_i = max(0, m⁺ − s_ii)  +  max(0, max_{j≠i} s_ij − m⁻)

    A single pair has no second term. Equal maxima share the gradient.

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [n, d], row i belongs to row i of queries.
        positive_margin: m⁺, the similarity from which on a pair has no loss.
        negative_margin: m⁻, the similarity up to which a negative has no loss.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        >>> mega_batch_margin(q, k)   # 0.8 − 0.6 and 0.8 − 0.3, twice
        tensor(0.7000)

    Source: Wieting & Gimpel 2018, https://arxiv.org/abs/1711.05732
    """
    settings: Any = {"positive_margin": positive_margin, "negative_margin": negative_margin}
    (q, k), shards = begin_views(
        "MegaBatchMargin", (queries, keys), problem=_settings_problem(**settings), normalize=normalize,
        reduction=reduction, world=world, **settings,
    )  # fmt: skip
    pairs = sample_indices(shards, q)
    return sum_over_anchors(
        BlockLoss(_hinges, **settings), q, pairs, candidates=k, candidate_ids=pairs, shards=shards,
        reduction=reduction, world=world,
    )  # fmt: skip


def _settings_problem(positive_margin: float, negative_margin: float) -> str | None:
    return number_problem(positive_margin=positive_margin, negative_margin=negative_margin)


class MegaBatchMargin(Loss, function=mega_batch_margin, check=_settings_problem): ...


def _hinges(block: AnchorBlock, positive_margin: float, negative_margin: float) -> tuple[Tensor, Tensor]:
    similarity = dot_products(block.anchors, block.candidates)
    own = similarity.where(block.positive, 0).sum(1)
    hardest = masked_max(similarity, block.negative)  # −inf without a negative
    return (positive_margin - own).relu() + (hardest - negative_margin).relu(), block.positive.any(1)
