"""Proxies and classifiers for the table of losses under test."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.loss_base.class_loss import ClassLoss
from tests.zoo import Entry, row

CLASSES, WIDTH = 64, 8
"""More than the labels that are drawn, and than the widths."""


def fixed_weights(centers: int = 1) -> Tensor:
    shape = (CLASSES, WIDTH) if centers == 1 else (CLASSES, centers, WIDTH)
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(5)).double()


def prepare(loss: ClassLoss) -> None:
    loss.weights.data.copy_(fixed_weights(getattr(loss, "sub_centers", 1)))


def padded(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows get a constant further feature: of width 1 they would stand at angle 0 or π to weights, where angles jump."""
    return F.pad(F.pad(z, (0, 1), value=0.5), (0, WIDTH - 1 - z.shape[1])), labels


def cosines(z: Tensor, centers: int = 1) -> Tensor:
    w = fixed_weights(centers).reshape(CLASSES, centers, WIDTH)
    return torch.einsum("nd,ckd->nck", F.normalize(z, dim=1), F.normalize(w, dim=2))


def _one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).double()


def dense_normalized_softmax(z: Tensor, labels: Tensor, temperature: Any = 0.05) -> Tensor:
    return F.cross_entropy(cosines(z)[..., 0] / temperature, labels)


def dense_proxy_nca(z: Tensor, labels: Tensor, temperature: Any = 1 / 9) -> Tensor:
    distances = (F.normalize(z, dim=1)[:, None] - F.normalize(fixed_weights(), dim=1)).square().sum(2)
    return F.cross_entropy(-distances / temperature, labels)


def dense_cos_face(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(64 * (cosines(z)[..., 0] - 0.35 * _one_hot(labels)), labels)


def dense_arc_face(
    z: Tensor, labels: Tensor, sub_centers: int = 1, margin: float = 0.5, label_smoothing: float = 0.0
) -> Tensor:
    s, target = cosines(z, sub_centers).amax(2), labels[:, None]
    own = s.gather(1, target)
    angle = own.acos()
    moved = (angle + margin).cos().where(angle <= torch.pi - margin, own - margin * math.sin(margin))
    return F.cross_entropy(64 * s.scatter(1, target, moved), labels, label_smoothing=label_smoothing)


def dense_soft_triple(z: Tensor, labels: Tensor, tau: float = 0.2, label_smoothing: float = 0.0) -> Tensor:
    s = cosines(z, 3)
    relaxed = ((s / 0.1).softmax(2) * s).sum(2)
    w = F.normalize(fixed_weights(3), dim=2)
    pairs = [(2 + 1e-5 - 2 * (w[:, k] * w[:, m]).sum(1)).sqrt().sum() for k in range(3) for m in range(k)]
    ce = F.cross_entropy(20 * (relaxed - 0.01 * _one_hot(labels)), labels, label_smoothing=label_smoothing)
    return ce + tau * torch.stack(pairs).sum() / (CLASSES * 3 * 2)


def dense_proxy_anchor(z: Tensor, labels: Tensor) -> Tensor:
    s, own = cosines(z)[..., 0], _one_hot(labels) > 0
    positive = (-32 * (s - 0.1)).exp().where(own, 0).sum(0).log1p()
    negative = (32 * (s + 0.1)).exp().where(~own, 0).sum(0).log1p()
    return positive[own.any(0)].mean() + negative.mean()


def dense_large_margin(
    z: Tensor, labels: Tensor, margin: int = 4, normalize_weights: bool = False, label_smoothing: float = 0.0
) -> Tensor:
    w, target = fixed_weights(), labels[:, None]
    w = F.normalize(w, dim=1) if normalize_weights else w
    logits, norms = z @ w.T, (z.norm(dim=1, keepdim=True) * w.norm(dim=1)).gather(1, target)
    angle = (logits.gather(1, target) / norms).acos()
    k = (angle.detach() / (math.pi / margin)).floor()
    own = norms * ((-1) ** k * (margin * angle).cos() - 2 * k)
    return F.cross_entropy(logits.scatter(1, target, own), labels, label_smoothing=label_smoothing)


def of_classes(name: str, dense: Callable[..., Tensor], **fixed: Any) -> Entry:
    return row(name, dense, "labels", padded, prepare=prepare, num_classes=CLASSES, embedding_size=WIDTH, **fixed)


ENTRIES = [
    of_classes("NormalizedSoftmax", dense_normalized_softmax),
    of_classes("ProxyNCA", dense_proxy_nca),
    of_classes("CosFace", dense_cos_face),
    of_classes("ArcFace", dense_arc_face),
    of_classes("ArcFace, smoothed sub-centers", dense_arc_face, sub_centers=3, label_smoothing=0.2),
    of_classes("SoftTriple", dense_soft_triple, sub_centers=3),
    of_classes("SoftTriple, smoothed", dense_soft_triple, sub_centers=3, label_smoothing=0.2),
    of_classes("ProxyAnchor", dense_proxy_anchor),
    of_classes("LargeMarginSoftmax", dense_large_margin),
    of_classes(
        "LargeMarginSoftmax, smoothed", dense_large_margin, margin=3, normalize_weights=True, label_smoothing=0.2
    ),
]
