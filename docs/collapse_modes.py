"""Draws docs/pages/figures/collapse_modes.png and writes the table of docs/pages/monitoring.md.

``python docs/collapse_modes.py``. Small trainings on two processes with uneven shards, each in a known mode of failure,
beside a healthy one.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.metrics.figures import Measurement
from contrastive_zoo.metrics.plots import DARK, PALE, STYLE, draw_similarities
from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill, table

PICTURE = PAGES / "figures" / "collapse_modes.png"
WIDTH, STEPS, SHARDS = 32, 300, (96, 160)
SHOWN = {
    "positive_similarity": "positive similarity",
    "negative_similarity": "negative similarity",
    "top1_forward": "top-1",
    "uniformity": "uniformity",
    "effective_rank": "effective rank",
    "likely_false_negatives": "likely false negatives",
    "temperature": "temperature",
}


class Mode(NamedTuple):
    """A training: its loss, noise of each half of a view, distinct samples, their rank, and whether rank 1 shifts a view."""

    loss: Callable[[], nn.Module] = lambda: cz.NTXent(temperature=0.2)
    noise: tuple[float, float] = (0.2, 0.2)
    distinct: int = 100_000
    rank: int = WIDTH
    shifted: bool = False


MODES = {
    "healthy": Mode(),
    "complete collapse": Mode(loss=lambda: cz.AlignUniform(uniformity=0.0), noise=(1.0, 1.0)),
    "dimensional collapse": Mode(noise=(0.1, 5.0)),
    "temperature at its bound": Mode(
        loss=lambda: cz.Clip(temperature=cz.LearnableTemperature(0.05)), noise=(0.01, 0.01), rank=4
    ),
    "false negatives": Mode(distinct=24),
    "unaligned shards": Mode(shifted=True),
}


def batches(mode: Mode) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two views of this rank's samples of each global batch."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(mode.distinct, WIDTH, generator=generator)
    samples[:, mode.rank :] = 0
    noise = torch.tensor(mode.noise).repeat_interleave(WIDTH // 2)
    for _ in range(STEPS):
        chosen = samples[torch.randint(mode.distinct, (sum(SHARDS),), generator=generator)]
        views = chosen + noise * torch.randn(2, sum(SHARDS), WIDTH, generator=generator)
        first, second = (x.split(SHARDS)[dist.get_rank()] for x in views)
        yield first, second.roll(1, 0) if mode.shifted and dist.get_rank() == 1 else second


def train(mode: Mode) -> Measurement:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    loss_fn = cz.DistributedLoss(mode.loss())
    monitor = cz.Monitor(loss_fn, every=STEPS - 1)
    parameters = [{"params": list(encoder.parameters())}, {"params": list(loss_fn.parameters()), "lr": 0.05}]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    for first, second in batches(mode):
        optimizer.zero_grad()
        loss_fn(encoder(first), encoder(second)).backward()
        cz.average_gradients(encoder)
        optimizer.step()
    assert monitor.measurement is not None
    return monitor.measurement


def shown(measurement: Measurement) -> dict[str, float]:
    """Return the figures of the table; of two encoders those of the first."""
    first = f"{measurement.encoders[0]}/"
    return {name: measurement.figures.get(name, measurement.figures.get(first + name, float("nan"))) for name in SHOWN}


def main() -> None:
    with rc_context(STYLE), Worlds(timeout=300) as worlds:
        figure = Figure(figsize=(15.0, 5.0), layout="constrained")
        axes = figure.subplots(2, len(MODES))
        rows = []
        for column, (name, mode) in enumerate(MODES.items()):
            measurement = worlds.run(len(SHARDS), train, mode)[0]
            rows.append([name, *("–" if x != x else f"{x:.3g}" for x in shown(measurement).values())])
            top, bottom = axes[:, column]
            draw_similarities(top, measurement)
            top.set(title=name, yscale="symlog", ylabel="density" if column == 0 else "", ylim=(0, 70))
            top.set_yticks([0, 1, 10], ["0", "1", "10"])
            if column:
                top.get_legend().remove()
            spectrum = measurement.spectrum(measurement.encoders[0]).clamp(min=1e-9)
            bottom.plot(range(1, WIDTH + 1), spectrum.tolist(), color=DARK, lw=1.8)
            bottom.axhline(1 / WIDTH, color=PALE, lw=4, alpha=0.7, zorder=0)
            label = "eigenvalue of ZᵀZ / N" if column == 0 else ""
            bottom.set(yscale="log", ylim=(1e-8, 2), xlabel="largest first", ylabel=label)
        FigureCanvasAgg(figure).print_png(PICTURE)
    fill(PAGES / "monitoring.md", {"collapse modes": table(["mode", *SHOWN.values()], rows, texts=1)})


if __name__ == "__main__":
    main()
