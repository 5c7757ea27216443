"""DeepSpeed: ``DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 -m examples deepspeed_engine``."""

import os
from functools import partial
from typing import Any, Literal

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, EncoderWithLoss, make_loader, make_loss
from examples.setup import Setup, Trained, one_process


def train(
    stage: int,
    accumulate: int = 1,
    grad_reduction: Literal["mean", "sum"] = "mean",
    frozen: bool = False,
    chunk_size: int = 0,
    engine_in_chunks: bool = False,
) -> Trained:
    deepspeed.init_distributed("gloo")
    model = EncoderWithLoss(
        cz.DistributedLoss(make_loss(), grad_reduction=grad_reduction)
    ).float()  # DeepSpeed takes no float64
    if chunk_size:
        model.encoder = cz.GradCache(model.encoder, chunk_size)
    trained = model.encoder if frozen else model
    config = {
        "train_micro_batch_size_per_gpu": 1,  # not used: batches come from our loader
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,  # the default is a norm of 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(trained.parameters(), LEARNING_RATE, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    encode = cz.GradCache(engine, 4) if engine_in_chunks else engine
    loader = make_loader(dist.get_rank(), dist.get_world_size())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            engine.backward(encode(images.float(), labels))
            engine.step()
    with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
        return Trained.of(model.encoder, model.loss_fn)


def make_setup(name: str, stage: int = 0, accumulate: int = 1, mistake: str = "", fix: str = "", **wrong: Any) -> Setup:
    reference = partial(one_process, accumulate=accumulate, dtype=torch.float32)
    start = partial(train, stage, accumulate, **wrong)
    note = "float32 rounds to 2⁻²⁴"
    return Setup(name, start, bound=1e-5, note=note, reference=reference, mistake=mistake, fix=fix)


SETUPS = [
    *(make_setup(f"ZeRO stage {stage}", stage) for stage in range(4)),
    make_setup("ZeRO stage 2, accumulation of 5 batches", 2, accumulate=5),
    make_setup("ZeRO stage 2, GradCache inside of the engine", 2, chunk_size=4),
    make_setup("ZeRO stage 3, GradCache inside of the engine", 3, chunk_size=4),
    make_setup(
        "gradients assumed to be summed", mistake="DeepSpeed averages gradients.", fix='`grad_reduction="mean"`',
        grad_reduction="sum",
    ),
    make_setup(
        "loss parameters not in the optimizer", mistake="The engine updates the parameters of its optimizer only.",
        fix="`SGD(model.parameters())`, the loss in the model", frozen=True,
    ),
    make_setup(
        "GradCache around the engine", 3, mistake="The engine owns the backward pass.",
        fix="`GradCache(encoder, chunk_size)` inside the engine's module", engine_in_chunks=True,
    ),
]  # fmt: skip
