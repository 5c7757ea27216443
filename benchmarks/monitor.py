"""What a monitor adds to a training step: two gloo ranks of one thread, n = 256 samples a rank, d = 256, float32.

python benchmarks/monitor.py [--rounds 20]

The step is a forward and a backward pass of a small convolutional encoder of 32 × 32 images under DDP, and Adam. Steps with
a measurement, whose figures are read, run interleaved with steps without, in rotated order; a time is that of the slower
rank. The share of every k-th call is the median of (measured − plain) / (k · plain) over rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from suite.harness import Round, in_rounds, on_new_ranks, program
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from tools.pages import table

RANKS, SAMPLES, WIDTH = 2, 256, 256
EVERY = (10, 50)


def make_encoder() -> nn.Module:
    """Return a convolutional encoder of 0.1 million parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, WIDTH),
    )  # fmt: skip


LOSSES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "NTXent, two views": (cz.NTXent, False),
    "Clip, two encoders": (cz.Clip, False),
    "SupCon, labels": (cz.SupCon, True),
}
"""By name the loss, and whether it takes labels."""


def of_rank(name: str, rounds: int) -> list[Round]:
    """Return the seconds of a plain and of a measured step in each round."""
    make, labelled = LOSSES[name]
    encoder = make_encoder()
    model = DistributedDataParallel(encoder)
    plain = cz.DistributedLoss(make())
    watched = cz.DistributedLoss(plain.loss)
    monitor = cz.Monitor(watched, every=1, encoder=encoder)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-4)
    torch.manual_seed(dist.get_rank())
    images = torch.randn(2, SAMPLES, 3, 32, 32)
    labels = torch.randint(32, (SAMPLES,))

    def step(loss_fn: Any) -> None:
        optimizer.zero_grad()
        first, *second = model(images[: 2 - labelled].flatten(0, 1)).split(SAMPLES)
        loss_fn(first, *(second or [labels])).backward()
        optimizer.step()
        if loss_fn is watched:
            assert monitor.take()

    runners = {"plain": lambda: step(plain), "measured": lambda: step(watched)}
    return in_rounds(runners, rounds=rounds)


def measure(given: argparse.Namespace) -> dict[str, str]:
    lines = []
    for name in LOSSES:
        found = on_new_ranks(RANKS, of_rank, name, given.rounds)[0]
        plain = statistics.median(x["plain"] for x in found)
        added = [x["measured"] - x["plain"] for x in found]
        shares = [statistics.median(a / (k * x["plain"]) for a, x in zip(added, found, strict=True)) for k in EVERY]
        times = f"{1e3 * plain:.0f}", f"{1e3 * statistics.median(added):.1f}"
        lines.append([name, *times, *(f"{100 * share:.2f}" for share in shares)])
    every = (f"every={k}, % of a step" for k in EVERY)
    return {"monitor": table(("loss", "plain step, ms", "a measured call adds, ms", *every), lines, texts=1)}


if __name__ == "__main__":
    program(measure, __doc__, rounds=20)
