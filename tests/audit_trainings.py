"""Trainings that the audit names or does not accuse, besides those of tests/audit_corpus.py, and how they are audited."""

import importlib
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import contrastive_zoo as cz
from contrastive_zoo.testing.auditing import launch
from contrastive_zoo.testing.report import WorldReport
from tests.digits import SAMPLES, Right, add_up, make_dataset, make_encoder, make_loader, make_loss
from tests.interpreter import forked
from tests.zoo import dense_clip

TRAININGS: dict[str, tuple[Callable[[], Any], str | None]] = {}
"""Trainings by name, each with the diagnosis that is expected; None for a right one."""


def variant(name: str, mistake: str | None = None, base: type = Right) -> Callable[[Callable[[Any], None]], Any]:
    def register(change: Callable[[Any], None]) -> Any:
        def changed() -> Any:
            result = base()
            change(result)
            return result

        TRAININGS[name] = changed, mistake
        return change

    return register


@variant("every rank draws from all samples", "not sharded")
def _(x: Any) -> None:
    generator = torch.Generator().manual_seed(x.rank)
    x.loader = DataLoader(make_dataset(SAMPLES), 16, shuffle=True, generator=generator)
    x.start_epoch = lambda epoch: None


@variant("a sampler that does not shuffle")
def _(x: Any) -> None:
    x.loader.batch_sampler.shuffle = False


@variant('"sum" with a trainer that sums')
def _(x: Any) -> None:
    x.loss_fn = DistributedDataParallel(cz.DistributedLoss(make_loss(), grad_reduction="sum"))
    for module in (x.model, x.loss_fn):
        module.register_comm_hook(None, add_up)


variant('"mean" with a trainer that sums', "trainer sums")(lambda x: x.model.register_comm_hook(None, add_up))


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


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two views of images, with an augmentation."""

    def __init__(self, noise: float = 0.0) -> None:
        self.images, self.noise = make_dataset(96).tensors[0], noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index] + self.noise * torch.randn_like(self.images[index])
        return image, image.flip(0)


class ClipLoss(nn.Module):
    """The loss of CLIP as its users write it: rank and number of processes are arguments."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.gather_with_grad = rank, world_size, True

    def gathered(self, x: Tensor) -> Tensor:
        if self.world_size == 1:
            return x
        if self.gather_with_grad:
            return torch.cat(torch.distributed.nn.all_gather(x))
        parts = [torch.zeros_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.detach())
        parts[self.rank] = x
        return torch.cat(parts)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor | float = 5.0) -> Tensor:
        return dense_clip(self.gathered(x), self.gathered(y), 1 / scale)


class OpenClip(Right):
    """Two views of images, and ClipLoss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = ClipLoss(self.rank, self.world_size)
        self.load(Views(), shards=self.world_size)

    def load(self, data: Any, *, shards: int = 0, shard: int | None = None) -> DataLoader[Any]:
        """Load a shard of the data, by default this rank's; or all of them, whatever the rank."""
        shard = self.rank if shard is None else shard
        sampler = DistributedSampler(data, shards, shard) if shards else None
        self.loader = DataLoader(data, 16 // (shards or 1), sampler=sampler)
        return self.loader

    def start_epoch(self, epoch: int) -> None:
        """Leave the first order: no training takes a second epoch."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.model(x), self.model(y))


TRAININGS["ClipLoss(rank, world_size) that gathers with gradient"] = OpenClip, None


class Clip(nn.Module):
    """The model of OpenCLIP, which holds the scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.logit_scale = make_encoder(), nn.Parameter(torch.tensor(1.0).double())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(x), self.encoder(y), self.logit_scale.exp()


@variant("the scale of the logits in the model, a gather with gradient", base=OpenClip)
def with_scale(x: Any) -> None:
    x.model = DistributedDataParallel(Clip())
    x.loss = lambda *views: x.loss_fn(*x.model(*views))


@variant("the scale of the logits in the model, a gather that keeps its own slice", "own slice", base=OpenClip)
def _(x: Any) -> None:
    with_scale(x)
    x.loss_fn.gather_with_grad = False


@variant("an overflow under GradScaler", base=OpenClip)
def _(x: Any) -> None:
    x.loss_fn, scaler, factors = cz.DistributedLoss(cz.NTXent()), torch.amp.GradScaler("cpu"), iter([1.0, math.inf])

    def step() -> None:
        scaler.step(x.optimizer)
        scaler.update()

    x.backward = lambda *views: scaler.scale(next(factors, 1.0) * x.loss(*views)).backward()
    x.step = step


class Momentum(OpenClip):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn.gather_with_grad = False  # keys have none
        self.teacher = make_encoder().requires_grad_(False)
        self.teacher.queue = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).double()
        self.share, self.gathered = 0.2, self.loss_fn.gathered

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            keys = nn.functional.normalize(self.teacher(y))
            gathered = self.gathered(keys)
        z = nn.functional.normalize(self.model(x))
        logits = torch.cat([(z * keys).sum(1, keepdim=True), z @ self.teacher.queue.T], 1) / 0.2
        self.teacher.queue = torch.cat([gathered, self.teacher.queue])[:32]
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def end_step(self) -> None:
        with torch.no_grad():
            for x, y in zip(self.teacher.parameters(), self.model.module.parameters(), strict=True):
                x.lerp_(y, self.share)


TRAININGS["a teacher of moving averages, and a queue in a plain attribute"] = Momentum, None


CHANGED: list[tuple[str, str, type, str, Callable[[Any], Any]]] = [
    ("no set_epoch", "no set_epoch", Right, "start_epoch", lambda x: lambda epoch: None),
    ("one rank has fewer batches", "different numbers of steps", Right, "loader",
     lambda x: make_loader(x.rank, x.world_size, samples=70 if x.rank else SAMPLES)),
    ("a learning rate of one rank", "unequal settings", OpenClip, "make_optimizer",
     lambda x: partial(torch.optim.SGD, lr=0.1 * (1 + x.rank))),
    ("one rank clips", "unequal settings", OpenClip, "clip",
     lambda x: lambda: x.rank and nn.utils.clip_grad_norm_(x.model.parameters(), 0.01)),
    ("the module in DDP is called", "not reduced", OpenClip, "loss",
     lambda x: lambda *views: x.loss_fn(*map(x.model.module, views))),
    ("a teacher that rank 0 alone updates", "unequal state", Momentum, "share", lambda x: 0.0 if x.rank else 0.2),
    ("a queue of the local keys", "unequal state", Momentum, "gathered", lambda x: lambda keys: keys),
]  # fmt: skip
"""One attribute is another one: the name, the mistake, the class, the attribute and its value."""
for changed, *mistake_of, attribute, value in CHANGED:
    variant(changed, *mistake_of)(lambda x, of=attribute, value=value: setattr(x, of, value(x)))


@variant("a part of every batch on each rank, with noise", base=OpenClip)
def _(x: Any) -> None:
    """Every rank loads the same batches, and takes its part of each."""
    torch.manual_seed(x.rank)
    x.load(Views())

    def loss(*views: Tensor) -> Tensor:
        parts = (y.tensor_split(x.world_size)[x.rank] for y in views)
        return OpenClip.loss(x, *(y + torch.randn_like(y) for y in parts))

    x.loss = loss


@variant("a loader of each view, and a validation by an iterator", base=OpenClip)
def _(x: Any) -> None:
    samples = x.load(Views())
    assert sum(1 for _ in samples) == 6  # as for a mean of all samples
    validation = iter(samples)
    x.loader = zip(*[x.load(view, shards=x.world_size) for view in zip(*Views(), strict=True)], strict=True)
    x.end_step = torch.no_grad()(lambda: x.model(next(validation)[0]))


@variant("one shard, with noise in the loop", "same shard", base=OpenClip)
def _(x: Any) -> None:
    x.load(Views(), shards=x.world_size, shard=0)
    torch.manual_seed(x.rank)
    x.loss = lambda *views: OpenClip.loss(x, *(y + torch.randn_like(y) for y in views))


@variant("one shard, with noise in the dataset", "same shard", base=OpenClip)
def _(x: Any) -> None:
    torch.manual_seed(x.rank)
    x.load(Views(noise=1.0), shards=x.world_size, shard=0)


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids), src_key_padding_mask=ids == 0)[:, 0]


@variant("a transformer with dropout, each batch padded to its longest sentence", base=OpenClip)
def _(x: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (96, 2), generator=generator).tolist()
    pairs: Any = [[torch.randint(1, 30, (n,), generator=generator) for n in pair] for pair in lengths]
    collate = partial(map, partial(nn.utils.rnn.pad_sequence, batch_first=True))
    x.load(pairs, shards=x.world_size)
    x.loader.collate_fn = lambda batch: [*collate(zip(*batch, strict=True))]
    x.model = DistributedDataParallel(Sentences().double())
    x.make_optimizer = partial(torch.optim.AdamW, lr=1e-3)
    torch.manual_seed(x.rank)


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


@variant("no loader, two views in one call", base=OpenClip)
def without_loader(x: Any, more: int = 0) -> None:
    generator = torch.Generator().manual_seed(x.rank)
    x.loader = torch.randn(3, 1, 8 + more, 64, generator=generator).double()
    x.loss = lambda y: x.loss_fn(*x.model(torch.cat([y, -y])).chunk(2))


@variant("no loader, three views in one call, unequal shards", base=OpenClip)
def _(x: Any) -> None:
    without_loader(x, more=x.rank)
    x.loss_fn = cz.DistributedLoss(cz.NTXent())
    x.loss = lambda y: x.loss_fn(*x.model(torch.cat([y, -y, y.flip(1)])).chunk(3))


@variant("a learning rate that is scaled with W, a sum over the global batch by all_reduce", base=OpenClip)
def _(x: Any) -> None:
    x.make_optimizer = partial(torch.optim.AdamW, lr=1e-3 * x.world_size)
    x.loss_fn = nn.Identity()
    x.loss = lambda *views: dense_clip(*(cz.collectives.all_gather(x.model(view)) for view in views), 0.2)


class AfterReference(OpenClip):
    def __init__(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in DataLoader(torch.ones(4, 2), 2):  # type: ignore[arg-type]  # a tensor is a dataset
            model(batch).square().sum().backward()
            optimizer.step()
        super().__init__()


TRAININGS["a reference on one process before the group"] = AfterReference, None


def run(name: str) -> Any:
    return TRAININGS[name][0]().train()


STEPS = {"no set_epoch": 6, "a sampler that does not shuffle": 6, "one rank has fewer batches": 7}
"""Of trainings whose second epoch matters."""


def audit_apart(module: str, name: str, *, processes: int = 2, steps: int = 0) -> WorldReport:
    """Audit a training of this module, or of another one, in processes of their own."""
    start, steps = time.monotonic(), steps or STEPS.get(name, 3)
    with tempfile.TemporaryDirectory() as folder:

        def run(names: list[str]) -> str:
            store = launch.local_store()
            jobs = [(folder, x, rank, len(names), store.port, module, name, steps) for rank, x in enumerate(names)]
            with forked(_rank, jobs) as ranks:
                launch.wait_for_records(Path(folder), names, lambda index: not ranks[index].is_alive(), 60.0)
                for x, code in zip(names, [rank.exitcode for rank in ranks], strict=True):
                    if code is not None:
                        Path(folder, f"{x}.ended").write_text(str(code))
            return launch.without_record(Path(folder), names)

        report = launch.judged(Path(folder), processes, run)
    report.seconds = time.monotonic() - start
    return report


def _rank(folder: str, file: str, rank: int, world_size: int, port: int, module: str, name: str, steps: int) -> None:
    variables = launch.environment(rank, world_size, port, file.startswith("rank"))
    os.environ.clear()
    os.environ.update(variables)
    log = os.open(Path(folder, f"{file}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    launch.record_script(Path(folder), file, steps, (), setup(module, name))


def setup(module: str, name: str) -> Callable[[], object]:
    return lambda: importlib.import_module(module).run(name)
