"""Modules with the names and the signatures of the peers that are timed on a GPU, which compute dense formulas.

The signatures are those of the versions in ``benchmarks/gpu_suite/install.py``. An adapter that passes an argument which
the peer does not have raises here, without a GPU and without the peer.
"""

import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | None = None, head_dim: int = 256
) -> Tensor:
    """Inf-CL: the mean over queries."""
    assert scale is None, "the backward pass of a scale is an all-reduce, which needs a process group"
    heads = (x.view(len(x), -1, head_dim) for x in (q, k))
    return F.cross_entropy(torch.einsum("mhd,nhd->mn", *heads), torch.arange(len(q)) if labels is None else labels)


class _Memeff(nn.Module):
    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (z if self.normalized_inputs else F.normalize(z, dim=1) for z in (x, y))
        return x @ y.T / self.temperature

    def value(self, loss: Tensor) -> Tensor:
        """With ``stable`` the gradient has another factor, √(n/t) instead of 1/t, than the value."""
        if not self.stable:
            return loss
        return loss.detach() + (loss - loss.detach()) * math.sqrt(self.rows * self.temperature)


class MemoryEfficientCLIPLoss(_Memeff):
    """memeff: both directions; the temperature is a number."""

    def __init__(
        self, temperature=0.07, normalized_inputs=False, stable=True, tau_plus=0.0, label_smoothing=0.0
    ) -> None:
        super().__init__()
        self.temperature, self.normalized_inputs, self.stable = float(temperature), normalized_inputs, stable

    def forward(self, image_features: Tensor, text_features: Tensor, tau_plus: Any = None) -> Tensor:
        self.rows = len(image_features)
        logits, own = self.logits(image_features, text_features), torch.arange(self.rows)
        return self.value((F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2)


class MemoryEfficientQwen3Loss(_Memeff):
    """memeff: one direction, without negatives that are closer than the positive by more than a margin."""

    def __init__(
        self,
        temperature=0.07,
        margin=0.1,
        use_qq_negatives=False,
        use_dd_negatives=False,
        normalized_inputs=False,
        stable=True,
        tau_plus=0.0,
        label_smoothing=0.0,
    ) -> None:
        super().__init__()
        assert not use_qq_negatives
        assert not use_dd_negatives
        self.temperature, self.margin = float(temperature), margin
        self.normalized_inputs, self.stable = normalized_inputs, stable

    def forward(
        self, query_features: Tensor, doc_features: Tensor, hard_negative_features: Tensor | None = None, tau_plus=None
    ) -> Tensor:
        self.rows = len(query_features)
        logits = self.logits(query_features, doc_features)
        masked = logits > logits.diagonal()[:, None] + self.margin / self.temperature
        return self.value(F.cross_entropy(logits.masked_fill(masked, -torch.inf), torch.arange(self.rows)))


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    ignore_index=-100,
    softcap=None,
    reduction="mean",
    shift=False,
    filter_eps="high",
    impl="cce",
) -> Tensor:
    """cut-cross-entropy: rows e, classes c."""
    assert filter_eps is None, "small weights of the gradient are set to zero"
    return F.cross_entropy(e @ c.T, targets, ignore_index=ignore_index, reduction=reduction)


def fused_siglip_loss(
    img_features: Tensor, txt_features: Tensor, log_temperature: Tensor, bias: Tensor, use_fp8=False, backend="auto"
) -> Tensor:
    """siglip-kernel: the sum of all pairs over the rows; the temperature multiplies."""
    logits = img_features @ txt_features.T * log_temperature.exp() + bias
    return F.binary_cross_entropy_with_logits(logits, torch.eye(len(logits)).to(logits), reduction="sum") / len(logits)


class ClipLoss(nn.Module):
    """OpenCLIP: both directions."""

    def __init__(
        self, local_loss=False, gather_with_grad=False, cache_labels=False, rank=0, world_size=1, use_horovod=False
    ) -> None:
        super().__init__()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict=False,
    ) -> Tensor:
        own = torch.arange(len(image_features))
        towers = ((image_features, text_features), (text_features, image_features))
        return sum(F.cross_entropy(logit_scale * x @ y.T, own) for x, y in towers) / 2


class SigLipLoss(nn.Module):
    """OpenCLIP: the sum of all pairs over the rows."""

    def __init__(
        self, cache_labels: bool = False, rank: int = 0, world_size: int = 1, dist_impl: str | None = None
    ) -> None:
        super().__init__()

    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor, output_dict=False
    ) -> Tensor:
        logits = logit_scale * image_features @ text_features.T + logit_bias
        return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


CONTENTS: dict[str, tuple[Any, ...]] = {
    "inf_cl": (cal_inf_loss,),
    "memeff": (MemoryEfficientCLIPLoss, MemoryEfficientQwen3Loss),
    "cut_cross_entropy": (linear_cross_entropy,),
    "siglip_kernel": (fused_siglip_loss,),
    "open_clip.loss": (ClipLoss, SigLipLoss),
}


def modules() -> dict[str, ModuleType]:
    """Return the modules by the name under which they are imported."""
    found = {}
    for name, contents in CONTENTS.items():
        found[name] = ModuleType(name)
        for x in contents:
            setattr(found[name], x.__name__, x)
    return found
