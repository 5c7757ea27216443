"""GIST: a guide model masks false negatives of all ranks."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy, log_sum_exp
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem, towers_problem, word_problem
from contrastive_zoo.loss_base.graph_operator import in_graph
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.pair_candidates import concat_pairs, split_pairs
from contrastive_zoo.loss_base.preparation import begin, prepare_rows, sample_indices
from contrastive_zoo.world import ALONE, Shards, World

Strategy = Literal["absolute", "relative"]


@in_graph
def gist(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    guide_anchors: Float[Tensor, "n e"],
    guide_positives: Float[Tensor, "n e"],
    negatives: Float[Tensor, "m d"] | None = None,
    guide_negatives: Float[Tensor, "m e"] | None = None,
    *,
    temperature: float | Tensor = 0.01,
    margin_strategy: Strategy = "absolute",
    margin: float = 0.0,
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute InfoNCE over the candidates that a guide model does not find closer to the anchor than its positive.

    With a, p, x the unit rows of anchors, positives and negatives of all ranks, g(·,·) the guide's cosine and

        τ_i = g(a_i, p_i) − margin,   or, relative,   g(a_i, p_i) − margin · |g(a_i, p_i)|

    anchor i's logits are a_i·p_j / t; with ``contrast_anchors`` also a_i·a_j / t, j ≠ i; with ``contrast_positives``
    p_i·p_j / t, j ≠ i; and a_i·x / t. Pairs with g(·,·) > τ_i are masked, except a_i·p_i:

        loss = mean_i [ logsumexp of i's logits  −  a_i·p_i / t ]

    Equal to sentence-transformers' GISTEmbedLoss on one process, which masks a_i·a_i and p_i·p_i only if the guide finds
    them closer than τ_i, that is, if τ_i < 1. On several ranks it compares anchors only with anchors of the same rank.

    Args:
        anchors: [n, d], n may differ between ranks.
        positives: [n, d], row i belongs to row i of anchors.
        guide_anchors: [n, e], the guide's embeddings of the same samples; without gradient.
        guide_positives: [n, e].
        negatives: [m, d], candidates of every anchor of every rank; m may differ between ranks.
        guide_negatives: [m, e].
        temperature: t > 0, dimensionless; a tensor is learnable.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        margin: the margin in τ; a larger margin masks more pairs.
        contrast_anchors: whether anchors are candidates of each other.
        contrast_positives: whether positives are candidates of each other.
        reduction: ``"mean"`` over all ranks' anchors (nats per anchor), ``"sum"``, or ``"none"`` for the local anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not pair or lack their guide's, an unknown strategy, a margin that is not finite,
            or what any :class:`Loss` refuses.

    Examples:
        >>> eye, equal = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> gist(eye, eye, eye, eye, temperature=1.0)   # log(e + 3) − 1
        tensor(0.7437)
        >>> gist(eye, eye, equal, equal, temperature=1.0, margin=0.1)   # all other pairs are masked
        tensor(0.)

    Source: Solatorio 2024, §3, https://arxiv.org/abs/2402.16829
    """
    problem = _problem(anchors, positives, guide_anchors, guide_positives, negatives, guide_negatives)
    problem = problem or _settings_problem(margin_strategy, margin)
    x = anchors[:0] if negatives is None else negatives
    guide_x = guide_anchors[:0] if guide_negatives is None else guide_negatives
    named = {"anchors": anchors, "positives": positives, "negatives": x}
    named |= {"guide_anchors": guide_anchors, "guide_positives": guide_positives, "guide_negatives": guide_x}
    settings: dict[str, Any] = {"relative": margin_strategy == "relative", "margin": margin}
    settings |= {"contrast_anchors": contrast_anchors, "contrast_positives": contrast_positives}
    shards, _, mined, *_ = begin(
        "GIST", named, problem=problem, temperature=temperature, reduction=reduction, world=world, **settings
    )
    pairs, columns, single = concat_pairs(
        *(prepare_rows(rows, normalize=True, world=world) for rows in (anchors, positives, x))
    )
    guides = (
        prepare_rows(rows.detach(), normalize=True, world=world) for rows in (guide_anchors, guide_positives, guide_x)
    )
    guide_pairs, guide_columns, _ = concat_pairs(*guides)
    ids = sample_indices(shards, pairs)
    sizes = tuple(n + m for n, m in zip(shards.sizes, mined.sizes, strict=True))
    return sum_over_anchors(
        BlockLoss(_guided, temperature=temperature, **settings), pairs, ids, candidates=columns, shards=shards,
        candidate_ids=torch.cat([ids, ids.new_full((len(x),), -1)]), candidate_shards=Shards(sizes, shards.rank),
        companions=[(ids, single), (guide_pairs, guide_columns)], reduction=reduction, world=world,
    )  # fmt: skip


def _settings_problem(margin_strategy: str, margin: float) -> str | None:
    return word_problem("margin_strategy", margin_strategy, Strategy) or number_problem(margin=margin)


class GIST(Loss, function=gist, check=_settings_problem):
    ring_refusal = "its guide compares the pairs that anchors and candidates make together, so it needs all of them"


def _guided(
    block: AnchorBlock,
    temperature: Tensor,
    relative: bool,
    margin: float,
    contrast_anchors: bool,
    contrast_positives: bool,
) -> tuple[Tensor, Tensor]:
    (_, single), (guide_rows, guide_columns) = block.companions
    own = block.positive
    x, guide = (
        split_pairs(rows, columns, single)
        for rows, columns in ((block.anchors, block.candidates), (guide_rows, guide_columns))
    )
    similarity = (guide.first * guide.second).sum(1, keepdim=True)
    threshold = similarity - margin * (similarity.abs() if relative else 1)

    logits = x.first @ x.documents.T / temperature
    sums = [masked_log_sum_exp(logits, (guide.first @ guide.documents.T <= threshold) & ~own)]
    blocks = []
    if contrast_anchors:
        blocks.append((x.first, x.candidate_first, guide.first, guide.candidate_first))
    if contrast_positives:
        blocks.append((x.second, x.documents, guide.second, guide.documents))
    for rows, columns, guide_of_rows, guide_of_columns in blocks:
        mask = (guide_of_rows @ guide_of_columns.T <= threshold) & x.is_pair & ~own
        sums.append(masked_log_sum_exp(rows @ columns.T / temperature, mask))
    positive = logits.where(own & x.is_pair, 0).sum(1)
    return cross_entropy(positive, log_sum_exp(torch.stack(sums), 0)), torch.ones_like(block.ids, dtype=torch.bool)


def _problem(
    anchors: Tensor,
    positives: Tensor,
    guide_anchors: Tensor,
    guide_positives: Tensor,
    negatives: Tensor | None,
    guide_negatives: Tensor | None,
) -> str | None:
    rule = "row i is one pair everywhere"
    if len(guide_anchors) != len(anchors):
        return f"{rule}, got guide_anchors {kind(guide_anchors)} and anchors {kind(anchors)}."
    if (negatives is None) != (guide_negatives is None):
        return "negatives and guide_negatives come together, got one of them."
    if negatives is not None and guide_negatives is not None:
        fits = negatives.shape[1:] == anchors.shape[1:] and guide_negatives.shape[1:] == guide_anchors.shape[1:]
        same = negatives.dtype == anchors.dtype and guide_negatives.dtype == guide_anchors.dtype
        if not (fits and same and len(negatives) == len(guide_negatives)):
            got = f"got negatives {kind(negatives)} and guide_negatives {kind(guide_negatives)}"
            return f"negatives are rows like anchors, one for each of guide_negatives, {got}."
    found = towers_problem(rule, anchors=anchors, positives=positives)
    return found or towers_problem(rule, guide_anchors=guide_anchors, guide_positives=guide_positives)
