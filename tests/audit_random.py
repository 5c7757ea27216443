"""A random right training: model, loss, optimizer, precision, shards and accumulation are drawn from a seed."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import contrastive_zoo as cz
from contrastive_zoo.testing.auditing.running import audit
from contrastive_zoo.testing.report import AuditReport

LOSSES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "NTXent": ("views", lambda: cz.NTXent(temperature=0.2)),
    "NTXent, learnt": ("views", lambda: cz.NTXent(temperature=cz.LearnableTemperature(0.5))),
    "InfoNCE": ("views", lambda: cz.InfoNCE(symmetric=True)),
    "SigLIP": ("views", lambda: cz.SigLIP()),
    "VICReg": ("views", lambda: cz.VICReg()),
    "BarlowTwins": ("views", lambda: cz.BarlowTwins()),
    "SupCon": ("labels", lambda: cz.SupCon(temperature=0.3)),
    "ProxyAnchor": ("labels", lambda: cz.ProxyAnchor(num_classes=4, embedding_size=5, alpha=4)),
    "MultiSimilarity": ("labels", lambda: cz.MultiSimilarity()),
    "a function": ("labels", lambda: _Centres()),
}
"""Call form and constructor of the losses that are drawn."""

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda x: torch.optim.SGD(x, 0.1, momentum=0.9),
    lambda x: torch.optim.SGD(x, 0.05, weight_decay=0.1, nesterov=True, momentum=0.5),
    lambda x: torch.optim.AdamW(x, 0.01),
    lambda x: torch.optim.RMSprop(x, 0.01, eps=1e-3),
]


class _Centres(nn.Module):
    """A third-party loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 5))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(-torch.cdist(embeddings.to(self.centres.dtype), self.centres), labels)


def audit_random_training(seed: int, steps: int = 3) -> tuple[str, AuditReport]:
    """Audit a random training on this rank; return what was drawn and the report."""
    draw = random.Random(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    dtype = draw.choice([torch.float64, torch.float32])
    name = draw.choice(list(LOSSES))
    form, make = LOSSES[name]
    encoder = nn.Sequential(nn.Linear(6, 8), draw.choice([nn.Tanh, nn.GELU, nn.Identity])())
    if draw.random() < 0.3:
        encoder.append(nn.LayerNorm(8))
    if dropped := draw.random() < 0.3:
        encoder.append(nn.Dropout(0.3))
    encoder.append(nn.Linear(8, 5)).to(dtype)
    loss_fn = cz.DistributedLoss(make().to(dtype), check_distinct=False)
    inside = draw.random() < 0.5
    model = DistributedDataParallel(encoder) if inside else encoder
    optimizer = draw.choice(OPTIMIZERS)([*encoder.parameters(), *loss_fn.parameters()])
    accumulate, clip = draw.choice([1, 1, 2, 3]), draw.choice([None, 0.5, 10.0])
    scaler = torch.amp.GradScaler("cpu", enabled=draw.random() < 0.3)
    low = dtype is torch.float32 and draw.random() < 0.3
    normalised, weight = draw.random() < 0.3, draw.choice([1.0, 1.0, 0.37])
    drawn = (
        f"{name}, {dtype}, W = {world_size}, dropout {dropped}, DDP {inside}, {accumulate} micro-batches, clip {clip}"
    )
    drawn += f", scaler {scaler.is_enabled()}, autocast {low}, {type(optimizer).__name__}, weight {weight}"
    kind = type(loss_fn.loss) if name == "a function" else None
    data = [[list(_batches(draw, form, dtype, accumulate, rank, world_size))] for _ in range(steps)]

    def train() -> None:
        torch.manual_seed(seed + rank)  # dropout differs between ranks
        for (batches,) in DataLoader(data, batch_size=None):
            optimizer.zero_grad()
            for index, (views, labels) in enumerate(batches):
                unsynchronised = inside and index + 1 < accumulate
                with model.no_sync() if unsynchronised else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=low):
                        z = [model(x) for x in views]
                    z = [nn.functional.normalize(x) for x in z] if normalised else z
                    value = loss_fn(*z) if form == "views" else loss_fn(z[0], labels)
                    scaler.scale(weight * value / accumulate).backward()
            if not inside:
                cz.average_gradients(encoder)
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([*encoder.parameters(), *loss_fn.parameters()], clip)
            scaler.step(optimizer)
            scaler.update()

    return drawn, audit(train, steps=steps, loss=kind, name=drawn)


def _batches(
    draw: random.Random, form: str, dtype: torch.dtype, count: int, rank: int, world_size: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield this rank's part of global batches with uneven, sometimes empty shards."""
    for _ in range(count):
        sizes = [draw.randint(0, 6) for _ in range(world_size)]
        sizes[draw.randrange(world_size)] += 6
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        views = [torch.randn(sum(sizes), 6, generator=generator, dtype=dtype) for _ in range(2)]
        labels = torch.randint(0, 4, (sum(sizes),), generator=generator)
        start = sum(sizes[:rank])
        local = slice(start, start + sizes[rank])
        yield [x[local] for x in views[: 2 if form == "views" else 1]], labels[local]
