"""Peak extra memory of every loss, forward and backward, on one process; each in a new process (Linux).

python benchmarks/memory.py [--rows 8192 16384] [--width 128] [--docs] [name …]
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

import torch
from suite.harness import in_new_process, peak, program, progress
from torch import Tensor

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.pages import table

LIMIT = 400  # MB; larger figures are bold
CLASSES = 512
CAPTIONS = 3
TOKENS = 16
WITHOUT_LIMIT = ("sigreg", "lejepa")


def made(entry: Entry, width: int) -> torch.nn.Module:
    sizes = {"num_classes": CLASSES, "num_prototypes": CLASSES, "embedding_size": width, "out_dim": width}
    settings = {name: sizes.get(name, value) for name, value in entry.settings.items()}
    return replace(entry, settings=settings).make()


def arguments(entry: Entry, rows: int, width: int) -> Iterator[Tensor]:
    """Return the arguments of the loss, with the given number of embeddings in total."""

    def drawn(n: int, *more: int, learnt: bool = True) -> Tensor:
        return torch.randn(n, *more, width, requires_grad=learnt)

    half = rows // 2
    if entry.name == "mil-nce":
        yield from (drawn(rows // (1 + CAPTIONS)), drawn(rows // (1 + CAPTIONS), CAPTIONS))
    elif entry.name in ("margin-mse", "score-distillation"):
        n, negatives = rows // (2 + CAPTIONS), "negatives" in entry.called_with
        yield from (drawn(n), *([drawn(n)] if negatives else []), drawn(n, CAPTIONS), torch.rand(n, CAPTIONS))
    elif entry.name.startswith("max-sim"):
        yield from (drawn(half // TOKENS, TOKENS), drawn(half // TOKENS, TOKENS))
    elif entry.called_with == "embeddings":
        yield drawn(rows)
    elif entry.called_with.startswith("projections1"):
        yield from (drawn(rows // 4) for _ in range(4))
    elif entry.call == "labels":
        yield from (drawn(rows), torch.arange(rows) % CLASSES)
    else:
        numbers = {"ids": torch.arange(half) // 2, "scores": torch.rand(half), "labels": torch.arange(half) % 2}
        yield from (drawn(half), drawn(half))
        for name in entry.called_with.split(", ")[2:] if entry.call == "other" else ():
            yield numbers[name] if name in numbers else drawn(half, learnt=False)


def measure(name: str, rows: int, width: int) -> float:
    """Return the MB at the peak of a step beyond those after a small one."""
    entry = CATALOGUE[name]
    loss = made(entry, width)
    loss(*arguments(entry, CLASSES, width)).backward()
    return peak(lambda: loss(*arguments(entry, rows, width)).backward())[0]


def main(given: Namespace) -> dict[str, str]:
    lines = []
    for name in given.names:
        found = [in_new_process(measure, name, rows, given.width) for rows in given.rows]
        figures = (f"**{x:.0f}**" if x >= LIMIT and name not in WITHOUT_LIMIT else f"{x:.0f}" for x in found)
        lines.append([f"`{name}`", CATALOGUE[name].engine, *figures])
        progress(*lines[-1])
    return {"memory": table(["loss", "engine", *(f"{rows:,} samples" for rows in given.rows)], lines)}


if __name__ == "__main__":
    program(main, __doc__, page="memory.md", names=CATALOGUE, rows=[8192, 16384], width=128)
