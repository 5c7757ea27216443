"""Proxies and classifiers for the table of losses under test."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.losses.class_softmax import (
    ArcFace,
    CosFace,
    Instance,
    LargeMarginSoftmax,
    NormalizedSoftmax,
    P2SGrad,
    ProxyAnchor,
    ProxyNCA,
    SoftTriple,
    SphereFace,
)
from tests.losses import zoo_softmax
from tests.zoo import Entry, fed, row

CLASSES, WIDTH = 64, 8
"""More than the labels and the widths that are drawn."""


def fixed_weights(centers: int = 1) -> Tensor:
    """The same on every process."""
    shape = (CLASSES, WIDTH) if centers == 1 else (CLASSES, centers, WIDTH)
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(3)).double()


def of_any_width(cls: type[ClassLoss]) -> type[ClassLoss]:
    """The loss with fixed weights, of which it uses as many columns as rows have.

    Rows get a constant further feature: of width 1 they would stand at angle 0 or π to weights, where angles jump.
    """

    class OfAnyWidth(cls):
        def __init__(self, **settings: Any) -> None:
            super().__init__(CLASSES, WIDTH, **settings)
            self.weights.data = fixed_weights(getattr(self, "sub_centers", 1)).to(self.weights.dtype)

        def inputs(self, z: Tensor, labels: Tensor | None = None) -> Inputs:
            rows = off_the_poles(z)
            with self.narrowed(rows.shape[-1]):
                return super().inputs(rows, labels)

        def compute(self, batch: Batch) -> Tensor:
            with self.narrowed(batch.first.shape[1]):
                return super().compute(batch)

        @contextmanager
        def narrowed(self, width: int) -> Iterator[None]:
            self.__dict__["weights"] = self._parameters["weights"][..., :width]  # found before the parameter
            try:
                yield
            finally:
                del self.__dict__["weights"]

    OfAnyWidth.__name__ = cls.__name__
    return OfAnyWidth


def off_the_poles(z: Tensor) -> Tensor:
    return F.pad(z, (0, 1), value=0.5)


InstanceOfLabels = fed(Instance, zoo_softmax.two_towers)
"""The second modality is made of the first."""


def cosines(z: Tensor, centers: int = 1) -> Tensor:
    """[n, C, centers]."""
    z = off_the_poles(z)
    w = fixed_weights(centers).reshape(CLASSES, centers, WIDTH)[..., : z.shape[1]]
    return torch.einsum("nd,ckd->nck", F.normalize(z, dim=1), F.normalize(w, dim=2))


def _one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).double()


def dense_normalized_softmax(z: Tensor, labels: Tensor, temperature: Any = 0.05) -> Tensor:
    return F.cross_entropy(cosines(z)[..., 0] / temperature, labels)


def dense_proxy_nca(z: Tensor, labels: Tensor, temperature: Any = 1 / 9) -> Tensor:
    z = off_the_poles(z)
    p = F.normalize(fixed_weights()[:, : z.shape[1]], dim=1)
    distances = (F.normalize(z, dim=1)[:, None] - p).square().sum(2)
    return F.cross_entropy(-distances / temperature, labels)


def dense_cos_face(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(64 * (cosines(z)[..., 0] - 0.35 * _one_hot(labels)), labels)


def dense_arc_face(z: Tensor, labels: Tensor, sub_centers: int = 1, margin: float = 0.5) -> Tensor:
    s, target = cosines(z, sub_centers).amax(2), labels[:, None]
    own = s.gather(1, target)
    angle = own.acos()
    moved = (angle + margin).cos().where(angle <= torch.pi - margin, own - margin * math.sin(margin))
    return F.cross_entropy(64 * s.scatter(1, target, moved), labels)


def dense_soft_triple(z: Tensor, labels: Tensor, tau: float = 0.2) -> Tensor:
    s = cosines(z, 3)
    relaxed = ((s / 0.1).softmax(2) * s).sum(2)
    w = F.normalize(fixed_weights(3)[..., : z.shape[1] + 1], dim=2)
    pairs = [(2 + 1e-5 - 2 * (w[:, k] * w[:, m]).sum(1)).sqrt().sum() for k in range(3) for m in range(k)]
    ce = F.cross_entropy(20 * (relaxed - 0.01 * _one_hot(labels)), labels)
    return ce + tau * torch.stack(pairs).sum() / (CLASSES * 3 * 2)


def dense_proxy_anchor(z: Tensor, labels: Tensor) -> Tensor:
    s, own = cosines(z)[..., 0], _one_hot(labels) > 0
    positive = (-32 * (s - 0.1)).exp().where(own, 0).sum(0).log1p()
    negative = (32 * (s + 0.1)).exp().where(~own, 0).sum(0).log1p()
    return positive[own.any(0)].mean() + negative.mean()


def dense_p2s_grad(z: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(cosines(z)[..., 0], _one_hot(labels))


def dense_large_margin(z: Tensor, labels: Tensor, margin: int = 4, normalize_weights: bool = False) -> Tensor:
    x, target = off_the_poles(z), labels[:, None]
    w = fixed_weights()[:, : x.shape[1]]
    w = F.normalize(w, dim=1) if normalize_weights else w
    logits, norms = x @ w.T, (x.norm(dim=1, keepdim=True) * w.norm(dim=1)).gather(1, target)
    angle = (logits.gather(1, target) / norms).acos()
    k = (angle.detach() / (math.pi / margin)).floor()
    own = norms * ((-1) ** k * (margin * angle).cos() - 2 * k)
    return F.cross_entropy(logits.scatter(1, target, own), labels)


def dense_instance(z: Tensor, labels: Tensor, temperature: Any = 1.0, normalize: bool = False) -> Tensor:
    x = off_the_poles(z)
    w, towers = fixed_weights()[:, : x.shape[1]], (x, zoo_softmax.second_tower(x))
    if normalize:
        w, towers = F.normalize(w, dim=1), tuple(F.normalize(tower, dim=1) for tower in towers)
    return torch.stack([F.cross_entropy(tower @ w.T / temperature, labels) for tower in towers]).sum()


def of_classes(name: str, cls: type[ClassLoss], dense: Callable[..., Tensor], **fixed: Any) -> Entry:
    return row(name, of_any_width(cls), dense, "labels", **fixed)


ENTRIES = [
    of_classes("NormalizedSoftmax", NormalizedSoftmax, dense_normalized_softmax),
    of_classes("ProxyNCA++", ProxyNCA, dense_proxy_nca),
    of_classes("CosFace", CosFace, dense_cos_face),
    of_classes("ArcFace", ArcFace, dense_arc_face),
    of_classes("ArcFace, sub-centers", ArcFace, dense_arc_face, sub_centers=3),
    of_classes("SoftTriple", SoftTriple, dense_soft_triple, sub_centers=3),
    of_classes("ProxyAnchor", ProxyAnchor, dense_proxy_anchor),
    of_classes("P2SGrad", P2SGrad, dense_p2s_grad),
    of_classes("Instance", InstanceOfLabels, dense_instance),
    of_classes("Instance, unit rows", InstanceOfLabels, dense_instance, normalize=True),
    of_classes("LargeMarginSoftmax", LargeMarginSoftmax, dense_large_margin),
    of_classes("SphereFace", SphereFace, dense_large_margin, margin=3, normalize_weights=True),
]
