# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]

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
    """Compute the multiple negatives ranking loss of sentence-transformers.

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

class MNRL(Loss):
    """Compute the multiple negatives ranking loss of sentence-transformers.

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
        temperature: t > 0, dimensionless; a tensor is learnable.
        directions: ``"query_to_doc"`` and any of the above. GTE's loss is all four, symmetric InfoNCE query_to_doc and
            doc_to_query ``"per_direction"``.
        partition_mode: ``"joint"`` or ``"per_direction"``.
        hardness_mode: ``"in_batch_negatives"`` (other queries' documents and negatives), ``"hard_negatives"`` (a
            query's own), ``"all_negatives"``, or None.
        hardness_strength: non-negative; 9 in Lan et al., 5 in EmbeddingGemma.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: invalid owners, settings that are unknown or contradict each other, or what any :class:`Loss`
            refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> MNRL(temperature=1.0)(eye, eye, -eye[:1], torch.tensor([0]))   # mean of log(e + 1 + e⁻¹) and log(e + 2), − 1
        tensor(0.4795)

    Source: Henderson et al. 2017, §4.4, https://arxiv.org/abs/1705.00652; directions: Li et al. 2023,
    https://arxiv.org/abs/2308.03281; hardness: Lan et al. 2025, https://arxiv.org/abs/2503.04812
    """

    temperature: float | Tensor | nn.Module
    directions: tuple[Direction, ...]
    partition_mode: Literal["joint", "per_direction"]
    hardness_mode: Hardness | None
    hardness_strength: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.05,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: Hardness | None = None,
        hardness_strength: float = 0.0,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        documents: Float[Tensor, "n d"],
        negatives: Float[Tensor, "m d"] | None = None,
        owners: Int[Tensor, " m"] | None = None,
        *,
        world: World | None = None,
    ) -> Tensor: ...
    def can_ring(self) -> bool: ...
