"""Times of the Triton kernels on this GPU, beside peers, dense formulas and the limits of the device.

    python benchmarks/gpu.py [loss …] [--quick] [--peers FOLDER] [--out FILE]
    python benchmarks/gpu.py --model [--rates TFLOP TB T]    without a GPU: what the model predicts
    python benchmarks/gpu.py --crossover    losses by kernels and by operations on the whole matrix, from 1,024 embeddings on

Medians by CUDA events, forward and backward, inputs rotated so that none is in L2, ceilings measured before each loss. The
model is the largest of FLOP over the rate of a large matrix product, bytes over copy bandwidth, and exponentials over
their rate. Memory is the peak beyond inputs, gradients included. FOLDER has the peers of
``.ci/gpu-peers.txt``; each implementation is compared with the dense formula in float64 before it is timed. --quick leaves
out small batches and a million embeddings.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
import triton
from gpu_suite.crossover import largest_matrix
from gpu_suite.implementations import COMPILED, IMPLEMENTATIONS, MODULES, NORMALISED, OURS, PUBLIC, SCALE, as_called
from gpu_suite.measure import H100, Ceilings, Measurement, Size, measured, median_ms, steps
from suite.harness import program, progress

import contrastive_zoo as cz
from contrastive_zoo.engine import plan
from tools.peer_losses.packages import installed, missing, required

LARGE, MILLION = (65_536, 768), (1_048_576, 512)
SMALL = (256, 512, 1024, 2048)
SIDE_BY_SIDE = [(4096, 768), (16_384, 768), LARGE]
CROSSOVER = (1024, 2048, 4096, 8192, 16_384)


def sizes_of(loss: str, name: str, quick: bool) -> list[Size]:
    also_small = name in (OURS, COMPILED, PUBLIC, NORMALISED) and loss != "InfoNCE"
    small = [(n, 768) for n in SMALL] if also_small else []
    million = [MILLION] if name == OURS and loss != "InfoNCE" else []
    return SIDE_BY_SIDE if quick else [*small, *SIDE_BY_SIDE, *million]


def predictions(ceilings: Ceilings) -> Iterator[str]:
    yield "| loss | B | d | model ms | FLOP ms | bytes ms | exponentials ms |"
    yield "|---|---|---|---|---|---|---|"
    for name in IMPLEMENTATIONS:
        for n, d in sizes_of(name, OURS, quick=False):
            parts = " | ".join(f"{x:.3g}" for x in ceilings.parts_ms(name, n, d))
            yield f"| {name} | {n:,} | {d} | {ceilings.model_ms(name, n, d):.3g} | {parts} |"


def crossover() -> Iterator[str]:
    """Return the table of ``gpu_suite/crossover.py`` and what follows from it; InfoNCE is one direction of CLIP."""
    plan.SMALL_ON_ACCELERATORS = max(CROSSOVER) ** 2
    table: dict[str, dict[int, tuple[float, ...]]] = {x: {} for x in MODULES if x != "InfoNCE"}
    for loss, n in product(table, CROSSOVER):
        ms = []
        for path in ("triton", "torch"):
            with cz.engine.use_implementation(path):
                ms.append(round(median_ms(steps(loss, as_called(loss)(SCALE), n, 768)), 3))
        table[loss][n] = tuple(ms)
    yield from (f'"{loss}": {times},' for loss, times in table.items())
    yield f"Kernels are used above {largest_matrix(table):,} embeddings."


def times(found: Sequence[Measurement], ceilings: Mapping[str, Ceilings]) -> Iterator[str]:
    yield "| loss | B | d | kernel ms | model ms | model / kernel | MB beyond inputs |"
    yield "|---|---|---|---|---|---|---|"
    for x in found:
        if x.implementation == OURS:
            model = ceilings[x.loss].model_ms(x.loss, x.n, x.d)
            figures = f"{x.reason} | {model:.3g} | – | –"
            if x.ms is not None:
                figures = f"{x.ms:.3g} | {model:.3g} | {model / x.ms:.0%} | {x.mb:,.0f}"
            yield f"| {x.loss} | {x.n:,} | {x.d} | {figures} |"


def side_by_side(found: Sequence[Measurement]) -> Iterator[str]:
    yield "| loss | B | d | implementation | ms | ms / ours | MB beyond inputs | relative error |"
    yield "|---|---|---|---|---|---|---|---|"
    ours = {(x.loss, x.n, x.d): x.ms for x in found if x.implementation == OURS}
    for size in {(x.loss, x.n, x.d): None for x in found if x.implementation != OURS}:
        for x in found:
            if (x.loss, x.n, x.d) == size:
                ratio = f"{x.ms / ms:.2f}" if x.ms and (ms := ours.get(size)) else "–"
                figures = f"{x.reason} | –" if x.ms is None else f"{x.ms:.3g} | {ratio}"
                memory = "–" if x.mb is None else f"{x.mb:,.0f}"
                error = "–" if x.error is None else f"{x.error:.1e}"
                yield f"| {x.loss} | {x.n:,} | {x.d} | {x.implementation} | {figures} | {memory} | {error} |"


def notes(found: Sequence[Measurement]) -> Iterator[str]:
    for loss, name in {(x.loss, x.implementation): None for x in found}:
        if note := IMPLEMENTATIONS[loss][name].note:
            yield f"- {loss} by {name}: {note}."


def page(device: str, found: Sequence[Measurement], ceilings: Mapping[str, Ceilings]) -> str:
    rates = [f"- Before {loss}: {x}." for loss, x in ceilings.items()]
    parts = [[device], rates, times(found, ceilings), side_by_side(found), notes(found)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main(given: Namespace) -> dict[str, str]:
    if given.model:
        return {"model": "\n".join(predictions(Ceilings(*(1e12 * x for x in given.rates))))}
    if given.crossover:
        return {"crossover": "\n".join(crossover())}
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    found_peers = installed(given.peers) if given.peers else {}
    peers = ", ".join(f"{name} {version}" for name, version in found_peers.items())
    absent = ", ".join(missing(given.peers, required("gpu-peers.txt")))
    device = f"{versions}. Peers: {peers or 'none'}." + (f" Not installed: {absent}." if absent else "")
    progress(device)
    folder = str(Path(given.peers).resolve()) if given.peers else ""
    found: list[Measurement] = []
    ceilings: dict[str, Ceilings] = {}
    for loss in given.names:
        ceilings[loss] = Ceilings.measured()
        torch.cuda.empty_cache()  # for the processes of the implementations
        for name in IMPLEMENTATIONS[loss]:
            new = measured(loss, name, sizes_of(loss, name, given.quick), folder)
            found += new
            for x in new:
                progress(f"{loss}, {name}, {x.n:,} × {x.d}: {x.reason or f'{x.ms:.3g} ms'}")
            if given.out:  # what was measured is not lost with what comes later
                Path(given.out).write_text(page(device, found, ceilings))
    return {"gpu": page(device, found, ceilings)}


if __name__ == "__main__":
    of_peers = {"peers": "", "out": ""}
    program(main, __doc__, names=IMPLEMENTATIONS, **of_peers, quick=False, model=False, crossover=False, rates=[*H100])
