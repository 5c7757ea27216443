"""A set-up of an example: how it trains, and how far it ends from a training on one process in plain torch."""

import contextlib
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.digits import LEARNING_RATE, make_encoder, make_loader, make_loss, run_steps

SGD = partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)


class Trained(NamedTuple):
    """Whole parameters, in the order of ``module.parameters()``."""

    encoder: list[Tensor]
    loss: list[Tensor]

    @classmethod
    def of(cls, encoder: nn.Module, loss: nn.Module) -> "Trained":
        """Copy the parameters of both modules; a DTensor is gathered, so every rank must call this."""
        parameters = ([x.detach() for x in module.parameters()] for module in (encoder, loss))
        return cls(*([(x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for x in of] for of in parameters))


def one_process(
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = SGD,
    *,
    samples: int = 125,
    batch_size: int = 31,
    accumulate: int = 1,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    dtype: torch.dtype = torch.float64,
) -> tuple[Trained, Trained]:
    """Train on one process in plain torch, without DistributedLoss.

    The context is entered around the encoder, for example autocast.
    """
    encoder, loss_fn = make_encoder().to(dtype), make_loss().to(dtype)
    parameters = [*encoder.parameters(), *loss_fn.parameters()]
    before = Trained.of(encoder, loss_fn)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        with context():
            embeddings = encoder(images.to(dtype))
        return loss_fn(embeddings, labels)

    run_steps(loss, make_optimizer(parameters), make_loader(samples=samples, batch_size=batch_size), accumulate)
    return before, Trained.of(encoder, loss_fn)


Reference: TypeAlias = Callable[[], tuple[Trained, Trained]]
"""Train on one process; return the parameters before and after."""


@dataclass(frozen=True)
class Setup:
    """One way to train on several processes, and the same training on one process, with which it is compared.

    ``train`` initialises the process group and leaves it to the caller to destroy it. A wrong set-up has a mistake, and a
    fix in Markdown; a right one has a bound, with a note if it is above 1e-9. ``step`` returns the model and one step, as
    ``contrastive-zoo check --level training-step`` takes them; None if a trainer of a framework owns the step.
    """

    name: str
    train: Callable[[], Trained]
    processes: int = 2
    bound: float = 1e-9
    mistake: str = ""
    fix: str = ""
    reference: Reference = one_process
    shards: str = "uneven, one empty"
    note: str = ""
    step: Callable[[], tuple[nn.Module, Callable[..., Tensor]]] | None = None


class Deviation(NamedTuple):
    """Distance to the parameters of one process, relative to the distance that training moved them."""

    encoder: float
    loss: float

    @classmethod
    def between(cls, found: Trained, before: Trained, after: Trained) -> "Deviation":
        return cls(*map(_relative, found, before, after))


def _relative(found: list[Tensor], before: list[Tensor], after: list[Tensor]) -> float:
    error = torch.stack([(x - y).double().norm() for x, y in zip(found, after, strict=True)]).norm()
    moved = torch.stack([(x - y).double().norm() for x, y in zip(before, after, strict=True)]).norm()
    return (error / moved).item()


def measured(setup: Setup) -> Deviation:
    """Train on this process, one of several, and return the largest deviation over the ranks."""
    torch.set_num_threads(1)
    before, after = setup.reference()
    found = torch.tensor(Deviation.between(setup.train(), before, after), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        gc.collect()  # DDP keeps a reference to the group; gloo's threads must end before Python exits
        dist.destroy_process_group()
    return Deviation(*found.tolist())
