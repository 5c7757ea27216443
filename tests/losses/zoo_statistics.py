"""Feature statistics, clusters and teachers for the table of losses under test, each with its paper's dense formula."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.random_keys import normal_numbers
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards
from tests.helpers import numbers
from tests.losses.zoo_softmax import own_negatives
from tests.zoo import itself, roots, row, unit

PROTOTYPES, WIDTH = 5, 8


def fixed_prototypes() -> Tensor:
    return numbers(PROTOTYPES, WIDTH, seed=4, dtype=torch.float32).double()


def widened(*views: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.pad(view, (0, WIDTH - view.shape[1])) for view in views)


def side_by_side(*views: Tensor) -> tuple[Tensor]:
    return (torch.cat(widened(*views), 1),)


def embeddings_alone(embeddings: Tensor, labels: Tensor) -> tuple[Tensor]:
    return (embeddings,)


def student_and_teacher(*views: Tensor) -> tuple[Tensor, Tensor]:
    """The student is its own teacher of the first two views."""
    student = torch.stack(widened(*views), 1)
    return student, student[:, :2]


def masked_patches(*views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three patches of each image, of which a mask takes some; the teacher has learnt another order of features."""
    first, second = widened(*views)
    mask = ~(first[:, :3] <= 0)  # NaN is a masked patch, too
    patches = torch.stack([first, second, first.flip(1)], 1)[mask]
    return patches, patches.roll(1, 1), mask.sum(1)


def predicted(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Projections, and what a predictor makes of them, which turns features around."""
    z1, z2 = widened(first, second)
    return z1, z2, z1.flip(1), z2.flip(1)


def ramp() -> Tensor:
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float32).double()


def remembered() -> Tensor:
    """Unit embeddings of a memory, the same on every process."""
    return unit(numbers(6, WIDTH, seed=5, dtype=torch.float32).double())


def remember(loss: cz.NNCLR) -> None:
    """Fill the memory, but for one place, with what all ranks have."""
    loss.queue.write(remembered().to(loss.queue.embeddings), None, None, Shards((6,)), ONE_PROCESS)


def dense_vicreg(a: Tensor, b: Tensor) -> Tensor:
    loss = 25 * F.mse_loss(a, b)
    for z in (a, b):
        x = z - z.mean(0)
        cov = x.T @ x / max(1, len(z) - 1)
        loss = loss + 25 / 2 * (1 - (cov.diagonal() + 1e-4).sqrt()).relu().mean()
        loss = loss + (cov - cov.diagonal().diag()).square().sum() / len(cov)
    return loss


def dense_barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    a, b = (F.batch_norm(x, None, None, training=True) if len(x) > 1 else 0 * x for x in (a, b))
    c = a.T @ b / len(a)
    on_diagonal = (c.diagonal() - 1).square().sum()
    off_diagonal = (c - c.diagonal().diag()).square().sum()
    return on_diagonal + 0.0051 * off_diagonal


def dense_align_uniform(a: Tensor, b: Tensor) -> Tensor:
    """As the authors' code writes it, λ = 1; by hand, as pdist cannot be differentiated twice."""
    a, b = unit(a), unit(b)
    pairs = [(x[:, None] - x).square().sum(2)[~itself(x)] for x in (a, b)] if len(a) > 1 else []
    uniform = [x.mul(-2).exp().mean().log() for x in pairs]
    return (a - b).norm(dim=1).pow(2).mean() + sum(uniform, torch.zeros(())) / 2


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float) -> Tensor:
    q = torch.exp((scores - scores.amax()) / epsilon).T if len(scores) else scores.T
    k, n = q.shape
    q = q / q.sum()
    for _ in range(3):
        q = q * (torch.full((k,), 1 / k) / q.sum(1))[:, None]
        q = q * (torch.full((n,), 1 / max(1, n)) / q.sum(0))[None]
    return (q / q.sum(0, keepdim=True)).T


def dense_swav(*views: Tensor, temperature: Any = 0.1) -> Tensor:
    scores = [unit(z) @ unit(fixed_prototypes()).T for z in views]
    codes, log_shares = [sinkhorn(s, 0.05) for s in scores[:2]], [(s / temperature).log_softmax(1) for s in scores]
    pairs = [(q, s) for u, q in enumerate(codes) for v, s in enumerate(log_shares) if v != u]
    return torch.stack([-(q * s).sum(1).mean() for q, s in pairs]).mean()


def masked_views(*views: Tensor) -> tuple[Tensor, Tensor]:
    """The student is its own teacher of the last view."""
    return torch.stack(widened(*views), 1), widened(*views)[-1]


def dense_msn(student: Tensor, teacher: Tensor, temperature: Any = 0.1, iterations: int = 0) -> Tensor:
    c = F.normalize(fixed_prototypes(), dim=1)
    p = (F.normalize(student, dim=2) @ c.T / temperature).softmax(2)
    targets = (F.normalize(teacher.detach(), dim=1) @ c.T / 0.1).softmax(1) ** 4
    targets = targets / targets.sum(1, keepdim=True)
    targets = sinkhorn(targets.log(), 1.0) if iterations else targets
    mean = p.mean((0, 1))
    return -(targets[:, None] * p.log()).sum(2).mean() + 0.5 * (mean * mean.log()).sum()


def of_teacher(teacher: Tensor, centering: str) -> Tensor:
    if centering == "mean":
        return ((teacher.detach() - ramp()) / 0.4).softmax(-1)
    return sinkhorn(teacher.flatten(0, -2), 0.4).view(teacher.shape)


def dense_dino(student: Tensor, teacher: Tensor, temperature: Any = 0.1, centering: str = "mean") -> Tensor:
    t, s = of_teacher(teacher, centering), (student / temperature).log_softmax(2)
    pairs = [(u, v) for u in range(t.shape[1]) for v in range(s.shape[1]) if v != u]
    return torch.stack([-(t[:, u] * s[:, v]).sum(1).mean() for u, v in pairs]).mean()


def dense_ibot(student: Tensor, teacher: Tensor, counts: Tensor, temperature: Any, centering: str = "mean") -> Tensor:
    losses = -(of_teacher(teacher, centering) * (student / temperature).log_softmax(1)).sum(1)
    means = [x.mean() for x in losses.split(counts.tolist()) if len(x)]
    return torch.stack([0 * student.sum(), *means]).sum() / len(counts)


def dense_nnclr(z1: Tensor, z2: Tensor, p1: Tensor, p2: Tensor, temperature: Any = 0.1) -> Tensor:
    loss, memory = torch.zeros(()), remembered().float().double()
    for z, p in ((z1, p2), (z2, p1)):
        neighbours = F.normalize(torch.stack([memory[(memory @ x).argmax()] for x in z.detach()]), dim=1)
        logits = neighbours @ F.normalize(p, dim=1).T / temperature
        loss = loss + F.cross_entropy(logits, torch.arange(len(p))) / 2
    return loss


def dense_tico(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    c = 0.9 * torch.outer(ramp(), ramp()).float().double() + 0.1 * (a.T @ a / len(a)).detach()
    return (1 - (a * b).sum(1) + 8 * ((a @ c) * a).sum(1)).mean()


def first_numbers(z: Tensor, *shape: int) -> Tensor:
    """The normal numbers of step 0."""
    if not devices.on_cpu(z):
        return normal_numbers(torch.zeros((), dtype=torch.int64), *shape).to(z)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(z)


def dense_sigreg(z: Tensor) -> Tensor:
    x, loss = z @ F.normalize(first_numbers(z, z.shape[1], 6), dim=0), 0 * z.sum()
    for k, weight in ((-4, 0.5), *((k, 1.0) for k in range(-3, 4)), (4, 0.5)):
        t = 0.75 * k
        real, imaginary = (t * x).cos().mean(0), (t * x).sin().mean(0)
        error = (real - math.exp(-t * t / 2)) ** 2 + imaginary**2
        loss = loss + 0.75 * weight * math.exp(-t * t / 2) * error.mean()
    return len(z) * loss


def dense_lejepa(*views: Tensor) -> Tensor:
    center = (views[0] + views[1]) / 2
    distance = torch.stack([F.mse_loss(z, center) for z in views]).mean()
    return 0.3 * torch.stack([dense_sigreg(z) for z in views]).mean() + 0.7 * distance


def dense_visreg(*views: Tensor) -> Tensor:
    center, n = (views[0] + views[1]) / 2, len(views[0])
    directions = F.normalize(first_numbers(center, WIDTH, 6), dim=0)
    normal = torch.distributions.Normal(0.0, 1.0).icdf(torch.arange(1, n + 1).to(center) / (n + 1))[:, None]
    loss = torch.zeros(())
    for z in views:
        scale = roots((z - z.mean(0)).square().mean(0))
        projections = (z - z.mean(0)) / (scale.detach() + 1e-4) @ directions
        shape = F.mse_loss(projections.sort(dim=0, stable=True).values, normal.expand_as(projections))
        loss = loss + 2 * (1 - scale).square().mean() + 3 * shape + 4 * z.mean(0).square().mean()
    return 0.3 * loss / len(views) + 0.7 * torch.stack([F.mse_loss(z, center) for z in views]).mean()


def dense_rdmreg(a: Tensor, b: Tensor, p: float = 1.0) -> Tensor:
    directions, noise = first_numbers(a, 6 + len(a), WIDTH).split([6, len(a)])
    size = stats.gennorm.isf(stats.norm.sf(noise.abs().to(torch.float64).numpy()), p) / stats.gennorm.std(p)
    noise = noise.sign() * torch.from_numpy(size).to(noise)
    targets, loss = (noise - 0.25).relu(), 25 * F.mse_loss(a, b)
    for z in (a, b):
        x, y = ((rows @ F.normalize(directions, dim=1).T).sort(dim=0, stable=True).values for rows in (z, targets))
        loss = loss + 125 / 2 * F.mse_loss(x, y)
    return loss


def dense_koleo(z: Tensor, group_size: int = 10**6) -> Tensor:
    groups = [x for x in unit(z).split(group_size) if len(x) > 1]
    squares = [(x[:, None] - x).square().sum(2).masked_fill(itself(x), torch.inf).min(1).values for x in groups]
    losses = [-(roots(x) + 1e-8).log() for x in squares]
    return torch.cat(losses).mean() if losses else 0 * z.sum()


def dense_orthogonal(z: Tensor) -> Tensor:
    s = (F.normalize(z, dim=1) @ F.normalize(z, dim=1).T)[~itself(z)]
    return s.mean().square() + (s.square().mean() - 1 / z.shape[1]).relu() if len(s) else 0 * z.sum()


def dense_negative_cosine(a: Tensor, b: Tensor) -> Tensor:
    return -(unit(a) * unit(b).detach()).sum(1).mean()


def dense_cyclic_consistency(x: Tensor, y: Tensor, cross_modal: float = 0.25, in_modal: float = 0.25) -> Tensor:
    x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    s, within = x @ y.T, x @ x.T - y @ y.T
    return (cross_modal * (s - s.T).square().sum() + in_modal * within.square().sum()) / len(x)


def dense_flops(*views: Tensor, query_weight: float = 1.0, document_weight: float = 1.0) -> Tensor:
    queries, *documents = (z.flatten(0, -2) for z in views)
    q, d = (z.abs().mean(0).square().sum() for z in (queries, torch.cat(documents)))
    return query_weight * q + document_weight * d


COVARIANCE: dict[str, Any] = {"prepare": lambda loss: loss.covariance.copy_(torch.outer(ramp(), ramp()))}
TERMS = {"scale_weight": 2.0, "shape_weight": 3.0, "center_weight": 4.0}
SLICES: dict[str, Any] = {"embedding_size": WIDTH, "num_slices": 6}
CLUSTERS: dict[str, Any] = {"num_prototypes": PROTOTYPES, "embedding_size": WIDTH}
CLUSTERS["prepare"] = lambda loss: loss.prototypes.data.copy_(fixed_prototypes())
OUTPUTS: dict[str, Any] = {"out_dim": WIDTH, "teacher_temperature": 0.4, "centre_momentum": 0.7}
OUTPUTS["prepare"] = lambda loss: loss.centre.copy_(ramp())

ENTRIES = [
    row("CyclicConsistency", dense_cyclic_consistency),
    row("CyclicConsistency, one of two", dense_cyclic_consistency, cross_modal=1.0, in_modal=0.0),
    row("VICReg", dense_vicreg),
    row("BarlowTwins", dense_barlow_twins),
    row("AlignUniform", dense_align_uniform),
    row("NNCLR", dense_nnclr, "views", predicted, prepare=remember, size=7, embedding_size=WIDTH),
    row("LeJEPA, three views", dense_lejepa, "views", widened, 3, lambda_=0.3, num_points=5, **SLICES),
    row("TiCo", dense_tico, "views", widened, embedding_size=WIDTH, **COVARIANCE),
    row("SIGReg", dense_sigreg, "views", side_by_side, embedding_size=2 * WIDTH, num_slices=6, num_points=5),
    row("VISReg, three views", dense_visreg, "views", widened, 3, lambda_=0.3, **TERMS, **SLICES),
    row("RDMReg", dense_rdmreg, "views", widened, shift=-0.25, **SLICES),
    *(row(f"RDMReg, p = {p}", dense_rdmreg, "views", widened, shift=-0.25, p=p, **SLICES) for p in (0.4, 2.0, 3.5)),
    row("KoLeo", dense_koleo, "labels", embeddings_alone),
    row("KoLeo, groups", dense_koleo, "labels", embeddings_alone, group_size=3),
    row("OrthogonalRegularization", dense_orthogonal, "labels", embeddings_alone),
    row("NegativeCosine", dense_negative_cosine, "views", lambda a, b: (torch.cat([a, b]), torch.cat([b, a]))),
    row("FLOPS", dense_flops, "views", own_negatives, 4, query_weight=0.5),
    row("SwAV", dense_swav, "views", widened, **CLUSTERS),
    row("SwAV, three views", dense_swav, "views", widened, 3, **CLUSTERS),
    row("MSN", dense_msn, "views", masked_views, entropy_weight=0.5, **CLUSTERS),
    row("MSN, Sinkhorn", dense_msn, "views", masked_views, 3, entropy_weight=0.5, iterations=3, **CLUSTERS),
    row("DINO", dense_dino, "views", student_and_teacher, **OUTPUTS),
    row("DINO, three views", dense_dino, "views", student_and_teacher, 3, **OUTPUTS),
    row("DINO, Sinkhorn", dense_dino, "views", student_and_teacher, 3, centering="sinkhorn", **OUTPUTS),
    row("IBOT", dense_ibot, "views", masked_patches, **OUTPUTS),
    row("IBOT, Sinkhorn", dense_ibot, "views", masked_patches, centering="sinkhorn", **OUTPUTS),
]
