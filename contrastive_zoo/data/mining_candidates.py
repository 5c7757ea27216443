"""The nearest rows of each query that are not known to be positives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.data.mining_inputs import fetched
from contrastive_zoo.metrics.faiss_search import ApproximateIndex
from contrastive_zoo.metrics.search import Neighbors, top_k
from contrastive_zoo.ranks.world import Shards, World


@dataclass(frozen=True)
class Corpus:
    """The rows of all ranks in which negatives are searched.

    Args:
        rows: this rank's.
        shards: the split of all of them.
        labels: [m, l], labels of this rank's rows; a candidate is no negative if one of them is the query's.
        normalize: whether scores are cosines.
        index: the approximate index; None for an exact search.
        world: the ranks.
    """

    rows: Tensor
    shards: Shards
    labels: Int[Tensor, "m l"] | None
    normalize: bool
    index: ApproximateIndex | None
    world: World

    def candidates(
        self, queries: Float[Tensor, "n d"], excluded: Int[Tensor, "n e"], labels: Int[Tensor, "n l q"] | None, k: int
    ) -> Neighbors:
        """Return the k best rows of each query that are not excluded and have none of the query's labels.

        The number of rows with the query's labels is not known before, so the search is repeated with twice the depth for
        queries that need it; all ranks repeat it together.

        Args:
            queries: this rank's queries.
            excluded: global indices that are no candidates; −1 for none.
            labels: for each kind of label, the query's; None if labels are not compared.
            k: number of candidates.
        """
        everything = self.shards.total
        k = min(k, everything)
        results = self._searched(queries, excluded, k)
        if labels is None:
            return results
        result = Neighbors(results.scores.clone(), results.indices.clone())
        open_queries, depth = torch.arange(len(queries)), k
        while True:
            differs = self._differs(results.indices, labels[open_queries])
            results = Neighbors(
                results.scores.masked_fill(~differs, -torch.inf), results.indices.masked_fill(~differs, -1)
            )
            order = (~differs).int().argsort(dim=1, stable=True)[:, :k]
            result.scores[open_queries] = results.scores.gather(1, order)
            result.indices[open_queries] = results.indices.gather(1, order)
            open_queries = open_queries[differs.sum(1) < k]
            # a search of the whole corpus has found all there is
            if depth == everything or not any(number for (number,) in self.world.exchange([len(open_queries)])):
                return result
            depth = min(2 * depth, everything)
            results = self._searched(queries[open_queries], excluded[open_queries], depth)

    def _searched(self, queries: Tensor, excluded: Tensor, k: int) -> Neighbors:
        return top_k(
            queries, self.rows, k=k, excluded=excluded, normalize=self.normalize, index=self.index,
            process_group=self.world,
        )  # fmt: skip

    def _differs(self, indices: Int[Tensor, "n k"], labels: Int[Tensor, "n l q"]) -> Tensor:
        """Return which candidates exist and have none of the query's labels."""
        assert self.labels is not None
        theirs = fetched(self.labels, self.shards, indices.clamp(min=0), self.world)
        same = (theirs[..., None] == labels[:, None]) & (labels[:, None] != NO_LABEL)
        return ~same.flatten(2).any(2) & (indices >= 0)


NO_LABEL = torch.iinfo(torch.int64).min
"""The label of a query that no row has."""
