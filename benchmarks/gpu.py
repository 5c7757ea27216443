"""Times of the Triton kernels on this GPU, with the limits of the device and the times of dense formulas.

    python benchmarks/gpu.py [--quick] [--out FILE]
    python benchmarks/gpu.py --model [--rates TFLOP TB T]    without a GPU: what the model predicts

Medians by CUDA events, forward and backward, inputs rotated so that none is in L2, ceilings measured in the same minute. The
model is the largest of FLOP over the rate of a large matrix product, bytes over copy bandwidth, and exponentials over
their rate. Memory is the peak beyond inputs, gradients included.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from contrastive_zoo.kernels.sigmoid import siglip
from contrastive_zoo.kernels.softmax import clip, nt_xent

DEVICE = "cuda"
PRODUCTS = {"CLIP": 4, "SigLIP": 3, "NT-Xent": 2}
EXPONENTIALS = {"CLIP": 2, "SigLIP": 1, "NT-Xent": 1}
"""Of B² each, forward and backward; B rows of NT-Xent are B/2 pairs."""

WEIGHTS = {"CLIP": 1.0, "SigLIP": 1.0, "NT-Xent": 0.5}
"""How many of B² weights are written once and read twice."""

H100 = (737.0, 2.98, 3.9)
"""TFLOP/s of bfloat16, TB/s and T exponentials/s that one H100 reached; benchmarks/gpu.md."""

SIZES = [(4096, 768), (16_384, 768), (65_536, 768), (1_048_576, 512)]

Loss = Callable[..., Tensor]


def dense_clip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits, own = (scale * a @ b.T).float(), torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def dense_siglip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = (scale * a @ b.T).float() + bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(a), device=a.device) - 1)).sum() / len(a)


def dense_nt_xent(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    z, n = torch.cat([a, b]), len(a)
    logits = (scale * z @ z.T).float().fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * n, device=a.device).roll(n))


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "CLIP": (clip, dense_clip),
    "SigLIP": (siglip, dense_siglip),
    "NT-Xent": (nt_xent, dense_nt_xent),
}


def median_ms(step: Callable[[], object], *, seconds: float = 1.0) -> float:
    """Return the milliseconds of a step, by events around each step; as many steps as fit into the time limit."""
    step()
    times: list[float] = []
    while sum(times) < 1e3 * seconds * (5 if len(times) < 5 else 1) and len(times) < 100:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


@triton.jit
def _exponentials(out, COUNT: tl.constexpr) -> None:
    places = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = places.to(tl.float32)
    for _ in range(COUNT):
        x = tl.exp2(-x)
    tl.store(out + places, x)


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of the device: FLOP, bytes and exponentials per second."""

    flop: float
    bytes: float
    exp: float

    @classmethod
    def measured(cls) -> "Ceilings":
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        x = torch.randn(2**29, device=DEVICE)
        y, out = torch.empty_like(x), torch.empty(2**20, device=DEVICE)
        return cls(
            2 * 8192**3 / median_ms(lambda: a @ b) * 1e3,
            2 * x.nbytes / median_ms(lambda: y.copy_(x)) * 1e3,
            2**20 * 4096 / median_ms(lambda: _exponentials[(2**10,)](out, 4096)) * 1e3,
        )

    def model_ms(self, name: str, n: int, d: int) -> float:
        """Return the lower bound of the time of a loss with n rows per side (NT-Xent: n rows in total)."""
        return max(self.parts_ms(name, n, d))

    def parts_ms(self, name: str, n: int, d: int) -> tuple[float, float, float]:
        """Return the times of FLOP, bytes and exponentials."""
        flop = PRODUCTS[name] * 2 * n * n * d / self.flop
        moved = 3 * 2 * WEIGHTS[name] * n * n / self.bytes
        return 1e3 * flop, 1e3 * moved, 1e3 * EXPONENTIALS[name] * n * n / self.exp

    def __str__(self) -> str:
        return (
            f"matrix product 8192³ bf16 {self.flop / 1e12:.0f} TFLOP/s, copy {self.bytes / 1e12:.2f} TB/s, "
            f"exp2 {self.exp / 1e12:.2f} T/s"
        )


def steps(name: str, loss: Loss, n: int, d: int) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward on the next of several inputs, together larger than L2."""
    rows = n // 2 if name == "NT-Xent" else n
    count = max(2, -(-(2**28) // (4 * rows * d)))
    numbers = [torch.tensor(x, device=DEVICE, requires_grad=True) for x in (20.0, -10.0)]
    sets: Iterator[list[Tensor]] = cycle(
        [[F.normalize(torch.randn(rows, d, device=DEVICE), dim=1).bfloat16().requires_grad_() for _ in range(2)]
         for _ in range(count)]
    )  # fmt: skip

    def step() -> Tensor:
        inputs = [*next(sets), *numbers[: 2 if name == "SigLIP" else 1]]
        value = loss(*inputs)
        torch.autograd.grad(value, inputs)
        return value

    return step


def peak_mb(step: Callable[[], object]) -> float:
    """Return the peak memory of a step minus the memory before it, in MB (10⁶ bytes)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def attempt(measure: Callable[[Callable[[], object]], float], step: Callable[[], object]) -> str:
    """Format a number, or the reason why there is none."""
    try:
        return f"{measure(step):.3g}"
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"


def large(sizes: list[tuple[int, int]], ceilings: Ceilings) -> Iterator[str]:
    """Return a table of kernels and eager dense formulas."""
    yield "| loss | B | d | kernel ms | model ms | model / kernel | kernel MB | dense eager ms | dense MB |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for n, d in sizes:
        for name, (kernel, dense) in LOSSES.items():
            step = steps(name, kernel, n, d)
            ms, model, memory = median_ms(step), ceilings.model_ms(name, n, d), peak_mb(step)
            eager, eager_memory = "–", "–"
            if n <= 65_536:  # 4 · 65,536² bytes are 17 GB, and dense formulas hold several
                eager, eager_memory = (attempt(measure, steps(name, dense, n, d)) for measure in (median_ms, peak_mb))
                torch.cuda.empty_cache()
            yield (
                f"| {name} | {n:,} | {d} | {ms:.3g} | {model:.3g} | {model / ms:.0%} | {memory:.0f} | {eager} "
                f"| {eager_memory} |"
            )


def small(sizes: list[int], ceilings: Ceilings, d: int = 768) -> Iterator[str]:
    """Return a table of kernels and compiled dense formulas."""
    yield "| loss | B | kernel ms | model ms | dense compiled ms |"
    yield "|---|---|---|---|---|"
    for name, (kernel, dense) in LOSSES.items():
        for n in sizes:
            torch._dynamo.reset()
            compiled = torch.compile(dense, fullgraph=True, dynamic=False)
            yield (
                f"| {name} | {n:,} | {median_ms(steps(name, kernel, n, d)):.3g} "
                f"| {ceilings.model_ms(name, n, d):.3g} | {attempt(median_ms, steps(name, compiled, n, d))} |"
            )


def predictions(ceilings: Ceilings) -> Iterator[str]:
    """Return a table of the model's times, for a device with these rates."""
    yield "| loss | B | d | model ms | FLOP ms | bytes ms | exponentials ms |"
    yield "|---|---|---|---|---|---|---|"
    for n, d in SIZES:
        for name in LOSSES:
            parts = " | ".join(f"{x:.3g}" for x in ceilings.parts_ms(name, n, d))
            yield f"| {name} | {n:,} | {d} | {ceilings.model_ms(name, n, d):.3g} | {parts} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without small batches and without a million rows")
    parser.add_argument("--out", type=Path, help="a file for the tables")
    parser.add_argument("--model", action="store_true", help="print what the model predicts, and measure nothing")
    parser.add_argument("--rates", nargs=3, type=float, default=H100, help="of that model, in 10¹² a second")
    options = parser.parse_args()
    if options.model:
        print(*predictions(Ceilings(*(1e12 * x for x in options.rates))), sep="\n")
        return
    ceilings = Ceilings.measured()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; {ceilings}.", ""]
    print(*lines, sep="\n", flush=True)
    tables = [large(SIZES[:-1], ceilings)]
    if not options.quick:
        tables += [small([256, 512, 1024, 2048], ceilings), large(SIZES[-1:], ceilings)]
    for table in tables:
        for line in table:
            print(line, flush=True)
            lines.append(line)
        print(flush=True)
        lines.append("")
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
