"""Two pictures: training curves of all jobs, and held-out embeddings before and after training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from contrastive_zoo.metrics.plots import DARK, PALE, STYLE, TEN, principal_plane
from examples.demo.training import HELD_OUT, Comparison, Digits

WRONG = (("#CC3311", "-"), ("#009988", (0, (6, 1, 1, 1))))


def training_curves(right: Comparison, wrong: Sequence[Comparison], path: Path) -> None:
    """Draw the held-out loss of one process (pale), of two (dashed), and of the wrong recipes, and their differences."""
    reference = right.one_process.curve
    lines: list[tuple[Comparison, str, str, Any]] = [(right, "two processes, DistributedLoss", DARK, (0, (4, 2.5)))]
    for comparison, (colour, dashes) in zip(wrong, WRONG, strict=True):
        lines.append((comparison, f"two processes, {comparison.job.title} (wrong)", colour, dashes))
    with _figure(path, 2, 1, figsize=(7.5, 7.5), sharex=True, height_ratios=(3, 2)) as (top, bottom):
        top.plot(list(reference), list(reference.values()), color=PALE, alpha=0.7, lw=8, label="one process")
        for comparison, label, colour, dashes in lines:
            curve = comparison.two_processes[0].curve
            top.plot(list(curve), list(curve.values()), color=colour, ls=dashes, lw=1.8, label=label)
            differences = {step: abs(curve[step] - reference[step]) for step in curve}
            # A logarithmic axis has no zero: equal values are drawn as one rounding step of float64.
            shown = [max(difference, 2**-53) for difference in differences.values()]
            bottom.plot(list(differences), shown, color=colour, ls=dashes, lw=1.8)
        top.set(yscale="log", ylabel="loss on held-out digits, nats", title="InfoNCE between two views of a digit")
        ticks = [tick for tick in (0.6, 0.8, 1, 1.5, 2, 3, 4, 6) if tick > 0.95 * min(reference.values())]
        top.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        top.minorticks_off()
        top.legend(loc="upper right")
        ticks = [10.0**power for power in (-16, -12, -8, -4, 0)]
        bottom.set(yscale="log", ylim=(2**-54, 10), yticks=ticks, xlim=(0, right.job.steps))
        bottom.set(xlabel="optimizer step", ylabel="nats", title="Difference from one process")


def embeddings(comparison: Comparison, digits: Digits, path: Path) -> None:
    """Draw held-out embeddings of a job with one tower, before and after training, on their plane of largest variance."""
    trained = comparison.two_processes[0]
    labels = digits.labels[:HELD_OUT]
    with _figure(path, 1, 2, figsize=(11.5, 5.6)) as axes:
        for axis, name, rows in zip(axes, ("Before", "After"), (trained.before, trained.after), strict=True):
            plane = principal_plane(F.normalize(rows[0], dim=1))
            for digit, colour in enumerate(TEN):
                x, y = plane[labels == digit].T
                axis.scatter(x, y, marker=f"${digit}$", s=54, color=colour, linewidth=0)
            recall = comparison.recall(rows, digits)
            axis.set_title(f"{name} training: nearest neighbour of the same class {recall:.1%}")
            axis.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")
            axis.spines[:].set_visible(False)


@contextmanager
def _figure(path: Path, rows: int, columns: int, figsize: tuple[float, float], **settings: Any) -> Iterator[Any]:
    """Yield the axes of a figure, then save it; no display is needed, and matplotlib's settings do not change."""
    with rc_context(STYLE):
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure.subplots(rows, columns, **settings)
        FigureCanvasAgg(figure).print_png(path)
