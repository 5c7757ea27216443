"""The rates of a GPU, measured, and the time that a loss takes at least at these rates."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gpu_suite.measure import DEVICE, median_ms

PRODUCTS = {"CLIP": 4, "InfoNCE": 4, "SigLIP": 3, "NT-Xent": 2}
EXPONENTIALS = {"CLIP": 2, "InfoNCE": 2, "SigLIP": 1, "NT-Xent": 1}
"""Of B² each, forward and backward; B rows of NT-Xent are B/2 pairs."""

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
        """Return the lower bound of the time of a loss with n rows per side (NT-Xent: n rows in total)."""
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
