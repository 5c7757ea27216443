"""The implementations of each loss: this library's kernels, dense formulas by torch, and adapters of peers.

An adapter is a function from the value of the scale to one of unit embeddings a and b and of the scale (and bias): the
mean loss of a dense formula. It imports its package when it is called. It was written from the source of the version in
``.ci/gpu-peers.txt``; ``measure.py`` compares value and gradients with the dense formula before anything is timed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from tools.peer_losses.packages import loaded

Loss = Callable[..., Tensor]
Construct = Callable[[float], Loss]
"""From the scale's value, which some peers take as a setting, to a function of the embeddings and the scale as a tensor."""

OURS, EAGER, COMPILED = "ours", "dense eager", "dense compiled"
PUBLIC, NORMALISED = "ours, the public loss", "dense compiled, normalised"
TF32, FLOAT32 = "ours, TF32", "ours, float32"
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


DENSE = {
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
    """A function that computes a loss: one of ours, a dense formula that holds the matrix, or a peer's kernel."""

    construct: Construct
    kind: Literal["ours", "dense", "peer"]
    note: str = ""  # how it differs from the dense formula, or from the same work
    normalizes: bool = False  # whether it divides embeddings by their norms first
    rows: Literal["bfloat16", "TF32", "float32"] = (
        "bfloat16"  # the dtype of the embeddings, and how float32 is multiplied
    )


KINDS: dict[str, Callable[..., nn.Module]] = {
    "CLIP": cz.Clip,
    "InfoNCE": cz.InfoNCE,
    "SigLIP": cz.SigLIP,
    "NT-Xent": cz.NTXent,
}


def kernel(loss: str, rows: Literal["bfloat16", "TF32", "float32"] = "bfloat16") -> Implementation:
    """Return this library's kernels of a loss of unit embeddings, at any size."""

    def compute(a: Tensor, b: Tensor, scale: Tensor, *bias: Tensor) -> Tensor:
        settings = {"logit_bias": bias[0]} if bias else {}
        with cz.engine.use_implementation("triton"):
            return KINDS[loss](temperature=1 / scale, normalize=False, **settings)(a, b)

    note = "" if rows == "bfloat16" else f"float32 embeddings, multiplied in {rows}"
    return Implementation(lambda scale: compute, "ours", note, rows=rows)


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


def all_of(loss: str, others: dict[str, Implementation]) -> dict[str, Implementation]:
    """Return a kernel of this library, then the peers, which are timed in the minutes after it, then the dense formula."""
    return {
        OURS: kernel(loss),
        TF32: kernel(loss, "TF32"),
        FLOAT32: kernel(loss, "float32"),
        **others,
        EAGER: Implementation(lambda scale: DENSE[loss], "dense"),
        COMPILED: Implementation(compiled(DENSE[loss]), "dense"),
        PUBLIC: Implementation(
            as_called(loss), "ours", "scale and bias are parameters of the module, or numbers", normalizes=True
        ),
        NORMALISED: Implementation(compiled(normalised(DENSE[loss])), "dense", normalizes=True),
    }


def inf_cl_info_nce(scale: float) -> Loss:
    """Construct Inf-CL's loss of queries. It computes in float32 (TF32) whatever the dtype; d is a multiple of 256."""
    loss = import_module("inf_cl").cal_inf_loss
    # the backward pass of its argument scale is an all-reduce, also on one process
    return lambda a, b, scale: loss(scale * a, b)


def inf_cl_clip(scale: float) -> Loss:
    one_sided = inf_cl_info_nce(scale)
    return lambda a, b, scale: (one_sided(a, b, scale) + one_sided(b, a, scale)) / 2


def memeff_clip(scale: float) -> Loss:
    """Construct memeff's CLIP loss. ``stable=True``, its default, multiplies gradients by another factor."""
    loss = import_module("memeff").MemoryEfficientCLIPLoss(temperature=1 / scale, normalized_inputs=True, stable=False)
    return lambda a, b, scale: loss(a, b)


def memeff_info_nce(scale: float) -> Loss:
    loss = import_module("memeff").MemoryEfficientQwen3Loss(
        temperature=1 / scale, margin=4.0, normalized_inputs=True, stable=False
    )
    return lambda a, b, scale: loss(a, b)


def cut_cross_entropy(scale: float) -> Loss:
    """Construct a linear cross-entropy of n embeddings and n classes, which is InfoNCE."""
    loss = import_module("cut_cross_entropy").linear_cross_entropy
    # its default filter_eps leaves out small weights of the gradient: of 65,536 equally likely classes all but the positives
    return lambda a, b, scale: loss(scale * a, b, torch.arange(len(a), device=a.device), filter_eps=None)


def siglip_kernel(scale: float) -> Loss:
    """Construct siglip-kernel's loss, which takes the logarithm of the scale, and the sum of the pairs over n."""
    loss = import_module("siglip_kernel").fused_siglip_loss
    return lambda a, b, scale, bias: loss(a, b, scale.log(), bias)


def open_clip(name: str) -> Construct:
    return lambda scale: getattr(loaded("open_clip.loss"), name)(cache_labels=True)


_INF_CL = "TF32, on float32 copies of the rows"
_MEMEFF = "the temperature is a constant: no gradient of the scale"
_BFLOAT16 = "cross-entropies of logits in bfloat16, where the other dense formulas convert them to float32"

_OF_CLIP = {
    "Inf-CL": Implementation(inf_cl_clip, "peer", f"one call for each direction; {_INF_CL}"),
    "memeff": Implementation(memeff_clip, "peer", _MEMEFF),
    "OpenCLIP": Implementation(open_clip("ClipLoss"), "dense", _BFLOAT16),
}
_OF_INFO_NCE = {
    "Inf-CL": Implementation(inf_cl_info_nce, "peer", _INF_CL),
    "memeff": Implementation(memeff_info_nce, "peer", f"Qwen3 loss without its mask; {_MEMEFF}"),
    "cut-cross-entropy": Implementation(
        cut_cross_entropy, "peer", "linear cross-entropy of B classes; no weight of the gradient is left out"
    ),
}
_OF_SIGLIP = {
    "siglip-kernel": Implementation(siglip_kernel, "peer", "gradients of the text rows are added up in bfloat16"),
    "OpenCLIP": Implementation(open_clip("SigLipLoss"), "dense", _BFLOAT16),
}

IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "CLIP": all_of("CLIP", _OF_CLIP),
    "InfoNCE": all_of("InfoNCE", _OF_INFO_NCE),
    "SigLIP": all_of("SigLIP", _OF_SIGLIP),
    "NT-Xent": all_of("NT-Xent", {}),
}
