"""Measure distances between embeddings, and sum over positives block by block: the parts that margin losses share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from contrastive_zoo.compiling import traced_as
from contrastive_zoo.engine.dense_mode import dense, is_dense
from contrastive_zoo.engine.masked import READS_COUNTS, masked_indices
from contrastive_zoo.engine.pairwise import dot_products, euclidean
from contrastive_zoo.loss_base.checks import word_problem
from contrastive_zoo.loss_base.row_loss import RowLoss, RowSettings

Metric = Literal["distance", "squared distance", "similarity"]
CountedTerms = Literal["nonzero", "all"]
"""The terms that a mean counts: those with a loss, or all."""


def squared_distances(anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
    """Return ‖a − b‖² of every anchor and candidate; 0, without gradient, of points that rounding does not resolve.

    Examples:
        >>> squared_distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]]))
        tensor([[25.,  0.]])
    """
    return euclidean(anchors, candidates, squared=True)


def distances(anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
    """Return ‖a − b‖ of every anchor and candidate; the gradient at 0 is 0.

    Examples:
        >>> distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]]))
        tensor([[5., 0.]])
    """
    return euclidean(anchors, candidates)


def dissimilarities(anchors: Tensor, candidates: Tensor, metric: Metric) -> Float[Tensor, "c N"]:
    """Return distances, or negative similarities: values that grow as embeddings move apart.

    Examples:
        >>> dissimilarities(torch.eye(2), torch.eye(2), "similarity")
        tensor([[-1.,  0.],
                [ 0., -1.]])
    """
    if metric == "similarity":
        return dot_products(-anchors, candidates)
    return distances(anchors, candidates) if metric == "distance" else squared_distances(anchors, candidates)


def row_sums(*terms: Shaped[Tensor, "c N"]) -> Shaped[Tensor, "c k"]:
    """Return the sums of the rows of k matrices, one column per matrix.

    Examples:
        >>> row_sums(torch.ones(1, 3), torch.ones(1, 2))
        tensor([[3., 2.]])
    """
    return torch.stack([x.sum(1) for x in terms], 1)


@traced_as(lambda *args, **named: READS_COUNTS)
def sum_over_positives(
    term: Callable[[Int[Tensor, "c 1"]], Float[Tensor, " c"]], positive: Bool[Tensor, "c N"], most: int | None = None
) -> Float[Tensor, " c"]:
    """Return Σ over each anchor's positives p of ``term(p)``; a term may make c × N matrices, of which one lives at a time.

    ``term`` is called with the first positive of each anchor, then with the second of each, and so on. The backward
    pass recomputes each term. ``most`` is a number that no anchor's positives exceed; None counts them.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0, 4.0]])
        >>> sum_over_positives(lambda p: x.gather(1, p)[:, 0], torch.tensor([[True, False, True]]))
        tensor([5.])
    """
    columns, present = masked_indices(positive, most)
    if not columns.shape[1]:  # one call of padding alone keeps the sum connected to the graph
        columns, present = columns.new_zeros(len(columns), 1), present.new_zeros(len(present), 1)
    # the mode of the forward pass, wherever backward() is called
    context = partial(_ReentrantContext, dense if is_dense() else nullcontext)
    total: Tensor | float = 0.0
    for column, counts in zip(columns.split(1, dim=1), present.split(1, dim=1), strict=True):
        value: Tensor = checkpoint(
            term, column, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (context(), context())
        )
        total = total + value.where(counts[:, 0], 0)
    assert isinstance(total, Tensor)
    return total


class _ReentrantContext(AbstractContextManager[None]):
    """Enter a new context from ``make`` each time: every order of derivatives recomputes a term in the same mode."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make
        self.entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self.entered.append(self.make())
        self.entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.pop().__exit__(*error)


class MetricLoss(RowLoss):
    """A row loss whose representation shows all settings. Its constructor ends with ``refuse_bad_settings()``."""

    def extra_repr(self) -> str:
        hidden = ("training", "check_finite") if self.check_finite else ("training",)
        shown = {name: x for name, x in vars(self).items() if name[0] != "_" and name not in hidden}
        return ", ".join(f"{name}={x!r}" for name, x in shown.items())


class DissimilarityLoss(MetricLoss):
    """A metric loss whose user chooses the metric.

    Examples:
        >>> DissimilarityLoss(metric="similarity").sign
        -1
    """

    def __init__(self, *, metric: Metric = "distance", **row_settings: Unpack[RowSettings]) -> None:
        super().__init__(**row_settings)
        self.metric = metric

    def settings_problem(self) -> str | None:
        return super().settings_problem() or word_problem("metric", self.metric, Metric, one_of=True)

    @property
    def sign(self) -> int:
        """The factor of margins: −1 for similarities, whose dissimilarity is their negative."""
        return -1 if self.metric == "similarity" else 1

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        """Return dissimilarities by the metric."""
        return dissimilarities(anchors, candidates, self.metric)
