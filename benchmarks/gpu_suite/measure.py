"""Time, memory and errors of one implementation in a process of its own, which may die, hang or fill the GPU.

The process is ``python -m gpu_suite.measure``. :func:`measured` starts it; a size without a time has the reason.
"""

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu_suite.implementations import BIAS, DENSE, IMPLEMENTATIONS, SCALE, Loss, normalised

DEVICE = "cuda"
ROWS_FOR_ERRORS = 4133  # ragged, and more pairs than a single launch with masks computes
LIMIT = 2e-2
"""Largest relative error of a value or a gradient: bfloat16 has 2⁻⁹, and a wrong call changes a gradient by its own size."""

SECONDS = 300.0  # for all sizes of an implementation, its compilation and tuning included
ROTATED = 2**28  # bytes of all inputs of a step together, at least: several times the L2 cache
MARK = "measured "  # begins a line that is a measurement; peers print others

Size = tuple[int, int]


@dataclass(frozen=True)
class Measurement:
    """What was found at one size: milliseconds and 10⁶ bytes beyond inputs, or the reason why they are not known."""

    loss: str
    implementation: str
    n: int
    d: int
    ms: float | None = None
    mb: float | None = None
    error: float | None = None
    reason: str = ""


def numbers(loss: str, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    values = (SCALE, BIAS) if loss == "SigLIP" else (SCALE,)
    return [torch.tensor(x, device=device, dtype=dtype, requires_grad=True) for x in values]


def value_and_gradients(function: Loss, inputs: list[Tensor]) -> list[Tensor | None]:
    """Run forward and backward; an input that the function takes as a constant has no gradient."""
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs, allow_unused=True)]


def relative_error(
    loss: str,
    function: Loss,
    d: int,
    *,
    normalizes: bool = False,
    n: int = ROWS_FOR_ERRORS,
    device: str = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Return the largest error of value and gradients against the dense formula in float64, relative to each's norm."""
    generator = torch.Generator().manual_seed(0)
    a, noise = (F.normalize(torch.randn(n, d, generator=generator), dim=1) for _ in range(2))
    b = F.normalize(torch.linspace(-0.25, 0.5, n)[:, None] * a + noise, dim=1)
    rows = [x.to(device, dtype) for x in (a, b)]
    wide = [x.double().requires_grad_() for x in rows] + numbers(loss, device, torch.float64)
    found = value_and_gradients(function, [x.requires_grad_() for x in rows] + numbers(loss, device))
    expected = value_and_gradients(normalised(DENSE[loss]) if normalizes else DENSE[loss], wide)
    if any(x is None for x in found[:3]):
        return float("inf")  # a tower is a constant
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
    return torch.stack([(x.double() - y).norm() / y.norm() for x, y in pairs]).max().item()  # NaN if one is


def steps(loss: str, function: Loss, n: int, d: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Return a function that runs forward and backward on the next of several inputs, so that none is in the L2 cache."""
    shapes = [(n // 2 if loss == "NT-Xent" else n, d)] * 2
    count = max(2, -(-ROTATED // (2 * sum(map(math.prod, shapes)))))
    constants = numbers(loss, DEVICE)
    sets: Iterator[list[Tensor]] = cycle(
        [[F.normalize(torch.randn(shape, device=DEVICE), dim=-1).to(dtype).requires_grad_() for shape in shapes]
         for _ in range(count)]
    )  # fmt: skip
    return lambda: value_and_gradients(function, [*next(sets), *constants])


def peak_mb(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def median_ms(step: Callable[[], object]) -> float:
    """Return the milliseconds of a step, by events around each step; as many steps as fit into a second."""
    step()
    times: list[float] = []
    while sum(times) < 1e3 * (5 if len(times) < 5 else 1) and len(times) < 100:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def reason_of(problem: BaseException) -> str:
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(problem, ModuleNotFoundError):
        return f"not installed: {problem.name or problem}"
    said = str(problem) or traceback.extract_tb(problem.__traceback__)[-1].line or ""  # a bare assert says nothing
    first = (said.strip().splitlines() or [""])[0]
    return f"{type(problem).__name__}: {first}"[:120].replace("|", "/")


def measure(loss: str, name: str, sizes: list[Size]) -> Iterator[Measurement]:
    implementation = IMPLEMENTATIONS[loss][name]
    construct = implementation.construct
    error, reason = None, ""
    dtype = torch.bfloat16 if implementation.rows == "bfloat16" else torch.float32
    torch.set_float32_matmul_precision("high" if implementation.rows == "TF32" else "highest")
    try:
        error = relative_error(loss, construct(SCALE), sizes[0][1], normalizes=implementation.normalizes, dtype=dtype)
        if not error <= LIMIT:
            reason = f"relative error {error:.2g}, which is more than {LIMIT:g}"
    except Exception as problem:
        reason = reason_of(problem)
    for n, d in sizes:
        ms, mb, why = None, None, reason
        if not reason:
            try:
                step = steps(loss, construct(SCALE), n, d, dtype)
                ms, mb = median_ms(step), peak_mb(step)
            except Exception as problem:
                why = reason_of(problem)
            torch.cuda.empty_cache()
        yield Measurement(loss, name, n, d, ms, mb, error, why)


def measured(
    loss: str,
    name: str,
    sizes: list[Size],
    folder: str = "",
    *,
    command: tuple[str, ...] = (),
    seconds: float = SECONDS,
) -> list[Measurement]:
    """Measure an implementation in a new process; a size of which it says nothing has the reason of its end."""
    measuring = sys.executable, "-m", "gpu_suite.measure", folder, loss, name, *(f"{n}x{d}" for n, d in sizes)
    pipe, root = subprocess.PIPE, Path(__file__).parent.parent
    options = {"stdout": pipe, "stderr": pipe, "text": True, "cwd": root, "start_new_session": True}
    with subprocess.Popen(command or measuring, **options) as process:
        try:
            out, err = process.communicate(timeout=seconds)
            last = (err.strip().splitlines() or [""])[-1]
            reason = f"the process ended with status {process.returncode}: {last}"[:160].replace("|", "/")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also compilers that it started, which hold its pipes
            out, _ = process.communicate()
            reason = f"not finished within {seconds:g} s"
    lines = (json.loads(x.removeprefix(MARK)) for x in out.splitlines() if x.startswith(MARK))
    found = {(x.n, x.d): x for x in (Measurement(**line) for line in lines)}
    return [found.get(size, Measurement(loss, name, *size, reason=reason)) for size in sizes]


PRODUCTS = {"CLIP": 4, "InfoNCE": 4, "SigLIP": 3, "NT-Xent": 2}
EXPONENTIALS = {"CLIP": 2, "InfoNCE": 2, "SigLIP": 1, "NT-Xent": 1}
"""Of B² each, forward and backward; B embeddings of NT-Xent are B/2 pairs."""

WEIGHTS = {"CLIP": 1.0, "InfoNCE": 1.0, "SigLIP": 1.0, "NT-Xent": 0.5}
"""How many of B² weights are written once and read twice."""

H100 = (737.0, 2.98, 3.9)
"""TFLOP/s of bfloat16, TB/s and T exponentials/s that one H100 reached; benchmarks/gpu.md."""


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
        """Return the lower bound of the time of a loss with n embeddings per side (NT-Xent: n in total)."""
        return max(self.parts_ms(name, n, d))

    def parts_ms(self, name: str, n: int, d: int) -> tuple[float, float, float]:
        flop = PRODUCTS[name] * 2 * n * n * d / self.flop
        moved = 3 * 2 * WEIGHTS[name] * n * n / self.bytes
        return 1e3 * flop, 1e3 * moved, 1e3 * EXPONENTIALS[name] * n * n / self.exp

    def __str__(self) -> str:
        return (
            f"matrix product 8192³ bf16 {self.flop / 1e12:.0f} TFLOP/s, copy {self.bytes / 1e12:.2f} TB/s, "
            f"exp2 {self.exp / 1e12:.2f} T/s"
        )


def main() -> None:
    folder, loss, name, *sizes = sys.argv[1:]
    sys.path[:0] = [folder] if folder else []
    out = sys.stdout
    pairs = [(int(n), int(d)) for n, d in (size.split("x") for size in sizes)]
    with contextlib.redirect_stdout(sys.stderr):
        for measurement in measure(loss, name, pairs):
            print(MARK + json.dumps(asdict(measurement)), file=out, flush=True)


if __name__ == "__main__":
    main()
