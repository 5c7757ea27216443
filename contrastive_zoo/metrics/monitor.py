"""Monitor watches a DistributedLoss: figures of the global batch, the same numbers on every rank."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from contrastive_zoo.metrics.figures import Measurement, Samples, samples_problem, sketch, totals
from contrastive_zoo.ranks.row_checks import is_integer
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.distributed import DistributedLoss

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Monitor:
    """Measure the embeddings that a :class:`DistributedLoss` receives, at every k-th call in training mode.

    All ranks monitor, with equal settings, and get the same figures of the global batch. With s the cosine:

    - ``positive_similarity``, ``negative_similarity``: mean s of pairs; ``…_q5``, ``…_q50``, ``…_q95``: quantiles in
      percent, at most 2^-11 off.
    - ``top1_forward``: share of anchors whose nearest candidate is positive; ties are misses. ``top1_backward``: from the
      second view or encoder to the first.
    - ``alignment``: mean ‖x − y‖² of positive pairs. ``uniformity``: log of the mean exp(−2 ‖x − y‖²) of pairs
      within a view.
    - ``effective_rank``: exp of the entropy of the eigenvalues of ZᵀZ / N.
    - ``variance_min``, ``variance_mean``, ``variance_max``: over the d dimensions of unit embeddings.
    - ``anchors_without_positive``: share of anchors.
    - ``likely_false_negatives``: share of negative pairs above the median of the positive similarities.
    - ``temperature``: of the loss, if it has one.
    - ``encoder_drift``: the largest relative distance of a rank's parameters from rank 0's.

    With two encoders a name begins with the argument's: ``queries/effective_rank``.

    Args:
        loss_fn: a loss of embeddings, [n, d] or [n, views, d], then labels, views or another encoder's embeddings. Those
            are positive pairs by ``ids``, or else by index. With ``labels`` or ``scores`` of pairs there are no figures of
            pairs.
        every: k; the first call is measured.
        encoder: a module whose unsharded parameters are compared between ranks.

    Raises:
        ValueError: no ``DistributedLoss``, or one with a monitor; ``every`` below 1. At a measured call: a first argument
            without embeddings.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
        >>> monitor = cz.Monitor(loss_fn, every=10)
        >>> for step in range(20):
        ...     loss = loss_fn(torch.eye(4), torch.eye(4))
        ...     if figures := monitor.take():
        ...         print(step, figures["top1_forward"])
        0 1.0
        10 1.0

    Source: Wang & Isola 2020, https://arxiv.org/abs/2005.10242; Roy & Vetterli 2007, https://doi.org/10.5281/zenodo.40511
    """

    def __init__(self, loss_fn: DistributedLoss, *, every: int = 50, encoder: nn.Module | None = None) -> None:
        if not isinstance(loss_fn, DistributedLoss):
            raise ValueError(
                f"Monitor: expects a DistributedLoss, got {type(loss_fn).__name__}. Write DistributedLoss(loss), also "
                "for one process."
            )
        if not is_integer(every, at_least=1):
            raise ValueError(f"Monitor: every is a number of calls, at least 1, got {every!r}.")
        self.every, self.encoder = every, encoder
        self.measurement: Measurement | None = None
        self._taken, self._calls, self._loss_fn = True, 0, loss_fn
        loss_fn.observe_with(self)

    @property
    def latest(self) -> dict[str, float]:
        """The figures of the last measured call by name; empty before the first."""
        return {} if self.measurement is None else dict(self.measurement.figures)

    def take(self) -> dict[str, float]:
        """Return :attr:`latest` once after each measured call, otherwise an empty dict: ``if figures := monitor.take()``."""
        fresh, self._taken = not self._taken, True
        return self.latest if fresh else {}

    def plot(self) -> Figure:
        """Return a picture of the last measured call: similarities of pairs, eigenvalues, variance of the dimensions.

        Raises:
            ValueError: no call has been measured.
            ImportError: matplotlib is not installed.
        """
        from contrastive_zoo.metrics.plots import measurement_picture  # matplotlib is an optional dependency

        if self.measurement is None:
            raise ValueError("Monitor: no call has been measured yet. Call the loss in training mode first.")
        return measurement_picture(self.measurement)

    def remove(self) -> None:
        """Stop measuring; the last figures stay. Call it on every rank."""
        self._loss_fn.observe_with(None)

    def compared(self) -> str:
        """Return what must be equal on every rank, as text."""
        return f"{self!r}, call {self._calls}"

    def problem(self, rows: Mapping[str, Tensor]) -> str | None:
        """Return why a call with these arguments cannot be measured, in words; None if it can, or is not due."""
        return None if self._calls % self.every else samples_problem(rows)

    def observe(self, loss: Any, rows: Mapping[str, Tensor], shards: Sequence[Shards], world: World) -> None:
        """Measure a call if it is due. Every rank calls this after the loss, with what all have agreed on."""
        call, self._calls = self._calls, self._calls + 1
        if call % self.every:
            return
        with torch.no_grad():
            samples = Samples.of(rows, shards)
            result = totals(samples, sketch(self.encoder), _temperature(loss), world)
        self.measurement, self._taken = Measurement(call, list(samples.encoders), result), False

    def __repr__(self) -> str:
        with_encoder = "" if self.encoder is None else f", encoder={type(self.encoder).__name__}"
        return f"Monitor(every={self.every}{with_encoder})"

    def __str__(self) -> str:
        """Return the last figures as a table."""
        return repr(self) if self.measurement is None else str(self.measurement)


def _temperature(loss: Any) -> float:
    for module in loss.modules() if isinstance(loss, nn.Module) else ():
        result: Any = getattr(module, "temperature", None)
        if isinstance(result, nn.Module):  # one that takes the logits holds no temperature
            takes = inspect.signature(result.forward).parameters.values()
            result = None if any(x.default is x.empty for x in takes) else result()
        if isinstance(result, (int, float)) or (type(result) in (Tensor, nn.Parameter) and result.numel() == 1):
            return float(result)
    return math.nan
