"""The picture of one measurement."""

from typing import Any

from matplotlib.figure import Figure

from contrastive_zoo.monitor.figures import Measurement
from contrastive_zoo.monitor.pairs import BINS
from contrastive_zoo.plots import DARK, PALE, RIGHT, TEN, WRONG, styled_figure

_JOINED = 16
"""Bins that are drawn as one."""


def picture(measurement: Measurement) -> Figure:
    """Draw the similarities of positive and negative pairs, the eigenvalues of ZᵀZ / N and the variance of each dimension.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
        >>> monitor = cz.Monitor(loss_fn)
        >>> _ = loss_fn(torch.eye(4), torch.eye(4))
        >>> [axis.get_xlabel() for axis in monitor.plot().axes]
        ['cosine', 'eigenvalue, largest first', 'dimension, sorted']
    """
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
    """Draw the density of positive and negative similarities on an axis."""
    edges = [2 * k / (BINS // _JOINED) - 1 for k in range(BINS // _JOINED + 1)]
    for counts, name, colour in zip(measurement.counts(), ("positive", "negative"), (RIGHT, WRONG), strict=True):
        joined = [sum(counts[k : k + _JOINED]) for k in range(0, BINS, _JOINED)]
        density = [x * BINS / _JOINED / 2 / max(1, sum(counts)) for x in joined]
        axis.stairs(density, edges, fill=True, alpha=0.35, color=colour)
        axis.stairs(density, edges, color=colour, lw=1.6, label=name)
    axis.set(xlabel="cosine", ylabel="density", title="Similarity of pairs", xlim=(-1, 1))
    axis.legend(loc="upper left")
