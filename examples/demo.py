"""A demonstration: ``python -m examples.demo [FOLDER] [--docs]``, with the folder for its pictures.

One process, and two that hold a third and two thirds of every batch, train encoders of scikit-learn's digits in float64.
With DistributedLoss both end with the same encoder. With two common hand-written gathers they do not.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.metrics.plots import TEN, principal_plane
from contrastive_zoo.testing.worlds import Worlds
from examples import losses
from examples.losses import TRAINED, Result, Started, images, train
from tools.gallery import make
from tools.pages import PAGES, fill, table

TOLERANCE = 1e-9  # largest difference that counts as rounding, in float64


class Job(NamedTuple):
    """A training: its title, the loss for the table of the page, and how it starts; the name is that of its picture."""

    name: str
    title: str
    loss: str
    start: Callable[[], Started]


def by_hand(title: str) -> Started:
    """Start a training of two towers with a recipe of the gallery."""
    return losses.two_towers(make(title))


RIGHT = (
    Job("simclr", "SimCLR (NTXent)", "NTXent", losses.simclr),
    Job("sup_con", "SupCon", "SupCon", losses.sup_con),
    Job("two_towers", "two towers (Clip)", "Clip", losses.two_towers),
    Job("moco", "MoCo (InfoNCE, queue)", "InfoNCE with a queue", losses.moco),
    Job(
        "pml_miner",
        "PML, with a miner",
        "pytorch-metric-learning's MultiSimilarityLoss, with its miner",
        losses.pml_miner,
    ),
)
WRONG = tuple(
    Job(title.replace(" ", "_"), title, "", partial(by_hand, title))
    for title in ("detached candidates", "mean of means")
)


def difference(one: Result, several: Result) -> float:
    """Return the largest difference of losses and held-out embeddings of two trainings."""
    of_losses = max(abs(a - b) for a, b in zip(one.losses, several.losses, strict=True))
    return max(of_losses, (one.after - several.after).abs().max().item())


def demo(
    folder: Path, out: TextIO = sys.stdout, epochs: int = 60, jobs: Sequence[Job] = (*RIGHT, *WRONG)
) -> dict[str, Any]:
    """Train all jobs, compare them with one process, print a line for each, and draw them into the folder.

    Return ``ok``, whether every right job is the same on one process and on two; for the ``right`` and the
    ``wrong`` jobs how far two processes are from one, and hit_rate@1 of held-out digits before and after.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"right": {}, "wrong": {}}
    say = partial(print, file=out, flush=True)
    say(f"{'training':<24} {'value, W=1':>16} {'W=2':>6} {'hit_rate@1':>16} {'difference':>11}")
    with Worlds(timeout=300) as worlds:
        for job in jobs:
            one, several = worlds.run(1, train, job.start, epochs)[0], worlds.run(2, train, job.start, epochs)
            far, kind = max(difference(one, x) for x in several), "wrong" if job in WRONG else "right"
            recalls = [recall(x) for x in (one.before, one.after)]
            draw(job.title, one, several[0], recalls, folder / f"example-{job.name.replace('_', '-')}.png")
            found[kind][job.title] = {"difference": far, "recall": recalls}
            values, learnt = f"{one.losses[0]:.3f} → {one.losses[-1]:.3f}", " → ".join(f"{x:.3f}" for x in recalls)
            mark = "✗ " if kind == "wrong" else ""
            say(f"{mark + job.title:<24} {values:>16} {several[0].losses[-1]:>6.3f} {learnt:>16} {far:>11.0e}")
    found["ok"] = all(x["difference"] <= TOLERANCE for x in found["right"].values())  # NaN is not
    verdict = "Same training" if found["ok"] else "FAILED: not the same training"
    say(
        "difference: the largest of losses and held-out embeddings, from one process.\n"
        "✗: a hand-written gather, which people write and which is wrong.\n"
        f"{verdict} with DistributedLoss on two processes with a third and\n"
        f"two thirds of every batch; {TOLERANCE:.0e} is allowed. Pictures are in {folder.resolve()}"
    )
    return found


def recall(rows: Tensor) -> float:
    labels = images()[1][TRAINED:]
    found = cz.metrics.evaluate(rows, labels=labels, metrics=["hit_rate@1"], process_group=cz.World())
    return found["hit_rate@1"]


def draw(title: str, one: Result, several: Result, recalls: Sequence[float], path: Path) -> None:
    """Draw the losses on one process and on two, and the plane of the largest variance before and after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=80, layout="constrained")
    curve, *planes = figure.subplots(1, 3, width_ratios=(4, 3, 3))
    curve.plot(one.losses, lw=6, alpha=0.4, label="one process")
    curve.plot(several.losses, color="black", ls="--", lw=1.2, label="two processes")
    curve.set(xlabel="step", ylabel="loss", title=title)
    curve.legend(frameon=False)
    colours = [TEN[x % 10] for x in images()[1][TRAINED:].tolist()]
    for plane, when, rows, share in zip(planes, ("before", "after"), one[1:], recalls, strict=True):
        plane.scatter(*principal_plane(rows.float()).T.tolist(), s=6, c=colours, linewidths=0)
        plane.set(xticks=[], yticks=[], title=f"{when}: hit_rate@1 {100 * share:.0f} %")
    figure.savefig(path)


def write_page(found: dict[str, Any]) -> None:
    rows = []
    for job in RIGHT:
        of_job = found["right"][job.title]
        rows.append([f"`{job.name}`", job.loss, *(f"{x:.3f}" for x in of_job["recall"]), f"{of_job['difference']:.0e}"])
    columns = ("training", "loss", "hit_rate@1 before", "after", "difference, W = 2 from W = 1")
    fill(PAGES / "index.md", {"results": table(columns, rows)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Compare one process with two.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo-output"), help="where pictures are written")
    parser.add_argument("--docs", action="store_true", help="write the table and the picture of docs/pages/index.md")
    options = parser.parse_args()
    jobs = RIGHT if options.docs else (*RIGHT, *WRONG)
    compared = demo(options.folder, jobs=jobs)
    if options.docs:
        write_page(compared)
        shutil.copy(options.folder / "example-sup-con.png", PAGES / "figures")
    sys.exit(not compared["ok"])
