"""Parts of the trainings of tests/audit_corpus.py: encoders, augmentations, validations, schedules, optimizers, losses."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, Dataset

import contrastive_zoo as cz
from tests.zoo import dense_clip

BATCH, SAMPLES, FEATURES, WIDTH = 8, 96, 12, 16
HALF = torch.bfloat16


class Pairs(Dataset[dict[str, Tensor]]):
    """Two views of each sample, drawn before the training."""

    def __init__(self, more: int = 0) -> None:
        views = torch.randn(SAMPLES + more, FEATURES, generator=torch.Generator().manual_seed(0))
        self.views = views, views + 0.3 * torch.randn(views.shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.views[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.views[0][index], "y": self.views[1][index]}


class Encoder(nn.Module):
    """A residual network."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + self.dropout(block(h))
        return self.last(h)


class LayerDrop(Encoder):
    """A whole block is left out of a batch at random, as in wav2vec 2.0 and BART."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.3:
                h = h + block(h)
        return self.last(h)


class Unused(Encoder):
    """A classifier that is not trained in this stage."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, 10)


class Noisy(Encoder):
    """Noise on the hidden layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return super().forward(x) + 0.1 * self.last(h + 0.1 * torch.randn_like(h))


class AutocastInside(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return super().forward(x)


class CastByHand(Encoder):
    """Weights are cast in every call; no module returns bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(x.to(HALF), self.first.weight.to(HALF), self.first.bias.to(HALF)))
        return F.linear(h, self.last.weight.to(HALF), self.last.bias.to(HALF)).float()


class WithBatchNorm(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH))  # type: ignore[assignment]  # a layer in place of one


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "residual": Encoder,
    "dropout": partial(Encoder, 0.2),
    "LayerDrop": LayerDrop,
    "unused parameters": Unused,
    "noise inside": Noisy,
    "autocast inside of forward": AutocastInside,
    "casts by hand": CastByHand,
    "bfloat16 parameters": lambda: Encoder().to(HALF),
    "BatchNorm": WithBatchNorm,
}


def mixed(x: Tensor) -> Tensor:
    """Mix each sample with another one, as mixup does."""
    share = float(np.random.beta(0.4, 0.4))
    return share * x + (1 - share) * x[np.random.permutation(len(x))]


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "mask": lambda x: x * (torch.rand(len(x), FEATURES) > 0.3).to(x.dtype),
    "NumPy mixup": mixed,
    "random.uniform": lambda x: x.roll(random.randrange(4), dims=1) * random.uniform(0.8, 1.2),
}
"""Of the views of one rank, in the loop."""


def recall(model: nn.Module) -> float:
    x, y = (model(view.to(next(model.parameters()).dtype)) for view in Pairs().views)
    return float((x.float() @ y.float().T).argmax(1).eq(torch.arange(len(x))).float().mean())


def in_evaluation_mode(model: nn.Module) -> None:
    model.eval()
    with torch.inference_mode():
        recall(model)
    model.train()


def with_a_loader(model: nn.Module) -> None:
    for batch in DataLoader(Pairs(), 32):
        with torch.no_grad():
            model(batch["x"].to(next(model.parameters()).dtype))


VALIDATIONS: dict[str, Callable[[nn.Module], object]] = {
    "": lambda model: None,
    "train mode, whole set": torch.no_grad()(recall),
    "eval mode": in_evaluation_mode,
    "with a loader": with_a_loader,
}


SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "warm-up from 0": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 2)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}


class OpenClip(nn.Module):
    """Local anchors against the gathered candidates, as in OpenCLIP with ``--local-loss --gather-with-grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def gathered(self, x: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.all_gather(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
        target = torch.arange(len(x)) + dist.get_rank() * len(x)
        logits = self.logit_scale.exp() * x @ self.gathered(y).T, self.logit_scale.exp() * y @ self.gathered(x).T
        return (F.cross_entropy(logits[0], target) + F.cross_entropy(logits[1], target)) / 2


class OwnSlice(OpenClip):
    """Every rank computes the whole loss; its part of the gathered embeddings alone carries a gradient."""

    def gathered(self, x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        parts[dist.get_rank()] = x
        return torch.cat(parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return dense_clip(self.gathered(x), self.gathered(y), (-self.logit_scale).exp())


class Detached(OwnSlice):
    def gathered(self, x: Tensor) -> Tensor:
        return super().gathered(x).detach() + 0 * x.sum()


class Changed(nn.Module):
    """A loss of this library with its views or its value changed."""

    def __init__(self, of_views: Callable[[Tensor], Tensor] = lambda x: x, power_of_w: int = 0) -> None:
        super().__init__()
        self.loss_fn, self.power_of_w = cz.DistributedLoss(learnt(), check_distinct=False), power_of_w
        self.of_views = of_views

    def forward(self, *views: Tensor) -> Tensor:
        return self.loss_fn(*map(self.of_views, views)) * dist.get_world_size() ** self.power_of_w


def learnt() -> nn.Module:
    return cz.NTXent(temperature=cz.LearnableTemperature(0.5))


def seeded_per_rank() -> nn.Module:
    loss = learnt()
    with torch.no_grad():
        next(loss.parameters()).add_(0.1 * dist.get_rank())
    return cz.DistributedLoss(loss)


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "NTXent": lambda: cz.DistributedLoss(learnt()),
    "OpenCLIP": OpenClip,
    "loss × W": partial(Changed, power_of_w=1),
    "loss / W": partial(Changed, power_of_w=-1),
    "local loss": learnt,
    "own slice": OwnSlice,
    "detached": Detached,
    "gathered first": partial(Changed, cz.collectives.all_gather),
    "loss parameters seeded per rank": seeded_per_rank,
    "sum with a trainer that averages": lambda: cz.DistributedLoss(learnt(), grad_reduction="sum"),
}
