"""Train on one process in plain torch: what every example is compared with."""

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from examples.digits import EPOCHS, LEARNING_RATE, make_encoder, make_loader, make_loss


class Trained(NamedTuple):
    """Whole parameters, in the order of ``module.parameters()``."""

    encoder: list[Tensor]
    loss: list[Tensor]

    @classmethod
    def of(cls, encoder: nn.Module, loss: nn.Module) -> "Trained":
        """Copy the parameters of both modules; a DTensor is gathered, so every rank must call this."""
        return cls(*([_whole(x) for x in module.parameters()] for module in (encoder, loss)))


def _whole(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return (detached.full_tensor() if hasattr(detached, "full_tensor") else detached).clone()


def one_process(
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    *,
    samples: int = 125,
    batch_size: int = 31,
    accumulate: int = 1,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    dtype: torch.dtype = torch.float64,
) -> tuple[Trained, Trained]:
    """Train on one process in plain torch, without DistributedLoss; SGD with momentum is the default.

    The context is entered around the encoder, for example autocast. The mean gradient of ``accumulate`` batches is one step.
    """
    encoder, loss_fn = make_encoder().to(dtype), make_loss().to(dtype)
    parameters = [*encoder.parameters(), *loss_fn.parameters()]
    optimizer = (
        make_optimizer(parameters) if make_optimizer else torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9)
    )
    before = Trained.of(encoder, loss_fn)
    loader = make_loader(samples=samples, batch_size=batch_size)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            with context():
                embeddings = encoder(images.to(dtype))
            (loss_fn(embeddings, labels) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return before, Trained.of(encoder, loss_fn)
