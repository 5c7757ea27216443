"""Monitor watches a DistributedLoss: figures of the global batch, the same numbers on every rank.

The figures of a measurement are computed from the sums over all ranks when they are first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from contrastive_zoo.metrics.sums import BINS, Samples, Totals, samples_problem, sketch, totals
from contrastive_zoo.ranks.row_checks import described, is_integer
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.distributed import DistributedLoss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEANINGS = {
    "positive_similarity": "mean cosine of positive pairs",
    "negative_similarity": "mean cosine of negative pairs",
    "top1_forward": "anchors whose nearest candidate is positive",
    "top1_backward": "the same from the second view or encoder to the first",
    "anchors_without_positive": "share of anchors",
    "likely_false_negatives": "negative pairs as similar as positive ones",
    "alignment": "mean squared distance of positive pairs",
    "uniformity": "log mean Gaussian potential; lower is more uniform",
    "effective_rank": "dimensions in use",
    "variance_min": "smallest variance of a dimension",
    "variance_mean": "mean variance; 1 / d if nothing has collapsed",
    "variance_max": "largest variance of a dimension",
    "temperature": "of the loss",
    "loss_drift": "distance of a rank's parameters from rank 0's",
    "encoder_drift": "distance of a rank's parameters from rank 0's",
}


@dataclass(frozen=True)
class Measurement:
    """The sums of one call, and the figures that follow from them; see :class:`contrastive_zoo.Monitor`.

    Args:
        call: the call that was measured, counted from 0.
        encoders: names of the encoders.
        totals: sums over all ranks.
        quantiles: the quantiles of similarities.
        false_negative_quantile: of positive similarities; a negative at or above it is a likely false negative.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent())
        >>> monitor, value = cz.Monitor(loss_fn), loss_fn(torch.eye(2), torch.eye(2))
        >>> monitor.measurement.spectrum("embeddings")   # of ZᵀZ / N = I / 2
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    call: int
    encoders: Sequence[str]
    totals: Totals
    quantiles: Sequence[float]
    false_negative_quantile: float

    @cached_property
    def figures(self) -> dict[str, float]:
        """Every figure as a plain float, NaN where it is not defined."""
        return {**self._of_pairs(), **self._of_encoders(), **self._of_parameters()}

    def __str__(self) -> str:
        """Return the figures with their meaning, one a line.

        Examples:
            >>> import torch, contrastive_zoo as cz
            >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
            >>> monitor = cz.Monitor(loss_fn)
            >>> _ = loss_fn(torch.eye(4), torch.eye(4))
            >>> print(monitor)
            call 0                        value  meaning
            positive_similarity               1  mean cosine of positive pairs
            positive_similarity_q5       0.9995  5 % quantile
            ...
            temperature                     0.1  of the loss
        """
        rows = [(f"call {self.call}", "value", "meaning")]
        for name, value in self.figures.items():
            plain, _, quantile = name.rpartition("/")[2].partition("_q")
            rows.append((name, f"{value:.4g}", f"{quantile} % quantile" if quantile else _MEANINGS[plain]))
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{name:<{first}}  {value:>{second}}  {meaning}" for name, value, meaning in rows)

    def counts(self) -> Tensor:
        """Return the numbers of positive and of negative pairs in each of the 2,048 bins between −1 and 1, [2, 2048]."""
        return self.totals["counts"].view(2, BINS).cpu() if "counts" in self.totals else torch.zeros(2, BINS)

    def spectrum(self, encoder: str) -> Tensor:
        """Return the eigenvalues of ZᵀZ / N in descending order, [d] on the CPU; NaN if some embedding is not finite."""
        moments = (self.totals[f"{encoder} moments"] / self.totals[f"{encoder} rows"]).cpu()
        if not bool(moments.isfinite().all()):
            return torch.full_like(moments[0], math.nan)
        return torch.linalg.eigvalsh(moments).clamp(min=0).flip(0)

    def variance(self, encoder: str) -> Tensor:
        """Return the variance of each dimension of the unit embeddings, [d] on the CPU."""
        count = self.totals[f"{encoder} rows"]
        mean = self.totals[f"{encoder} sum"] / count
        return (self.totals[f"{encoder} moments"].diagonal() / count - mean**2).clamp(min=0).cpu()

    def _of_pairs(self) -> dict[str, float]:
        if "counts" not in self.totals:
            return {}
        result: dict[str, float] = {}
        counts = self.counts()
        sums = self.totals["sums"].tolist()
        for kind, of_kind, total in zip(("positive", "negative"), counts, sums, strict=True):
            result[f"{kind}_similarity"] = _ratio(total, of_kind.sum().item())
            for q in self.quantiles:
                index = _quantile_bin(of_kind, q)
                result[f"{kind}_similarity_q{100 * q:g}"] = math.nan if index is None else (index + 0.5) * 2 / BINS - 1
        anchors, without = self.totals["anchors"].item(), self.totals["without_positive"].item()
        forward = _ratio(self.totals["hits"].item(), anchors - without)
        result["top1_forward"] = result["top1_backward"] = forward
        if len(beaten := self.totals["beaten"]):
            result["top1_backward"] = _ratio((beaten == 0).sum().item(), anchors)
        result["anchors_without_positive"] = _ratio(without, anchors)
        bound = _quantile_bin(counts[0], self.false_negative_quantile)
        above = math.nan if bound is None else counts[1][bound:].sum().item()
        result["likely_false_negatives"] = _ratio(above, counts[1].sum().item())
        result["alignment"] = 2 - 2 * result["positive_similarity"]
        return result

    def _of_encoders(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for encoder in self.encoders:
            prefix = f"{encoder}/" if len(self.encoders) > 1 else ""
            mean = _ratio(self.totals[f"{encoder} potential"].item(), self.totals[f"{encoder} ordered pairs"].item())
            result[f"{prefix}uniformity"] = math.log(mean) if mean > 0 else math.nan
            result[f"{prefix}effective_rank"] = effective_rank(self.spectrum(encoder))
            variance = self.variance(encoder)
            for name, x in (("min", variance.min()), ("mean", variance.mean()), ("max", variance.max())):
                result[f"{prefix}variance_{name}"] = x.item()
        return result

    def _of_parameters(self) -> dict[str, float]:
        temperature = self.totals["temperature"].item()
        result = {} if math.isnan(temperature) else {"temperature": temperature}
        for name, x in self.totals.items():
            if name.endswith(" sketch") and bool((sketches := x.cpu()).any()):
                distance, norm = vector_norm(sketches - sketches[0], dim=1).max(), vector_norm(sketches[0])
                result[f"{name.removesuffix(' sketch')}_drift"] = distance.item() / norm.clamp(min=1e-300).item()
        return result


def effective_rank(eigenvalues: Tensor) -> float:
    """Return exp(−Σ pᵢ log pᵢ) with p the eigenvalues divided by their sum; NaN without a positive one.

    Source: Roy & Vetterli 2007, https://doi.org/10.5281/zenodo.40511
    """
    total = eigenvalues.sum().item()
    return torch.special.entr(eigenvalues / total).sum().exp().item() if total > 0 else math.nan


def _quantile_bin(counts: Tensor, q: float) -> int | None:
    """Return the bin of the smallest similarity that at least a share q of all does not exceed; None without any."""
    total = counts.sum().item()
    wanted = max(1, math.ceil(q * total - 1e-9))  # 0.05 · 20 is a little more than 1 in binary
    return int(torch.searchsorted(counts.cumsum(0), wanted).item()) if total else None


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


class Monitor:
    """Measure the embeddings that a :class:`DistributedLoss` receives, at every k-th call in training mode.

    The figures are those of the global batch, not of a rank: the same numbers on every rank, and for every split of the
    samples over ranks, uneven and empty shards included. Value, gradients and random numbers of the loss do not change.
    A measured call gathers the embeddings in rounds, compares them block by block, never N × N at once, and adds up one
    message. Every rank monitors, with equal settings; otherwise the call raises on all of them.

    With s the cosine of two embeddings. Partners are the other view of a sample, the embedding of the other encoder
    with the same index, or, with labels, the other embeddings of the same class; all other compared pairs are negative.
    Views are compared with each other, not within themselves.

    - ``positive_similarity``, ``negative_similarity``: mean s of all positive and of all negative pairs; ``…_q5``:
      quantiles, the smallest s that at least 5 % do not exceed. They are counted in 2,048 bins between −1 and 1, so a
      quantile is at most 2^-11 off, and the same bits for every split.
    - ``top1_forward``: share of anchors whose nearest candidate is positive; ties count as misses, and anchors without a
      positive do not count. ``top1_backward``: the same from the second view or encoder to the first.
    - ``alignment``: mean ‖x − y‖² of positive pairs. ``uniformity``: log of the mean exp(−2 ‖x − y‖²) of all pairs of
      different embeddings of one view.
    - ``effective_rank``: exp of the entropy of the eigenvalues of ZᵀZ / N, from 1 to min(N, d).
    - ``variance_min``, ``variance_mean``, ``variance_max``: over the d dimensions of unit embeddings; the mean is at most
      1 / d.
    - ``anchors_without_positive``: share of anchors.
    - ``likely_false_negatives``: share of negative pairs in or above the bin of a quantile of the positive similarities.
    - ``temperature``: of the loss, if it has one.
    - ``loss_drift``, ``encoder_drift``: the largest distance of a rank's parameters from rank 0's, relative to their norm;
      0 if they are the same bits, otherwise estimated from 64 numbers of each rank.

    With two encoders, names of the figures of one begin with the name of its argument, as in ``queries/effective_rank``.

    Args:
        loss_fn: the loss. The first argument of its calls is embeddings, [n, d] or [n, views, d]; integers behind it are
            labels; arguments named ``view…`` are views; a second argument [n, d] is another encoder's. Others are ignored.
        every: k; the first call is measured. Calls in eval mode do not count.
        encoder: a module whose parameters are compared between ranks, besides the loss's. Sharded parameters and buffers,
            such as running means of BatchNorm, are left out.
        quantiles: of the similarities, each above 0 and at most 1.
        false_negative_quantile: of the positive similarities; 0.5 counts the negative pairs that are as similar as half of
            the positive pairs.

    Raises:
        ValueError: a loss that is no ``DistributedLoss`` or has a monitor already; ``every`` below 1; a quantile outside
            of (0, 1]. At a measured call: a first argument that holds no embeddings.

    Examples:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
        >>> monitor = cz.Monitor(loss_fn, every=10)
        >>> for step in range(20):
        ...     loss = loss_fn(torch.eye(4), torch.eye(4))
        ...     if figures := monitor.take():
        ...         print(step, figures["positive_similarity"], figures["top1_forward"], round(figures["effective_rank"], 3))
        0 1.0 1.0 4.0
        10 1.0 1.0 4.0

    Source: Wang & Isola 2020 (alignment, uniformity), https://arxiv.org/abs/2005.10242; Roy & Vetterli 2007 (effective
    rank), https://doi.org/10.5281/zenodo.40511
    """

    def __init__(
        self,
        loss_fn: DistributedLoss,
        *,
        every: int = 50,
        encoder: nn.Module | None = None,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
        false_negative_quantile: float = 0.5,
    ) -> None:
        if not isinstance(loss_fn, DistributedLoss):
            raise ValueError(
                f"Monitor: a DistributedLoss is monitored, got {type(loss_fn).__name__}. Write DistributedLoss(loss), also "
                "for one process."
            )
        if not is_integer(every, at_least=1):
            raise ValueError(f"Monitor: every is a number of calls, at least 1, got {every!r}.")
        for q in (*quantiles, false_negative_quantile):
            if not (isinstance(q, (int, float)) and 0 < q <= 1):
                raise ValueError(f"Monitor: quantiles are above 0 and at most 1, got {q!r}. For 5 % pass 0.05.")
        self.every, self.encoder = every, encoder
        self.quantiles, self.false_negative_quantile = tuple(quantiles), false_negative_quantile
        self.measurement: Measurement | None = None
        self._taken = True
        self._calls = 0
        self._loss_fn = loss_fn
        loss_fn.observe_with(self)

    @property
    def latest(self) -> dict[str, float]:
        """The figures of the last measured call by name; empty before the first."""
        return {} if self.measurement is None else dict(self.measurement.figures)

    def take(self) -> dict[str, float]:
        """Return :attr:`latest` once after each measured call, otherwise an empty dict: ``if figures := monitor.take()``."""
        if self._taken:
            return {}
        self._taken = True
        return self.latest

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

    def state_dict(self) -> dict[str, Any]:
        """Return the number of calls, so that a resumed run measures the same ones."""
        return {"calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; load it on every rank.

        Raises:
            ValueError: no number of calls; the present one is kept.
        """
        calls = state.get("calls") if isinstance(state, Mapping) else None
        if calls is None or not is_integer(calls, at_least=0):
            raise ValueError(
                f"Monitor: a state has the number of calls, such as {{'calls': 0}}, got {described(state)}."
            )
        self._calls = int(calls)

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
            modules = {"loss": loss if isinstance(loss, nn.Module) else None, "encoder": self.encoder}
            sketches = {name: sketch(module) for name, module in modules.items()}
            result = totals(samples, sketches, _temperature(loss), world)
        settings = self.quantiles, self.false_negative_quantile
        self.measurement = Measurement(call, list(samples.encoders), result, *settings)
        self._taken = False

    def __repr__(self) -> str:
        with_encoder = "" if self.encoder is None else f"encoder={type(self.encoder).__name__}, "
        return (
            f"Monitor(every={self.every}, {with_encoder}quantiles={self.quantiles}, "
            f"false_negative_quantile={self.false_negative_quantile})"
        )

    def __str__(self) -> str:
        """Return the last figures as a table."""
        return repr(self) if self.measurement is None else str(self.measurement)


def _temperature(loss: Any) -> float:
    """Return the temperature of the first module that has one; NaN if none has."""
    for module in loss.modules() if isinstance(loss, nn.Module) else ():
        result: Any = getattr(module, "temperature", None)
        result = result() if isinstance(result, nn.Module) else result
        if isinstance(result, (int, float)) or (type(result) in (Tensor, nn.Parameter) and result.numel() == 1):
            return float(result)
    return math.nan
