"""Retrieval metrics that collect embeddings batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.evaluation.checks import Given, Settings
from contrastive_zoo.evaluation.faiss_search import ApproximateIndex
from contrastive_zoo.evaluation.measurement import measured
from contrastive_zoo.evaluation.metrics import Ties
from contrastive_zoo.evaluation.names import names_problem
from contrastive_zoo.row_checks import tensor_problem
from contrastive_zoo.world import Processes, World

_ROWS = ("queries", "gallery")
_NUMBERS = ("labels", "gallery_labels", "ids", "gallery_ids", "judged_queries", "judged_items")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class RetrievalMetrics(nn.Module):
    """Collect embeddings with ``update``, and return the metrics of all ranks' embeddings with ``compute``.

    The methods are those of a torchmetrics metric. ``compute`` communicates by itself, so the embeddings of all ranks are
    never gathered; every rank must call it, also one without embeddings. For ``self.log`` of Lightning see
    :class:`contrastive_zoo.adapters.torchmetrics.RetrievalMetric`.

    Args:
        metrics: names as in :func:`contrastive_zoo.evaluate`; ``compute`` returns a number if it is one name, and numbers by
            name if it is a list.
        ignore_label: rows with this label are neither queries nor in the gallery.
        ties: what ties mean.
        normalize: compare cosines; otherwise dot products.
        index: search approximately, for metrics with a k.
        process_group: who holds rows.

    Raises:
        ValueError: an unknown metric. ``compute`` raises what :func:`contrastive_zoo.evaluate` raises.

    Examples:
        >>> metric = RetrievalMetrics("map@r")
        >>> metric.update(torch.eye(2), labels=torch.tensor([0, 1]))
        >>> metric.update(torch.eye(2), labels=torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
        >>> metric.reset()
    """

    def __init__(
        self,
        metrics: str | Sequence[str] = ("precision@1", "r_precision", "map@r"),
        *,
        ignore_label: int | None = None,
        ties: Ties = "pessimistic",
        normalize: bool = True,
        index: ApproximateIndex | None = None,
        process_group: Processes = None,
    ) -> None:
        super().__init__()
        self.names: list[str] = [metrics] if isinstance(metrics, str) else metrics  # type: ignore[assignment]
        if (problem := names_problem(self.names)) is not None:
            raise ValueError(f"RetrievalMetrics: {problem}")
        self.names = list(self.names)
        self.single = isinstance(metrics, str)
        self.ignore_label, self.process_group = ignore_label, process_group
        self.settings = Settings(ties, normalize, index)
        self.reset()

    def reset(self) -> None:
        """Forget all embeddings."""
        self.batches: dict[str, list[Tensor]] = {}

    def update(
        self,
        queries: Float[Tensor, "n d"],
        labels: Int[Tensor, " n"] | None = None,
        *,
        gallery: Float[Tensor, "m d"] | None = None,
        gallery_labels: Int[Tensor, " m"] | None = None,
        ids: Int[Tensor, " n"] | None = None,
        gallery_ids: Int[Tensor, " m"] | None = None,
    ) -> None:
        """Collect a batch of queries, of rows to search in, or of both; they are copied to the CPU.

        Args:
            queries: embeddings; [0, d] for a batch of the gallery alone.
            labels: one integer per query.
            gallery: rows to search in; if no batch has any, queries search among themselves.
            gallery_labels: one integer per row of the gallery.
            ids: one integer per query; repeated ones count once.
            gallery_ids: one integer per row of the gallery.
        """
        given = {"queries": queries, "labels": labels, "gallery": gallery, "gallery_labels": gallery_labels}
        self._collect(**given, ids=ids, gallery_ids=gallery_ids)

    def update_judgements(self, queries: Tensor, items: Tensor, grades: Tensor) -> None:
        """Collect judgements: ids of queries of this rank, ids of the gallery, and grades, [j] each."""
        self._collect(judged_queries=queries, judged_items=items, grades=grades)

    @uncompiled
    def forward(self, queries: Tensor, labels: Tensor | None = None, **more: Tensor) -> None:
        """Call :meth:`update`."""
        self.update(queries, labels, **more)

    def merge_state(self, other: RetrievalMetrics) -> None:
        """Add what another object of this process has collected."""
        for name, batches in other.batches.items():
            self.batches[name] = self.batches.get(name, []) + batches

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Return the metrics of what all ranks have collected since the last reset, in float64 on the CPU."""
        world = World.of(self.process_group, "RetrievalMetrics")
        tensors = self._collected(world)
        judged, items, grades = (tensors.pop(name, None) for name in ("judged_queries", "judged_items", "grades"))
        judgements = None if judged is None or items is None or grades is None else (judged, items, grades)
        given = Given(**tensors, judgements=judgements, ignore_label=self.ignore_label)
        found = measured("RetrievalMetrics", given, self.names, self.settings, world)
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
        return numbers[self.names[0]] if self.single else numbers

    def _collect(self, **tensors: Tensor | None) -> None:
        for name, x in tensors.items():
            if x is not None:
                if problem := tensor_problem(name, x) or (
                    None if x.ndim else f"{name} have rows, got a single number."
                ):
                    raise ValueError(f"RetrievalMetrics: {problem}")
                self.batches.setdefault(name, []).append(x.detach().to("cpu", copy=True))

    def _collected(self, world: World) -> dict[str, Tensor]:
        """Return the collected rows, and empty ones for what only other ranks have collected."""
        names = [*_ROWS, *_NUMBERS, "grades"]
        own = {name: torch.cat(self.batches[name]) for name in names if name in self.batches}
        rows = own.get("queries", own.get("gallery"))
        kind = [rows.shape[-1], 1 + _DTYPES.index(rows.dtype)] if rows is not None and rows.dtype in _DTYPES else [0, 0]
        by_rank = world.exchange([*kind, *(name in own for name in names)])
        width, dtype = max(x[:2] for x in by_rank)
        empty = torch.empty(0, width, dtype=_DTYPES[max(0, dtype - 1)])
        for name, *known in zip(names, *(x[2:] for x in by_rank), strict=True):
            if name not in own and (any(known) or name == "queries"):
                like = self._empty_of(name, empty)
                own[name] = like
        return own

    @staticmethod
    def _empty_of(name: str, rows: Tensor) -> Tensor:
        if name in _ROWS:
            return rows
        return torch.empty(0, dtype=torch.float32 if name == "grades" else torch.int64)
