"""Softmax over pairs of texts and mined negatives, as sentence embeddings are trained: MNRL and GIST."""

import math
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.masked import masked_log_sum_exp, tie_width
from contrastive_zoo.engine.pairs import Direction, TowerPairs
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_pairs, split_pairs
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.settings import Bounds, Number, Reduction, Temperature
from contrastive_zoo.ranks.row_checks import described, labels_problem, range_rule, towers_problem, two_models_problem

PartitionMode = Literal["joint", "per_direction"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
_DIRECTIONS = get_args(Direction)
_HOLD_THE_POSITIVE = {"query_to_doc", "doc_to_query"}


class MNRL(Loss):
    r"""Compute the multiple negatives ranking loss of sentence-transformers.

    With q, d the unit embeddings of queries and documents of all ranks, D all documents and hard negatives,

        query_to_doc    Z_i = Σ_{x∈D} exp(q_i·x / t + h_ix)        query_to_query  Z_i = Σ_{j≠i} exp(q_i·q_j / t)
        doc_to_query    Z_i = Σ_j exp(d_i·q_j / t)                 doc_to_doc      Z_i = Σ_{x∈D, not i's} exp(d_i·x / t)

        loss = mean_i [ log Σ_directions Z_i  −  q_i·d_i / t ]            partition_mode "joint"
        loss = mean_i [ mean_directions log Z_i  −  q_i·d_i / t ]         "per_direction"

    h_ix = hardness_strength · q_i·x, held constant, for the negatives that hardness_mode names, else 0. Equal to
    MultipleNegativesRankingLoss(scale=1/t) on one process; there every query has the same number of hard negatives.

    Called as ``loss(queries, documents, negatives, owners)``:

    - queries, documents: [n, d].
    - negatives: [m, d] hard negatives, candidates of every query of every rank; m may differ between ranks. If one rank
      passes them, all must: a rank without any passes [0, d].
    - owners: [m], the index of the query of this rank that a negative was mined for, any number each, or −1 for none;
      None is −1.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        directions: ``"query_to_doc"`` and any of the above. GTE's loss is all four, symmetric InfoNCE query_to_doc and
            doc_to_query ``"per_direction"``.
        partition_mode: ``"joint"`` or ``"per_direction"``.
        hardness_mode: ``"in_batch_negatives"`` (other queries' documents and negatives), ``"hard_negatives"`` (a
            query's own), ``"all_negatives"``, or None.
        hardness_strength: non-negative; 9 in Lan et al., 5 in EmbeddingGemma.

    Raises:
        ValueError: invalid owners or settings that contradict each other.

    Examples:
        >>> eye = torch.eye(2)   # mean of log(e + 1 + e⁻¹) and log(e + 2), − 1
        >>> MNRL(temperature=1.0)(eye, eye, -eye[:1], torch.tensor([0]))
        tensor(0.4795)

    Source: Henderson et al. 2017, §4.4, https://arxiv.org/abs/1705.00652; directions: Li et al. 2023,
    https://arxiv.org/abs/2308.03281; hardness: Lan et al. 2025, https://arxiv.org/abs/2503.04812
    """

    temperature: Temperature = 0.05
    directions: tuple[Direction, ...] = ("query_to_doc",)
    partition_mode: PartitionMode = "joint"
    hardness_mode: Hardness | None = None
    hardness_strength: Annotated[float, Bounds("hardness_strength is non-negative", low=0, constant=True)] = 0.0
    normalize: bool = True
    reduction: Reduction = "mean"

    has_kernels = True
    ring_refusal = "with hardness_mode or the direction doc_to_doc it compares an anchor with all candidates at once"

    row_indices = MappingProxyType({"owners": "queries"})

    def settings_problem(self) -> str | None:
        directions = self.directions
        are_words = isinstance(directions, (list, tuple)) and all(isinstance(x, str) for x in directions)
        if not are_words or "query_to_doc" not in directions or not set(directions) <= set(_DIRECTIONS):
            return f"directions are 'query_to_doc' and any of {', '.join(_DIRECTIONS[1:])}, got {directions}."
        if problem := super().settings_problem():
            return problem
        if self.partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
            return "query_to_query and doc_to_doc never hold the positive: with them use partition_mode='joint'."
        return None

    def can_ring(self) -> bool:
        return self.hardness_mode is None and "doc_to_doc" not in self.directions

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        documents: Float[Tensor, "n d"],
        negatives: Float[Tensor, "m d"] | None = None,
        owners: Int[Tensor, " m"] | None = None,
    ) -> Inputs:
        rows = {"queries": queries, "documents": documents, "negatives": negatives, "owners": owners}
        problem = _mnrl_problem(queries, documents, negatives, owners)

        def owners_problem(least: int, most: int) -> str:
            return f"owners are rows of this rank's {len(queries)} queries, or -1, got {least} … {most}."

        values = [] if problem or owners is None else [range_rule(owners, -1, len(queries) - 1, owners_problem)]
        compared = {"directions": tuple(self.directions)}  # which may also be a list
        return Inputs.of(rows, problem, values=values, compared=compared, local=owners is not None)

    def compute(self, batch: Batch) -> Tensor:
        pairs, directions = TowerPairs(batch, batch.settings.temperature, self.normalize), tuple(self.directions)
        has_negatives = "negatives" in batch.shards and batch.shards["negatives"].total > 0
        unsupported = None if self.can_ring() else _UNSUPPORTED
        if self.hardness_mode is None and not ("doc_to_doc" in directions and has_negatives):
            # each Z_i is a plain sum
            others, positive = pairs.sums_by_direction(directions, unsupported=unsupported)
            losses = _losses(others, positive, self.partition_mode)
            return batch.reduce(losses.to(pairs.rows[0].dtype), reduction=self.reduction)

        queries, documents = (batch.rows[name] for name in ("queries", "documents"))
        arguments = (queries, documents, batch.rows.get("negatives", queries[:0]))
        loss = BlockLoss(
            _ranked, temperature=batch.settings.temperature, directions=directions,
            partition_mode=self.partition_mode, hardness_mode=self.hardness_mode,
            hardness_strength=batch.settings.hardness_strength,
        )  # fmt: skip
        return reduce_pairs(
            batch, loss, [batch.prepared(x, normalize=self.normalize) for x in arguments], owners=batch.rows.get("owners"),
            reduction=self.reduction, unsupported=unsupported,
        )  # fmt: skip


_UNSUPPORTED = "computes MNRL without hardness_mode and without the direction doc_to_doc"


def _losses(others: dict[Direction, Tensor], positive: Tensor, partition_mode: str) -> Tensor:
    """Return −log of the positive's share, given the log-sum-exps of the other candidates of each direction."""
    if partition_mode == "per_direction":
        return torch.stack([cross_entropy(positive, x) for x in others.values()]).mean(0)
    # Z contains the positive once for each of these k directions: log(k + Σ exp(s − p)) = log k + log(1 + Σ … / k)
    shift = math.log(len(_HOLD_THE_POSITIVE & others.keys()))
    return shift + cross_entropy(positive, log_sum_exp(torch.stack([*others.values()]), 0) - shift)


def _ranked(
    block: AnchorBlock,
    temperature: Tensor,
    directions: tuple[Direction, ...],
    partition_mode: str,
    hardness_mode: Hardness | None,
    hardness_strength: float,
) -> tuple[Tensor, Tensor]:
    x, is_positive = split_pairs(block.anchors, block.candidates, block.companions[0][1]), block.positive
    mined = ~x.is_pair

    cos = x.first @ x.documents.T
    logits = cos / temperature
    positive = logits.where(is_positive & ~mined, 0).sum(1)
    if hardness_mode is not None:
        hard = {
            "in_batch_negatives": ~is_positive,
            "hard_negatives": is_positive & mined,
            "all_negatives": ~is_positive | mined,
        }[hardness_mode]
        logits = logits + (hardness_strength * cos.detach()).where(hard, 0)
    others: dict[Direction, Tensor] = {"query_to_doc": masked_log_sum_exp(logits, ~is_positive | mined)}
    if "query_to_query" in directions:
        others["query_to_query"] = masked_log_sum_exp(
            x.first @ x.candidate_first.T / temperature, x.is_pair & ~is_positive
        )
    if "doc_to_query" in directions:
        others["doc_to_query"] = masked_log_sum_exp(
            x.second @ x.candidate_first.T / temperature, x.is_pair & ~is_positive
        )
    if "doc_to_doc" in directions:
        others["doc_to_doc"] = masked_log_sum_exp(x.second @ x.documents.T / temperature, ~is_positive)
    return _losses(others, positive, partition_mode), torch.ones_like(block.ids, dtype=torch.bool)


def _mnrl_problem(queries: Tensor, documents: Tensor, negatives: Tensor | None, owners: Tensor | None) -> str | None:
    if negatives is not None and (negatives.shape[1:] != queries.shape[1:] or negatives.dtype != queries.dtype):
        return f"negatives are [m, d], got {described(negatives)} for queries {described(queries)}."
    if owners is not None and negatives is None:
        return "owners say whose the negatives are, but there are no negatives."
    rule, fix = "row i of queries belongs to row i of documents", "Pass further documents as negatives."
    problem = towers_problem(rule, fix, queries=queries, documents=documents)
    if problem is None and owners is not None and negatives is not None:
        return labels_problem("owners", owners, len(negatives))
    return problem


Strategy = Literal["absolute", "relative"]


class GIST(Loss):
    r"""Compute InfoNCE over the candidates that a guide model does not find closer to the anchor than its positive.

    With a, p, x the unit embeddings of anchors, positives and negatives of all ranks, g(·,·) the guide's cosine and

        τ_i = g(a_i, p_i) − margin,   or, relative,   g(a_i, p_i) − margin · |g(a_i, p_i)|

    anchor i's logits are a_i·p_j / t; with ``contrast_anchors`` also a_i·a_j / t, j ≠ i; with ``contrast_positives``
    p_i·p_j / t, j ≠ i; and a_i·x / t. Pairs with g(·,·) > τ_i are masked, except a_i·p_i; 64 units of rounding above τ_i
    still count as τ_i, so that a repeated sample is kept on every rank, however its matmul rounds:

        loss = mean_i [ logsumexp of i's logits  −  a_i·p_i / t ]

    Equal to sentence-transformers' GISTEmbedLoss on one process, which masks a_i·a_i and p_i·p_i only if the guide finds
    them closer than τ_i, that is, if τ_i < 1. On several ranks it compares anchors only with anchors of the same rank.

    Called as ``loss(anchors, positives, guide_anchors, guide_positives, negatives, guide_negatives)``:

    - anchors, positives: [n, d].
    - guide_anchors, guide_positives: [n, e], the guide's embeddings of the same samples; without gradient.
    - negatives: [m, d], candidates of every anchor of every rank; m may differ between ranks.
    - guide_negatives: [m, e].

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        margin: the margin in τ; a larger margin masks more pairs.
        contrast_anchors: whether anchors are candidates of each other.
        contrast_positives: whether positives are candidates of each other.
        reduction: the mean is over all ranks' anchors, in nats.

    Raises:
        ValueError: embeddings without those of the guide.

    Examples:
        >>> eye, equal = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> GIST(temperature=1.0)(eye, eye, eye, eye)   # log(e + 3) − 1
        tensor(0.7437)
        >>> GIST(temperature=1.0, margin=0.1)(eye, eye, equal, equal)   # all other pairs are masked
        tensor(0.)

    Source: Solatorio 2024, §3, https://arxiv.org/abs/2402.16829
    """

    temperature: Temperature = 0.01
    margin_strategy: Strategy = "absolute"
    margin: Number = 0.0
    contrast_anchors: bool = True
    contrast_positives: bool = True
    reduction: Reduction = "mean"

    ring_refusal = "its guide compares the pairs that anchors and candidates make together, so it needs all of them"

    def inputs(
        self,
        anchors: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        guide_anchors: Float[Tensor, "n e"],
        guide_positives: Float[Tensor, "n e"],
        negatives: Float[Tensor, "m d"] | None = None,
        guide_negatives: Float[Tensor, "m e"] | None = None,
    ) -> Inputs:
        pairs = {"anchors": anchors, "positives": positives}
        guides = {"guide_anchors": guide_anchors, "guide_positives": guide_positives}
        problem = two_models_problem("row i is one pair everywhere", **pairs, **guides)
        problem = problem or _gist_problem(negatives, guide_negatives, anchors, guide_anchors)
        return Inputs.of({**pairs, "negatives": negatives, **guides, "guide_negatives": guide_negatives}, problem)

    def compute(self, batch: Batch) -> Tensor:
        arguments = dict(batch.rows)
        arguments.setdefault("negatives", arguments["anchors"][:0])
        arguments.setdefault("guide_negatives", arguments["guide_anchors"][:0])
        names = ("anchors", "positives", "negatives")
        rows = [batch.prepared(arguments[name], normalize=True) for name in names]
        guides = [batch.prepared(arguments[f"guide_{name}"].detach(), normalize=True) for name in names]
        loss = BlockLoss(
            _guided, temperature=batch.settings.temperature, relative=self.margin_strategy == "relative",
            margin=batch.settings.margin, contrast_anchors=self.contrast_anchors,
            contrast_positives=self.contrast_positives,
        )  # fmt: skip
        return reduce_pairs(batch, loss, rows, [guides], reduction=self.reduction)


def _guided(
    block: AnchorBlock,
    temperature: Tensor,
    relative: bool,
    margin: float,
    contrast_anchors: bool,
    contrast_positives: bool,
) -> tuple[Tensor, Tensor]:
    (_, single), (guide_rows, guide_columns) = block.companions
    is_positive = block.positive
    x = split_pairs(block.anchors, block.candidates, single)
    guide = split_pairs(guide_rows, guide_columns, single)
    similarity = (guide.first * guide.second).sum(1, keepdim=True)
    threshold = similarity - margin * (similarity.abs() if relative else 1) + tie_width(similarity)

    logits = x.first @ x.documents.T / temperature
    sums = [masked_log_sum_exp(logits, (guide.first @ guide.documents.T <= threshold) & ~is_positive)]
    if contrast_anchors:
        mask = (guide.first @ guide.candidate_first.T <= threshold) & x.is_pair & ~is_positive
        sums.append(masked_log_sum_exp(x.first @ x.candidate_first.T / temperature, mask))
    if contrast_positives:
        mask = (guide.second @ guide.documents.T <= threshold) & x.is_pair & ~is_positive
        sums.append(masked_log_sum_exp(x.second @ x.documents.T / temperature, mask))
    positive = logits.where(is_positive & x.is_pair, 0).sum(1)
    return cross_entropy(positive, log_sum_exp(torch.stack(sums), 0)), torch.ones_like(block.ids, dtype=torch.bool)


def _gist_problem(
    negatives: Tensor | None, guide_negatives: Tensor | None, anchors: Tensor, guide_anchors: Tensor
) -> str | None:
    """Return what is wrong with the negatives of anchors that are fine, or None."""
    if (negatives is None) != (guide_negatives is None):
        return "negatives and guide_negatives come together, got one of them."
    if negatives is None or guide_negatives is None:
        return None
    fits = negatives.shape[1:] == anchors.shape[1:] and guide_negatives.shape[1:] == guide_anchors.shape[1:]
    fits = fits and negatives.ndim == guide_negatives.ndim == 2
    same = negatives.dtype == anchors.dtype and guide_negatives.dtype == guide_anchors.dtype
    if fits and same and len(negatives) == len(guide_negatives):
        return None
    got = f"got negatives {described(negatives)} and guide_negatives {described(guide_negatives)}"
    return f"negatives are rows like anchors, one for each of guide_negatives, {got}."
