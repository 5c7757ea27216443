"""Trainings that the audit must name rightly, besides the mistakes of the examples, and right ones it must not accuse."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import contrastive_zoo as cz
from examples.digits import make_dataset, make_encoder, make_loader, make_loss
from examples.mistakes import BATCH_SIZE, EPOCHS, LEARNING_RATE, SAMPLES, Right
from examples.setup import Trained

TRAININGS: dict[str, tuple[Callable[[], Any], str | None]] = {}
"""Trainings by name, each with the diagnosis that is expected; None for a right one."""


def training(name: str, mistake: str | None = None) -> Callable[[type], type]:
    """Register a training."""

    def register(cls: type) -> type:
        TRAININGS[name] = cls, mistake
        return cls

    return register


@training("the same shard on every rank", "same shard")
class SameShard(Right):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = cz.DistributedLoss(make_loss(), check_distinct=False)
        self.loader = make_loader(0, self.world_size, samples=SAMPLES, batch_size=BATCH_SIZE)


@training("every rank draws from all samples", "not sharded")
class NotSharded(Right):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        self.loader = DataLoader(make_dataset(SAMPLES), 16, shuffle=True, generator=generator)

    def start_epoch(self, epoch: int) -> None:
        pass


@training("one rank has fewer batches", "different numbers of steps")
class FewerBatches(Right):
    def __init__(self) -> None:
        super().__init__()
        samples = SAMPLES if self.rank == 0 else 70
        self.loader = make_loader(self.rank, self.world_size, samples=samples, batch_size=BATCH_SIZE)


@training("gradients not reduced", "not reduced")
class NotReduced(Right):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_encoder()  # type: ignore[assignment]  # without DDP


@training('loss parameters not reduced under "sum"', "parameters not reduced")
class SumOutside(Right):
    def __init__(self) -> None:
        super().__init__()
        from examples.ddp import add_up

        self.loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum")
        self.model.register_comm_hook(None, add_up)


@training("BatchNorm", "batch statistics")
class BatchNormed(Right):
    def __init__(self) -> None:
        super().__init__()
        self.model = DistributedDataParallel(nn.Sequential(make_encoder(), nn.BatchNorm1d(16)).double())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss(images + 0.01, labels)


def distributed() -> nn.Module:
    """Return the loss of the examples, distributed, without the check that refuses gathered embeddings."""
    return cz.DistributedLoss(make_loss(), check_distinct=False)


@training("Fabric's all_gather before DistributedLoss", "gathered first")
class FabricGathered:
    def train(self) -> Trained:
        from examples import fabric

        with patch.object(fabric, "make_loss", distributed):
            return fabric.train(gather=True)


@training("accelerator.gather before DistributedLoss", "gathered first")
class AccelerateGathered:
    def train(self) -> Trained:
        from examples import accelerate_loop

        with patch.object(accelerate_loop, "make_loss", distributed):
            return accelerate_loop.train(120, compute=accelerate_loop.gathered_first)


@training("gathered without gradient", "detached")
class GatheredWithoutGradient(Right):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = make_loss()
        self.model = DistributedDataParallel(make_encoder(), find_unused_parameters=True)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        z = cz.collectives.all_gather(self.model(images).detach()) + 0 * sum(x.sum() for x in self.model.parameters())
        return self.loss_fn(z, cz.collectives.all_gather(labels))


@training("the loss divided by W", "divided by W")
class DividedByW(Right):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss(images, labels) / self.world_size


@training("the gradient of the loss parameters scaled", "parameters scaled")
class ParametersScaled(Right):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.loss_fn.parameters():
            parameter.register_hook(lambda gradient: gradient * self.world_size)


@training("encoder gradient of an unknown mistake", "not recognised")
class Unknown(Right):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        z = self.model(images)
        if self.world_size > 1:
            z.register_hook(lambda gradient: gradient.roll(1, 1))
        return self.loss_fn(z, labels)


@training("gradient clipping, Adam, a weight of the loss")
class Clipped(Right):
    def train(self) -> Trained:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        for epoch in range(EPOCHS):
            self.start_epoch(epoch)
            for images, labels in self.loader:
                optimizer.zero_grad()
                (0.3 * self.loss(images, labels)).backward()
                torch.nn.utils.clip_grad_norm_([*self.parameters()], 0.1)
                optimizer.step()
        return Trained.of(self.model, self.loss_fn)


@training("dropout")
class Dropout(Right):
    def __init__(self) -> None:
        super().__init__()
        self.model = DistributedDataParallel(nn.Sequential(nn.Dropout(0.2), make_encoder(), nn.Dropout(0.2)))
        torch.manual_seed(self.rank)


@training("an overflow under GradScaler")
class Overflow(Right):
    def train(self) -> Trained:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu")
        for step, (images, labels) in enumerate(self.loader):
            optimizer.zero_grad()
            loss = self.loss(images, labels)
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return Trained.of(self.model, self.loss_fn)


@training("two towers, normalised before the loss")
class Towers(Right):
    def __init__(self) -> None:
        super().__init__()
        self.second = DistributedDataParallel(make_encoder())
        self.loss_fn = cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.5)).double())

    def parameters(self) -> Iterable[nn.Parameter]:
        return [*super().parameters(), *self.second.parameters()]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        towers = (nn.functional.normalize(x(images)) for x in (self.model, self.second))
        return self.loss_fn(*towers)


@training("a third-party loss")
class ThirdParty(Right):
    def __init__(self) -> None:
        super().__init__()
        import pytorch_metric_learning.losses as pml

        self.loss_fn = cz.DistributedLoss(pml.ProxyAnchorLoss(10, 16).double(), broadcast_parameters=True)


# --- set-ups whose steps the script itself computes, in plain torch ------------------------------------------------------


class Plain:
    """Two views of images, a loop over a DataLoader, SGD: right, with what a class overrides."""

    make_optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.encoder = self.make_encoder()
        self.model: nn.Module = DistributedDataParallel(self.encoder)
        self.images = make_dataset(96).tensors[0]

    def make_encoder(self) -> nn.Module:
        return make_encoder()

    def make_sampler(self) -> DistributedSampler[Any]:
        return DistributedSampler(self.images)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.loss(x, y).backward()

    def clip(self) -> None:
        """Change gradients before the optimizer receives them."""

    def end_step(self) -> None:
        """Do what follows the optimizer."""

    def train(self) -> None:
        self.optimizer = self.make_optimizer(self.model.parameters())
        for images in DataLoader(self.images, 16 // self.world_size, sampler=self.make_sampler()):
            self.optimizer.zero_grad()
            self.backward(images, images.flip(1))
            self.clip()
            self.optimizer.step()
            self.end_step()


def logits_of(x: Tensor, y: Tensor) -> Tensor:
    return 5 * nn.functional.normalize(x) @ nn.functional.normalize(y).T


def clip_loss(x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of pairs in one process."""
    logits, target = logits_of(x, y), torch.arange(len(x))
    return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2


class ClipLoss(nn.Module):
    """The loss of CLIP as its users write it: rank and number of processes are arguments."""

    def __init__(self, rank: int, world_size: int, gather_with_grad: bool) -> None:
        super().__init__()
        self.rank, self.world_size, self.gather_with_grad = rank, world_size, gather_with_grad

    def gathered(self, x: Tensor) -> Tensor:
        if self.world_size == 1:
            return x
        if self.gather_with_grad:
            return torch.cat(torch.distributed.nn.all_gather(x))
        parts = [torch.zeros_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.detach())
        parts[self.rank] = x
        return torch.cat(parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return clip_loss(self.gathered(x), self.gathered(y))


@training("ClipLoss(rank, world_size) that gathers with gradient")
class OpenClip(Plain):
    gather_with_grad = True

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = ClipLoss(self.rank, self.world_size, self.gather_with_grad)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.model(x), self.model(y))


@training("ClipLoss(rank, world_size) that gathers without gradient", "own slice")
class OpenClipOwnSlice(OpenClip):
    gather_with_grad = False


class WithEncoder(nn.Module):
    """A loss that holds its encoder, with a second term."""

    def __init__(self, encoder: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss_fn = encoder, loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.encoder(x), self.encoder(y)
        return self.loss_fn(*z) + 0.1 * torch.cat(z).mean(1).square().mean()


@training("a loss that holds its encoder, and a second loss")
class Holding(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.holding = WithEncoder(self.encoder, ClipLoss(self.rank, self.world_size, True))
        self.model = DistributedDataParallel(self.holding)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, y) + 1e-3 * sum(p.square().sum() for p in self.model.parameters())


@training("a teacher of moving averages, and a queue in a plain attribute")
class Momentum(OpenClip):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_encoder().requires_grad_(False)
        self.teacher.queue = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).double()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            keys = nn.functional.normalize(self.teacher(y))
            gathered = self.keys(keys)
        z = nn.functional.normalize(self.model(x))
        logits = torch.cat([(z * keys).sum(1, keepdim=True), z @ self.teacher.queue.T], 1) / 0.2
        self.teacher.queue = torch.cat([gathered, self.teacher.queue])[:32]
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def keys(self, keys: Tensor) -> Tensor:
        return ClipLoss(self.rank, self.world_size, False).gathered(keys)

    def updates(self) -> bool:
        return True

    def end_step(self) -> None:
        with torch.no_grad():
            for x, y in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                x.lerp_(y, 0.2 if self.updates() else 0.0)


@training("a teacher that rank 0 alone updates", "unequal state")
class TeacherOfRankZero(Momentum):
    def updates(self) -> bool:
        return self.rank == 0


@training("a queue of the local keys", "unequal state")
class LocalQueue(Momentum):
    def keys(self, keys: Tensor) -> Tensor:
        return keys


@training("a cache of gradients by hand")
class CachedByHand(OpenClip):
    def backward(self, x: Tensor, y: Tensor) -> None:
        chunks = [*x.chunk(2), *y.chunk(2)]
        with torch.no_grad():
            cached = [self.model(chunk) for chunk in chunks]
        z = [torch.cat(part).requires_grad_() for part in (cached[:2], cached[2:])]
        self.loss_fn(*z).backward()
        gradients = [g for part in z for g in part.grad.chunk(2)]
        for i, (chunk, gradient) in enumerate(zip(chunks, gradients, strict=True)):
            with nullcontext() if i == 3 else self.model.no_sync():  # type: ignore[operator]  # of DDP
                (self.model(chunk) * gradient).sum().backward()


@training("FSDP1, clipped by the norm of all ranks")
class ClippedSharded(OpenClip):
    def __init__(self) -> None:
        super().__init__()
        self.images = self.images.float()  # torch clips in float32
        encoder = make_encoder().float()
        self.model = FullyShardedDataParallel(encoder, device_id=torch.device("cpu"), use_orig_params=True)

    def clip(self) -> None:
        assert self.model.clip_grad_norm_(0.1) > 0.1  # type: ignore[operator]  # of FSDP1


@training("FSDP1, clipped by the norm of each rank", "clipped per rank")
class ClippedPerRank(ClippedSharded):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


@training("a sampler with a seed per rank", "sampler seeded per rank")
class SeededSampler(OpenClip):
    def make_sampler(self) -> DistributedSampler[Any]:
        return DistributedSampler(self.images, seed=self.rank)


class Sentences(nn.Module):
    """A transformer with dropout over padded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids), src_key_padding_mask=ids == 0)[:, 0]


@training("a transformer with dropout, each batch padded to its longest sentence")
class Tokens(OpenClip):
    def make_encoder(self) -> nn.Module:
        torch.manual_seed(0)
        return Sentences().double()

    def train(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 12, (2, 96), generator=generator).tolist()
        pairs = [[torch.randint(1, 30, (n,), generator=generator) for n in pair] for pair in zip(*lengths, strict=True)]
        torch.manual_seed(self.rank)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        collate = partial(map, partial(nn.utils.rnn.pad_sequence, batch_first=True))
        loader = DataLoader(
            pairs,  # type: ignore[arg-type]  # a list is a dataset
            16 // self.world_size,
            sampler=DistributedSampler(pairs),  # type: ignore[arg-type]  # as above
            collate_fn=lambda batch: [*collate(zip(*batch, strict=True))],
        )
        for x, y in loader:
            optimizer.zero_grad()
            self.loss(x, y).backward()
            optimizer.step()


@training("a learning rate that is scaled with W, a sum over the global batch by all_reduce")
class ScaledRate(OpenClip):
    def train(self) -> None:
        self.make_optimizer = partial(torch.optim.AdamW, lr=1e-3 * self.world_size)
        super().train()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = cz.collectives.all_gather(self.model(x)), cz.collectives.all_gather(self.model(y))
        return clip_loss(*z)


@training("a reference on one process before the group")
class AfterReference(OpenClip):
    def __init__(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in DataLoader(torch.ones(4, 2), 2):  # type: ignore[arg-type]  # a tensor is a dataset
            model(batch).square().sum().backward()
            optimizer.step()
        super().__init__()


class Accumulating(Right):
    """Four micro-batches in a step."""

    divisor = 4.0

    def train(self) -> Trained:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE)
        for i, batch in enumerate(self.loader):
            with nullcontext() if i % 4 == 3 else self.model.no_sync():
                (self.loss(*batch) / self.divisor).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return Trained.of(self.model, self.loss_fn)


@training("micro-batches that are parts of a batch")
class Splitting(Accumulating):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        parts = zip(images.tensor_split(2), labels.tensor_split(2), strict=True)
        return sum(super(Splitting, self).loss(*x) for x in parts) / 2


@training("an accumulation that is not divided", "accumulation not divided")
class NotDivided(Accumulating):
    divisor = 1.0


@training("an accumulation that is divided twice", "accumulation divided twice")
class DividedTwice(Accumulating):
    divisor = 16.0


def run(name: str) -> Any:
    """Run a training by its name, on this rank."""
    return TRAININGS[name][0]().train()
