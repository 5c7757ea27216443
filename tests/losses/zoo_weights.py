"""Proxies and classifiers for the table of losses under test."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.ranks.random_keys import random_keys
from tests.helpers import numbers
from tests.zoo import Entry, row

CLASSES, WIDTH = 64, 8
"""More than the labels that are drawn, and than the widths."""


def fixed_weights(centers: int = 1) -> Tensor:
    shape = (CLASSES, WIDTH) if centers == 1 else (CLASSES, centers, WIDTH)
    return numbers(*shape, seed=5, dtype=torch.float32).double()


PAST = {"mean_cosine": 0.25, "mean_norm": 2.0, "std_norm": 0.5, "step": 3}
"""Of moving averages, and of a count of steps."""


def prepare(loss: ClassLoss) -> None:
    loss.weights.data.copy_(fixed_weights(getattr(loss, "sub_centers", 1)))
    for name, buffer in loss.named_buffers():
        buffer.fill_(PAST[name])


def padded(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows get a constant further feature: of width 1 they would stand at angle 0 or π to weights, where angles jump."""
    return F.pad(F.pad(z, (0, 1), value=0.5), (0, WIDTH - 1 - z.shape[1])), labels


def cosines(z: Tensor, centers: int = 1) -> Tensor:
    w = fixed_weights(centers).reshape(CLASSES, centers, WIDTH)
    return torch.einsum("nd,ckd->nck", F.normalize(z, dim=1), F.normalize(w, dim=2))


def _one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).double()


def dense_partial_fc(z: Tensor, labels: Tensor, sample_rate: float, label_smoothing: float = 0.0) -> Tensor:
    """CosFace over the classes of all samples, and so many others, in the order of the numbers of the fourth step."""
    order = random_keys(3, np.arange(CLASSES)).view(np.int64).argsort().tolist()
    present = labels.unique().tolist()
    others = [c for c in order if c not in present][: max(0, math.ceil(sample_rate * CLASSES) - len(present))]
    place = {c: i for i, c in enumerate([*present, *others])}
    logits = 64 * (cosines(z)[..., 0] - 0.35 * _one_hot(labels))[:, [*place]]
    return F.cross_entropy(logits, torch.tensor([place[c] for c in labels.tolist()]), label_smoothing=label_smoothing)


def dense_normalized_softmax(z: Tensor, labels: Tensor, temperature: Any = 0.05) -> Tensor:
    return F.cross_entropy(cosines(z)[..., 0] / temperature, labels)


def dense_proxy_nca(z: Tensor, labels: Tensor, temperature: Any = 1 / 9) -> Tensor:
    distances = (F.normalize(z, dim=1)[:, None] - F.normalize(fixed_weights(), dim=1)).square().sum(2)
    return F.cross_entropy(-distances / temperature, labels)


def dense_arc_face(z: Tensor, labels: Tensor, sub_centers: int = 1, label_smoothing: float = 0.0) -> Tensor:
    s, target = cosines(z, sub_centers).amax(2), labels[:, None]
    own = s.gather(1, target)
    angle = own.acos()
    moved = (angle + 0.5).cos().where(angle <= torch.pi - 0.5, own - 0.5 * math.sin(0.5))
    return F.cross_entropy(64 * s.scatter(1, target, moved), labels, label_smoothing=label_smoothing)


def dense_curricular_face(z: Tensor, labels: Tensor, sub_centers: int = 1, label_smoothing: float = 0.0) -> Tensor:
    """As the authors' code, after a past whose mean cosine is 0.25."""
    s, target = cosines(z, sub_centers).amax(2), labels[:, None]
    own = s.gather(1, target)
    t = (0.8 * 0.25 + 0.2 * own.mean()).detach()
    moved = (own.acos() + 0.5).cos()
    harder = s.where(s <= moved, s * (t + s))
    moved = moved.where(own > math.cos(math.pi - 0.5), own - math.sin(math.pi - 0.5) * 0.5)
    return F.cross_entropy(64 * harder.scatter(1, target, moved), labels, label_smoothing=label_smoothing)


def dense_mag_face(z: Tensor, labels: Tensor, norm_weight: float = 35.0) -> Tensor:
    s, target, norms = cosines(z)[..., 0], labels[:, None], z.norm(dim=1).clamp(0.7, 1.5)
    own, margin = s.gather(1, target), (0.45 + (0.8 - 0.45) / (1.5 - 0.7) * (norms - 0.7))[:, None]
    moved = (own.acos() + margin).cos()
    moved = moved.where(own > (math.pi - margin).cos(), own - (math.pi - margin).sin() * margin)
    losses = F.cross_entropy(64 * s.scatter(1, target, moved), labels, reduction="none")
    return (losses + norm_weight * (norms / 1.5**2 + 1 / norms)).mean()


def dense_ada_face(z: Tensor, labels: Tensor, margin: float = 0.4) -> Tensor:
    """As the authors' code, after a past in which norms were 2 ± 0.5."""
    s, target, norms = cosines(z)[..., 0], labels[:, None], z.norm(dim=1).clamp(0.001, 100).detach()
    own, deviation = s.gather(1, target).clamp(-0.999, 0.999), norms.std() if len(norms) > 1 else 0.0
    mean, deviation = 0.7 * 2.0 + 0.3 * norms.mean(), 0.7 * 0.5 + 0.3 * deviation
    scaler = (0.333 * (norms - mean) / (deviation + 1e-3)).clamp(-1, 1)[:, None]
    angle = (own.acos() - margin * scaler).clamp(1e-3, math.pi - 1e-3)
    moved = angle.cos() - (margin + margin * scaler)
    return F.cross_entropy(64 * s.scatter(1, target, moved), labels)


def dense_center_loss(z: Tensor, labels: Tensor) -> Tensor:
    return (z - fixed_weights()[labels]).square().sum(1).mean() / 2


def dense_bal_scl(z: Tensor, labels: Tensor, temperature: Any = 0.1) -> Tensor:
    """Anchor by anchor and class by class."""
    z, w, losses = F.normalize(z, dim=1), F.normalize(fixed_weights(), dim=1), []
    for i, own in enumerate(labels.tolist()):
        others = torch.arange(len(z)) != i
        logits = [torch.cat([z[others & (labels == j)], w[j, None]]) @ z[i] / temperature for j in range(CLASSES)]
        log_means = torch.stack([x.logsumexp(0) - math.log(len(x)) for x in logits])
        losses.append(log_means.logsumexp(0) - logits[own].mean())
    return torch.stack(losses).mean()


def classified(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    z, labels = padded(z, labels)
    return z, labels, z.repeat(1, CLASSES // WIDTH)  # exact in 16 bits


def with_keys(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Some embeddings have a key, of their class or of the next one."""
    z, labels, logits = classified(z, labels)
    keyed = z[:, 0] > 0
    return z, labels, logits, z.flip(1)[keyed], (labels + (z[:, -2] > 0))[keyed]


def dense_paco(z, labels, logits, keys=None, key_labels=None, *, temperature=0.2, alpha=0.05, label_smoothing=0.0):
    """As the authors' code: one softmax over classes and samples, with a weight for each of its targets."""
    z, itself = F.normalize(z, dim=1), torch.eye(len(z), dtype=torch.bool)
    candidates, ids = z, labels
    if keys is not None:
        candidates, ids = torch.cat([z, F.normalize(keys, dim=1)]), torch.cat([labels, key_labels])
        itself = F.pad(itself, (0, len(keys)))
    s = (z @ candidates.T / temperature).masked_fill(itself, -torch.inf)
    log_shares = torch.cat([logits, s], 1).log_softmax(1)
    targets = (1 - label_smoothing) * _one_hot(labels) + label_smoothing / CLASSES
    weights = torch.cat([targets, alpha * ((labels[:, None] == ids) & ~itself).double()], 1)
    return -((weights * log_shares.where(weights > 0, 0)).sum(1) / weights.sum(1)).mean()


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


def dense_large_margin(z: Tensor, labels: Tensor, margin=4, normalize_weights=False, label_smoothing=0.0) -> Tensor:
    w, target = fixed_weights(), labels[:, None]
    w = F.normalize(w, dim=1) if normalize_weights else w
    logits, norms = z @ w.T, (z.norm(dim=1, keepdim=True) * w.norm(dim=1)).gather(1, target)
    angle = (logits.gather(1, target) / norms).acos()
    k = (angle.detach() / (math.pi / margin)).floor()
    own = norms * ((-1) ** k * (margin * angle).cos() - 2 * k)
    return F.cross_entropy(logits.scatter(1, target, own), labels, label_smoothing=label_smoothing)


def of_classes(name: str, dense: Callable[..., Tensor], **fixed: Any) -> Entry:
    return row(name, dense, "labels", padded, prepare=prepare, num_classes=CLASSES, embedding_size=WIDTH, **fixed)


SMOOTHED, SUB_CENTERS = {"label_smoothing": 0.2}, {"sub_centers": 3}
ENTRIES = [
    of_classes("NormalizedSoftmax", dense_normalized_softmax),
    of_classes("ProxyNCA", dense_proxy_nca),
    of_classes("CosFace", dense_partial_fc, sample_rate=1.0),
    of_classes("CosFace, a part of the classes", dense_partial_fc, sample_rate=0.45, label_smoothing=0.2),
    of_classes("CosFace, those of the labels", dense_partial_fc, sample_rate=0.02),
    of_classes("ArcFace", dense_arc_face),
    of_classes("ArcFace, smoothed sub-centers", dense_arc_face, **SUB_CENTERS, **SMOOTHED),
    of_classes("CurricularFace", dense_curricular_face, momentum=0.8),
    of_classes("CurricularFace, smoothed sub-centers", dense_curricular_face, momentum=0.8, **SUB_CENTERS, **SMOOTHED),
    of_classes("MagFace", dense_mag_face, low_norm=0.7, high_norm=1.5),
    of_classes("AdaFace", dense_ada_face, momentum=0.7),
    of_classes("CenterLoss", dense_center_loss),
    of_classes("BalSCL", dense_bal_scl),
    row("PaCo", dense_paco, "labels", classified),
    row("PaCo, keys", dense_paco, "labels", with_keys, alpha=0.5, label_smoothing=0.2),
    of_classes("SoftTriple", dense_soft_triple, sub_centers=3),
    of_classes("SoftTriple, smoothed", dense_soft_triple, **SUB_CENTERS, **SMOOTHED),
    of_classes("ProxyAnchor", dense_proxy_anchor),
    of_classes("LargeMarginSoftmax", dense_large_margin),
    of_classes("LargeMarginSoftmax, smoothed", dense_large_margin, margin=3, normalize_weights=True, **SMOOTHED),
]
