"""Late interaction: losses of sets of token embeddings, which are sent without padding, and the scores of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.max_sim import late_interaction_scores, packed_tokens, read_lengths
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.settings import Reduction
from contrastive_zoo.ranks.world import Shards

TokenReduction = Literal["sum", "mean"]

MASKS = {"queries": "query_mask", "documents": "document_mask", "negatives": "negative_mask"}
"""The argument that says which tokens of another one are valid."""


@dataclass(frozen=True)
class Scores:
    """The scores of the local queries and the documents of all ranks."""

    # [n, N + K], those of the N documents that queries belong to, then those of K negatives
    scores: Float[Tensor, "n c"]
    shards: Shards  # the split of queries, and of the documents that belong to them, over the ranks

    @property
    def is_pair(self) -> Tensor:
        """Which document each query belongs to, as a mask [n, N + K]."""
        is_pair = torch.zeros_like(self.scores, dtype=torch.bool)
        is_pair[:, self.shards.local].fill_diagonal_(True)
        return is_pair

    @property
    def positive(self) -> Tensor:
        """The score of each query and its own document, [n]."""
        return self.scores[:, self.shards.local].diagonal()


class LateInteractionLoss(Loss):
    """A loss of queries and documents that are sets of token embeddings, [n, L, d].

    Every number of tokens L may differ between ranks, and from call to call. A rank computes the scores of its own queries;
    documents are gathered, without padding, or pass from rank to rank with ``ring=True``.
    """

    token_reduction: TokenReduction = "sum"  # ``"sum"`` over the query's tokens, or ``"mean"``
    normalize: bool = True  # normalise each token to unit length first
    # ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n]
    reduction: Reduction = "mean"

    has_kernels = supports_ring = True

    @staticmethod
    def inputs(
        queries: Float[Tensor, "n a d"],
        documents: Float[Tensor, "n b d"],
        query_mask: Bool[Tensor, "n a"] | Int[Tensor, "n a"] | None = None,
        document_mask: Bool[Tensor, "n b"] | Int[Tensor, "n b"] | None = None,
        negatives: Float[Tensor, "m c d"] | None = None,
        negative_mask: Bool[Tensor, "m c"] | Int[Tensor, "m c"] | None = None,
    ) -> Inputs:
        """State the number of tokens of each set, and the valid tokens of all sets, one set after the other.

        The host waits once for the numbers of an accelerator; :meth:`compute` finds them in the batch.
        """
        rows = {
            "queries": queries, "documents": documents, "negatives": negatives,
            "query_mask": query_mask, "document_mask": document_mask, "negative_mask": negative_mask,
        }  # fmt: skip
        arguments = {name: x for name in MASKS if (x := rows[name]) is not None}
        read = read_lengths(arguments, {name: rows[MASKS[name]] for name in arguments})
        if problem := lengths_problem(read):
            return Inputs({}, problem)
        packed = {name: packed_tokens(x, rows[MASKS[name]], sum(read[name])) for name, x in arguments.items()}
        lengths = {name: result for name, (_, result) in packed.items()}
        tokens = {f"tokens of {name}": result for name, (result, _) in packed.items()}
        passed = {"the passed arguments": ", ".join(name for name, x in rows.items() if x is not None)}
        return Inputs({**lengths, **tokens}, compared=passed, host=read)

    def replicable(self) -> bool:
        """Return False: a batch of tokens is not small."""
        return False

    def scores(self, batch: Batch) -> Scores:
        scores = late_interaction_scores(batch, normalize=self.normalize)
        return Scores(scores / batch.first[:, None] if self.token_reduction == "mean" else scores, batch.samples)


def lengths_problem(lengths: Mapping[str, Sequence[int]]) -> str | None:
    for name, of_sets in lengths.items():
        empty = [str(row) for row, length in enumerate(of_sets) if length == 0]
        if empty:
            return (
                f"{name} have one valid token or more each, got none in row {', '.join(empty[:5])}. Drop the row, or "
                "correct its mask."
            )
    return None
