"""Retrieval metrics that collect embeddings batch by batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.metrics.measurement import measured
from contrastive_zoo.metrics.ranking import Ties, names_problem
from contrastive_zoo.metrics.search import ApproximateIndex
from contrastive_zoo.metrics.task import DEFAULT, JUDGED, NUMBERS, ROWS, Evaluation
from contrastive_zoo.ranks.row_checks import described
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, World

STATES = (*ROWS, *NUMBERS, *JUDGED)  # what is collected, an attribute each
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class RetrievalMetrics(nn.Module):
    """Collect embeddings with ``update``, and return the metrics of all ranks' embeddings with ``compute``.

    Every rank calls ``compute``, which never gathers embeddings. As a torchmetrics metric, for Lightning's ``self.log`` and
    ``MetricCollection``: :class:`contrastive_zoo.adapters.torchmetrics.RetrievalMetric`.

    Args:
        metrics: names as in :func:`contrastive_zoo.metrics.evaluate`; ``compute`` returns a number if it is one
            name, and numbers by name if it is a list. The other arguments are those of that function, too.

    Raises:
        ValueError: an unknown metric. ``compute`` raises what :func:`contrastive_zoo.metrics.evaluate` raises.

    Examples:
        >>> metric = RetrievalMetrics("map@r")
        >>> metric.update(torch.eye(2), labels=torch.tensor([0, 1]))
        >>> metric.update(torch.eye(2), labels=torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
        >>> metric.reset()
    """

    process_group = ProcessGroupAttribute()

    def __init__(
        self,
        metrics: str | Sequence[str] = DEFAULT,
        *,
        ignore_label: int | None = None,
        ties: Ties = "pessimistic",
        normalize: bool = True,
        index: ApproximateIndex | None = None,
        process_group: Processes = None,
    ) -> None:
        super().__init__()
        names = [metrics] if isinstance(metrics, str) else metrics
        if (problem := names_problem(names)) is not None:
            raise ValueError(f"RetrievalMetrics: {problem}")
        self.names, self.single, self.process_group = list(names), isinstance(metrics, str), process_group
        self.settings: dict[str, Any] = {"metrics": self.names, "ignore_label": ignore_label}
        self.settings |= {"ties": ties, "normalize": normalize, "index": index}
        self.reset()

    def reset(self) -> None:
        """Forget all embeddings."""
        for name in STATES:
            setattr(self, name, [])

    @property
    def batches(self) -> dict[str, list[Tensor]]:
        """What has been collected, batch by batch."""
        return {name: of_name for name in STATES if (of_name := getattr(self, name))}

    @torch.no_grad()
    def update(
        self,
        queries: Float[Tensor, "n d"],
        labels: Int[Tensor, " n"] | None = None,
        *,
        gallery: Float[Tensor, "m d"] | None = None,
        gallery_labels: Int[Tensor, " m"] | None = None,
        ids: Int[Tensor, " n"] | None = None,
        gallery_ids: Int[Tensor, " m"] | None = None,
        judgements: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Copy a batch of queries, [0, d] for none, and of embeddings to search in to the CPU.

        The arguments are those of :func:`contrastive_zoo.metrics.evaluate`.

        Raises:
            ValueError: on this rank: embeddings of another width than earlier ones, or arguments that do not belong
                together. Nothing is stored then.
        """
        inputs = Evaluation(queries, gallery, (), labels, gallery_labels, judgements, ids, gallery_ids)
        if (problem := inputs.shapes_problem()) is not None:
            raise ValueError(f"RetrievalMetrics: {problem}")
        # of one dtype on every rank, also on one that has collected nothing
        dtypes = {**dict.fromkeys(ROWS, queries.dtype), "grades": torch.float64}
        batch = inputs.tensors().items()
        self._store({name: [x.to("cpu", dtypes.get(name, torch.int64), copy=True)] for name, x in batch})

    def forward(self, queries: Tensor, labels: Tensor | None = None, **more: Any) -> None:
        """Call :meth:`update`."""
        self.update(queries, labels, **more)

    def merge_state(self, other: "RetrievalMetrics | dict[str, list[Tensor]]") -> None:
        """Add what another object of this process has collected, or its ``batches``.

        Raises:
            ValueError: the other one has collected embeddings of another width, or is something else.
        """
        batches = other.batches if isinstance(other, RetrievalMetrics) else other
        if not (isinstance(batches, dict) and batches.keys() <= {*STATES}):
            raise ValueError(f"RetrievalMetrics: metrics of the same kind are merged, got {described(other)}.")
        self._store(batches)

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Return the metrics of what all ranks have collected since the last reset, in float64 on the CPU.

        Raises:
            ValueError: on every rank alike, what :func:`contrastive_zoo.metrics.evaluate` raises.
        """
        world = World.of(self.process_group, "RetrievalMetrics")
        if not any(x for (x,) in world.exchange([len(self.batches)])):  # equal on every rank
            raise ValueError(
                "RetrievalMetrics: compute() came before any update(). Call update(embeddings, labels=labels) first."
            )
        arguments: dict[str, Any] = {**self._collected(world), **self.settings}
        if JUDGED[0] in arguments:
            arguments["judgements"] = tuple(arguments.pop(name) for name in JUDGED)
        result = measured("RetrievalMetrics", Evaluation(**arguments, process_group=self.process_group))
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in result.items()}
        return numbers[self.names[0]] if self.single else numbers

    def _store(self, batches: Mapping[str, list[Tensor]]) -> None:
        """Store batches, or none of them if one has another width."""
        for name, before in self.batches.items():
            if different := [x for x in batches.get(name, ()) if x.shape[1:] != before[0].shape[1:]]:
                raise ValueError(
                    f"RetrievalMetrics: {name} are as wide as those of earlier batches, {described(before[0])}, got "
                    f"{described(different[0])}. Call reset() between evaluations."
                )
        for name, of_name in batches.items():
            getattr(self, name).extend(of_name)

    def _collected(self, world: World) -> dict[str, Tensor]:
        """Return the collected embeddings, and empty ones for what only other ranks have collected."""
        tensors = {name: torch.cat([x.cpu() for x in of_name]) for name, of_name in self.batches.items()}
        rows = tensors.get("queries", tensors.get("gallery"))
        like = [rows.shape[-1], 1 + _DTYPES.index(rows.dtype)] if rows is not None and rows.dtype in _DTYPES else [0, 0]
        by_rank = world.exchange([*like, *(name in tensors for name in STATES)])
        width, dtype = max(x[:2] for x in by_rank)
        empty = torch.empty(0, width, dtype=_DTYPES[max(0, dtype - 1)])
        for name, *known in zip(STATES, *(x[2:] for x in by_rank), strict=True):
            if name not in tensors and (any(known) or name == "queries"):
                numbers = torch.empty(0, dtype=torch.float64 if name == "grades" else torch.int64)
                tensors[name] = empty if name in ROWS else numbers
        return tensors
