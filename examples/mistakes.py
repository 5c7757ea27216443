"""Mistakes in a training with DDP: ``torchrun --standalone --nproc-per-node 2 -m examples mistakes --setup "no set_epoch"``.

`Right` is a right training. Each function makes the mistake that its docstring tells; ``fix`` says how to correct it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import contrastive_zoo as cz
from examples.ddp import add_up
from examples.digits import EPOCHS, LEARNING_RATE, make_dataset, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, one_process

SAMPLES, BATCH_SIZE = 155, 32  # two epochs of batches of 32, 32, 32, 32 and 27: ten steps


class Right:
    """A right training, whose parts a mistake replaces."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(make_encoder())
        self.loss_fn: nn.Module = cz.DistributedLoss(make_loss())
        self.loader = make_loader(self.rank, self.world_size, samples=SAMPLES, batch_size=BATCH_SIZE)

    def parameters(self) -> Iterable[nn.Parameter]:
        return [*self.model.parameters(), *self.loss_fn.parameters()]

    def start_epoch(self, epoch: int) -> None:
        self.loader.sampler.set_epoch(epoch)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(self.model(images), labels)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def train(self) -> Trained:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE, momentum=0.9)
        for epoch in range(EPOCHS):
            self.start_epoch(epoch)
            for images, labels in self.loader:
                self.zero_grad(optimizer)
                self.loss(images, labels).backward()
                optimizer.step()
        return Trained.of(self.model, self.loss_fn)


def make_step(make: Callable[[], Right]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a model and a step, as ``contrastive-zoo check --level training-step`` takes them."""
    training = make()

    def step(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
        images = nn.functional.pad(features, (0, 64 - features.shape[1]))
        value = training.loss(images, labels % 10)
        value.backward()
        return value

    return training.model, step


def make_setup(make: Callable[[], Right], name: str, **about: Any) -> Setup:
    reference = partial(one_process, samples=SAMPLES, batch_size=BATCH_SIZE)
    about = {"shards": "uneven", **about}
    return Setup(name, lambda: make().train(), reference=reference, step=partial(make_step, make), **about)


SETUPS = [make_setup(Right, "the training that the mistakes change")]


def mistake(name: str, fix: str, **about: Any) -> Callable[[Callable[[Any], None]], None]:
    """Add a set-up that a function makes wrong."""

    def register(change: Callable[[Any], None]) -> None:
        def make() -> Right:
            training = Right()
            change(training)
            return training

        SETUPS.append(make_setup(make, name, mistake=" ".join((change.__doc__ or "").split()), fix=fix, **about))

    return register


@mistake("loss parameters not in the optimizer", fix="`SGD([*model.parameters(), *loss_fn.parameters()])`")
def _(x: Any) -> None:
    """The optimizer has the parameters of the model, not those of the loss."""
    x.parameters = x.model.parameters


@mistake("loss parameters never zeroed", fix="`optimizer.zero_grad()` in place of `model.zero_grad()`")
def _(x: Any) -> None:
    """Gradients of the model are cleared, those of the loss add up from step to step."""
    x.zero_grad = lambda optimizer: x.model.zero_grad()


def gather_first(x: Any) -> None:
    """Embeddings are gathered before DistributedLoss, which gathers them again: each sample counts twice."""
    all_gather = cz.collectives.all_gather
    x.loss = lambda images, labels: x.loss_fn(all_gather(x.model(images)), all_gather(labels))


mistake("gathered before the loss", fix="pass local embeddings")(gather_first)


@mistake("gathered before the loss, not checked", fix="pass local embeddings")
def _(x: Any) -> None:
    """The same, with `check_distinct=False`."""
    gather_first(x)
    x.loss_fn = cz.DistributedLoss(make_loss(), check_distinct=False)


@mistake("padded last batch", fix="`ShardedBatches` of examples/digits.py", shards="padded")
def _(x: Any) -> None:
    """DistributedSampler repeats a sample so that shards are equal; the loss compares it with itself."""
    dataset = make_dataset(SAMPLES)
    x.loader = DataLoader(dataset, BATCH_SIZE // x.world_size, sampler=DistributedSampler(dataset))


@mistake("no set_epoch", fix="`sampler.set_epoch(epoch)` before each epoch")
def _(x: Any) -> None:
    """Every epoch has the order of the first one, and so the same batches with the same negatives."""
    x.start_epoch = lambda epoch: None


@mistake('"sum" with a trainer that averages', fix='`grad_reduction="mean"`')
def _(x: Any) -> None:
    """DistributedLoss expects a trainer that sums gradients; DDP averages them."""
    x.loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum")


@mistake('"mean" with a trainer that sums', fix='`grad_reduction="sum"`, and the loss in the model')
def _(x: Any) -> None:
    """DistributedLoss expects a trainer that averages gradients; a communication hook sums them."""
    x.model.register_comm_hook(None, add_up)


@mistake("loss × W", fix="leave the factor out")
def _(x: Any) -> None:
    """The loss is multiplied by the number of processes, as other gathers need it."""
    x.loss = lambda *batch: x.world_size * Right.loss(x, *batch)


@mistake("local loss, parameters outside DDP", fix="`DistributedLoss(loss)`")
def _(x: Any) -> None:
    """Each process compares its own samples only, and its loss parameters differ from the second step on."""
    x.loss_fn = make_loss()


@mistake("local loss, parameters in DDP", fix="`DistributedLoss(loss)`")
def _(x: Any) -> None:
    """Each process compares its own samples only; DDP averages the gradients of the loss parameters too."""
    x.loss_fn = DistributedDataParallel(make_loss())


@mistake("loss parameters seeded per rank", fix="`torch.manual_seed(0)` before the loss, or DDP")
def _(x: Any) -> None:
    """Loss parameters start from other values on each process; no message makes them equal."""
    for parameter in x.loss_fn.parameters():
        parameter.data.add_(0.1 * x.rank)


@mistake("loss parameters not in the checkpoint", fix="save `loss_fn.state_dict()`")
def _(x: Any) -> None:
    """A checkpoint has the model and the optimizer; the second epoch resumes with initial loss parameters."""

    def start_epoch(epoch: int) -> None:
        Right.start_epoch(x, epoch)
        x.loss_fn.load_state_dict(cz.DistributedLoss(make_loss()).state_dict())

    x.start_epoch = start_epoch
