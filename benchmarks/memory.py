"""Peak extra memory of every loss, forward and backward, on one process; each in a new process (Linux).

python benchmarks/memory.py [--rows 8192 16384] [--width 128] [--docs] [name …]
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from suite.harness import command_line, in_new_process, resident
from torch import Tensor

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.pages import PAGES, fill, table

LIMIT = 400
CLASSES = 512
CAPTIONS = 3
TOKENS = 16
WITHOUT_LIMIT = ("sigreg", "lejepa")


def made(entry: Entry, width: int) -> torch.nn.Module:
    sizes = {"num_classes": CLASSES, "num_prototypes": CLASSES, "embedding_size": width, "out_dim": width}
    settings = {name: sizes.get(name, value) for name, value in entry.settings.items()}
    return replace(entry, settings=tuple(settings.items())).make()


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


def measure(name: str, rows: int, width: int) -> tuple[float, float]:
    """Return the peak memory of a large step minus the memory after a small one, and its seconds."""
    entry = CATALOGUE[name]
    loss = made(entry, width)
    loss(*arguments(entry, CLASSES, width)).backward()
    before, start = resident("VmRSS"), time.perf_counter()
    loss(*arguments(entry, rows, width)).backward()
    return resident("VmHWM") - before, time.perf_counter() - start


def measured(name: str, rows: int, width: int) -> float:
    """Return the MB of a loss, measured in a new process; print them with the seconds."""
    megabytes, seconds = in_new_process(measure, name, rows, width)
    print(f"{name:28s} {rows:8d} rows {megabytes:8.0f} MB {seconds:8.1f} s", file=sys.stderr, flush=True)
    return megabytes


def main() -> None:
    parser = command_line(__doc__, width=128, docs=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CATALOGUE)}")
    given = parser.parse_args()
    if unknown := set(given.names) - set(CATALOGUE):
        parser.error(f"no loss is called {', '.join(sorted(unknown))}; `contrastive-zoo list` has their names")
    if given.docs and given.names:
        parser.error("--docs is a page of all losses: name none")
    found = {name: [measured(name, rows, given.width) for rows in given.rows] for name in given.names or CATALOGUE}
    head = ["loss", "engine", *(f"{rows:,} samples" for rows in given.rows)]
    lines = [[f"`{name}`", CATALOGUE[name].engine, *(f"{x:.0f}" for x in of)] for name, of in found.items()]
    print(table(head, lines))
    if given.docs:
        fill(PAGES / "memory.md", {"memory": table(head, lines)})
    if above := [name for name, of in found.items() if max(of) >= LIMIT and name not in WITHOUT_LIMIT]:
        sys.exit(f"{LIMIT} MB or more: {', '.join(above)}")


if __name__ == "__main__":
    main()
