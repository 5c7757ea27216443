"""Peak extra memory of every loss, forward and backward, on one process; each in a new process (Linux).

python benchmarks/memory.py [--rows 8192 16384] [--width 128] [--docs] [name …]
"""

from argparse import Namespace
from collections import defaultdict
from dataclasses import replace

import torch
from suite.harness import in_new_process, peak, program, progress
from torch import Tensor

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.pages import table

CLASSES = 512
CAPTIONS = 3
TOKENS = 16


def made(entry: Entry, width: int) -> torch.nn.Module:
    sizes = {"num_classes": CLASSES, "num_prototypes": CLASSES, "embedding_size": width, "out_dim": width}
    settings = {name: sizes.get(name, value) for name, value in entry.settings.items()}
    return replace(entry, settings=settings).make()


def arguments(entry: Entry, rows: int, width: int) -> list[Tensor]:
    fixed = {
        name for name, kind in entry.kinds.items() if name.startswith(("teacher_", "guide_")) or kind == "negatives"
    }
    several = TOKENS if entry.name.startswith("max-sim") else CAPTIONS
    counts = {"rows": 1, "several": several}
    n = rows // sum(counts.get(kind, 0) for name, kind in entry.kinds.items() if name not in fixed)
    shapes = {"rows": (n, width), "negatives": (n, width), "several": (n, several, width)}
    others = {
        "labels": torch.arange(n) % (width if "logits" in entry.kinds else CLASSES),
        "hierarchy": torch.stack([torch.arange(n) % k for k in (CLASSES // 4, CLASSES)], 1),
        "binary": torch.arange(n) % 2,
        "counts": torch.ones(n, dtype=torch.int64),
        "scores": torch.rand(n),
        "several scores": torch.rand(n, several),
        "token mask": torch.ones(n, several, dtype=torch.bool),
    }
    return [
        torch.randn(shapes[kind], requires_grad=name not in fixed) if kind in shapes else others[kind]
        for name, kind in entry.kinds.items()
    ]


def measure(name: str, rows: int, width: int) -> float:
    """Return the MB at the peak of a step beyond those after a small one."""
    entry = CATALOGUE[name]
    loss = made(entry, width)
    loss(*arguments(entry, CLASSES, width)).backward()
    return peak(lambda: loss(*arguments(entry, rows, width)).backward())[0]


def main(given: Namespace) -> dict[str, str]:
    by_engine = defaultdict[str, list[list[float]]](list)
    for name in given.names:
        found = [in_new_process(measure, name, rows, given.width) for rows in given.rows]
        by_engine[CATALOGUE[name].engine].append(found)
        progress(name, CATALOGUE[name].engine, *(f"{x:.0f}" for x in found))
    lines = [
        [engine, str(len(found)), *(f"{max(x):.0f}" for x in zip(*found, strict=True))]
        for engine, found in by_engine.items()
    ]
    return {"memory": table(["engine", "losses", *(f"{rows:,} samples" for rows in given.rows)], lines, texts=1)}


if __name__ == "__main__":
    program(main, __doc__, page="measurements.md", names=CATALOGUE, rows=[8192, 16384], width=128)
