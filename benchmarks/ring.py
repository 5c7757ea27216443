"""Memory and time of a rank with and without a ring, beside open_clip's SigLIP (Linux, gloo ranks of one thread).

python benchmarks/ring.py [--docs] [--ranks 4] [--rows 8192] [--width 512] [name …]
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from suite.cases import peer
from suite.harness import memory_and_time, program, progress, slowest_rank
from suite.report import number
from torch import Tensor

import contrastive_zoo as cz
from tools.pages import table

CLASSES = 512
STEPS = 3

VIEWS = ("SigLIP", "Clip", "InfoNCE", "NTXent", "MNRL", "AlignUniform")
LABELLED = ("SupCon",)
LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    **{name: (getattr(cz, name), "views") for name in VIEWS},
    **{name: (getattr(cz, name), "labels") for name in LABELLED},
}
SIGLIP = ("gathered", "ring", "open_clip")


def open_clip_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """Return open_clip's SigLIP with its bidirectional exchange, on unit embeddings."""
    loss = peer("open_clip.loss").SigLipLoss(rank=dist.get_rank(), world_size=dist.get_world_size())
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)

    def call(x: Tensor, y: Tensor) -> Tensor:
        x, y = (torch.nn.functional.normalize(z, dim=1) for z in (x, y))
        value: Tensor = loss(x, y, scale, bias)
        return value

    return call


def arguments(compares: str, count: int, width: int) -> list[Tensor]:
    rows = [torch.randn(count, width, requires_grad=True) for _ in range(1 if compares == "labels" else 2)]
    if compares == "texts":
        return [rows[0], torch.randn(count, 2, width, requires_grad=True)]
    return [*rows, *([torch.arange(count) % CLASSES] if compares == "labels" else [])]


def measured(name: str, option: str, steps: int, rows: int, width: int) -> tuple[float, float]:
    """Return the extra MB of the largest step and the median seconds of so many steps, on a rank."""
    make, compares = LOSSES[name]
    loss = open_clip_loss() if option == "open_clip" else cz.DistributedLoss(make(), ring=option == "ring")

    def draw(count: int) -> list[Tensor]:
        torch.manual_seed(dist.get_rank())
        return arguments(compares, count, width)

    sizes = 64, rows // dist.get_world_size()
    return memory_and_time(draw, lambda *inputs: loss(*inputs).backward(), sizes, steps)


def line(name: str, ranks: int, options: Sequence[str], steps: int, given: argparse.Namespace) -> list[str]:
    """Return MB of each option, then seconds, each of the worst rank."""
    found = [slowest_rank(ranks, measured, name, option, steps, given.rows, given.width) for option in options]
    figures = [number(x[index]) for index in (0, 1) for x in found]
    progress(name, ranks, *figures)
    return figures


def main(given: argparse.Namespace) -> Mapping[str, str]:
    assert given.rows % 4 == 0, "rows are a multiple of 4"
    peer("open_clip.loss")  # says at once whether it is there
    lines = [[name, *line(name, given.ranks, SIGLIP[:2], 1, given)] for name in given.names]
    siglip = [[w, *line("SigLIP", w, SIGLIP, STEPS, given)] for w in (1, 2, 4) if "SigLIP" in given.names]
    size = f"{given.rows:,} samples of width {given.width} in total, {given.ranks} ranks:"
    head = [f"{unit} {x}" for unit in ("MB,", "s,") for x in SIGLIP]
    return {
        "ring": f"{size}\n\n{table(['loss', *(x for x in head if 'open_clip' not in x)], lines)}",
        "siglip": table(["ranks W", *head], siglip),
    }


if __name__ == "__main__":
    program(main, __doc__, page="measurements.md", names=LOSSES, ranks=4, rows=8192, width=512)
