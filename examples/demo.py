"""A demonstration: ``python -m examples.demo [FOLDER] [--json]``, with the folder for its pictures.

One process, and two that hold a third and two thirds of every batch, train encoders of scikit-learn's digits in float64.
With DistributedLoss both end with the same encoder. With two common hand-written gathers they do not.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from examples.losses.digits import Result, augmented, batches, difference, draw, encoder, held_out, images, result
from examples.losses.two_towers import Towers
from tools.gallery import make

TOLERANCE = 1e-9  # largest difference that counts as rounding, in float64


class Job(NamedTuple):
    """A training: its loss, whether it compares two halves of a digit or labelled digits, and a name for its picture."""

    title: str
    loss: Callable[[], nn.Module]
    towers: bool
    picture: str


def pml_triplet() -> nn.Module:
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import TripletMarginMiner

    miner = TripletMarginMiner(margin=0.2, type_of_triplets="semihard")
    return cz.DistributedLoss(TripletMarginLoss(margin=0.2), miner=miner)


RIGHT = (
    Job("InfoNCE, two towers", partial(make, "DistributedLoss, own loss"), True, "two_towers"),
    Job("SupCon", lambda: cz.DistributedLoss(cz.SupCon(temperature=0.1)), False, "sup_con"),
    Job("pml triplet, mined", pml_triplet, False, "pml_triplet"),
)
WRONG = (
    Job("detached candidates", partial(make, "detached candidates"), True, "detached_candidates"),
    Job("mean of means", partial(make, "mean of means"), True, "mean_of_means"),
)
"""Recipes of the gallery with the loss of the first right job."""


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a batch: rank r has r + 1 parts of equal size."""
    world = cz.World.of()
    start, stop = (len(x) * r * (r + 1) // (world.size * (world.size + 1)) for r in (world.rank, world.rank + 1))
    return x[start:stop]


def train(job: Job, epochs: int) -> Result:
    """Train on this process, one of several; only :func:`local` depends on their number."""
    torch.set_default_dtype(torch.float64)
    model, (pixels, labels) = DistributedDataParallel(Towers() if job.towers else encoder()), images()
    loss = job.loss().double()
    # DistributedLoss keeps its parameters equal on all ranks; a hand-written loss needs DDP for that.
    criterion = loss if isinstance(loss, cz.DistributedLoss) else DistributedDataParallel(loss)
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=2e-3)

    def embeddings() -> Tensor:
        rows = model.module(held_out())
        return torch.cat(rows, 1) if job.towers else rows

    losses, before = [], embeddings()
    for indices, generator in batches(epochs):
        rows = model(local(augmented(pixels[indices], generator)))
        optimizer.zero_grad()
        value = criterion(*rows) if job.towers else criterion(rows, local(labels[indices]))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return result(losses, before, embeddings())


def demo(folder: Path, out: TextIO = sys.stdout, epochs: int = 40) -> dict[str, Any]:
    """Train all jobs, compare them with one process, print a line for each, and draw them into the folder.

    Return in plain types ``ok``, whether every right job is the same on one process and on two, and how far two processes
    are from one for the ``right`` and the ``wrong`` jobs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"folder": str(folder), "right": {}, "wrong": {}}
    say = partial(print, file=out, flush=True)
    say(f"{'loss':<24} {'value, W=1':>16} {'W=2':>6} {'difference':>11}")
    with Worlds(timeout=300) as worlds:
        for job in (*RIGHT, *WRONG):
            one, several = worlds.run(1, train, job, epochs)[0], worlds.run(2, train, job, epochs)
            far, kind = max(difference(one, x) for x in several), "right" if job in RIGHT else "wrong"
            draw(job.title, one, several[0], folder / f"{job.picture}.png")
            found[kind][job.title] = {"difference": far}
            values = f"{one.losses[0]:.3f} → {one.losses[-1]:.3f}"
            mark = "✗ " if kind == "wrong" else ""
            say(f"{mark + job.title:<24} {values:>16} {several[0].losses[-1]:>6.3f} {far:>11.0e}")
    found["ok"] = all(x["difference"] <= TOLERANCE for x in found["right"].values())  # NaN is not
    verdict = "Same training" if found["ok"] else "FAILED: not the same training"
    say(
        "difference: the largest of losses and held-out embeddings, from one process.\n"
        "✗: a hand-written gather, which people write and which is wrong.\n"
        f"{verdict} with DistributedLoss on two processes with a third and\n"
        f"two thirds of every batch; {TOLERANCE:.0e} is allowed. Pictures are in {folder.resolve()}"
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Compare one process with two.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("demo-output"), help="where pictures are written")
    parser.add_argument("--json", action="store_true", help="print what was compared as JSON; words go to stderr")
    options = parser.parse_args()
    compared = demo(options.folder, sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(compared, indent=2))
    sys.exit(not compared["ok"])
