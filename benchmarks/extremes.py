"""Losses at the edge of the numbers, against their formulas in float64; the range that float16 leaves under a GradScaler.

python benchmarks/extremes.py [--docs]
"""

from argparse import Namespace
from collections.abc import Sequence
from statistics import median

import torch
from suite.harness import program, progress

import contrastive_zoo as cz
from contrastive_zoo.engine import implementation
from tests.extremes import GOAL, SITUATIONS, Comparison, Result, compare
from tests.test_extremes import EVERY
from tools.pages import table

LARGEST_FLOAT16, WORLD_SIZES = torch.finfo(torch.float16).max, (1, 8, 64, 512)


def errors(found: Sequence[Comparison]) -> list[str]:
    """Return the median error, and the largest one as a part of what is allowed."""
    defined = [x for x in found if x.exact is not None and isinstance(x.found, Result)]
    return [f"{median(x.error for x in defined):.0e}", f"{max(x.error / x.allowed for x in defined):.2f}"]


def situations() -> str:
    head = ["batch", "losses", "formula undefined", "float64: median error", "largest / allowed"]
    head += ["float32: median error", "largest / allowed"]
    lines = []
    for name, situation in SITUATIONS.items():
        entries = EVERY[::4] if "65,536" in name else EVERY  # pair by pair, such rows take minutes
        by_dtype = {
            dtype: [x for entry in entries if (x := compare(entry, situation, dtype)) is not None] for dtype in GOAL
        }
        of_double = by_dtype[torch.float64]
        undefined = sum(x.exact is None for x in of_double)
        columns = [column for found in by_dtype.values() for column in errors(found)]
        lines.append([name, len(of_double), undefined, *columns])
        progress(*lines[-1])
    return table(head, lines, texts=1)


def float16() -> str:
    """Return the table of what float16 keeps of the gradient of embeddings, at the largest scale without an overflow.

    The gradient of a rank's embeddings is rounded to float16 and multiplied by W. Training with a loss of each rank's
    own batch has gradients of this size, too, without the rounding before.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(512, 128, generator=generator)]
    rows.append(rows[0] + 0.5 * torch.randn(512, 128, generator=generator))
    views = [x.requires_grad_() for x in rows]
    cz.Clip(temperature=0.05)(*views).backward()
    gradient = torch.cat([x.grad for x in views if x.grad is not None])
    largest = gradient.abs().max().item()
    lines = []
    for size in WORLD_SIZES:
        scale = 2.0 ** int(torch.tensor(LARGEST_FLOAT16 / (size * largest)).log2().floor())
        found = (scale * gradient).half() * size
        assert found.isfinite().all()
        lost = ((found == 0) & (gradient != 0)).double().mean().item()
        relative = ((found.double() / scale / size - gradient).norm() / gradient.norm()).item()
        lines.append([str(size), f"2^{torch.tensor(scale).log2().int().item()}", f"{lost:.1e}", f"{relative:.1e}"])
    return table(["W", "scale", "gradients that become 0", "relative error of the gradient"], lines, texts=0)


def main(_: Namespace) -> dict[str, str]:
    implementation.SMALL_BATCH_ELEMENTS = -1  # the engines, not plain autograd
    return {"situations": situations(), "float16": float16()}


if __name__ == "__main__":
    program(main, __doc__, page="extreme-numbers.md")
