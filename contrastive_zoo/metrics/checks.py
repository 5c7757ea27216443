"""The arguments of an evaluation: what belongs together, agreed on by all ranks before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from contrastive_zoo.metrics.faiss_search import ApproximateIndex, faiss_problem
from contrastive_zoo.metrics.names import KNN, Metric, names_problem
from contrastive_zoo.metrics.ranking_metrics import Ties
from contrastive_zoo.metrics.search import rows_problem, settings_problem
from contrastive_zoo.ranks.row_checks import described, is_integer, labels_problem, tensor_problem
from contrastive_zoo.ranks.session import agree_on_shards
from contrastive_zoo.ranks.world import Shards, World


class EvaluationInputs(NamedTuple):
    """The rows of one rank and what is known about them; see :func:`contrastive_zoo.metrics.evaluate`."""

    queries: Tensor
    gallery: Tensor | None = None
    labels: Tensor | None = None
    gallery_labels: Tensor | None = None
    judgements: tuple[Tensor, Tensor, Tensor] | None = None
    ids: Tensor | None = None
    gallery_ids: Tensor | None = None
    ignore_label: int | None = None

    @property
    def rows(self) -> Tensor:
        """The rows to search in."""
        return self.queries if self.gallery is None else self.gallery

    @property
    def partners(self) -> bool:
        """Whether relevant is the row with the same index."""
        return self.labels is None and self.judgements is None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        result = {"queries": self.queries, "gallery": self.rows}
        for name in ("labels", "gallery_labels", "ids", "gallery_ids"):
            if (x := getattr(self, name)) is not None:
                result[name] = x
        if isinstance(self.judgements, (list, tuple)) and len(self.judgements) == 3:
            result |= zip(("judged queries", "judged items", "grades"), self.judgements, strict=True)
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in result.items()}

    def problem(self) -> str | None:
        """Return why the arguments do not belong together, in words; None if they do."""
        if (problem := rows_problem(self.queries, self.rows)) is not None:
            return problem
        for name, rows in (("labels", self.queries), ("ids", self.queries)):
            for prefix, of in (("", rows), ("gallery_", self.gallery)):
                x = getattr(self, prefix + name)
                if x is not None and of is None:
                    return (
                        f"{prefix}{name} belong to a gallery, got none. Rows that search among themselves have {name}."
                    )
                if x is not None and of is not None and (problem := labels_problem(prefix + name, x, len(of))):
                    return problem
        if self.gallery is None and self.partners:
            return "rows that search among themselves need labels or judgements."
        if self.gallery is not None and (self.labels is None) != (self.gallery_labels is None):
            return "labels and gallery_labels come together; without them, partners have the same index."
        if self.ignore_label is not None and self.labels is None:
            return "ignore_label needs labels."
        if not (self.ignore_label is None or is_integer(self.ignore_label, at_least=-(2**63), at_most=2**63 - 1)):
            return f"ignore_label is an integer of 64 bits or None, got {described(self.ignore_label)}."
        return self._judgements_problem()

    def _judgements_problem(self) -> str | None:
        if self.judgements is None:
            return None
        if self.labels is not None:
            return "relevant is what has the same label or what is judged: pass labels or judgements, not both."
        if self.ids is None or (self.gallery is not None and self.gallery_ids is None):
            return "judgements name rows by id: pass ids and gallery_ids."
        if not isinstance(self.judgements, (list, tuple)) or len(self.judgements) != 3:
            return f"judgements are query ids, gallery ids and grades, three tensors, got {described(self.judgements)}."
        query, item, grade = self.judgements
        for name, x in zip(("judged queries", "judged items", "grades"), self.judgements, strict=True):
            if problem := tensor_problem(name, x):
                return problem
        if not (query.ndim == 1 and query.shape == item.shape == grade.shape):
            shapes = ", ".join(described(x) for x in self.judgements)
            return f"judgements are query ids [j], gallery ids [j] and grades [j], got {shapes}."
        if query.is_floating_point() or item.is_floating_point():
            return f"judgements name integer ids, got {described(query)} and {described(item)}."
        query, item = query.cpu(), item.cpu()  # they may come from the data set, and ids from the model
        if bool((unknown := ~torch.isin(query, self.ids.cpu())).any()):
            return f"judgements name query {query[unknown][0].item()}, which is not in ids of this rank."
        if len(torch.stack([query, item]).unique(dim=1).T) < len(query):
            return "judgements name a pair twice. Keep one grade of each query and item."
        return None


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation, equal on every rank; see :func:`contrastive_zoo.metrics.evaluate`."""

    ties: Ties = "pessimistic"
    normalize: bool = True
    index: ApproximateIndex | None = None

    def problem(self, metrics: Sequence[Metric]) -> str | None:
        """Return why these metrics cannot have these settings, in words; None if they can."""
        if problem := settings_problem(normalize=self.normalize, index=self.index):
            return problem
        if not (isinstance(self.ties, str) and self.ties in get_args(Ties)):
            return f"ties are 'pessimistic', 'optimistic' or 'expected', got {self.ties!r}."
        if self.index is not None and (whole := [x.name for x in metrics if x.whole]):
            return f"{', '.join(whole)} needs all positions, which an approximate index does not find. Pass index=None."
        return None


def agreed(
    caller: str, inputs: EvaluationInputs, names: Sequence[str], settings: Settings, world: World
) -> tuple[Shards, Shards]:
    """Agree with all ranks on the arguments; return how queries and gallery are split over ranks.

    Raises:
        ValueError: on every rank alike, if the arguments of any rank do not belong together, if faiss is not
            installed, or if ranks disagree.
    """
    problem = faiss_problem() or names_problem(names) or inputs.problem()
    if problem is None:
        wanted = [metric for name in names if (metric := Metric.of(name))]
        problem = settings.problem(wanted)
        if inputs.judgements is not None and any(x.kind == KNN for x in wanted):
            problem = "knn_accuracy needs labels, got judgements."
    compared = {"metrics": names, **vars(settings), "ignore_label": inputs.ignore_label}
    compared["leave one out"] = inputs.gallery is None
    queries, gallery, *_ = agree_on_shards(caller, inputs.tensors(), world=world, problem=problem, settings=compared)
    if inputs.partners and queries.total != gallery.total:
        raise ValueError(
            f"{caller}: without labels row i of the gallery is query i's partner, got {queries.total} queries and "
            f"{gallery.total} rows on all ranks."
        )
    return queries, gallery
