"""The implementations of each loss: this library's kernels, dense formulas by torch, and peers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from gpu_suite import peers
from gpu_suite.peers import Construct, Loss

OURS, EAGER, COMPILED = "ours", "dense eager", "dense compiled"
PUBLIC, NORMALISED = "ours, the public loss", "dense compiled, normalised"
SCALE, BIAS = 20.0, -10.0


def dense_info_nce(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(wide(scale * a @ b.T), torch.arange(len(a), device=a.device))


def dense_clip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits, own = wide(scale * a @ b.T), torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def dense_siglip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = wide(scale * a @ b.T) + bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(a), device=a.device) - 1)).sum() / len(a)


def dense_nt_xent(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    z, n = torch.cat([a, b]), len(a)
    logits = wide(scale * z @ z.T).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * n, device=a.device).roll(n))


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


DENSE: dict[str, Loss] = {
    "CLIP": dense_clip,
    "InfoNCE": dense_info_nce,
    "SigLIP": dense_siglip,
    "NT-Xent": dense_nt_xent,
}


MODULES: dict[str, Callable[[float], nn.Module]] = {
    "CLIP": lambda scale: cz.Clip(temperature=cz.LearnableTemperature(1 / scale)),
    "InfoNCE": lambda scale: cz.InfoNCE(temperature=1 / scale),
    "SigLIP": lambda scale: cz.SigLIP(
        temperature=cz.LearnableTemperature(1 / scale, max_scale=math.inf),
        logit_bias=nn.Parameter(torch.tensor([BIAS])),
    ),
    "NT-Xent": lambda scale: cz.NTXent(temperature=1 / scale),
}
"""This library's losses as users call them: checks, normalisation, and kernels for large batches only."""


@dataclass(frozen=True)
class Implementation:
    """A function that computes a loss.

    Args:
        construct: imports what it needs, and returns the function.
        kind: a dense formula holds the similarity matrix; a peer is another library's kernel.
        note: how it differs from the dense formula, or from the same work.
        normalizes: whether it divides rows by their norms first.
    """

    construct: Construct
    kind: Literal["ours", "dense", "peer"]
    note: str = ""
    normalizes: bool = False


def kernel(module: str, name: str) -> Implementation:
    """Return a kernel of this library, which is imported with Triton."""
    return Implementation(
        lambda scale: getattr(import_module(f"contrastive_zoo.engine.kernels.{module}"), name), "ours"
    )


def as_called(loss: str) -> Construct:

    def construct(scale: float) -> Loss:
        module = MODULES[loss](scale).to("cuda" if torch.cuda.is_available() else "cpu")
        return lambda a, b, *numbers: module(a, b)

    return construct


def normalised(formula: Loss) -> Loss:
    return lambda a, b, *numbers: formula(F.normalize(a, dim=1), F.normalize(b, dim=1), *numbers)


def compiled(formula: Loss) -> Construct:

    def construct(scale: float) -> Loss:
        torch.compiler.reset()
        return torch.compile(formula, fullgraph=True, dynamic=False)

    return construct


def all_of(loss: str, module: str, name: str, others: dict[str, Implementation]) -> dict[str, Implementation]:
    """Return a kernel of this library, then the peers, which are timed in the minutes after it, then the dense formula."""
    return {
        OURS: kernel(module, name),
        **others,
        EAGER: Implementation(lambda scale: DENSE[loss], "dense"),
        COMPILED: Implementation(compiled(DENSE[loss]), "dense"),
        PUBLIC: Implementation(
            as_called(loss), "ours", "scale and bias are parameters of the module, or numbers", normalizes=True
        ),
        NORMALISED: Implementation(compiled(normalised(DENSE[loss])), "dense", normalizes=True),
    }


_INF_CL = "TF32, on float32 copies of the rows"
_MEMEFF = "the temperature is a constant: no gradient of the scale"
_BFLOAT16 = "cross-entropies of logits in bfloat16, where the other dense formulas convert them to float32"

IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "CLIP": all_of(
        "CLIP",
        "softmax",
        "clip",
        {
            "Inf-CL": Implementation(peers.inf_cl_clip, "peer", f"one call for each direction; {_INF_CL}"),
            "memeff": Implementation(peers.memeff_clip, "peer", _MEMEFF),
            "OpenCLIP": Implementation(peers.open_clip("ClipLoss"), "dense", _BFLOAT16),
        },
    ),
    "InfoNCE": all_of(
        "InfoNCE",
        "softmax",
        "info_nce",
        {
            "Inf-CL": Implementation(peers.inf_cl_info_nce, "peer", _INF_CL),
            "memeff": Implementation(peers.memeff_info_nce, "peer", f"Qwen3 loss without its mask; {_MEMEFF}"),
            "cut-cross-entropy": Implementation(
                peers.cut_cross_entropy,
                "peer",
                "linear cross-entropy of B classes; no weight of the gradient is left out",
            ),
        },
    ),
    "SigLIP": all_of(
        "SigLIP",
        "sigmoid",
        "siglip",
        {
            "siglip-kernel": Implementation(
                peers.siglip_kernel, "peer", "gradients of the text rows are added up in bfloat16"
            ),
            "OpenCLIP": Implementation(peers.open_clip("SigLipLoss"), "dense", _BFLOAT16),
        },
    ),
    "NT-Xent": all_of("NT-Xent", "softmax", "nt_xent", {}),
}
"""By loss; the first is this library's."""
