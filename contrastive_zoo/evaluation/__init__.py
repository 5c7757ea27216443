"""Retrieval metrics of the rows of all ranks, the same bits for every split: search, metrics, objects."""

from contrastive_zoo.evaluation.faiss_search import ApproximateIndex
from contrastive_zoo.evaluation.measurement import evaluate
from contrastive_zoo.evaluation.recall import cross_modal_recall, recall_at_k
from contrastive_zoo.evaluation.retrieval import RetrievalMetrics
from contrastive_zoo.evaluation.search import Neighbors, top_k
from contrastive_zoo.evaluation.search_quality import index_recall

__all__ = [
    "ApproximateIndex",
    "Neighbors",
    "RetrievalMetrics",
    "cross_modal_recall",
    "evaluate",
    "index_recall",
    "recall_at_k",
    "top_k",
]
