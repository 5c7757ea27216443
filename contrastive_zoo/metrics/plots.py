"""Pictures of embeddings, each one call that returns a matplotlib Figure; ``pip install 'contrastive_zoo[plot]'``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.figures import Measurement, pair_sums, unit
from contrastive_zoo.metrics.task import Evaluation
from contrastive_zoo.ranks.row_checks import described, first_non_finite, is_integer
from contrastive_zoo.ranks.session import agree
from contrastive_zoo.ranks.suggestions import needed
from contrastive_zoo.ranks.world import Processes, World

with needed("contrastive_zoo.metrics.plots", "contrastive_zoo[plot]"):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

# Paul Tol's colours, distinguishable with any colour vision: https://personal.sron.nl/~pault/
PALE, DARK = "#77AADD", "#0B2545"
RIGHT, WRONG = "#009988", "#CC3311"
TEN = ("#332288", "#3399CC", "#44AA99", "#117733", "#999933", "#DDAA33", "#CC6677", "#882255", "#AA4499", "#777777")
INK = "#333333"
STYLE: Any = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)
STYLE |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 12, "font.size": 11, "legend.handlelength": 3}
STYLE |= {"figure.dpi": 160}

_JOINED = 16  # bins of a measurement that are drawn as one


@torch.no_grad()
def similarity_histogram(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"] | None = None,
    *,
    labels: Int[Tensor, " n"],
    gallery_labels: Int[Tensor, " m"] | None = None,
    bins: int = 100,
    process_group: Processes = None,
) -> Figure:
    """Draw the distribution of the cosines of positive and of negative pairs of all ranks, the same on every rank.

    Args:
        queries: this rank's embeddings.
        gallery: this rank's embeddings to compare with; None: the queries, without pairs of one with itself.
        labels: one integer per query; pairs with equal labels are positive.
        gallery_labels: one integer per embedding of the gallery.
        bins: number of bins between −1 and 1.
        process_group: who holds embeddings.

    Raises:
        ValueError: the same on every rank: embeddings or labels that do not belong together or are not finite; ``bins``
            that is no integer of 1 or more.

    Examples:
        >>> figure = similarity_histogram(torch.eye(3), labels=torch.tensor([0, 0, 1]), bins=10)
        >>> figure.axes[0].get_xlabel()
        'cosine'
    """
    inputs = Evaluation(queries, gallery, labels=labels, gallery_labels=gallery_labels)
    problem = inputs.inputs_problem()
    if not is_integer(bins, at_least=1):
        problem = f"bins is an integer, at least 1, got {described(bins)}."
    world = World.of(process_group)
    stated: Any = {"problem": problem, "settings": {"bins": bins, "among the queries": gallery is None}}
    shards = agree("similarity_histogram", inputs.tensors(), world=world, distinct=inputs.rows, **stated).shards
    of_rows = labels if gallery_labels is None else gallery_labels
    both = labels.to(queries.device), of_rows.to(inputs.rows.device)
    sums = pair_sums(
        unit(queries), unit(inputs.rows), both, shards[gallery is not None], world,
        among_themselves=gallery is None, bins=bins,
    )  # fmt: skip
    positive, negative = torch.from_numpy(np.sum(world.exchange(sums["counts"].long().tolist()), 0)).view(2, bins)
    with styled_figure(1, 1, figsize=(7.5, 4.2)) as (figure, axis):
        for counts, name, colour in ((negative, "negative", WRONG), (positive, "positive", RIGHT)):
            draw_density(axis, counts, f"{name} pairs, {int(counts.sum()):,}", colour)
    return figure


def embedding_map(rows: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None) -> Figure:
    """Draw embeddings of unit length on the plane of their largest variance, one colour per label.

    Args:
        rows: embeddings of one process.
        labels: one integer per embedding.

    Raises:
        ValueError: embeddings and labels that do not belong together, embeddings of one feature, or that are not finite.

    Examples:
        >>> embedding_map(torch.eye(3), torch.tensor([0, 0, 1])).axes[0].get_title(loc="left")
        'Embeddings'
    """
    problem = Evaluation(rows, labels=labels).shapes_problem() or first_non_finite({"rows": rows}, optional=False)
    if problem is None and rows.shape[1] < 2:
        problem = f"embeddings of two or more features are drawn on a plane, got {described(rows)}."
    if problem is not None:
        raise ValueError(f"embedding_map: {problem}")
    plane = principal_plane(torch.nn.functional.normalize(rows.detach().cpu().float(), dim=1))
    labels = torch.zeros(len(rows), dtype=torch.int64, device="cpu") if labels is None else labels.cpu()
    with styled_figure(1, 1, figsize=(6.0, 6.0)) as (figure, axis):
        for number, label in enumerate(labels.unique().tolist()):
            x, y = plane[labels == label].T.tolist()
            axis.scatter(x, y, s=14, color=TEN[number % len(TEN)], linewidth=0, label=str(label))
        axis.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim", title="Embeddings")
        axis.spines[:].set_visible(False)
        if 1 < len(labels.unique()) <= len(TEN):
            axis.legend(markerscale=2, handlelength=1)
    return figure


def draw_density(axis: Any, counts: Int[Tensor, " bins"], label: str, colour: str) -> None:
    bins = len(counts)
    density, edges = (counts / max(1, int(counts.sum())) * bins / 2).tolist(), np.linspace(-1, 1, bins + 1)
    axis.stairs(density, edges, fill=True, alpha=0.35, color=colour)
    axis.stairs(density, edges, lw=1.6, color=colour, label=label)
    axis.set(xlabel="cosine", ylabel="density", title="Similarity of pairs", xlim=(-1, 1))
    axis.legend(loc="upper left")


def measurement_picture(measurement: Measurement) -> Figure:
    with styled_figure(1, 3, figsize=(13.0, 3.6)) as (figure, axes):
        for counts, name, colour in zip(measurement.counts(), ("positive", "negative"), (RIGHT, WRONG), strict=True):
            draw_density(axes[0], counts.view(-1, _JOINED).sum(1), name, colour)
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


def principal_plane(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    centred = rows - rows.mean(0)
    return centred @ torch.linalg.svd(centred).Vh.T[:, :2]


@contextmanager
def styled_figure(rows: int, columns: int, figsize: tuple[float, float]) -> Iterator[tuple[Figure, Any]]:
    with rc_context(STYLE):
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure, figure.subplots(rows, columns)
