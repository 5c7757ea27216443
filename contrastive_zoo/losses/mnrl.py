"""Multiple negatives ranking: classify each query's document among all documents and hard negatives."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy, log_sum_exp
from contrastive_zoo.engine.implementation import choose_kernels
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.engine.softmax import cross_log_sum_exp, self_log_sum_exp
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem, towers_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.pair_candidates import concat_pairs, split_pairs
from contrastive_zoo.loss_base.preparation import begin, prepare_rows, round_to_input_dtype, sample_indices
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.session import refuse
from contrastive_zoo.value_checks import range_problem
from contrastive_zoo.world import ALONE, Shards, World

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_HOLD_THE_POSITIVE = {"query_to_doc", "doc_to_query"}
_HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")


@checked
def mnrl(
    queries: Float[Tensor, "n d"],
    documents: Float[Tensor, "n d"],
    negatives: Float[Tensor, "m d"] | None = None,
    owners: Int[Tensor, " m"] | None = None,
    *,
    temperature: float | Tensor = 0.05,
    directions: tuple[Direction, ...] = ("query_to_doc",),
    partition_mode: Literal["joint", "per_direction"] = "joint",
    hardness_mode: Hardness | None = None,
    hardness_strength: float = 0.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the multiple negatives ranking loss of sentence-transformers.

    With q, d the unit rows of queries and documents of all ranks, D all documents and hard negatives,

        query_to_doc    Z_i = Σ_{x∈D} exp(q_i·x / t + h_ix)        query_to_query  Z_i = Σ_{j≠i} exp(q_i·q_j / t)
        doc_to_query    Z_i = Σ_j exp(d_i·q_j / t)                 doc_to_doc      Z_i = Σ_{x∈D, not i's} exp(d_i·x / t)

        loss = mean_i [ log Σ_directions Z_i  −  q_i·d_i / t ]            partition_mode "joint"
        loss = mean_i [ mean_directions log Z_i  −  q_i·d_i / t ]         "per_direction"

    h_ix = hardness_strength · q_i·x, held constant, for the negatives that hardness_mode names, else 0. Equal to
    MultipleNegativesRankingLoss(scale=1/t) on one process; there every query has the same number of hard negatives.

    Args:
        queries: [n, d], n may differ between ranks.
        documents: [n, d], row i belongs to row i of queries.
        negatives: [m, d] hard negatives, candidates of every query of every rank; m may differ between ranks. If one rank
            passes them, all must: a rank without any passes [0, d].
        owners: [m], the row among this rank's queries that a negative was mined for, any number each, or −1 for none;
            None is −1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        directions: ``"query_to_doc"`` and any of the above. GTE's loss is all four, symmetric InfoNCE query_to_doc and
            doc_to_query ``"per_direction"``.
        partition_mode: ``"joint"`` or ``"per_direction"``.
        hardness_mode: ``"in_batch_negatives"`` (other queries' documents and negatives), ``"hard_negatives"`` (a
            query's own), ``"all_negatives"``, or None.
        hardness_strength: non-negative; 9 in Lan et al., 5 in EmbeddingGemma.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: invalid owners, settings that are unknown or contradict each other, or what any :class:`Loss`
            refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> mnrl(eye, eye, -eye[:1], torch.tensor([0]), temperature=1.0)   # mean of log(e + 1 + e⁻¹) and log(e + 2), − 1
        tensor(0.4795)

    Source: Henderson et al. 2017, §4.4, https://arxiv.org/abs/1705.00652; directions: Li et al. 2023,
    https://arxiv.org/abs/2308.03281; hardness: Lan et al. 2025, https://arxiv.org/abs/2503.04812
    """
    directions = tuple(directions) if isinstance(directions, (list, tuple)) else directions
    settings: dict[str, Any] = {"directions": directions, "partition_mode": partition_mode}
    settings |= {"hardness_mode": hardness_mode, "hardness_strength": hardness_strength}
    problem = _problem(queries, documents, negatives, owners, world) or _settings_problem(**settings)
    if problem is not None:
        refuse("MNRL", problem, world=world)
    kernels = choose_kernels([queries, documents], unsupported=_unsupported_by_kernels(directions, hardness_mode))
    if negatives is None:
        negatives = queries[:0]
    if owners is None:
        owners = torch.full((len(negatives),), -1, device=queries.device)
    named = {"queries": queries, "documents": documents, "negatives": negatives, "owners": owners}
    shards, _, mined, _ = begin(
        "MNRL",
        named,
        problem=kernels.problem,
        temperature=temperature,
        reduction=reduction,
        normalize=normalize,
        implementation=str(kernels),
        world=world,
        **settings,
    )
    scale = logit_scale(temperature, world)
    if hardness_mode is None and not ("doc_to_doc" in directions and mined.total):  # each Z_i is a plain sum
        q, d, x = (
            round_to_input_dtype(prepare_rows(rows, normalize=normalize, world=world), rows, world)
            for rows in (queries, documents, negatives)
        )
        settings_of_sums: Any = {
            "scale": scale, "unit_norm": normalize, "dtype": queries.dtype, "world": world,
            "on_kernel": kernels.compute(shards.total, shards.total + mined.total),
        }  # fmt: skip
        others, positive = _sums(q, d, x, directions, shards, mined, **settings_of_sums)
        losses = _losses(others, positive, partition_mode).to(q.dtype)
        return reduce_anchors(losses, reduction=reduction, world=world)

    q, d, x = (prepare_rows(rows, normalize=normalize, world=world) for rows in (queries, documents, negatives))
    ids = sample_indices(shards, q)
    pairs, columns, single = concat_pairs(q, d, x)
    sizes = tuple(n + m for n, m in zip(shards.sizes, mined.sizes, strict=True))
    return sum_over_anchors(
        BlockLoss(_ranked, temperature=temperature, **settings), pairs, ids, candidates=columns, shards=shards,
        candidate_ids=torch.cat([ids, torch.where(owners < 0, -1, owners + shards.start)]),
        candidate_shards=Shards(sizes, shards.rank), companions=[(ids, single)], reduction=reduction, world=world,
    )  # fmt: skip


def _sums(
    q: Tensor, d: Tensor, x: Tensor, directions: tuple[Direction, ...], shards: Shards, mined: Shards, **rows: Any
) -> tuple[dict[Direction, Tensor], Tensor]:
    """Return log(Z − exp(positive)) of every direction, if none leaves out mined negatives, and the logits of the pairs."""
    documents, queries, (positive,) = cross_log_sum_exp(
        q,
        d,
        row_shards=shards,
        column_shards=shards,
        columnwise="doc_to_query" in directions,
        partner_offsets=[0],
        **rows,
    )
    if mined.total:
        over_mined, *_ = cross_log_sum_exp(q, x, row_shards=shards, column_shards=mined, columnwise=False, **rows)
        documents = log_sum_exp(torch.stack([documents, over_mined]), 0)
    others: dict[Direction, Tensor] = {"query_to_doc": documents}
    if queries is not None:
        others["doc_to_query"] = queries
    if "query_to_query" in directions:
        others["query_to_query"] = self_log_sum_exp(q, shards=shards, **rows)[0]
    if "doc_to_doc" in directions:
        others["doc_to_doc"] = self_log_sum_exp(d, shards=shards, **rows)[0]
    return others, positive


def _losses(others: dict[Direction, Tensor], positive: Tensor, partition_mode: str) -> Tensor:
    """Return −log of the positive's share, given the log-sum-exps of the other candidates of each direction."""
    if partition_mode == "per_direction":
        return torch.stack([cross_entropy(positive, x) for x in others.values()]).mean(0)
    # Z contains the positive once for each of these k directions: log(k + Σ exp(s − p)) = log k + log(1 + Σ … / k)
    shift = math.log(len(_HOLD_THE_POSITIVE & others.keys()))
    return shift + cross_entropy(positive, log_sum_exp(torch.stack([*others.values()]), 0) - shift)


def _unsupported_by_kernels(directions: tuple[Direction, ...], hardness_mode: Hardness | None) -> str | None:
    if hardness_mode is not None or "doc_to_doc" in directions:
        return "computes MNRL without hardness_mode and without the direction doc_to_doc"
    return None


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


def _problem(
    queries: Tensor, documents: Tensor, negatives: Tensor | None, owners: Tensor | None, world: World
) -> str | None:
    if negatives is not None and (negatives.shape[1:] != queries.shape[1:] or negatives.dtype != queries.dtype):
        return f"negatives are [m, d], got {kind(negatives)} for queries {kind(queries)}."
    if owners is not None:
        if negatives is None:
            return "owners say whose the negatives are, but there are no negatives."
        if wrong := labels_problem("owners", owners, len(negatives)) or _owners_problem(owners, len(queries), world):
            return wrong
    rule, fix = "row i of queries belongs to row i of documents", "Pass further documents as negatives."
    return towers_problem(rule, fix, queries=queries, documents=documents)


def _owners_problem(owners: Tensor, queries: int, world: World) -> str | None:
    def problem(least: int, most: int) -> str:
        return f"owners are rows of this rank's {queries} queries, or -1, got {least} … {most}."

    return range_problem(owners, -1, queries - 1, problem, world=world)


def _settings_problem(
    directions: tuple[str, ...], partition_mode: str, hardness_mode: str | None, hardness_strength: float
) -> str | None:
    are_words = isinstance(directions, (list, tuple)) and all(isinstance(x, str) for x in directions)
    if not are_words or "query_to_doc" not in directions or not set(directions) <= set(_DIRECTIONS):
        return f"directions are 'query_to_doc' and any of {', '.join(_DIRECTIONS[1:])}, got {directions}."
    if partition_mode not in ("joint", "per_direction"):
        return f"partition_mode is 'joint' or 'per_direction', got {partition_mode!r}."
    if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
        return "query_to_query and doc_to_doc never hold the positive: with them use partition_mode='joint'."
    if hardness_mode is not None and not (isinstance(hardness_mode, str) and hardness_mode in _HARDNESS):
        return f"hardness_mode is None or one of {', '.join(_HARDNESS)}, got {hardness_mode!r}."
    return number_problem("hardness_strength is non-negative", low=0, hardness_strength=hardness_strength)


class MNRL(Loss, function=mnrl, check=_settings_problem):
    rank_local = frozenset({"owners"})

    ring_refusal = "with hardness_mode or the direction doc_to_doc it compares an anchor with all candidates at once"

    def can_ring(self) -> bool:
        return self.hardness_mode is None and "doc_to_doc" not in self.directions
