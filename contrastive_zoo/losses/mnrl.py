"""Multiple negatives ranking: classify each query's document among all documents and hard negatives."""

import math
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.pair_candidates import reduce_pairs, split_pairs
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.engine.tower_pairs import Direction, TowerPairs
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature
from contrastive_zoo.ranks.row_checks import ValueRule, described, labels_problem, range_rule, towers_problem

PartitionMode = Literal["joint", "per_direction"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
_DIRECTIONS = get_args(Direction)
_HOLD_THE_POSITIVE = {"query_to_doc", "doc_to_query"}


class MNRL(Loss):
    r"""Compute the multiple negatives ranking loss of sentence-transformers.

    With q, d the unit rows of queries and documents of all ranks, D all documents and hard negatives,

        query_to_doc    Z_i = Σ_{x∈D} exp(q_i·x / t + h_ix)        query_to_query  Z_i = Σ_{j≠i} exp(q_i·q_j / t)
        doc_to_query    Z_i = Σ_j exp(d_i·q_j / t)                 doc_to_doc      Z_i = Σ_{x∈D, not i's} exp(d_i·x / t)

        loss = mean_i [ log Σ_directions Z_i  −  q_i·d_i / t ]            partition_mode "joint"
        loss = mean_i [ mean_directions log Z_i  −  q_i·d_i / t ]         "per_direction"

    h_ix = hardness_strength · q_i·x, held constant, for the negatives that hardness_mode names, else 0. Equal to
    MultipleNegativesRankingLoss(scale=1/t) on one process; there every query has the same number of hard negatives.

    Called as ``loss(queries, documents, negatives, owners)``:

    - queries: [n, d], n may differ between ranks.
    - documents: [n, d], row i belongs to row i of queries.
    - negatives: [m, d] hard negatives, candidates of every query of every rank; m may differ between ranks. If one rank
      passes them, all must: a rank without any passes [0, d].
    - owners: [m], the row among this rank's queries that a negative was mined for, any number each, or −1 for none;
      None is −1.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        directions: ``"query_to_doc"`` and any of the above. GTE's loss is all four, symmetric InfoNCE query_to_doc and
            doc_to_query ``"per_direction"``.
        partition_mode: ``"joint"`` or ``"per_direction"``.
        hardness_mode: ``"in_batch_negatives"`` (other queries' documents and negatives), ``"hard_negatives"`` (a
            query's own), ``"all_negatives"``, or None.
        hardness_strength: non-negative; 9 in Lan et al., 5 in EmbeddingGemma.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: invalid owners, settings that are unknown or contradict each other, or what any :class:`Loss`
            refuses.

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
        problem = _problem(queries, documents, negatives, owners)
        values = [] if problem or owners is None else [_owners_rule(owners, len(queries))]
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

        arguments = [batch.rows[name] for name in ("queries", "documents")]
        arguments.append(batch.rows.get("negatives", arguments[0][:0]))
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
    x, own = split_pairs(block.anchors, block.candidates, block.companions[0][1]), block.positive
    mined = ~x.is_pair

    cos = x.first @ x.documents.T
    logits = cos / temperature
    positive = logits.where(own & ~mined, 0).sum(1)
    if hardness_mode is not None:
        hard = {"in_batch_negatives": ~own, "hard_negatives": own & mined, "all_negatives": ~own | mined}[hardness_mode]
        logits = logits + (hardness_strength * cos.detach()).where(hard, 0)
    others: dict[Direction, Tensor] = {"query_to_doc": masked_log_sum_exp(logits, ~own | mined)}
    if "query_to_query" in directions:
        others["query_to_query"] = masked_log_sum_exp(x.first @ x.candidate_first.T / temperature, x.is_pair & ~own)
    if "doc_to_query" in directions:
        others["doc_to_query"] = masked_log_sum_exp(x.second @ x.candidate_first.T / temperature, x.is_pair & ~own)
    if "doc_to_doc" in directions:
        others["doc_to_doc"] = masked_log_sum_exp(x.second @ x.documents.T / temperature, ~own)
    return _losses(others, positive, partition_mode), torch.ones_like(block.ids, dtype=torch.bool)


def _problem(queries: Tensor, documents: Tensor, negatives: Tensor | None, owners: Tensor | None) -> str | None:
    if negatives is not None and (negatives.shape[1:] != queries.shape[1:] or negatives.dtype != queries.dtype):
        return f"negatives are [m, d], got {described(negatives)} for queries {described(queries)}."
    if owners is not None and negatives is None:
        return "owners say whose the negatives are, but there are no negatives."
    rule, fix = "row i of queries belongs to row i of documents", "Pass further documents as negatives."
    problem = towers_problem(rule, fix, queries=queries, documents=documents)
    if problem is None and owners is not None and negatives is not None:
        return labels_problem("owners", owners, len(negatives))
    return problem


def _owners_rule(owners: Tensor, queries: int) -> ValueRule:
    def problem(least: int, most: int) -> str:
        return f"owners are rows of this rank's {queries} queries, or -1, got {least} … {most}."

    return range_rule(owners, -1, queries - 1, problem)
