"""The figures of one measurement as a table and as a picture."""

from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from contrastive_zoo.metrics.monitor.figures import Measurement
from contrastive_zoo.metrics.plots import DARK, PALE, RIGHT, TEN, WRONG, draw_density, styled_figure

_JOINED = 16  # bins that are drawn as one


def picture(measurement: Measurement) -> Figure:
    """Draw the similarities of pairs, the eigenvalues of ZᵀZ / N and the variance of each dimension."""
    with styled_figure(1, 3, figsize=(13.0, 3.6)) as (figure, axes):
        draw_similarities(axes[0], measurement)
        for colour, encoder in zip((DARK, *TEN), measurement.encoders, strict=False):
            spectrum, variance = measurement.spectrum(encoder), measurement.variance(encoder).sort(descending=True)[0]
            d = len(variance)
            label = encoder if len(measurement.encoders) > 1 else None
            axes[1].plot(range(1, d + 1), spectrum.clamp(min=1e-12).tolist(), color=colour, lw=1.8, label=label)
            axes[2].plot(range(1, d + 1), variance.clamp(min=1e-12).tolist(), color=colour, lw=1.8, label=label)
        for axis in axes[1:]:
            axis.axhline(1 / d, color=PALE, lw=4, alpha=0.7, zorder=0)
            axis.set(yscale="log", ylim=(1e-9, 2))
            if len(measurement.encoders) > 1:
                axis.legend()
        axes[1].set(xlabel="eigenvalue, largest first", title="Eigenvalues of ZᵀZ / N; pale: 1 / d")
        axes[2].set(xlabel="dimension, sorted", title="Variance of dimensions")
    return figure


def draw_similarities(axis: Any, measurement: Measurement) -> None:
    for counts, name, colour in zip(measurement.counts(), ("positive", "negative"), (RIGHT, WRONG), strict=True):
        draw_density(axis, torch.tensor(counts).view(-1, _JOINED).sum(1), name, colour)


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


def table(measurement: Measurement) -> str:
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
    result = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    result.add_column(f"call {measurement.call}")
    result.add_column("value", justify="right")
    result.add_column("meaning")
    for name, value in measurement.figures.items():
        plain, _, quantile = name.rpartition("/")[2].partition("_q")
        meaning = f"{quantile} % quantile" if quantile else _MEANINGS[plain]
        result.add_row(name, f"{value:.4g}", meaning)
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(result)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
