"""How good embeddings are, the same bits for every split over the ranks: search, retrieval metrics, pictures, a monitor."""

from contrastive_zoo.metrics.comparison import Difference, paired_bootstrap
from contrastive_zoo.metrics.measurement import cross_modal_recall, evaluate, recall_at_k
from contrastive_zoo.metrics.retrieval import RetrievalMetrics
from contrastive_zoo.metrics.search import ApproximateIndex, Neighbors, top_k

__all__ = [
    "ApproximateIndex",
    "Difference",
    "Neighbors",
    "RetrievalMetrics",
    "cross_modal_recall",
    "evaluate",
    "paired_bootstrap",
    "recall_at_k",
    "top_k",
]
