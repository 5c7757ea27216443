"""DistributedDataParallel: ``torchrun --standalone --nproc-per-node 2 -m examples ddp``."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, EncoderWithLoss, make_encoder, make_loader, make_loss, run_steps
from examples.setup import Setup, Trained, one_process


def train(accumulate: int = 1) -> Trained:
    dist.init_process_group("gloo")  # "nccl" with one GPU per process
    model = DistributedDataParallel(make_encoder())
    loss_fn = cz.DistributedLoss(make_loss())
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], LEARNING_RATE, momentum=0.9)
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            last = (i + 1) % accumulate == 0  # of the batches of this step
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_fn(model(images), labels) / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return Trained.of(model, loss_fn)


def add_up(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients over ranks, without DDP's division by their number."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def train_in_one_module(*, sum_hook: bool) -> Trained:
    dist.init_process_group("gloo")
    loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum" if sum_hook else "mean")
    model = DistributedDataParallel(EncoderWithLoss(loss_fn))
    if sum_hook:
        model.register_comm_hook(None, add_up)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    run_steps(model, optimizer, make_loader(dist.get_rank(), dist.get_world_size()))
    return Trained.of(model.module.encoder, loss_fn)


SETUPS = [
    Setup("the loss beside the model", train),
    Setup("accumulation of 5 batches with no_sync", partial(train, 5), reference=partial(one_process, accumulate=5)),
    Setup("the loss in the model", partial(train_in_one_module, sum_hook=False)),
    Setup("the loss in the model, a communication hook that sums", partial(train_in_one_module, sum_hook=True)),
]
