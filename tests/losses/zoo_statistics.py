"""Feature statistics, clusters and teachers for the table of losses under test, each with its paper's dense formula."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.losses.memory_loss import NNCLR, ReSSL
from contrastive_zoo.losses.redundancy import MMCR, WMSE, BarlowTwins, FroSSL, TiCo, VIbCReg, VICReg
from contrastive_zoo.losses.self_distillation import DINO, NegativeCosine, SwAV
from contrastive_zoo.losses.triplet import DynamicSoftMargin
from contrastive_zoo.losses.uniformity import (
    AlignUniform,
    KoLeo,
    LeJEPA,
    OrthogonalRegularization,
    SIGReg,
    SpectralContrastive,
)
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.random_keys import normal_numbers
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards
from tests.zoo import row

PROTOTYPES, WIDTH = 5, 8


def fixed_prototypes() -> Tensor:
    """The same on every process."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(PROTOTYPES, WIDTH, dtype=torch.float32, generator=generator).double()


class SwAVOfAnyWidth(SwAV):
    """With fixed prototypes. Rows are padded with zeros."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(PROTOTYPES, WIDTH, **settings)
        self.prototypes.data = fixed_prototypes().to(self.prototypes.dtype)

    def inputs(self, *views: Tensor) -> Inputs:
        return super().inputs(*_widened(views).unbind(1))


class DINOOfViews(DINO):
    """The student is its own teacher of the first two views; the centre starts at a linear ramp."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(WIDTH, teacher_temperature=0.4, centre_momentum=0.7, **settings)
        self.centre.copy_(ramp())

    def inputs(self, *views: Tensor) -> Inputs:
        student = _widened(views)
        return super().inputs(student, student[:, :2])


def each_view(batch: Batch) -> list[Batch]:
    return [replace(batch, rows={name: x}, shards={name: batch.shards[name]}) for name, x in batch.rows.items()]


class SumOfViews(TwoViewLoss):
    """The sum over two views of a loss of embeddings."""

    def compute(self, batch: Batch) -> Tensor:
        first, second = each_view(batch)
        return super().compute(first) + super().compute(second)


class KoLeoOfViews(SumOfViews, KoLeo):
    """As DINOv2 adds it."""


class OrthogonalOfViews(SumOfViews, OrthogonalRegularization):
    """As sentence-transformers averages it over columns."""


class NegativeCosineOfViews(NegativeCosine):
    """SimSiam's two directions, without its predictor and factor."""

    def compute(self, batch: Batch) -> Tensor:
        exchanged = replace(batch, rows=dict(reversed([*batch.rows.items()])))
        return super().compute(batch) + super().compute(exchanged)


class SIGRegOfViews(SIGReg):
    """Both views of a sample, padded with zeros, as one row."""

    def inputs(self, *views: Tensor) -> Inputs:
        return super().inputs(_widened(views).flatten(1))


class TiCoOfAnyWidth(TiCo):
    """Rows are padded with zeros; the covariance starts at a matrix of rank 1."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(WIDTH, **settings)
        self.covariance.copy_(torch.outer(ramp(), ramp()))

    def inputs(self, view1: Tensor, view2: Tensor) -> Inputs:
        return super().inputs(*_widened((view1, view2)).unbind(1))


def _widened(views: Any) -> Tensor:
    return torch.stack([F.pad(view, (0, WIDTH - view.shape[1])) for view in views], 1)


def ramp() -> Tensor:
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float32).double()


def dense_vicreg(a: Tensor, b: Tensor) -> Tensor:
    loss = 25 * F.mse_loss(a, b)
    for z in (a, b):
        x = z - z.mean(0)
        cov = x.T @ x / max(1, len(z) - 1)
        loss = loss + 25 / 2 * (1 - (cov.diagonal() + 1e-4).sqrt()).relu().mean()
        loss = loss + (cov - cov.diagonal().diag()).square().sum() / len(cov)
    return loss


def dense_barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    """As the authors' code writes it."""
    a, b = (F.batch_norm(x, None, None, training=True) if len(x) > 1 else 0 * x for x in (a, b))
    c = a.T @ b / len(a)
    on_diagonal = (c.diagonal() - 1).square().sum()
    off_diagonal = (c - c.diagonal().diag()).square().sum()
    return on_diagonal + 0.0051 * off_diagonal


def dense_spectral_contrastive(a: Tensor, b: Tensor) -> Tensor:
    a, b = (torch.stack([x if x.norm() < 1 else x / x.norm() for x in rows]) for rows in (a, b))
    s, n = a @ b.T, len(a)
    return -2 * s.diagonal().mean() + (s - s.diagonal().diag()).square().sum() / max(1, n * (n - 1))


def dense_align_uniform(a: Tensor, b: Tensor) -> Tensor:
    """As the authors' code writes it, λ = 1."""
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    # by hand: pdist cannot be differentiated twice
    pairs = [[(x[i] - x[j]).square().sum() for i in range(len(x)) for j in range(i)] for x in (a, b)]
    uniform = [torch.stack(x).mul(-2).exp().mean().log() for x in pairs if x]
    return (a - b).norm(dim=1).pow(2).mean() + sum(uniform, torch.zeros(())) / 2


def dense_swav(*views: Tensor, temperature: Any = 0.1, codes: int = 2) -> Tensor:
    """As the authors' pseudo-code writes it."""
    c = F.normalize(fixed_prototypes(), dim=1)[:, : views[0].shape[1]]
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


def dense_vibcreg(a: Tensor, b: Tensor) -> Tensor:
    """As solo-learn writes it; the variance of a single embedding is 0."""
    loss = 25 * F.mse_loss(a, b)
    for z in (a, b):
        variance = z.var(0) if len(z) > 1 else 0 * z.sum(0)
        loss = loss + 25 * (1 - (variance + 1e-4).sqrt()).relu().mean()
        x = F.normalize(z - z.mean(0), dim=0)
        correlation = x.T @ x
        loss = loss + 200 * (correlation - correlation.diagonal().diag()).square().mean()
    return loss


def dense_frossl(*views: Tensor) -> Tensor:
    """With N × N matrices, whose Frobenius norm is the same."""
    rows = [F.normalize(z, dim=0) for z in views]
    center, loss = torch.stack(rows).mean(0), torch.zeros(())
    for z in rows:
        gram = z @ z.T
        loss = loss + (gram / gram.trace().item()).square().sum().log()
        loss = loss + len(rows) * (z - center).square().sum() / len(z)
    return loss


def dense_w_mse(*views: Tensor) -> Tensor:
    """With the inverse of the factor."""
    whitened, directed = [], torch.ones(len(views[0]), dtype=torch.bool)
    for z in views:
        x = z - z.mean(0)
        directed &= x.norm(dim=1) > 1e-6 * z.norm(dim=1)
        covariance = x.T @ x / max(1, len(z) - 1)
        eye, variance = torch.eye(z.shape[1], dtype=z.dtype), covariance.diagonal().mean()
        if variance > 0:
            covariance = 0.999 * covariance + 1e-3 * variance * eye
            whitened.append(F.normalize(x @ torch.linalg.cholesky(covariance).inverse().T, dim=1))
    if not directed.any():
        return 0 * sum(z.sum() for z in views)
    pairs = [(u - v)[directed].square().sum(1).mean() for i, u in enumerate(whitened) for v in whitened[:i]]
    return torch.stack(pairs).mean()


def dense_mmcr(*views: Tensor) -> Tensor:
    """From singular values, of which a matrix has as many as it has rows or columns."""

    def norm(x: Tensor) -> Tensor:
        return ((torch.linalg.svdvals(x).square() + 1e-6).sqrt() - 1e-3).sum()

    z = torch.stack([F.normalize(view, dim=1) for view in views], 1)
    return 0.5 * torch.stack([norm(x) for x in z]).mean() - norm(z.mean(1))


def remembered() -> Tensor:
    """The same on every process."""
    drawn = torch.randn(6, WIDTH, dtype=torch.float32, generator=torch.Generator().manual_seed(5))
    return F.normalize(drawn.double(), dim=1)


class NNCLROfViews(NNCLR):
    """The memory is not empty. Rows are padded with zeros; the predictor turns features around."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(7, WIDTH, **settings)
        self.queue.write(
            remembered().to(self.queue.embeddings), None, None, Shards((6,)), ONE_PROCESS
        )  # not of all ranks

    def inputs(self, view1: Tensor, view2: Tensor) -> Inputs:  # type: ignore[override]  # fewer arguments
        z1, z2 = _widened((view1, view2)).unbind(1)
        return super().inputs(z1, z2, z1.flip(1), z2.flip(1))


class ReSSLOfAnyWidth(ReSSL):
    """Rows are padded with zeros; the student sees both views, the teacher the second; the memory is not empty."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(7, 2 * WIDTH, teacher_temperature=0.3, **settings)
        rows = remembered().repeat(1, 2).to(self.queue.embeddings)
        self.queue.write(rows, None, None, Shards((6,)), ONE_PROCESS)  # not of all ranks

    def inputs(self, view1: Tensor, view2: Tensor) -> Inputs:
        rows = _widened((view1, view2))
        return super().inputs(rows.flatten(1), rows.flip(1).flatten(1))


def dense_nnclr(a: Tensor, b: Tensor, temperature: Any = 0.1) -> Tensor:
    z, loss, memory = _widened((a, b)).unbind(1), torch.zeros(()), remembered().float().double()
    for own, other in (z, z[::-1]):
        p = F.normalize(other.flip(1), dim=1)
        positives = F.normalize(torch.stack([memory[(memory @ x).argmax()] for x in own.detach()]), dim=1)
        loss = loss + F.cross_entropy(positives @ p.T / temperature, torch.arange(len(p))) / 2
    return loss


def dense_ressl(a: Tensor, b: Tensor, temperature: Any = 0.1) -> Tensor:
    memory, rows = F.normalize(remembered().float().double().repeat(1, 2), dim=1), _widened((a, b))
    student, teacher = (F.normalize(x.flatten(1), dim=1) @ memory.T for x in (rows, rows.flip(1)))
    return F.cross_entropy(student / temperature, (teacher.detach() / 0.3).softmax(1))


def dynamic_soft_margin(reduction: Any = "mean") -> DynamicSoftMargin:
    """With a past."""
    loss = DynamicSoftMargin(WIDTH - 1, momentum=0.25, reduction=reduction)
    loss.histogram.copy_(ramp().abs() / ramp().abs().sum())
    return loss


def dense_dynamic_soft_margin(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)

    def distance(x: Tensor, y: Tensor) -> Tensor:
        square = (x - y).square().sum()
        return square.sqrt() if square > 1e-14 else 0 * square

    past = (ramp().abs() / ramp().abs().sum()).float().double()
    n, differences = len(a), []
    for i in range(n if n > 1 else 0):
        nearest = [(distance(a[i], b[j]), distance(a[j], b[i])) for j in range(n) if j != i]
        rounded = torch.stack([torch.stack(x) for x in nearest])  # equal minima share the gradient
        by_side = [[x for x in side if x - rounded.min() < 1e-13] for side in rounded.unbind(1)]
        share = [torch.stack(side).mean() for side in by_side if side]
        differences.append(distance(a[i], b[i]) - torch.stack(share).mean())
    if not differences:
        return 0 * (a + b).sum()
    batch = torch.zeros(WIDTH, dtype=a.dtype)
    at = [(x.item() + 2) * (WIDTH - 1) / 4 for x in differences]
    for x in at:
        batch += (1 - (x - torch.arange(WIDTH, dtype=a.dtype)).abs()).clamp(min=0) / n
    cdf, total = (0.75 * past + 0.25 * batch).cumsum(0), torch.zeros(())
    for x, difference in zip(at, differences, strict=True):
        k = min(int(x), WIDTH - 2)
        total = total + ((1 - x + k) * cdf[k] + (x - k) * cdf[k + 1]) * difference / n
    return total


def dense_tico(a: Tensor, b: Tensor) -> Tensor:
    a, b = (F.normalize(F.pad(x, (0, WIDTH - x.shape[1])), dim=1) for x in (a, b))
    c = 0.9 * torch.outer(ramp(), ramp()).float().double() + 0.1 * (a.T @ a / len(a)).detach()
    return torch.stack([1 - x @ y + 8 * x @ c @ x for x, y in zip(a, b, strict=True)]).mean()


def dense_sigreg(a: Tensor, b: Tensor) -> Tensor:
    return _normality(_widened((a, b)).flatten(1))


def _normality(z: Tensor) -> Tensor:
    drawn = torch.randn(z.shape[1], 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    if not devices.on_cpu(z):
        drawn = normal_numbers(torch.zeros((), dtype=torch.int64), *drawn.shape)
    x, loss = z @ F.normalize(drawn.double(), dim=0), 0 * z.sum()
    for k, weight in ((-4, 0.5), *((k, 1.0) for k in range(-3, 4)), (4, 0.5)):
        t = 0.75 * k
        real, imaginary = (t * x).cos().mean(0), (t * x).sin().mean(0)
        error = (real - math.exp(-t * t / 2)) ** 2 + imaginary**2
        loss = loss + 0.75 * weight * math.exp(-t * t / 2) * error.mean()
    return len(z) * loss


class LeJEPAOfAnyWidth(LeJEPA):
    """Rows are padded with zeros."""

    def inputs(self, *views: Tensor) -> Inputs:
        return super().inputs(*_widened(views).unbind(1))


def dense_lejepa(*views: Tensor) -> Tensor:
    rows = list(_widened(views).unbind(1))
    center = (rows[0] + rows[1]) / 2
    distance = torch.stack([F.mse_loss(z, center) for z in rows]).mean()
    normality = torch.stack([_normality(z) for z in rows]).mean()
    return 0.3 * normality + 0.7 * distance


def dense_koleo(a: Tensor, b: Tensor) -> Tensor:
    loss = 0 * (a + b).sum()
    for z in (F.normalize(x, dim=1) for x in (a, b)):
        for i in range(len(z)):
            near = [(z[i] - z[j]).square().sum() for j in range(len(z)) if j != i]
            near = [x.sqrt() if x > 1e-29 else 0 * x for x in near]
            loss = loss - (torch.stack(near).min(0).values + 1e-8).log() / len(z) if near else loss
    return loss


def dense_orthogonal(a: Tensor, b: Tensor) -> Tensor:
    loss, n = 0 * (a + b).sum(), len(a)
    for z in (F.normalize(x, dim=1) for x in (a, b)):
        pairs = [z[i] @ z[j] for i in range(n) for j in range(n) if i != j]
        if pairs:
            s = torch.stack(pairs)
            loss = loss + s.mean().square() + (s.square().mean() - 1 / z.shape[1]).relu()
    return loss


def dense_negative_cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return -((a * b.detach()).sum(1) + (b * a.detach()).sum(1)).mean()


SLICES = {"num_slices": 6, "num_points": 5}

ENTRIES = [
    row("VICReg", VICReg, dense_vicreg),
    row("BarlowTwins", BarlowTwins, dense_barlow_twins),
    row("SpectralContrastive", SpectralContrastive, dense_spectral_contrastive),
    row("AlignUniform", AlignUniform, dense_align_uniform),
    row("VIbCReg", VIbCReg, dense_vibcreg),
    row("FroSSL, three views", FroSSL, dense_frossl, views=3),
    row("WMSE", WMSE, dense_w_mse),
    row("WMSE, three views", WMSE, dense_w_mse, views=3),
    row("MMCR, three views", MMCR, dense_mmcr, views=3, lambda_=0.5),
    row("DynamicSoftMargin", dynamic_soft_margin, dense_dynamic_soft_margin),
    row("NNCLR", NNCLROfViews, dense_nnclr),
    row("ReSSL", ReSSLOfAnyWidth, dense_ressl),
    row("LeJEPA, three views", LeJEPAOfAnyWidth, dense_lejepa, views=3, embedding_size=WIDTH, lambda_=0.3, **SLICES),
    row("TiCo", TiCoOfAnyWidth, dense_tico),
    row("SIGReg", SIGRegOfViews, dense_sigreg, embedding_size=2 * WIDTH, **SLICES),
    row("KoLeo", KoLeoOfViews, dense_koleo),
    row("OrthogonalRegularization", OrthogonalOfViews, dense_orthogonal),
    row("NegativeCosine", NegativeCosineOfViews, dense_negative_cosine),
    row("SwAV", SwAVOfAnyWidth, dense_swav),
    row("SwAV, three views", SwAVOfAnyWidth, dense_swav, views=3),
    row("DINO", DINOOfViews, dense_dino),
    row("DINO, three views", DINOOfViews, dense_dino, views=3),
]
