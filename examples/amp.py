"""Automatic mixed precision under DDP: ``torchrun --standalone --nproc-per-node 2 -m examples amp``."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, one_process

bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)


def train(
    autocast: Callable[[], contextlib.AbstractContextManager[object]], dtype: torch.dtype, *, scale: bool = False
) -> Trained:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_encoder().to(dtype))
    loss_fn = cz.DistributedLoss(make_loss().to(dtype))
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], LEARNING_RATE, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scale)  # float16 needs it; bfloat16 does not
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with autocast():
                embeddings = model(images.to(dtype))
            scaler.scale(loss_fn(embeddings, labels)).backward()
            scaler.step(optimizer)
            scaler.update()
    return Trained.of(model, loss_fn)


SETUPS = [
    Setup(
        "no autocast, float32",
        partial(train, contextlib.nullcontext, torch.float32),
        reference=partial(one_process, dtype=torch.float32),
        bound=1e-5,
        note="float32 rounds to 2⁻²⁴",
    ),
    Setup(
        "autocast to bfloat16, parameters in float32",
        partial(train, bfloat16, torch.float32),
        reference=partial(one_process, context=bfloat16, dtype=torch.float32),
        bound=2e-2,
        note="autocast rounds embeddings and their gradients to 2⁻⁹",
    ),
    Setup("GradScaler, float64", partial(train, contextlib.nullcontext, torch.float64, scale=True)),
]
