"""MaxSim: InfoNCE over late-interaction scores, as ColBERT is trained."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.collectives import extreme_over_ranks, sum_over_ranks
from contrastive_zoo.engine.cross_entropy import cross_entropy, log_sum_exp
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.late_interaction import (
    LateInteractionLoss,
    Scores,
    TokenReduction,
    begin_late_interaction,
    token_reduction_problem,
)
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World


@checked
def max_sim(
    queries: Float[Tensor, "n a d"],
    documents: Float[Tensor, "n b d"],
    query_mask: Bool[Tensor, "n a"] | Int[Tensor, "n a"] | None = None,
    document_mask: Bool[Tensor, "n b"] | Int[Tensor, "n b"] | None = None,
    negatives: Float[Tensor, "m c d"] | None = None,
    negative_mask: Bool[Tensor, "m c"] | Int[Tensor, "m c"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    symmetric: bool = False,
    token_reduction: TokenReduction = "sum",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute InfoNCE of queries against documents, scored token by token.

    With q, d the unit tokens of queries and documents of all ranks, valid ones only,

        S_ij = Σ_a max_b q_ia·d_jb
        loss = mean_i [ log Σ_{j∈D} exp(S_ij / t)  −  S_ii / t ]

    where D are all documents and all negatives. ``symmetric`` averages it with the direction from documents to queries,
    ``cross_entropy(S[:, :n].T / t, arange(n))``. Equal to PyLate's ``Contrastive(temperature=t)`` on one process
    where all tokens are valid; there padding counts as a similarity of 0. Of tokens with equal products the first one counts
    as the maximum, and gets its gradient.

    Args:
        queries: [n, a, d] tokens; n and the number of tokens a may differ between ranks.
        documents: [n, b, d] tokens; document i belongs to query i, b may differ between ranks.
        query_mask: [n, a], which tokens are valid (not 0); at least one of each query. None is all of them.
        document_mask: [n, b], likewise.
        negatives: [m, c, d] tokens of hard negatives, candidates of every query of every rank; m and c may differ between
            ranks. If one rank passes them, all must: a rank without any passes [0, 1, d].
        negative_mask: [m, c], likewise.
        temperature: t > 0, dimensionless; a tensor is learnable. 1 in PyLate, 0.02 with ``"mean"`` in colpali-engine.
        symmetric: whether to average with the direction from documents to queries, without negatives.
        token_reduction: ``"sum"`` over the query's tokens, or ``"mean"``, as colpali-engine's ``normalize_scores``.
        normalize: normalise each token to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: tokens that are not [n, L, d] of one width and dtype; a mask of another shape; a query or a document
            without a valid token; queries and documents of different number; or what any :class:`Loss` refuses.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)               # 3 equal tokens each
        >>> max_sim(tokens, tokens, torch.tensor([[1, 0, 0], [1, 1, 1]]))   # mean of log(1 + e⁻¹) and log(1 + e⁻³)
        tensor(0.1809)

    Source: Khattab & Zaharia 2020 (ColBERT), §3.2, https://arxiv.org/abs/2004.12832; Santhanam et al. 2022,
    https://arxiv.org/abs/2112.01488; Faysse et al. 2024 (ColPali), https://arxiv.org/abs/2407.01449
    """
    rows = {
        "queries": queries, "documents": documents, "negatives": negatives,
        "query_mask": query_mask, "document_mask": document_mask, "negative_mask": negative_mask,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "temperature": temperature, "symmetric": symmetric, "token_reduction": token_reduction,
        "normalize": normalize, "reduction": reduction,
    }  # fmt: skip
    found = begin_late_interaction("MaxSim", rows, world=world, **settings)
    losses = _losses(found.scores, found, logit_scale(temperature, world), symmetric, world)
    return reduce_anchors(losses, reduction=reduction, world=world)


class MaxSim(LateInteractionLoss, function=max_sim, check=token_reduction_problem, begins_once=True): ...


@without_autocast
def _losses(scores: Tensor, found: Scores, scale: float | Tensor, symmetric: bool, world: World) -> Tensor:
    positive = scale * found.positive
    others = (scale * scores).masked_fill(found.own, -torch.inf)
    losses = cross_entropy(positive, log_sum_exp(others, 1))
    if not symmetric:
        return losses
    of_documents = _log_sum_exp_over_ranks(others[:, : found.shards.total], world)[found.shards.local]
    return (losses + cross_entropy(positive, of_documents)) / 2


def _log_sum_exp_over_ranks(x: Tensor, world: World) -> Tensor:
    """Return the log-sum-exps of the columns over all ranks' rows; −inf, without gradient, where all terms are −inf."""
    largest = torch.cat([x.detach(), x.new_full((1, x.shape[1]), -torch.inf)]).amax(0)
    largest = extreme_over_ranks(largest, "max", world)
    largest = largest.where(largest > -torch.inf, 0)
    total = sum_over_ranks((x - largest).exp().sum(0), gradient="partial", world=world)
    return (largest + total.where(total > 0, 1).log()).where(total > 0, -torch.inf)
