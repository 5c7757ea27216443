"""Retrieval metrics as a torchmetrics metric, for ``MetricCollection`` and for ``self.log`` of Lightning."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from contrastive_zoo.metrics.retrieval import STATES, RetrievalMetrics
from contrastive_zoo.ranks.suggestions import needed

with needed("contrastive_zoo.adapters.torchmetrics", "torchmetrics>=1.6"):
    import torchmetrics


class RetrievalMetric(RetrievalMetrics, torchmetrics.Metric):  # type: ignore[misc]  # both merge states and forward batches
    """:class:`contrastive_zoo.metrics.RetrievalMetrics` as a torchmetrics metric.

    Metrics of a ``MetricCollection`` collect embeddings once (``compute_groups``). ``compute`` communicates by itself.
    Lightning computes and resets it at the end of the epoch: ``self.log("map@r", self.metric)``; of several names, log
    ``self.metric.compute()`` by ``self.log_dict``. ``forward`` returns None.

    Other than in ``RetrievalMAP(top_k=k)``, ``map@k`` divides by all relevant items, and a query without any does not count.

    Args:
        metrics: one name, for which ``compute`` returns a number, or a list, for which it returns numbers by name.
        settings: as in :class:`contrastive_zoo.metrics.RetrievalMetrics`.

    Raises:
        ValueError: an unknown metric.

    Examples:
        >>> import torch
        >>> metric = RetrievalMetric("hit_rate@1")
        >>> metric.update(torch.eye(2), labels=torch.tensor([3, 3]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True

    def __init__(self, metrics: str | Sequence[str], **settings: Any) -> None:
        super().__init__(metrics, **settings)
        for name in STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    def reset(self) -> None:
        """Forget all batches."""
        torchmetrics.Metric.reset(self)

    def sync(self, *_: Any, **__: Any) -> None:
        """Gather nothing: ``compute`` communicates by itself."""

    def _store(self, batches: Mapping[str, list[Tensor]]) -> None:
        super()._store(batches)
        self._computed = None  # of what had been collected before
