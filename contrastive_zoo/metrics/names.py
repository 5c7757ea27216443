"""Metrics by name, such as ``"map@r"`` or ``"ndcg@10"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from contrastive_zoo.metrics import ranking_metrics
from contrastive_zoo.metrics.ranking import Floats, Ints, Ranking
from contrastive_zoo.metrics.ranking_metrics import Ties

_AT_CUTOFF: dict[str, Callable[[Ranking, Ints, Ties], Floats]] = {
    "precision": ranking_metrics.precision,
    "recall": ranking_metrics.recall,
    "hit_rate": ranking_metrics.hit_rate,
    "map": ranking_metrics.average_precision,
    "mrr": ranking_metrics.reciprocal_rank,
    "ndcg": ranking_metrics.ndcg,
}
"""Functions of a ranking and a cutoff per query, by name."""

_WITHOUT_CUTOFF = ("map", "mrr", "ndcg")
"""Names that may stand alone: the whole ranking counts."""

KNN = "knn_accuracy"

NAMES = "precision@k, recall@k, hit_rate@k, r_precision, map, map@k, map@r, mrr, mrr@k, ndcg, ndcg@k, knn_accuracy@k"
"""What users may write, k being a number."""


@dataclass(frozen=True)
class Metric:
    """A metric and its cutoff.

    Args:
        name: as the user wrote it.
        kind: the name without its cutoff.
        k: the number of items that count; None for all of them, 0 for the number R of relevant items of each query.
    """

    name: str
    kind: str
    k: int | None

    @classmethod
    def of(cls, name: str) -> Metric | None:
        """Return the metric of this name; None if there is none.

        Examples:
            >>> Metric.of("map@r")
            Metric(name='map@r', kind='map', k=0)
        """
        kind, at, cutoff = str(name).partition("@")
        if name == "r_precision":
            return cls(name, "precision", 0)
        if not at:
            return cls(name, kind, None) if kind in _WITHOUT_CUTOFF else None
        if cutoff == "r":
            return cls(name, kind, 0) if kind == "map" else None
        valid = (kind in _AT_CUTOFF or kind == KNN) and cutoff.isdecimal() and int(cutoff) > 0
        return cls(name, kind, int(cutoff)) if valid else None

    @property
    def whole(self) -> bool:
        """Whether the positions of relevant items count wherever they are."""
        return not self.k

    def values(self, ranking: Ranking, ties: Ties) -> Floats:
        """Return the value for each query of a ranking."""
        if self.k is None:
            cutoff = np.full(ranking.queries, np.iinfo(np.int64).max // 2)
        else:
            cutoff = np.full(ranking.queries, self.k) if self.k else ranking.total
        return _AT_CUTOFF[self.kind](ranking, cutoff, ties)


def names_problem(names: Sequence[str]) -> str | None:
    """Return why these are not names of metrics, in words; None if they are."""
    if not isinstance(names, (list, tuple)) or len(names) == 0:
        return f"metrics are a list of names, got {names!r}. Metrics: {NAMES}."
    unknown = [str(name) for name in names if not isinstance(name, str) or Metric.of(name) is None]
    return f"there is no metric {', '.join(unknown)}. Metrics: {NAMES}." if unknown else None
