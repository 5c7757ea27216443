"""Peers' losses as functions of normalised rows a and b and of the scale (and bias): the mean loss of a dense formula.

Each adapter imports its package when it is called, and returns the function. It was written from the source of the version
in ``install.py``; ``measure.py`` compares value and gradients with the dense formula before anything is timed.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
Construct = Callable[[float], Loss]
"""From the value of the scale, which some peers take as a setting, to a function of the rows and the scale as a tensor."""


def inf_cl_info_nce(scale: float) -> Loss:
    """Construct Inf-CL's loss of queries. It computes in float32 (TF32) whatever the dtype; d is a multiple of 256.

    The queries are scaled here: the backward pass of its argument ``scale`` is an all-reduce, also on one process.
    """
    loss = import_module("inf_cl").cal_inf_loss
    return lambda a, b, scale: loss(scale * a, b)


def inf_cl_clip(scale: float) -> Loss:
    one_sided = inf_cl_info_nce(scale)
    return lambda a, b, scale: (one_sided(a, b, scale) + one_sided(b, a, scale)) / 2


def memeff_clip(scale: float) -> Loss:
    """Construct memeff's CLIP loss. ``stable=True``, its default, multiplies gradients by another factor."""
    loss = import_module("memeff").MemoryEfficientCLIPLoss(temperature=1 / scale, normalized_inputs=True, stable=False)
    return lambda a, b, scale: loss(a, b)


def memeff_info_nce(scale: float) -> Loss:
    """Construct memeff's InfoNCE. A margin of 2 or more leaves out no negative."""
    loss = import_module("memeff").MemoryEfficientQwen3Loss(
        temperature=1 / scale, margin=4.0, normalized_inputs=True, stable=False
    )
    return lambda a, b, scale: loss(a, b)


def cut_cross_entropy(scale: float) -> Loss:
    """Construct a linear cross-entropy of n rows and n classes, which is InfoNCE.

    Its default ``filter_eps`` sets small softmax weights of the gradient to zero: with 65,536 classes that are equally
    likely all of them but the positives', so that two matmuls would be left out.
    """
    loss = import_module("cut_cross_entropy").linear_cross_entropy
    return lambda a, b, scale: loss(scale * a, b, torch.arange(len(a), device=a.device), filter_eps=None)


def siglip_kernel(scale: float) -> Loss:
    """Construct siglip-kernel's loss, which takes the logarithm of the scale, and the sum of the pairs over n."""
    loss = import_module("siglip_kernel").fused_siglip_loss
    return lambda a, b, scale, bias: loss(a, b, scale.log(), bias)


def open_clip(name: str) -> Construct:
    """Return a constructor of a dense loss of OpenCLIP, which computes logits in the dtype of the rows."""

    return lambda scale: getattr(_open_clip_losses(), name)(cache_labels=True)


@cache
def _open_clip_losses() -> ModuleType:
    """Import the file of OpenCLIP's losses; the package itself imports torchvision."""
    from oracles import opened  # imported here: it needs packages that other peers do not

    if not opened("open_clip"):
        raise ModuleNotFoundError("No module named 'open_clip'", name="open_clip")
    return import_module("open_clip.loss")
