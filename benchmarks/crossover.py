"""Times of Triton kernels and of operations on the whole matrix by size, and the file by which the library chooses.

    python benchmarks/crossover.py    on a GPU: writes contrastive_zoo/engine/kernel_times.json
    python benchmarks/crossover.py --show    prints the file as a table, and the size from which kernels are used

Losses as they are called, normalisation and checks included; bfloat16, d = 768, forward and backward, medians.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
import triton
from gpu_suite.implementations import MODULES, SCALE, as_called
from gpu_suite.measure import median_ms, steps
from suite.harness import command_line

import contrastive_zoo as cz
from contrastive_zoo.engine import implementation
from contrastive_zoo.engine.crossover import FILE, largest_matrix

SIZES = (1024, 2048, 4096, 8192, 16_384)
LOSSES = [name for name in MODULES if name != "InfoNCE"]  # it is one direction of CLIP
PATHS = {"kernels": "triton", "matrix": "torch"}


def measured(loss: str, n: int, path: str) -> float:
    with cz.engine.use_implementation(PATHS[path]):
        return median_ms(steps(loss, as_called(loss)(SCALE), n, 768))


def content(device: str) -> dict[str, Any]:
    """Measure every loss, size and path; batches of all sizes count as small ones meanwhile."""
    small_batches = max(SIZES) ** 2 // implementation.SMALL_BATCH_ELEMENTS
    implementation.NO_KERNELS = implementation.Kernels(small_batches=small_batches)
    ms = {x: {str(n): {path: round(measured(x, n, path), 3) for path in PATHS} for n in SIZES} for x in LOSSES}
    about = "torch operations on the whole matrix, as the losses call them"
    return {"device": f"{device}; bfloat16, d = 768, forward and backward", "matrix": about, "ms": ms}


def table(found: dict[str, Any]) -> Iterator[str]:
    yield "| loss | embeddings | kernels, ms | whole matrix, ms |"
    yield "|---|---|---|---|"
    for loss, sizes in found["ms"].items():
        for n, of_size in sizes.items():
            cells = ["not measured" if of_size[path] is None else f"{of_size[path]:.3g}" for path in PATHS]
            yield f"| {loss} | {int(n):,} | {' | '.join(cells)} |"


def main() -> None:
    options = command_line(__doc__, show=False).parse_args()
    found = json.loads(FILE.read_text(encoding="utf-8"))
    if not options.show:
        versions = f"torch {torch.__version__}, Triton {triton.__version__}"
        found = content(f"{torch.cuda.get_device_name()}, {versions}")
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{found['device']}. Whole matrix: {found['matrix']}.\n")
    print(*table(found), sep="\n")
    print(f"\nKernels are used above {largest_matrix(found['ms']):,} embeddings.")


if __name__ == "__main__":
    main()
