"""Retrieval metrics as a torchmetrics metric, for ``MetricCollection`` and for ``self.log`` of Lightning."""

from collections.abc import Mapping, Sequence
from typing import Any

import torchmetrics
from torch import Tensor

from contrastive_zoo.metrics.retrieval import STATES, RetrievalMetrics


class RetrievalMetric(RetrievalMetrics, torchmetrics.Metric):  # type: ignore[misc]  # both merge states and forward batches
    """:class:`contrastive_zoo.metrics.RetrievalMetrics` as a torchmetrics metric.

    What is collected are registered states, so metrics of a ``MetricCollection`` collect it once (``compute_groups``), and
    ``merge_state`` and pickles hold it. Several names are computed in one search. ``compute`` communicates by itself, and
    states are not gathered. Lightning computes and resets it at the end of the epoch: ``self.log("map@r", self.metric)``;
    of several names, log ``self.metric.compute()`` by ``self.log_dict``. A batch by itself has no value: ``forward``
    returns None.

    Where torchmetrics' own metrics differ: ``RetrievalMAP(top_k=k)`` divides by the relevant items among the first k, and
    ``map@k`` by all of them; a query without a relevant item counts as 0 there (``empty_target_action="neg"``), and does
    not count here.

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
