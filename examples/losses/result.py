"""What an example has learnt, and its picture."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from contrastive_zoo.metrics.plots import TEN, principal_plane


class Result(NamedTuple):
    """The loss of each step, held-out embeddings before and after, their labels, and recall@1 before and after."""

    losses: list[float]
    before: Tensor
    after: Tensor
    labels: Tensor
    recall_before: float
    recall_after: float


def difference(one: Result, several: Result) -> float:
    """Return the largest difference of losses and held-out embeddings of two trainings."""
    of_losses = max(abs(a - b) for a, b in zip(one.losses, several.losses, strict=True))
    return max(of_losses, (one.after - several.after).abs().max().item())


def draw(title: str, one: Result, several: Result, path: Path) -> None:
    """Draw the losses on one process and on two, and the plane of the largest variance before and after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=80, layout="constrained")
    curve, *planes = figure.subplots(1, 3, width_ratios=(4, 3, 3))
    curve.plot(one.losses, lw=6, alpha=0.4, label="one process")
    curve.plot(several.losses, color="black", ls="--", lw=1.2, label="two processes")
    curve.set(xlabel="step", ylabel="loss", title=title)
    curve.legend(frameon=False)
    views = (("before", one.before, one.recall_before), ("after", one.after, one.recall_after))
    for plane, (when, rows, recall) in zip(planes, views, strict=True):
        points, colours = principal_plane(rows.float()).numpy(), [TEN[x % 10] for x in one.labels.tolist()]
        plane.scatter(points[:, 0], points[:, 1], s=6, c=colours, linewidths=0)
        plane.set(xticks=[], yticks=[], title=f"{when}: recall@1 {100 * recall:.0f} %")
    figure.savefig(path)
