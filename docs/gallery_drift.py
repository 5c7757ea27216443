"""Draws docs/pages/figures/gallery_drift.png: ``python docs/gallery_drift.py``.

Recipes of the gallery train the demo's encoder on four processes with uneven shards. What is drawn is the true loss of
held-out images, at the temperature that the recipe has learnt.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from contrastive_zoo.testing.worlds import Worlds
from examples.demo.recipes import TwoTowers
from examples.demo.training import HELD_OUT, Digits
from tools.gallery.recipe import GALLERY, symmetric_cross_entropy

PICTURE = Path(__file__).parent / "pages" / "figures" / "gallery_drift.png"
SHARES = {1: (1.0,), 4: (0.1, 0.2, 0.3, 0.4)}
STEPS, EVERY, BATCH = 120, 3, 120
DRAWN = {  # Paul Tol's colours, told apart with any colour vision
    "DistributedLoss, any loss": ("#0B2545", (0, (4, 2.5))),
    "own slice": ("#CC3311", "-"),
    "own slice × W": ("#EE7733", (0, (1, 1))),
    "detached candidates": ("#009988", (0, (6, 1, 1, 1))),
    "mean of means": ("#AA4499", (0, (3, 1))),
    "local negatives": ("#777777", "-"),
}


def curve(name: str, digits: Digits) -> dict[int, float]:
    """The true held-out loss after so many steps, trained on this rank's part of every batch."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    encoder, loss = TwoTowers(), GALLERY[name].make().double()
    scale: nn.Parameter = dict(loss.named_parameters()).get("scale", next(loss.parameters()))
    model, criterion = DistributedDataParallel(encoder), DistributedDataParallel(loss)
    groups = [{"params": list(encoder.parameters())}, {"params": list(loss.parameters()), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    @torch.no_grad()
    def held_out() -> float:
        a, b = (F.normalize(x, dim=1) for x in encoder(digits.images[:HELD_OUT]))
        return symmetric_cross_entropy(scale * a @ b.T).item()

    rank, shares = dist.get_rank(), SHARES[dist.get_world_size()]
    start, stop = (round(BATCH * sum(shares[:r])) for r in (rank, rank + 1))
    batches = torch.Generator().manual_seed(0)  # the same global batches in every world
    found = {0: held_out()}
    for step in range(1, STEPS + 1):
        batch = HELD_OUT + torch.randperm(len(digits.images) - HELD_OUT, generator=batches)[:BATCH]
        optimizer.zero_grad()
        criterion(*model(digits.images[batch[start:stop]])).backward()
        optimizer.step()
        if step % EVERY == 0:
            found[step] = held_out()
    return found


def main() -> None:
    digits = Digits.load()
    figure = Figure(figsize=(7.5, 4.6), layout="constrained", dpi=160)
    axis = figure.subplots()
    with Worlds(timeout=300) as worlds:
        truth = worlds.run(1, curve, "DistributedLoss, any loss", digits)[0]
        axis.plot(list(truth), list(truth.values()), color="#77AADD", alpha=0.7, lw=8, label="one process")
        for name, (colour, dashes) in DRAWN.items():
            found = worlds.run(4, curve, name, digits)[0]
            label = "DistributedLoss" if name.startswith("Distributed") else name
            axis.plot(list(found), list(found.values()), color=colour, ls=dashes, lw=1.8, label=label)
            gap = max(abs(found[step] - truth[step]) for step in truth)
            print(f"{label:18} ends at {found[STEPS]:.4f}, one process at {truth[STEPS]:.4f}; farthest {gap:.1e}")
    axis.set(xlabel="optimizer step", ylabel="true loss on held-out digits, nats", yscale="log", xlim=(0, STEPS))
    axis.set_title("Four processes, shards of 12, 24, 36 and 48 images")
    ticks = [x for x in (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6) if axis.get_ylim()[0] < x < axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, handlelength=3)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(PICTURE)


if __name__ == "__main__":
    main()
