"""MaxSimPairwise: each query's own document against the hardest other one, by late-interaction scores."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
def max_sim_pairwise(
    queries: Float[Tensor, "n a d"],
    documents: Float[Tensor, "n b d"],
    query_mask: Bool[Tensor, "n a"] | Int[Tensor, "n a"] | None = None,
    document_mask: Bool[Tensor, "n b"] | Int[Tensor, "n b"] | None = None,
    negatives: Float[Tensor, "m c d"] | None = None,
    negative_mask: Bool[Tensor, "m c"] | Int[Tensor, "m c"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    token_reduction: TokenReduction = "sum",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the softplus of the hardest document's score minus that of the query's own.

    With S the scores of :class:`MaxSim`, of the documents and negatives D of all ranks,

        loss = mean_i log(1 + exp( (max_{j∈D, j≠i} S_ij − S_ii) / t ))

    Equal to colpali-engine's ``ColbertPairwiseCELoss()`` on one process, for unit tokens without padding; releases that
    normalise scores have ``token_reduction="mean"``. A query without another document does not count. Documents of equal
    score share the gradient of the maximum.

    Args:
        queries: [n, a, d] tokens; n and the number of tokens a may differ between ranks.
        documents: [n, b, d] tokens; document i belongs to query i, b may differ between ranks.
        query_mask: [n, a], which tokens are valid (not 0); at least one of each query. None is all of them.
        document_mask: [n, b], likewise.
        negatives: [m, c, d] tokens of hard negatives, candidates of every query of every rank; m and c may differ between
            ranks. If one rank passes them, all must: a rank without any passes [0, 1, d].
        negative_mask: [m, c], likewise.
        temperature: t > 0, dimensionless; a tensor is learnable.
        token_reduction: ``"sum"`` over the query's tokens, or ``"mean"``.
        normalize: normalise each token to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: as :func:`max_sim`.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)               # 3 equal tokens each
        >>> max_sim_pairwise(tokens, tokens, torch.tensor([[1, 0, 0], [1, 0, 0]]))   # log(1 + e⁻¹)
        tensor(0.3133)

    Source: Faysse et al. 2024 (ColPali), §4.1, https://arxiv.org/abs/2407.01449
    """
    rows = {
        "queries": queries, "documents": documents, "negatives": negatives,
        "query_mask": query_mask, "document_mask": document_mask, "negative_mask": negative_mask,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "temperature": temperature, "token_reduction": token_reduction, "normalize": normalize, "reduction": reduction
    }  # fmt: skip
    found = begin_late_interaction("MaxSimPairwise", rows, world=world, **settings)
    losses = _losses(found.scores, found, logit_scale(temperature, world))
    counts = torch.full_like(losses, found.scores.shape[1] > 1, dtype=torch.bool)
    return reduce_anchors(losses, counts, reduction=reduction, world=world)


class MaxSimPairwise(
    LateInteractionLoss, function=max_sim_pairwise, check=token_reduction_problem, begins_once=True
): ...


@without_autocast
def _losses(scores: Tensor, found: Scores, scale: float | Tensor) -> Tensor:
    others = scores.masked_fill(found.own, -torch.inf)
    hardest = others.amax(1) if scores.shape[1] > 1 else torch.zeros_like(found.positive)
    return F.softplus(scale * (hardest - found.positive), threshold=40)
