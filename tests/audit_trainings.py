"""Trainings that the audit names or does not accuse, besides those of tests/audit_corpus.py, and how they are audited."""

import importlib
import math
import os
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
    without_record,
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


@variant("every rank draws from all samples", "not sharded")
def _(x: Any) -> None:
    generator = torch.Generator().manual_seed(x.rank)
    x.loader = DataLoader(make_dataset(SAMPLES), 16, shuffle=True, generator=generator)
    x.start_epoch = lambda epoch: None


@variant("one rank has fewer batches", "different numbers of steps")
def _(x: Any) -> None:
    x.loader = make_loader(x.rank, x.world_size, samples=70 if x.rank else SAMPLES)


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


@variant('loss parameters not reduced under "sum"', "parameters not reduced")
def _(x: Any) -> None:
    x.loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum")
    x.model.register_comm_hook(None, add_up)


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


@variant("pairs with noise in an order that the loop draws, both views in one call", base=OpenClip)
def _(x: Any) -> None:
    torch.manual_seed(x.rank)

    def loss(*views: Tensor) -> Tensor:
        order = torch.randperm(len(views[0]))
        return x.loss_fn(*x.model(torch.cat([(y + torch.randn_like(y))[order] for y in views])).chunk(2))

    x.loss = loss


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


@training("an accumulation that is divided twice", "accumulation divided twice")
class DividedTwice(Right):
    def train(self) -> None:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE)
        for i, batch in enumerate(self.loader):
            with nullcontext() if i % 4 == 3 else self.model.no_sync():
                (self.loss(*batch) / 16).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


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
                for x, code in zip(names, [rank.exitcode for rank in ranks], strict=True):
                    if code is not None:
                        Path(folder, f"{x}.ended").write_text(str(code))
            return without_record(Path(folder), names)

        problem = run([f"rank{rank}" for rank in range(processes)])
        report = judged(Path(folder), processes, run, problem)
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
