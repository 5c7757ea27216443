"""Feature statistics, clusters and teachers for the table of losses under test, each with its paper's dense formula."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses.align_uniform import AlignUniform
from contrastive_zoo.losses.barlow_twins import BarlowTwins
from contrastive_zoo.losses.dino import DINO, dino
from contrastive_zoo.losses.frossl import FroSSL
from contrastive_zoo.losses.koleo import koleo
from contrastive_zoo.losses.negative_cosine import negative_cosine
from contrastive_zoo.losses.orthogonal_regularization import orthogonal_regularization
from contrastive_zoo.losses.sigreg import SIGReg, sigreg
from contrastive_zoo.losses.spectral_contrastive import SpectralContrastive
from contrastive_zoo.losses.swav import SwAV
from contrastive_zoo.losses.tico import TiCo
from contrastive_zoo.losses.vibcreg import VIbCReg
from contrastive_zoo.losses.vicreg import VICReg
from contrastive_zoo.world import ALONE
from tests.zoo import Entry

PROTOTYPES, WIDTH = 5, 8


def fixed_prototypes() -> Tensor:
    """The same on every process."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(PROTOTYPES, WIDTH, dtype=torch.float32, generator=generator).double()


class SwAVOfAnyWidth(SwAV):
    """With fixed prototypes, of which it uses as many columns as rows have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(PROTOTYPES, WIDTH, **settings)
        self.prototypes.data = fixed_prototypes().to(self.prototypes.dtype)

    def forward(self, *rows: Tensor, world: Any = None) -> Tensor:
        self.width = rows[0].shape[1]
        return super().forward(*rows, world=world)

    def settings(self) -> dict[str, Any]:
        now = super().settings()
        return {**now, "prototypes": now["prototypes"][:, : self.width]}


def dino_of_views(
    *views: Tensor,
    centre: Tensor,
    temperature: Any = 0.1,
    teacher_temperature: Any,
    reduction: Any = "mean",
    world: Any,
) -> Tensor:
    s = _widened(views)
    settings = {"temperature": temperature, "teacher_temperature": teacher_temperature, "reduction": reduction}
    return dino(s, s[:, :2], centre=centre, world=world, **settings)


class DINOOfViews(DINO, function=dino_of_views):
    """The student is its own teacher of the first two views; the centre starts at a linear ramp."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(WIDTH, teacher_temperature=0.4, centre_momentum=0.7, **settings)
        self.centre.copy_(ramp())

    def forward(self, *views: Tensor, world: Any = None) -> Tensor:
        world = self.local() if world is None else world
        loss = Loss.forward(self, *views, world=world)
        self.move_centre(_widened(views)[:, :2], world)
        return loss


def koleo_of_views(view1: Tensor, view2: Tensor, *, reduction: Any = "mean", world: Any = ALONE) -> Tensor:
    return koleo(view1, reduction=reduction, world=world) + koleo(view2, reduction=reduction, world=world)


class KoLeoOfViews(Loss, function=koleo_of_views):
    """The sum over two views, as DINOv2 adds it."""


def negative_cosine_of_views(view1: Tensor, view2: Tensor, *, reduction: Any = "mean", world: Any = ALONE) -> Tensor:
    each = {"reduction": reduction, "world": world}
    return negative_cosine(view1, view2, **each) + negative_cosine(view2, view1, **each)


class NegativeCosineOfViews(Loss, function=negative_cosine_of_views):
    """SimSiam's two directions, without its predictor and factor."""


def orthogonal_of_views(view1: Tensor, view2: Tensor, *, world: Any = ALONE) -> Tensor:
    return orthogonal_regularization(view1, world=world) + orthogonal_regularization(view2, world=world)


class OrthogonalOfViews(Loss, function=orthogonal_of_views):
    """The sum over two columns."""


def sigreg_of_views(
    view1: Tensor, view2: Tensor, *, directions: Any, num_points: int = 5, limit: float = 3.0, world: Any = ALONE
) -> Tensor:
    """Both views of a sample, padded with zeros, as one row."""
    rows = _widened((view1, view2)).flatten(1)
    return sigreg(rows, directions=directions, num_points=num_points, limit=limit, world=world)


class SIGRegOfViews(SIGReg, function=sigreg_of_views):
    """The function as a module that counts its steps."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(2 * WIDTH, num_slices=6, **settings)

    def forward(self, *views: Tensor, world: Any = None) -> Tensor:
        loss = Loss.forward(self, *views, world=self.local() if world is None else world)
        if self.training:
            self.step.add_(1)
        return loss


class TiCoOfAnyWidth(TiCo):
    """Rows are padded with zeros; the covariance starts at a matrix of rank 1."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(WIDTH, **settings)
        self.covariance.copy_(torch.outer(ramp(), ramp()))

    def forward(self, view1: Tensor, view2: Tensor, world: Any = None) -> Tensor:
        return super().forward(*(F.pad(x, (0, WIDTH - x.shape[1])) for x in (view1, view2)), world=world)


def _widened(views: Any) -> Tensor:
    return torch.stack([F.pad(view, (0, WIDTH - view.shape[1])) for view in views], 1)


def ramp() -> Tensor:
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float32).double()


def given(make: Callable[..., Any], *takes: str, **fixed: Any) -> Callable[..., Any]:
    """``make`` with those of the settings that it takes."""
    return lambda **settings: make(**fixed, **{name: x for name, x in settings.items() if name in takes})


def dense_vicreg(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    n, d = a.shape
    loss = 25 * sum((a[i] - b[i]).square().sum() for i in range(n)) / (n * d)
    for z in (a, b):
        mean = sum(z[i] for i in range(n)) / n
        cov = sum(torch.outer(z[i] - mean, z[i] - mean) for i in range(n)) / max(1, n - 1)
        for k in range(d):
            loss = loss + 25 / (2 * d) * (1 - (cov[k, k] + 1e-4).sqrt()).clamp(min=0)
            loss = loss + sum((cov[k, m] ** 2 for m in range(d) if m != k), torch.zeros(())) / d
    return loss


def dense_barlow_twins(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    """As the authors' code writes it."""
    a, b = (F.batch_norm(x, None, None, training=True) if len(x) > 1 else 0 * x for x in (a, b))
    c = a.T @ b / len(a)
    on_diagonal = (c.diagonal() - 1).square().sum()
    off_diagonal = (c - c.diagonal().diag()).square().sum()
    return on_diagonal + 0.0051 * off_diagonal


def dense_spectral_contrastive(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    a, b = (torch.stack([x if x.norm() < 1 else x / x.norm() for x in rows]) for rows in (a, b))
    n, others = len(a), torch.zeros(())
    for i in range(n):
        others = others + sum(((a[i] @ b[j]) ** 2 for j in range(n) if j != i), torch.zeros(()))
    return -2 * (a * b).sum() / n + others / max(1, n * (n - 1))


def dense_align_uniform(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    """As the authors' code writes it, λ = 1."""
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    # by hand: pdist cannot be differentiated twice
    pairs = [[(x[i] - x[j]).square().sum() for i in range(len(x)) for j in range(i)] for x in (a, b)]
    uniform = [torch.stack(x).mul(-2).exp().mean().log() for x in pairs if x]
    return (a - b).norm(dim=1).pow(2).mean() + sum(uniform, torch.zeros(())) / 2


def dense_swav(*views: Tensor, temperature: Any = 0.1, codes: int = 2) -> Tensor:
    """As the authors' pseudo-code writes it."""
    c = F.normalize(fixed_prototypes()[:, : views[0].shape[1]], dim=1)
    scores = [F.normalize(z, dim=1) @ c.T for z in views]
    losses = []
    for u in range(codes):
        with torch.no_grad():
            q = torch.exp((scores[u] - scores[u].max()) / 0.05).T
            q /= q.sum()
            k, n = q.shape
            for _ in range(3):
                q *= (torch.full((k,), 1 / k) / q.sum(1))[:, None]
                q *= (torch.full((n,), 1 / n) / q.sum(0))[None]
            q = (q / q.sum(0, keepdim=True)).T
        losses += [-(q * F.log_softmax(s / temperature, 1)).sum(1).mean() for v, s in enumerate(scores) if v != u]
    return torch.stack(losses).mean()


def dense_dino(*views: Tensor, temperature: Any = 0.1) -> Tensor:
    """As the authors' pseudo-code writes it, the student being its own teacher."""
    outputs = [F.pad(view, (0, WIDTH - view.shape[1])) for view in views]
    losses = []
    for u, teacher in enumerate(outputs[:2]):
        t = F.softmax((teacher.detach() - ramp()) / 0.4, dim=1)
        losses += [-(t * F.log_softmax(s / temperature, dim=1)).sum(1).mean() for v, s in enumerate(outputs) if v != u]
    return sum(losses) / len(losses)


def dense_vibcreg(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    """As solo-learn writes it; the variance of a single row is 0."""
    loss = 25 * F.mse_loss(a, b)
    for z in (a, b):
        variance = z.var(0) if len(z) > 1 else 0 * z.sum(0)
        loss = loss + 25 * (1 - (variance + 1e-4).sqrt()).relu().mean()
        x = F.normalize(z - z.mean(0), dim=0)
        correlation = x.T @ x
        loss = loss + 200 * (correlation - correlation.diagonal().diag()).square().mean()
    return loss


def dense_frossl(*views: Tensor, temperature: Any = None) -> Tensor:
    """With N × N matrices, whose Frobenius norm is the same."""
    rows = [F.normalize(z, dim=0) for z in views]
    center, loss = torch.stack(rows).mean(0), torch.zeros(())
    for z in rows:
        gram = z @ z.T
        loss = loss + (gram / gram.trace().item()).square().sum().log()
        loss = loss + len(rows) * (z - center).square().sum() / len(z)
    return loss


def dense_tico(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    a, b = (F.normalize(F.pad(x, (0, WIDTH - x.shape[1])), dim=1) for x in (a, b))
    c = 0.9 * torch.outer(ramp(), ramp()).float().double() + 0.1 * (a.T @ a / len(a)).detach()
    return torch.stack([1 - x @ y + 8 * x @ c @ x for x, y in zip(a, b, strict=True)]).mean()


def dense_sigreg(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    z = _widened((a, b)).flatten(1)
    drawn = torch.randn(z.shape[1], 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x, loss = z @ F.normalize(drawn.double(), dim=0), 0 * z.sum()
    for k, weight in ((-4, 0.5), *((k, 1.0) for k in range(-3, 4)), (4, 0.5)):
        t = 0.75 * k
        real, imaginary = (t * x).cos().mean(0), (t * x).sin().mean(0)
        error = (real - math.exp(-t * t / 2)) ** 2 + imaginary**2
        loss = loss + 0.75 * weight * math.exp(-t * t / 2) * error.mean()
    return len(z) * loss


def dense_koleo(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    loss = 0 * (a + b).sum()
    for z in (F.normalize(x, dim=1) for x in (a, b)):
        for i in range(len(z)):
            near = [(z[i] - z[j]).square().sum() for j in range(len(z)) if j != i]
            near = [x.sqrt() if x > 1e-14 else 0 * x for x in near]
            loss = loss - (torch.stack(near).amin() + 1e-8).log() / len(z) if near else loss
    return loss


def dense_orthogonal(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    loss, n = 0 * (a + b).sum(), len(a)
    for z in (F.normalize(x, dim=1) for x in (a, b)):
        pairs = [z[i] @ z[j] for i in range(n) for j in range(n) if i != j]
        if pairs:
            s = torch.stack(pairs)
            loss = loss + s.mean().square() + (s.square().mean() - 1 / z.shape[1]).relu()
    return loss


def dense_negative_cosine(a: Tensor, b: Tensor, temperature: Any = None) -> Tensor:
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return -((a * b.detach()).sum(1) + (b * a.detach()).sum(1)).mean()


ENTRIES = [
    Entry("VICReg", given(VICReg), dense_vicreg),
    Entry("BarlowTwins", given(BarlowTwins), dense_barlow_twins),
    Entry("SpectralContrastive", given(SpectralContrastive), dense_spectral_contrastive),
    Entry("AlignUniform", given(AlignUniform), dense_align_uniform),
    Entry("VIbCReg", given(VIbCReg), dense_vibcreg),
    Entry("FroSSL, three views", given(FroSSL), dense_frossl, views=3),
    Entry("TiCo", given(TiCoOfAnyWidth), dense_tico),
    Entry("SIGReg", given(SIGRegOfViews), dense_sigreg),
    Entry("KoLeo", given(KoLeoOfViews, "reduction"), dense_koleo),
    Entry("OrthogonalRegularization", given(OrthogonalOfViews), dense_orthogonal),
    Entry("NegativeCosine", given(NegativeCosineOfViews, "reduction"), dense_negative_cosine),
    Entry("SwAV", given(SwAVOfAnyWidth, "temperature", "reduction"), dense_swav),
    Entry("SwAV, three views", given(SwAVOfAnyWidth, "temperature", "reduction"), dense_swav, views=3),
    Entry("DINO", given(DINOOfViews, "temperature", "reduction"), dense_dino),
    Entry("DINO, three views", given(DINOOfViews, "temperature", "reduction"), dense_dino, views=3),
]
