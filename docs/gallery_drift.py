"""Draws docs/pages/figures/gallery_drift.png: ``python docs/gallery_drift.py``.

Recipes of the gallery train the two towers of the demo on four processes with uneven shards. What is drawn is the true loss
of held-out images, at the scale that the recipe has learnt.
"""

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

from contrastive_zoo.testing.worlds import Worlds
from examples.losses import batches, held_out, two_towers
from tools.gallery.recipe import GALLERY, symmetric_cross_entropy
from tools.pages import PAGES

EPOCHS = 24  # of five steps
DRAWN = {  # Paul Tol's colours, told apart with any colour vision
    "DistributedLoss, any loss": ("#0B2545", (0, (4, 2.5))),
    "own slice": ("#CC3311", "-"),
    "own slice × W": ("#EE7733", (0, (1, 1))),
    "detached candidates": ("#009988", (0, (6, 1, 1, 1))),
    "mean of means": ("#AA4499", (0, (3, 1))),
    "local negatives": ("#777777", "-"),
}


def curve(name: str) -> list[float]:
    """The true held-out loss before each step and after the last."""
    torch.set_default_dtype(torch.float64)
    recipe = GALLERY[name].make()
    model, parameters, loss = two_towers(recipe)
    scale: nn.Parameter = dict(recipe.named_parameters()).get("scale", next(recipe.parameters()))
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    unseen = held_out()

    @torch.no_grad()
    def true_loss() -> float:
        a, b = (F.normalize(x, dim=1) for x in model.module(unseen))
        return symmetric_cross_entropy(scale * a @ b.T).item()

    losses = [true_loss()]
    for indices, generator in batches(EPOCHS):
        optimizer.zero_grad()
        loss(indices, generator).backward()
        optimizer.step()
        losses.append(true_loss())
    return losses


if __name__ == "__main__":
    figure = Figure(figsize=(7.5, 4.6), layout="constrained", dpi=160)
    axis = figure.subplots()
    with Worlds(timeout=300) as worlds:
        truth = worlds.run(1, curve, "DistributedLoss, any loss")[0]
        axis.plot(truth, color="#77AADD", alpha=0.7, lw=8, label="one process")
        for name, (colour, dashes) in DRAWN.items():
            found = worlds.run(4, curve, name)[0]
            label = "DistributedLoss" if name.startswith("Distributed") else name
            axis.plot(found, color=colour, ls=dashes, lw=1.8, label=label)
            gap = max(abs(x - y) for x, y in zip(found, truth, strict=True))
            print(f"{label:18} ends at {found[-1]:.4f}, one process at {truth[-1]:.4f}; farthest {gap:.1e}", flush=True)
    axis.set(
        xlabel="optimizer step", ylabel="true loss on held-out digits, nats", yscale="log", xlim=(0, len(truth) - 1)
    )
    axis.set_title("Four processes, shards of 25, 51, 77 and 103 images")
    ticks = [x for x in (1, 1.5, 2, 3, 4, 5, 6) if axis.get_ylim()[0] < x < axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, handlelength=3)
    FigureCanvasAgg(figure).print_png(PAGES / "figures" / "gallery_drift.png")
