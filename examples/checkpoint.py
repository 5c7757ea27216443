"""Save and resume: ``torchrun --standalone --nproc-per-node 2 -m examples checkpoint``."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained


class Training:
    """All that a checkpoint holds: the encoder, the loss with its parameters, the optimizer, the number of steps."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        self.encoder, self.loss_fn = wrap(make_encoder()), cz.DistributedLoss(make_loss())
        self.both = nn.ModuleDict({"encoder": self.encoder, "loss": self.loss_fn})
        self.optimizer = torch.optim.SGD(self.both.parameters(), LEARNING_RATE, momentum=0.9, foreach=False)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        parameters, optimizer = get_state_dict(self.both, self.optimizer)
        return {"parameters": parameters, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters, optimizer = state["parameters"], state["optimizer"]
        set_state_dict(self.both, self.optimizer, model_state_dict=parameters, optim_state_dict=optimizer)
        self.steps = state["steps"]

    def run(self, until: int) -> None:
        """Train from the current step on; steps that the checkpoint contains are skipped."""
        loader = make_loader(dist.get_rank(), dist.get_world_size())
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for i, (images, labels) in enumerate(loader):
                if self.steps <= epoch * len(loader) + i < until:
                    self.optimizer.zero_grad()
                    self.loss_fn(self.encoder(images), labels).backward()
                    self.optimizer.step()
                    self.steps += 1


def train(wrap: Callable[[nn.Module], Any]) -> Trained:
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint"

    interrupted = Training(wrap)
    interrupted.run(until=4)  # in the middle of the first epoch
    dcp.save({"training": interrupted}, checkpoint_id=path)

    resumed = Training(wrap)  # with other values, to show that all of them are loaded
    with torch.no_grad():
        for parameter in resumed.both.parameters():
            parameter.fill_(0.5)
    dcp.load({"training": resumed}, checkpoint_id=path)
    resumed.run(until=10)
    return Trained.of(resumed.encoder, resumed.loss_fn)


SETUPS = [
    Setup("DDP, resumed after 4 of 10 steps", partial(train, DistributedDataParallel)),
    Setup("FSDP2, resumed after 4 of 10 steps", partial(train, fully_shard)),
]
