"""Begin a step of a loss of token embeddings: check them, and score queries against the documents of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.max_sim import TokenSets, max_sim_scores
from contrastive_zoo.engine.token_blocks import packed_tokens, read_lengths
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.checks import word_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, begin_once, prepare_rows, round_to_input_dtype
from contrastive_zoo.world import Shards, World

TokenReduction = Literal["sum", "mean"]

MASKS = {"queries": "query_mask", "documents": "document_mask", "negatives": "negative_mask"}
"""The argument that says which tokens of another one are valid."""


class LateInteractionLoss(Loss):
    """A loss of queries and documents that are sets of token embeddings, [n, L, d].

    Every number of tokens L may differ between ranks, and from call to call. A rank computes the scores of its own queries;
    documents are gathered, without padding, or pass from rank to rank with ``ring=True``.
    """

    supports_ring = True

    def can_be_replicated(self, *rows: Any, **named_rows: Any) -> bool:
        """Return False: rows of different L are not gathered as they are, and a batch of tokens is not small."""
        return False

    def ragged_dims(self) -> Mapping[str, int]:
        return dict.fromkeys([*MASKS, *MASKS.values()], 1)


@dataclass(frozen=True)
class Scores:
    """The scores of the local queries and the documents of all ranks.

    Args:
        scores: [n, N + K], those of the N documents that queries belong to, then those of K negatives.
        shards: the split of queries, and of the documents that belong to them, over the ranks.
    """

    scores: Float[Tensor, "n c"]
    shards: Shards

    @property
    def own(self) -> Tensor:
        """Which document each query belongs to, as a mask [n, N + K]."""
        own = torch.zeros_like(self.scores, dtype=torch.bool)
        own[:, self.shards.local].fill_diagonal_(True)
        return own

    @property
    def positive(self) -> Tensor:
        """The score of each query and its own document, [n]."""
        return self.scores[:, self.shards.local].diagonal()


def begin_late_interaction(
    caller: str,
    rows: Mapping[str, Tensor | None],
    *,
    token_reduction: TokenReduction = "sum",
    normalize: bool = True,
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> Scores:
    """Begin with token embeddings and masks, by the names of :data:`MASKS`; return scores.

    Raises:
        ValueError: on every rank: what :func:`tokens_problem` or :func:`lengths_problem` returns, or what :func:`begin`
            raises.

    Examples:
        >>> from contrastive_zoo.world import ALONE
        >>> tokens = torch.eye(2)[:, None]
        >>> begin_late_interaction("Loss", {"queries": tokens, "documents": tokens}, world=ALONE).scores
        tensor([[1., 0.],
                [0., 1.]])
    """
    settings |= {"token_reduction": token_reduction, "normalize": normalize}
    problem = tokens_problem(rows) or token_reduction_problem(token_reduction) or problem
    given = {name: x for name in MASKS if (x := rows.get(name)) is not None}
    read = {} if problem else read_lengths(given, {name: rows.get(MASKS[name]) for name in given}, world)
    problem = problem or lengths_problem(read)
    if problem is not None:
        begin(caller, {}, problem=problem, world=world, **settings)
    packed = {name: packed_tokens(x, rows.get(MASKS[name]), sum(read[name])) for name, x in given.items()}
    named = {name: lengths for name, (_, lengths) in packed.items()}
    named |= {f"tokens of {name}": tokens for name, (tokens, _) in packed.items()}
    begun = begin_once(caller, named, world=world, **settings)
    world, agreed, sets = begun.world, dict(zip(named, zip(begun.rows, begun.shards, strict=True), strict=True)), {}
    for name in given:
        (lengths, shards), (tokens, token_shards) = agreed[name], agreed[f"tokens of {name}"]
        prepared = round_to_input_dtype(prepare_rows(tokens, normalize=normalize, world=world), tokens, world)
        sets[name] = TokenSets(prepared, lengths, shards, token_shards, read[name])
    queries, dtype = sets.pop("queries"), given["queries"].dtype
    parts = [max_sim_scores(queries, documents, dtype=dtype, world=world) for documents in sets.values()]
    scores = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return Scores(scores / queries.lengths[:, None] if token_reduction == "mean" else scores, queries.shards)


def tokens_problem(rows: Mapping[str, Tensor | None]) -> str | None:
    """Return what is wrong with token embeddings and their masks, or None.

    Examples:
        >>> tokens_problem({"queries": torch.ones(2, 3), "documents": torch.ones(2, 3)})
        'queries are floating-point tokens [n, L, d], got float32 [2, 3].'
    """
    queries, documents, negatives = (rows.get(name) for name in MASKS)
    assert queries is not None  # losses require both
    assert documents is not None
    given = {"queries": queries, "documents": documents} | ({} if negatives is None else {"negatives": negatives})
    for name, x in given.items():
        if x.ndim != 3 or not x.is_floating_point():
            return f"{name} are floating-point tokens [n, L, d], got {kind(x)}."
        if x.shape[2] != queries.shape[2] or x.dtype != queries.dtype:
            return f"{name} are of the queries' width and dtype, got {kind(x)} for queries {kind(queries)}."
    if len(queries) != len(documents):
        return (
            f"document i belongs to query i, got queries {kind(queries)} and documents {kind(documents)}. Pass further "
            "documents as negatives."
        )
    for name, of in MASKS.items():
        if (problem := _mask_problem(name, given.get(name), of, rows.get(of))) is not None:
            return problem
    return None


def _mask_problem(name: str, x: Tensor | None, of: str, mask: Tensor | None) -> str | None:
    if x is None:
        return None if mask is None else f"{of} came without {name}. Leave it out."
    if mask is not None and (mask.shape != x.shape[:2] or mask.is_floating_point()):
        return f"{of} holds a bool or an integer for each token of {name}, got {kind(mask)} for {kind(x)}."
    return None


def lengths_problem(lengths: Mapping[str, Sequence[int]]) -> str | None:
    """Return which sets have no valid token, in words, or None.

    Examples:
        >>> lengths_problem({"queries": [2, 0]})
        'queries have one valid token or more each, got none in row 1. Drop the row, or correct its mask.'
    """
    for name, of_sets in lengths.items():
        empty = [str(row) for row, length in enumerate(of_sets) if length == 0]
        if empty:
            return (
                f"{name} have one valid token or more each, got none in row {', '.join(empty[:5])}. Drop the row, or "
                "correct its mask."
            )
    return None


def token_reduction_problem(token_reduction: str) -> str | None:
    """Return what is wrong with the setting ``token_reduction``, or None.

    Examples:
        >>> token_reduction_problem("max")
        "token_reduction is 'sum' or 'mean', got 'max'."
    """
    return word_problem("token_reduction", token_reduction, TokenReduction)
