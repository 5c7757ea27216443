"""Trainings that the audit names or does not accuse, besides those of tests/audit_corpus.py, and how they are audited."""

import importlib
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import contrastive_zoo as cz
from contrastive_zoo.testing import mistakes
from contrastive_zoo.testing.auditing import diagnosis
from contrastive_zoo.testing.auditing.launch import (
    audit,
    environment,
    judged,
    local_store,
    record_script,
    wait_for_records,
)
from contrastive_zoo.testing.report import AuditReport, WorldReport
from tests.digits import (
    LEARNING_RATE,
    SAMPLES,
    Right,
    add_up,
    make_dataset,
    make_encoder,
    make_loader,
    make_loss,
)
from tests.interpreter import forked

TRAININGS: dict[str, tuple[Callable[[], Any], str | None]] = {}
"""Trainings by name, each with the diagnosis that is expected; None for a right one."""


def training(name: str, mistake: str | None = None) -> Callable[[type], type]:
    def register(cls: type) -> type:
        TRAININGS[name] = cls, mistake
        return cls

    return register


def variant(name: str, mistake: str | None = None, base: type = Right) -> Callable[[Callable[[Any], None]], None]:
    def register(change: Callable[[Any], None]) -> None:
        def changed() -> Any:
            result = base()
            change(result)
            return result

        TRAININGS[name] = changed, mistake

    return register


@variant("the same shard on every rank", "same shard")
def _(x: Any) -> None:
    x.loss_fn = cz.DistributedLoss(make_loss(), check_distinct=False)
    x.loader = make_loader(0, x.world_size)


@variant("every rank draws from all samples", "not sharded")
def _(x: Any) -> None:
    generator = torch.Generator().manual_seed(x.rank)
    x.loader = DataLoader(make_dataset(SAMPLES), 16, shuffle=True, generator=generator)
    x.start_epoch = lambda epoch: None


@variant("one rank has fewer batches", "different numbers of steps")
def _(x: Any) -> None:
    x.loader = make_loader(x.rank, x.world_size, samples=70 if x.rank else SAMPLES)


@variant("loss parameters never zeroed", "never zeroed")
def _(x: Any) -> None:
    x.zero_grad = lambda optimizer: x.model.zero_grad()


@variant("loss × W", "times W")
def _(x: Any) -> None:
    x.loss = lambda *batch: x.world_size * Right.loss(x, *batch)


@variant("gathered before the loss, not checked", "gathered first")
def _(x: Any) -> None:
    x.loss_fn, all_gather = cz.DistributedLoss(make_loss(), check_distinct=False), cz.collectives.all_gather
    x.loss = lambda images, labels: x.loss_fn(all_gather(x.model(images)), all_gather(labels))


@variant("local loss, parameters in DDP", "local negatives")
def _(x: Any) -> None:
    x.loss_fn = DistributedDataParallel(make_loss())


@variant('"sum" with a trainer that averages', "trainer averages")
def _(x: Any) -> None:
    x.loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum")


@variant('"sum" with a trainer that sums')
def _(x: Any) -> None:
    x.loss_fn = DistributedDataParallel(cz.DistributedLoss(make_loss(), grad_reduction="sum"))
    for module in (x.model, x.loss_fn):
        module.register_comm_hook(None, add_up)


@variant('"mean" with a trainer that sums', "trainer sums")
def _(x: Any) -> None:
    x.model.register_comm_hook(None, add_up)


@variant("no set_epoch", "no set_epoch")
def _(x: Any) -> None:
    x.start_epoch = lambda epoch: None


@variant("gradients not reduced", "not reduced")
def _(x: Any) -> None:
    x.model = make_encoder()  # without DDP


@variant('loss parameters not reduced under "sum"', "parameters not reduced")
def _(x: Any) -> None:
    x.loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum")
    x.model.register_comm_hook(None, add_up)


@variant("BatchNorm", "batch statistics")
def _(x: Any) -> None:
    x.model = DistributedDataParallel(nn.Sequential(make_encoder(), nn.BatchNorm1d(16)).double())
    x.loss = lambda images, labels: x.loss_fn(x.model(images + 0.01), labels)


@variant("the gradient of the loss parameters scaled", "parameters scaled")
def _(x: Any) -> None:
    for parameter in x.loss_fn.parameters():
        parameter.register_hook(lambda gradient: gradient * x.world_size)


@variant("encoder gradient of an unknown mistake", "not recognised")
def _(x: Any) -> None:
    def loss(images: Tensor, labels: Tensor) -> Tensor:
        z = x.model(images)
        if x.world_size > 1:
            z.register_hook(lambda gradient: gradient.roll(1, 1))
        return x.loss_fn(z, labels)

    x.loss = loss


@variant("two towers, normalised before the loss")
def _(x: Any) -> None:
    second = DistributedDataParallel(make_encoder())
    x.loss_fn = cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.5)).double())
    x.parameters = lambda: [*Right.parameters(x), *second.parameters()]
    x.loss = lambda images, labels: x.loss_fn(*(nn.functional.normalize(y(images)) for y in (x.model, second)))


@variant("a third-party loss")
def _(x: Any) -> None:
    import pytorch_metric_learning.losses as pml

    x.loss_fn = cz.DistributedLoss(pml.ProxyAnchorLoss(10, 16).double())


class Plain:
    """Two views of images, a loop over a DataLoader, SGD: right, with what a class overrides."""

    make_optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    make_encoder: Callable[[], nn.Module] = staticmethod(make_encoder)

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.encoder = self.make_encoder()
        self.model: nn.Module = DistributedDataParallel(self.encoder)
        self.images = make_dataset(96).tensors[0]

    def make_sampler(self) -> DistributedSampler[Any]:
        return DistributedSampler(self.images)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.loss(x, y).backward()

    def clip(self) -> None:
        """Change gradients before the optimizer receives them."""

    def step(self) -> None:
        self.optimizer.step()

    def end_step(self) -> None:
        """Do what follows the optimizer."""

    def train(self) -> None:
        self.optimizer = self.make_optimizer(self.model.parameters())
        for images in DataLoader(self.images, 16 // self.world_size, sampler=self.make_sampler()):
            self.optimizer.zero_grad()
            self.backward(images, images.flip(1))
            self.clip()
            self.step()
            self.end_step()


def logits_of(x: Tensor, y: Tensor) -> Tensor:
    return 5 * nn.functional.normalize(x) @ nn.functional.normalize(y).T


def clip_loss(x: Tensor, y: Tensor) -> Tensor:
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


class Clip(nn.Module):
    """The model of OpenCLIP, which holds the scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.logit_scale = make_encoder(), nn.Parameter(torch.tensor(1.0).double())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(x), self.encoder(y), self.logit_scale.exp()


@training("the scale of the logits in the model, a gather that keeps its own slice", "own slice")
class OpenClipScale(OpenClipOwnSlice):
    make_encoder = staticmethod(Clip)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x, y, scale = self.model(x, y)
        x, y = map(self.loss_fn.gathered, map(nn.functional.normalize, (x, y)))
        return nn.functional.cross_entropy(scale * x @ y.T, torch.arange(len(x)))


@training("the scale of the logits in the model, a gather with gradient")
class OpenClipScaleRight(OpenClipScale):
    gather_with_grad = True


@variant("a learning rate of one rank", "unequal settings", base=OpenClip)
def _(x: Any) -> None:
    x.make_optimizer = partial(torch.optim.SGD, lr=0.1 * (1 + x.rank))


@variant("a weight decay of one rank", "unequal settings", base=OpenClip)
def _(x: Any) -> None:
    x.make_optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1 * x.rank)


@variant("a limit of clipping of one rank", "unequal settings", base=OpenClip)
def _(x: Any) -> None:
    x.clip = lambda: nn.utils.clip_grad_norm_(x.model.parameters(), 0.1 / (1 + x.rank))


@variant("one rank clips", "unequal settings", base=OpenClip)
def _(x: Any) -> None:
    x.clip = lambda: x.rank and nn.utils.clip_grad_norm_(x.model.parameters(), 0.01)


@variant("the module in DDP is called", "not reduced", base=OpenClip)
def _(x: Any) -> None:
    x.loss = lambda *views: x.loss_fn(*map(x.encoder, views))


@variant("an overflow under GradScaler", base=OpenClip)
def _(x: Any) -> None:
    x.loss_fn, scaler, factors = cz.DistributedLoss(cz.NTXent()), torch.amp.GradScaler("cpu"), iter([1.0, math.inf])

    def step() -> None:
        scaler.step(x.optimizer)
        scaler.update()

    x.backward = lambda *views: scaler.scale(next(factors, 1.0) * x.loss(*views)).backward()
    x.step = step


class WithEncoder(nn.Module):
    def __init__(self, encoder: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss_fn = encoder, loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.encoder(x), self.encoder(y)
        return self.loss_fn(*z) + 0.1 * torch.cat(z).mean(1).square().mean()


@variant("a loss that holds its encoder, and a second loss", base=OpenClip)
def _(x: Any) -> None:
    x.model = DistributedDataParallel(WithEncoder(x.encoder, x.loss_fn))
    x.loss = lambda *views: x.model(*views) + 1e-3 * sum(p.square().sum() for p in x.model.parameters())


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

    def updates(self) -> bool:
        return True

    def keys(self, keys: Tensor) -> Tensor:
        return ClipLoss(self.rank, self.world_size, False).gathered(keys)

    def end_step(self) -> None:
        with torch.no_grad():
            for x, y in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                x.lerp_(y, 0.2 if self.updates() else 0.0)


@variant("a teacher that rank 0 alone updates", "unequal state", base=Momentum)
def _(x: Any) -> None:
    x.updates = lambda: x.rank == 0


@variant("a queue of the local keys", "unequal state", base=Momentum)
def _(x: Any) -> None:
    x.keys = lambda keys: keys


@training("a cache of gradients by hand, with dropout")
class CachedByHand(OpenClip):
    make_encoder = staticmethod(lambda: nn.Sequential(make_encoder(), nn.Dropout(0.2)))

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


def shard(x: Any) -> None:
    x.images = x.images.float()  # torch clips in float32
    x.model = FullyShardedDataParallel(make_encoder().float(), device_id=torch.device("cpu"), use_orig_params=True)


@variant("FSDP1, clipped by the norm of all ranks", base=OpenClip)
def _(x: Any) -> None:
    shard(x)
    x.clip = lambda: x.model.clip_grad_norm_(0.1)


@variant("FSDP1, clipped by the norm of each rank", "clipped per rank", base=OpenClip)
def _(x: Any) -> None:
    shard(x)
    x.clip = lambda: nn.utils.clip_grad_norm_(x.model.parameters(), 0.1)


def take_part(x: Any, augment: Callable[[Tensor], Tensor] = lambda y: y) -> None:
    """Load the same batches on every rank, of which each takes a part."""
    x.make_sampler = lambda: None
    x.loss = lambda *views: OpenClip.loss(x, *(augment(y.tensor_split(x.world_size)[x.rank]) for y in views))


@variant("a part of every batch on each rank", base=OpenClip)
def _(x: Any) -> None:
    take_part(x)


@variant("a part of every batch on each rank, with noise", base=OpenClip)
def _(x: Any) -> None:
    torch.manual_seed(x.rank)
    take_part(x, lambda y: y + torch.randn_like(y))


@variant("one shard, with noise in the loop", "same shard", base=OpenClip)
def _(x: Any) -> None:
    x.make_sampler = lambda: DistributedSampler(x.images, x.world_size, 0)
    torch.manual_seed(x.rank)
    x.loss = lambda *views: OpenClip.loss(x, *(y + torch.randn_like(y) for y in views))


class Noisy(Dataset[Tensor]):
    """Samples with an augmentation."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index] + torch.randn_like(self.images[index])


@variant("one shard, with noise in the dataset", "same shard", base=OpenClip)
def _(x: Any) -> None:
    x.images = Noisy(x.images)
    torch.manual_seed(x.rank)
    x.make_sampler = lambda: DistributedSampler(x.images, x.world_size, 0)


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids), src_key_padding_mask=ids == 0)[:, 0]


@training("a transformer with dropout, each batch padded to its longest sentence")
class Tokens(OpenClip):
    make_encoder = staticmethod(lambda: Sentences().double())

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


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.8)


@variant("views that the loop draws, and samples that skip a layer", base=OpenClip)
def _(x: Any) -> None:
    x.model = DistributedDataParallel(nn.Sequential(make_encoder(), DropPath()))
    torch.manual_seed(x.rank)
    x.loss = lambda *views: OpenClip.loss(x, *(y + torch.randn_like(y) for y in views))


@variant("a learning rate that is scaled with W, a sum over the global batch by all_reduce", base=Plain)
def _(x: Any) -> None:
    x.make_optimizer = partial(torch.optim.AdamW, lr=1e-3 * x.world_size)
    x.loss = lambda *views: clip_loss(*(cz.collectives.all_gather(x.model(view)) for view in views))


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
    divisor = 4.0

    def train(self) -> None:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE)
        for i, batch in enumerate(self.loader):
            with nullcontext() if i % 4 == 3 else self.model.no_sync():
                (self.loss(*batch) / self.divisor).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


@training("micro-batches that are parts of a batch")
class Splitting(Accumulating):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        parts = zip(images.tensor_split(2), labels.tensor_split(2), strict=True)
        return sum(super(Splitting, self).loss(*x) for x in parts) / 2


for _what, _divisor in {"not divided": 1.0, "divided twice": 16.0}.items():
    _class = type("Divided", (Accumulating,), {"divisor": _divisor})
    training(f"an accumulation that is {_what}", f"accumulation {_what}")(_class)


def run(name: str) -> Any:
    return TRAININGS[name][0]().train()


TIMEOUT = 60.0

STEPS = {"no set_epoch": 6, "one rank has fewer batches": 7}
"""Mistakes that show only after three steps."""


def audit_apart(module: str, name: str, *, processes: int = 2, steps: int = 0) -> WorldReport:
    """Audit a training of this module, or of another one, in processes of their own."""
    start, steps = time.monotonic(), steps or STEPS.get(name, 3)
    with tempfile.TemporaryDirectory() as folder:

        def run(names: list[str]) -> str:
            store = local_store()
            jobs = [(folder, x, rank, len(names), store.port, module, name, steps) for rank, x in enumerate(names)]
            with forked(_rank, jobs) as ranks:
                wait_for_records(Path(folder), names, lambda index: not ranks[index].is_alive(), TIMEOUT)
            return ""

        run([f"rank{rank}" for rank in range(processes)])
        report = judged(Path(folder), processes, run)
    report.seconds = time.monotonic() - start
    return report


def _rank(folder: str, file: str, rank: int, world_size: int, port: int, module: str, name: str, steps: int) -> None:
    for variable in set(os.environ) - set(variables := environment(rank, world_size, port, file.startswith("rank"))):
        del os.environ[variable]
    os.environ |= variables
    log = os.open(Path(folder, f"{file}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    record_script(Path(folder), file, steps, (), setup(module, name))


def setup(module: str, name: str) -> Callable[[], object]:
    return lambda: importlib.import_module(module).run(name)


def audit_here(module: str, name: str, without: str = "") -> AuditReport:
    """Audit a training on this rank of a pool, with a process group; without the probe or signature of a name."""
    probes = tuple(x for x in diagnosis.PROBES if x.__name__ != without)
    signatures = {
        stage: {name: fits for name, fits in of_stage.items() if name != without}
        for stage, of_stage in mistakes.SIGNATURES.items()
    }
    of_samples = (lambda records, alone: ()) if without == "_of_samples" else diagnosis._of_samples
    with (
        patch.object(dist, "init_process_group"),
        patch.object(diagnosis, "_of_samples", of_samples),
        patch.object(diagnosis, "PROBES", probes),
        patch.object(mistakes, "SIGNATURES", signatures),
    ):
        return audit(setup(module, name), name=name)


RANDOM_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "NTXent": lambda: cz.NTXent(temperature=0.2),
    "NTXent, learnt": lambda: cz.NTXent(temperature=cz.LearnableTemperature(0.5)),
    "InfoNCE": lambda: cz.InfoNCE(symmetric=True),
    "SigLIP": lambda: cz.SigLIP(),
    "VICReg": lambda: cz.VICReg(),
    "SupCon, labels": lambda: cz.SupCon(temperature=0.3),
    "ProxyAnchor, labels": lambda: cz.ProxyAnchor(num_classes=4, embedding_size=5, alpha=4),
    "MultiSimilarity, labels": lambda: cz.MultiSimilarity(),
    "a function of labels": lambda: Centres(),
}


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 5))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(-torch.cdist(embeddings.to(self.centres.dtype), self.centres), labels)


def audit_random_training(seed: int, steps: int = 3) -> tuple[str, AuditReport]:
    """Audit a right training whose loss, optimizer, precision, shards and accumulation are drawn from a seed."""
    draw = random.Random(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    name, dtype = draw.choice(list(RANDOM_LOSSES)), draw.choice([torch.float64, torch.float32])
    inside, dropped, normalised = (draw.random() < p for p in (0.5, 0.3, 0.3))
    accumulate, clip, weight = draw.choice([1, 1, 2, 3]), draw.choice([None, 0.5, 10.0]), draw.choice([1.0, 0.37])
    scaled, low = draw.random() < 0.3, dtype is torch.float32 and draw.random() < 0.3
    drawn = (
        f"{name}, {dtype}, {inside=}, {dropped=}, {normalised=}, {accumulate=}, {clip=}, {weight=}, {scaled=}, {low=}"
    )
    layers = nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3 * dropped), nn.Linear(8, 5)
    encoder = nn.Sequential(*layers).to(dtype)
    loss_fn = cz.DistributedLoss(RANDOM_LOSSES[name]().to(dtype), check_distinct=False)
    model = DistributedDataParallel(encoder) if inside else encoder
    parameters = [*encoder.parameters(), *loss_fn.parameters()]
    optimizer = draw.choice(
        [
            partial(torch.optim.SGD, lr=0.05, weight_decay=0.1, nesterov=True, momentum=0.5),
            partial(torch.optim.AdamW, lr=0.01),
            partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
        ]
    )(parameters)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def shard(x: Tensor, sizes: list[int]) -> Tensor:
        return x[sum(sizes[:rank]) :][: sizes[rank]]

    def batch() -> list[Tensor]:
        sizes = [draw.randint(0, 6) for _ in range(world_size)]  # of this rank perhaps none
        sizes[draw.randrange(world_size)] += 6
        views, labels = torch.randn(2, sum(sizes), 6, dtype=dtype), torch.randint(4, (sum(sizes),))
        return [shard(x, sizes) for x in (*views, labels)]

    data = [[[batch() for _ in range(accumulate)]] for _ in range(steps)]

    def train() -> None:
        torch.manual_seed(seed + rank)  # dropout differs between ranks
        for (batches,) in DataLoader(data, batch_size=None):  # type: ignore[arg-type]  # a list is a dataset
            optimizer.zero_grad()
            for index, (x, y, labels) in enumerate(batches):
                with model.no_sync() if inside and index + 1 < accumulate else nullcontext():  # type: ignore[operator]  # of DDP
                    with torch.autocast("cpu", torch.bfloat16, enabled=low):
                        z = [model(view) for view in ([x] if "labels" in name else [x, y])]
                    z = [nn.functional.normalize(part) for part in z] if normalised else z
                    value = loss_fn(*z, *[labels] * ("labels" in name))
                    scaler.scale(weight * value / accumulate).backward()
            if not inside:
                cz.average_gradients(encoder)
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            scaler.step(optimizer)
            scaler.update()

    kind = type(loss_fn.loss) if "function" in name else None
    return drawn, audit(train, steps=steps, loss=kind, name=drawn)
