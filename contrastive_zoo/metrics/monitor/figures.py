"""The figures of one measurement, computed from the sums over all ranks when they are first asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.metrics.monitor.sums import BINS, Totals

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
