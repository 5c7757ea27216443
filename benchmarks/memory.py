"""Peak extra memory of every loss, forward and backward, on one process; each in a new process (Linux).

python benchmarks/memory.py [--rows 8192 16384] [--width 128] [--docs] [name …]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from suite.processes import resident
from torch import Tensor

from contrastive_zoo.engine.tiling import BLOCK_BYTES, budget
from contrastive_zoo.testing.catalogue import CATALOGUE, Entry

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "memory.md"
LIMIT = 400
CLASSES = 512
CAPTIONS = 3
TOKENS = 16
WITHOUT_LIMIT = ("sigreg", "lejepa")

TEXT = f"""# Memory

How much memory does each loss add to a training step? For people who choose a batch size.

**Short answer.** No loss of the zoo holds the N × N similarity matrix. Every loss but SIGReg and LeJEPA adds less than
{LIMIT} MB of peak memory at N = 16,384, d = 128; these two project all samples on 1,024 directions. Memory is linear in N;
at these sizes blocks of constant size are a large part of it.

```bash
python benchmarks/memory.py --docs            # all losses, and this page
python benchmarks/memory.py nt-xent triplet   # some
```

## What is measured

Each loss runs in a separate process, without a process group. A first step with 512 samples loads all libraries. Then one
forward and one backward pass run in float32. The figure is the highest resident memory during that step minus the resident
memory before it, in MB of 2²⁰ bytes. It includes the embeddings and their gradients, 8 MB each for 16,384 samples. The
command fails if another loss needs {LIMIT} MB or more.

Samples are counted over all arguments: two views of 8,192, or 16,384 labelled embeddings. Labels are {CLASSES} classes of
equal size. Losses with class weights have {CLASSES} classes, SwAV has {CLASSES} prototypes, multi-positive has one id for
every two queries and their keys. For DINO a sample is an output of its head. A video of MIL-NCE has {CAPTIONS} candidate
texts, a query of MarginMSE and ScoreDistillation {CAPTIONS} negatives. A sample of MaxSim is a token; a sequence has
{TOKENS}.

The figure includes freed memory that malloc keeps. For losses with many small steps this may be the larger part. On a CPU
with glibc the library raises malloc's trim threshold to twice the memory budget plus {BLOCK_BYTES // 2**20} MiB, because
fetching freed memory from the system again takes a tenth of a step or more. The environment variable
`CONTRASTIVE_ZOO_MALLOPT=0` turns this off; glibc's own variables, such as `MALLOC_TRIM_THRESHOLD_`, take precedence.

## Why it is linear

An engine compares a block of anchors with all N candidates. All matrices that a loss computes for a block share a fixed
number of bytes ({BLOCK_BYTES // 2**20} MiB), a sixteenth for each; blocks of fewer than 64 anchors get up to a quarter.
More candidates mean fewer anchors per block. The gradient of a block is computed before the next block begins. Softmax
losses cache up to {budget() // 2**20} MiB of logits for the backward pass (`memory_budget` changes this). The memory kept
between blocks is linear in N: the embeddings, their gradients, and a few numbers per anchor. So a large part of each figure
is the constant memory of a block. The whole matrix would take {4 * 16384**2 // 2**20:,} MB for 16,384 samples of one tower.
Losses of feature statistics hold d × d elements, losses with classes N × C in blocks, SwAV N × prototypes.

## Measured

Additional MB at the peak, by total number of samples.

"""


def made(entry: Entry, width: int) -> torch.nn.Module:
    """Construct the loss, with typical sizes."""
    sizes = {"num_classes": CLASSES, "num_prototypes": CLASSES, "embedding_size": width, "out_dim": width}
    settings = {name: sizes.get(name, value) for name, value in entry.settings}
    return replace(entry, settings=tuple(settings.items())).make()


def arguments(entry: Entry, rows: int, width: int) -> Iterator[Tensor]:
    """Return the arguments of the loss, with the given number of rows in total."""

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


def measure(name: str, rows: int, width: int) -> None:
    """Print the peak memory of a large step minus the memory after a small one, and its seconds."""
    entry = CATALOGUE[name]
    loss = made(entry, width)
    loss(*arguments(entry, CLASSES, width)).backward()
    before, start = resident("VmRSS"), time.perf_counter()
    loss(*arguments(entry, rows, width)).backward()
    print(resident("VmHWM") - before, time.perf_counter() - start)


def measured(name: str, rows: int, width: int) -> float:
    """Return the MB of a loss, measured in a new process; print them with the seconds."""
    command = [sys.executable, __file__, "--here", "--rows", str(rows), "--width", str(width), name]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    megabytes, seconds = map(float, said.split())
    print(f"{name:28s} {rows:8d} rows {megabytes:8.0f} MB {seconds:8.1f} s", file=sys.stderr, flush=True)
    return megabytes


def main() -> None:
    """Measure the named losses, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--docs", action="store_true", help="write docs/pages/memory.md, of all losses")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CATALOGUE)}")
    given = parser.parse_args()
    if unknown := set(given.names) - set(CATALOGUE):
        parser.error(f"no loss is called {', '.join(sorted(unknown))}; `contrastive-zoo list` has their names")
    if given.docs and given.names:
        parser.error("--docs is a page of all losses: name none")
    if given.here:
        measure(given.names[0], given.rows[0], given.width)
        return
    found = {
        name: [measured(name, rows, given.width) for rows in given.rows] for name in given.names or list(CATALOGUE)
    }
    head = ["loss", "engine", *(f"{rows:,} samples" for rows in given.rows)]
    lines = [head, ["---", "---", *["---:"] * len(given.rows)]]
    lines += [[f"`{name}`", CATALOGUE[name].engine, *(f"{x:.0f}" for x in of)] for name, of in found.items()]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    print(table, end="")
    if given.docs:
        PAGE.write_text(TEXT + table, encoding="utf-8")
    if above := [name for name, of in found.items() if max(of) >= LIMIT and name not in WITHOUT_LIMIT]:
        sys.exit(f"{LIMIT} MB or more: {', '.join(above)}")


if __name__ == "__main__":
    main()
