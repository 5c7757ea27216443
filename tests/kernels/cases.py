"""Each kernel against the dense formula in float64: a program that prints the errors of all cases as JSON.

A program, because Triton decides when it is imported whether its interpreter is on, for the whole process.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.kernels.sigmoid import siglip
from contrastive_zoo.engine.kernels.softmax import clip, info_nce, nt_xent
from tests import zoo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def public(kind: Callable[..., Callable[..., Tensor]], **settings: Any) -> Callable[..., Tensor]:
    """A public loss of the same arguments as its kernel."""

    def loss(a: Tensor, b: Tensor, scale: Tensor, *bias: Tensor) -> Tensor:
        more = {"logit_bias": bias[0]} if bias else {}
        negatives = [b[len(a) :]] if len(b) > len(a) else []
        with cz.engine.use_implementation("triton"):
            return kind(temperature=1 / scale, **more, **settings)(a, b[: len(a)], *negatives)

    return loss


def normalised(dense: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b, *numbers: dense(F.normalize(a, dim=1), F.normalize(b, dim=1), *numbers)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "clip": (clip, zoo.clip),
    "info_nce": (info_nce, zoo.info_nce),
    "nt_xent": (nt_xent, zoo.nt_xent),
    "siglip": (siglip, zoo.siglip),
    "public clip": (public(cz.Clip), normalised(zoo.clip)),
    "public info_nce": (public(cz.InfoNCE), normalised(zoo.info_nce)),
    "public nt_xent": (public(cz.NTXent, normalize=False), zoo.nt_xent),
    "public siglip": (public(cz.SigLIP), normalised(zoo.siglip)),
}


@dataclass(frozen=True)
class Case:
    """A loss and what its rows are like."""

    loss: str
    n: int
    m: int
    d: int
    dtype: str = "float32"
    temperature: float = 0.07
    rows: str = "gaussian"

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(k, self.d, generator=generator) for k in (self.n, self.m))
        if self.rows == "clustered":  # about two centres: most similarities are near ±1
            a, b = (x * 0.05 + torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None] for x in (a, b))
        if self.rows == "duplicates":
            a, b = a[torch.arange(len(a)) // 3], b[torch.arange(len(b)) // 3]
        if self.rows == "opposite":  # all others of a column are as far below its neighbours' as can be
            b[: len(b) // 2] = -a[:1]
            a = a[:1] + 0.01 * a
        a, b = (F.normalize(x, dim=1).to(DEVICE, getattr(torch, self.dtype)) for x in (a, b))
        if self.rows == "strided":
            a, b = a.T.contiguous().T, torch.stack([b, b], 2).flatten(1)[:, ::2]
        if self.rows == "shifted":  # no row begins where a copy of a tile may
            a, b = (F.pad(x, (1, 0))[:, 1:] for x in (a, b))
        return [a, b, *(torch.tensor(x, device=DEVICE) for x in (1 / self.temperature, -3.0))]

    def results(self, loss: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        inputs = [x.detach() if dtype is None else x.to(dtype) for x in self.inputs()]
        inputs = [x.requires_grad_() for x in inputs[: 4 if "siglip" in self.loss else 3]]
        value = loss(*inputs)
        return [value.detach(), *torch.autograd.grad(value, inputs)]

    def errors(self) -> list[tuple[float, float]]:
        """Relative errors of value and gradients: of the kernel, and of the dense formula in the same dtype."""
        kernel, dense = LOSSES[self.loss]
        truth = self.results(dense, torch.float64)
        # what fills new memory must not matter
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        found = self.results(kernel)
        torch.use_deterministic_algorithms(False)
        same = self.results(dense, getattr(torch, self.dtype))
        # of scale and bias it is a difference of numbers up to 1, relative to which it can be right
        least = [1e-30, 1e-30, 1e-30, 1.0, 1.0]
        return [(_distance(x, z, e), _distance(y, z, e)) for x, y, z, e in zip(found, same, truth, least, strict=False)]


def _distance(x: Tensor, y: Tensor, least: float = 1e-30) -> float:
    return float((x.double() - y).norm() / y.norm().clamp(min=least)) if y.norm() > 0 else float(x.double().norm())


KERNELS = ("clip", "info_nce", "nt_xent", "siglip")

CASES = [
    *(Case(loss, 90, 90, 24, dtype) for loss in KERNELS for dtype in ("float32", "bfloat16", "float16")),
    *(Case(loss, 70, 70, 33, temperature=0.01) for loss in KERNELS),
    *(Case(loss, 66, 66, 9, "bfloat16", temperature=0.01) for loss in KERNELS),
    *(Case(loss, 65, 65, 8, temperature=0.01, rows=rows) for loss in KERNELS for rows in ("clustered", "duplicates")),
    *(Case(loss, 40, 40, 20, rows=rows) for loss in KERNELS for rows in ("strided", "shifted")),
    *(Case(loss, 1, 1, 1) for loss in KERNELS),
    *(Case(loss, 3, 3, 5) for loss in KERNELS),
    Case("clip", 90, 90, 8, temperature=0.005, rows="opposite"),
    Case("info_nce", 33, 140, 7),
    Case("siglip", 33, 140, 7),
    Case("siglip", 140, 33, 7),
]


PUBLIC = [
    Case("public clip", 40, 40, 9),
    Case("public clip", 33, 33, 8, "bfloat16", temperature=0.01),
    Case("public info_nce", 20, 45, 7, temperature=0.01),
    Case("public nt_xent", 33, 33, 8, temperature=0.01, rows="duplicates"),
    Case("public siglip", 33, 33, 8, "bfloat16"),
    Case("public siglip", 35, 35, 9, temperature=0.01, rows="clustered"),
]
"""The public losses, in every case."""


def selected() -> list[Case]:
    """Return every case on a GPU or with ALL_DTYPES=1; otherwise every fifth one, as the interpreter is slow."""
    return PUBLIC + (CASES if DEVICE != "cpu" or os.environ.get("ALL_DTYPES") else CASES[::5])


def interpret_bfloat16() -> None:
    """Teach the interpreter products of bfloat16, of which it multiplies the bits."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):  # type: ignore[no-untyped-def]  # Triton's own has no types
        for x in (a, b):
            if x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16:
                x.data = (x.data.astype(np.uint32) << 16).view(np.float32)
        return plain(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, about log2(0) in the interpreter
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        interpret_bfloat16()
    json.dump([{**asdict(case), "errors": case.errors()} for case in selected()], sys.stdout)


if __name__ == "__main__":
    main()
