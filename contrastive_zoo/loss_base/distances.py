"""How far rows are apart, and what losses of margins make of it, panel by panel."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from contrastive_zoo.engine import passes
from contrastive_zoo.engine.dense_mode import dense, is_dense
from contrastive_zoo.engine.passes import dot_products, euclidean, marked_columns
from contrastive_zoo.loss_base.checks import word_problem
from contrastive_zoo.loss_base.row_loss import RowLoss, RowSettings

Metric = Literal["distance", "squared distance", "similarity"]
Average = Literal["nonzero", "all"]


def squared_distances(anchors: Float[Tensor, "c d"], columns: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
    """‖a − b‖² of every anchor and column; 0, without gradient, of rows that rounding cannot tell apart.

    Example:
        >>> squared_distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]]))
        tensor([[25.,  0.]])
    """
    return euclidean(anchors, columns, squared=True)


def distances(anchors: Float[Tensor, "c d"], columns: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
    """‖a − b‖ of every anchor and column; the gradient at 0 is 0.

    Example:
        >>> distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]]))
        tensor([[5., 0.]])
    """
    return euclidean(anchors, columns)


def farness(anchors: Tensor, columns: Tensor, metric: Metric) -> Float[Tensor, "c N"]:
    """What grows as rows move apart: a distance, or minus the similarity.

    Example:
        >>> farness(torch.eye(2), torch.eye(2), "similarity")
        tensor([[-1.,  0.],
                [ 0., -1.]])
    """
    if metric == "similarity":
        return dot_products(-anchors, columns)
    return distances(anchors, columns) if metric == "distance" else squared_distances(anchors, columns)


def log1p_sum_exp(x: Float[Tensor, "c N"], where: Bool[Tensor, "c N"]) -> Float[Tensor, " c"]:
    """log(1 + Σ exp x) over the marked columns of each row.

    Example:
        >>> log1p_sum_exp(torch.zeros(1, 3), torch.tensor([[True, True, False]]))   # log 3
        tensor([1.0986])
    """
    found = passes.log_sum_exp(x, where)
    return torch.logaddexp(found, torch.zeros_like(found))


def log_sum_exp(x: Float[Tensor, "c N"], where: Bool[Tensor, "c N"]) -> Float[Tensor, " c"]:
    """log Σ exp x over the marked columns of each row; 0 where none is marked.

    Example:
        >>> log_sum_exp(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
        tensor([0.6931, 0.0000])
    """
    found = passes.log_sum_exp(x, where)
    return found.masked_fill(found == -torch.inf, 0)


def row_sums(*terms: Shaped[Tensor, "c N"]) -> Shaped[Tensor, "c k"]:
    """Of each of k terms the sum of each row, as columns.

    Example:
        >>> row_sums(torch.ones(1, 3), torch.ones(1, 2))
        tensor([[3., 2.]])
    """
    return torch.stack([x.sum(1) for x in terms], 1)


def sum_over_positives(
    term: Callable[[Int[Tensor, "c 1"]], Float[Tensor, " c"]], positive: Bool[Tensor, "c N"]
) -> Float[Tensor, " c"]:
    """Σ over each anchor's positives p of ``term(p)``, which may make c × N matrices: one lives at a time.

    Each anchor's first positive, each one's second, and so on; what a term needs again in the backward pass is computed
    again.

    Example:
        >>> x = torch.tensor([[1.0, 2.0, 4.0]])
        >>> sum_over_positives(lambda p: x.gather(1, p)[:, 0], torch.tensor([[True, False, True]]))
        tensor([5.])
    """
    columns, there = marked_columns(positive)
    if not columns.shape[1]:  # the sum still hangs in the graph
        columns, there = columns.new_zeros(len(columns), 1), there.new_zeros(len(there), 1)
    way = partial(_Anew, dense if is_dense() else nullcontext)  # the same again, wherever backward is called
    total: Tensor | float = 0.0
    for column, counts in zip(columns.split(1, dim=1), there.split(1, dim=1), strict=True):
        value: Tensor = checkpoint(
            term, column, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (way(), way())
        )
        total = total + value.where(counts[:, 0], 0)
    assert isinstance(total, Tensor)
    return total


class _Anew(AbstractContextManager[None]):
    """What ``make`` gives, anew at each entry: each order of derivatives computes a term again in the same context."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make
        self.entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self.entered.append(self.make())
        self.entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.pop().__exit__(*error)


class MetricLoss(RowLoss):
    """A row loss whose settings are numbers and words, and shown. Its constructor ends with ``refuse_bad_settings()``."""

    def extra_repr(self) -> str:
        hidden = ("training", "check_finite") if self.check_finite else ("training",)
        shown = {name: x for name, x in vars(self).items() if name[0] != "_" and name not in hidden}
        return ", ".join(f"{name}={x!r}" for name, x in shown.items())


class FarnessLoss(MetricLoss):
    """A metric loss that is told how to measure how far rows are apart.

    Example:
        >>> FarnessLoss(metric="similarity").sign
        -1
    """

    def __init__(self, *, metric: Metric = "distance", **kept: Unpack[RowSettings]) -> None:
        super().__init__(**kept)
        self.metric = metric

    def settings_problem(self) -> str | None:
        return super().settings_problem() or word_problem("metric", self.metric, Metric, one_of=True)

    @property
    def sign(self) -> int:
        """What margins are multiplied by: similarities are farness's negative."""
        return -1 if self.metric == "similarity" else 1

    def similarity(self, anchors: Tensor, columns: Tensor) -> Tensor:
        """How far apart, by the metric."""
        return farness(anchors, columns, self.metric)
