"""Mistakes in a training with DDP: ``torchrun --standalone --nproc-per-node 2 -m examples mistakes --setup "no set_epoch"``.

`Right` is a right training. Each other class makes one mistake: its docstring says which, ``fix`` how to correct it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

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
    """None."""

    name: ClassVar[str] = "none"
    fix: ClassVar[str] = ""
    options: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, name: str = "", fix: str = "") -> None:
        cls.name, cls.fix = name or cls.name, fix or cls.fix

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(make_encoder())
        self.loss_fn: nn.Module = cz.DistributedLoss(make_loss(), **self.options)
        self.loader = make_loader(self.rank, self.world_size, samples=SAMPLES, batch_size=BATCH_SIZE)

    def parameters(self) -> Iterable[nn.Parameter]:
        return [*self.model.parameters(), *self.loss_fn.parameters()]

    def start_epoch(self, epoch: int) -> None:
        self.loader.sampler.set_epoch(epoch)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(self.model(images), labels)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    @classmethod
    def step(cls) -> tuple[nn.Module, Callable[..., Tensor]]:
        """Return a model and a step, as ``contrastive-zoo check --level training-step`` takes them."""
        training = cls()

        def step(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
            images = nn.functional.pad(features, (0, 64 - features.shape[1]))
            value = training.loss(images, labels % 10)
            value.backward()
            return value

        return training.model, step

    def train(self) -> Trained:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE, momentum=0.9)
        for epoch in range(EPOCHS):
            self.start_epoch(epoch)
            for images, labels in self.loader:
                self.zero_grad(optimizer)
                self.loss(images, labels).backward()
                optimizer.step()
        return Trained.of(self.model, self.loss_fn)


class NotOptimized(
    Right, name="loss parameters not in the optimizer", fix="`SGD([*model.parameters(), *loss_fn.parameters()])`"
):
    """The optimizer has the parameters of the model, not those of the loss."""

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()


class NeverZeroed(
    Right, name="loss parameters never zeroed", fix="`optimizer.zero_grad()` in place of `model.zero_grad()`"
):
    """Gradients of the model are cleared, those of the loss add up from step to step."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.model.zero_grad()


class GatheredFirst(Right, name="gathered before the loss", fix="pass local embeddings"):
    """Embeddings are gathered before DistributedLoss, which gathers them again: each sample counts twice."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(cz.collectives.all_gather(self.model(images)), cz.collectives.all_gather(labels))


class GatheredFirstUnchecked(GatheredFirst, name="gathered before the loss, not checked"):
    """The same, with `check_distinct=False`."""

    options: ClassVar[dict[str, Any]] = {"check_distinct": False}


class Padded(Right, name="padded last batch", fix="`ShardedBatches` of examples/digits.py"):
    """DistributedSampler repeats a sample so that shards are equal; the loss compares it with itself."""

    def __init__(self) -> None:
        super().__init__()
        dataset = make_dataset(SAMPLES)
        self.loader = DataLoader(dataset, BATCH_SIZE // self.world_size, sampler=DistributedSampler(dataset))


class SameOrder(Right, name="no set_epoch", fix="`sampler.set_epoch(epoch)` before each epoch"):
    """Every epoch has the order of the first one, and so the same batches with the same negatives."""

    def start_epoch(self, epoch: int) -> None:
        pass


class SumUnderMean(Right, name='"sum" with a trainer that averages', fix='`grad_reduction="mean"`'):
    """DistributedLoss expects a trainer that sums gradients; DDP averages them."""

    options: ClassVar[dict[str, Any]] = {"grad_reduction": "sum"}


class MeanUnderSum(
    Right, name='"mean" with a trainer that sums', fix='`grad_reduction="sum"`, and the loss in the model'
):
    """DistributedLoss expects a trainer that averages gradients; a communication hook sums them."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_comm_hook(None, add_up)


class TimesW(Right, name="loss × W", fix="leave the factor out"):
    """The loss is multiplied by the number of processes, as other gathers need it."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.world_size * super().loss(images, labels)


class Local(Right, name="local loss, parameters outside DDP", fix="`DistributedLoss(loss)`"):
    """Each process compares its own samples only, and its loss parameters differ from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = make_loss()


class LocalInDDP(Local, name="local loss, parameters in DDP"):
    """Each process compares its own samples only; DDP averages the gradients of the loss parameters too."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = DistributedDataParallel(make_loss())


class SeededPerRank(
    Right, name="loss parameters seeded per rank", fix="`DistributedLoss(loss, broadcast_parameters=True)`, or one seed"
):
    """Loss parameters start from other values on each process; no message makes them equal."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.loss_fn.parameters():
                parameter.add_(0.1 * self.rank)


class NotSaved(Right, name="loss parameters not in the checkpoint", fix="save `loss_fn.state_dict()`"):
    """A checkpoint has the model and the optimizer; the second epoch resumes with initial loss parameters."""

    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        self.loss_fn.load_state_dict(cz.DistributedLoss(make_loss()).state_dict())


def _setup(training: type[Right]) -> Setup:
    mistake = "" if training is Right else " ".join((training.__doc__ or "").split())
    reference = partial(one_process, samples=SAMPLES, batch_size=BATCH_SIZE)
    shards = "padded" if training is Padded else "uneven"
    name = training.name if mistake else "the training that the mistakes change"
    kind: dict[str, Any] = {"mistake": mistake, "fix": training.fix, "shards": shards}
    return Setup(name, lambda: training().train(), reference=reference, step=training.step, **kind)


SETUPS = [_setup(x) for x in list(globals().values()) if isinstance(x, type) and issubclass(x, Right)]
