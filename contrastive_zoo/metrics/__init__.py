"""How good embeddings are, the same bits for every split over the ranks: search, retrieval metrics, pictures, a monitor."""

from typing import TYPE_CHECKING

from contrastive_zoo.metrics.measurement import evaluate
from contrastive_zoo.metrics.retrieval import RetrievalMetrics
from contrastive_zoo.metrics.search import Neighbors, top_k
from contrastive_zoo.ranks.suggestions import missing

__all__ = ["Neighbors", "RetrievalMetrics", "evaluate", "top_k"]

if not TYPE_CHECKING:  # a checker would take any name
    __getattr__ = missing(__name__, __all__)
