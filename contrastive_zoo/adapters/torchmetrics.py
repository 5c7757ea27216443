"""Retrieval metrics as a torchmetrics metric, for ``self.log`` of Lightning."""

from typing import Any

import torchmetrics
from torch import Tensor

from contrastive_zoo.metrics.retrieval import RetrievalMetrics


class RetrievalMetric(torchmetrics.Metric):
    """:class:`contrastive_zoo.metrics.RetrievalMetrics` as a torchmetrics metric.

    It communicates by itself in ``compute``, so torchmetrics does not gather its states. Lightning computes and resets it at
    the end of the epoch: ``self.log("map@r", self.metric)``.

    Args:
        metric: one name of a metric, for which ``compute`` returns a number.
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

    def __init__(self, metric: str, **settings: Any) -> None:
        super().__init__(sync_on_compute=False)
        self.collected = RetrievalMetrics(metric, **settings)

    def update(self, queries: Tensor, labels: Tensor | None = None, **more: Tensor) -> None:
        """Collect a batch, as :meth:`contrastive_zoo.metrics.RetrievalMetrics.update` does."""
        self.collected.update(queries, labels, **more)

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Return the metric of what all ranks have collected."""
        return self.collected.compute()

    def forward(self, queries: Tensor, labels: Tensor | None = None, **more: Tensor) -> None:
        """Collect a batch; a batch by itself has no value of its own."""
        self.update(queries, labels, **more)

    def reset(self) -> None:
        """Forget all batches."""
        super().reset()
        self.collected.reset()
