"""Retrieval metrics that collect embeddings batch by batch."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.measurement import measured
from contrastive_zoo.metrics.ranking import names_problem
from contrastive_zoo.metrics.task import DEFAULT, JUDGED, ROWS, Evaluation
from contrastive_zoo.ranks.row_checks import described
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, World


class RetrievalMetrics:
    """Collect embeddings with ``update``, and return the metrics of all ranks' embeddings with ``compute``.

    Every rank calls ``compute``, which never gathers embeddings.

    Args:
        metrics: names as in :func:`contrastive_zoo.metrics.evaluate`; ``compute`` returns a number if it is one
            name, and numbers by name if it is a list.
        normalize: compare cosines.
        process_group: the ranks.

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
        self, metrics: str | Sequence[str] = DEFAULT, *, normalize: bool = True, process_group: Processes = None
    ) -> None:
        names = [metrics] if isinstance(metrics, str) else metrics
        if (problem := names_problem(names)) is not None:
            raise ValueError(f"RetrievalMetrics: {problem}")
        self.names, self.single = list(names), isinstance(metrics, str)
        self.normalize, self.process_group = normalize, process_group
        self.reset()

    def reset(self) -> None:
        """Forget all embeddings."""
        self.batches: dict[str, list[Tensor]] = {}

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
        batch = inputs.tensors()
        for name, x in batch.items():
            before = self.batches.get(name, [x])[0]
            if x.shape[1:] != before.shape[1:]:
                raise ValueError(
                    f"RetrievalMetrics: {name} are as wide as those of earlier batches, {described(before)}, got "
                    f"{described(x)}. Call reset() between evaluations."
                )
        # of one dtype on every rank, also on one that has collected nothing
        dtypes = {**dict.fromkeys(ROWS, queries.dtype), "grades": torch.float64}
        for name, x in batch.items():
            self.batches.setdefault(name, []).append(x.to("cpu", dtypes.get(name, torch.int64), copy=True))

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Return the metrics of what all ranks have collected since the last reset, in float64 on the CPU.

        Raises:
            ValueError: the same on every rank, what :func:`contrastive_zoo.metrics.evaluate` raises.
        """
        world = World.of(self.process_group, "RetrievalMetrics")
        arguments: dict[str, Any] = {name: torch.cat(batches) for name, batches in self.batches.items()}
        kinds = {name: [str(x.dtype).removeprefix("torch."), *x.shape[1:]] for name, x in arguments.items()}
        for of_rank in world.exchange_text(json.dumps(kinds)):  # what only other ranks have collected is empty here
            for name, (dtype, *shape) in json.loads(of_rank).items():
                arguments.setdefault(name, torch.empty(0, *shape, dtype=getattr(torch, dtype), device="cpu"))
        if not arguments:  # equal on every rank
            raise ValueError(
                "RetrievalMetrics: compute() came before any update(). Call update(embeddings, labels=labels) first."
            )
        if JUDGED[0] in arguments:
            arguments["judgements"] = tuple(arguments.pop(name) for name in JUDGED)
        settings: dict[str, Any] = {"normalize": self.normalize, "process_group": self.process_group}
        result = measured("RetrievalMetrics", Evaluation(**arguments, metrics=self.names, **settings))
        numbers = {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in result.items()}
        return numbers[self.names[0]] if self.single else numbers
