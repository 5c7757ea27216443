"""What the Hugging Face Trainer computes without the mixin: ``python -m examples huggingface_mistakes``."""

import dataclasses
from typing import Any

import transformers

from examples.huggingface import get_train_dataloader, make_setup
from examples.setup import Setup


class PlainTrainer(transformers.Trainer):
    get_train_dataloader = get_train_dataloader


def wrong(mistake: str, loss: str, *args: Any, fix: str = "", **settings: Any) -> Setup:
    setup = make_setup(loss, *args, kind=PlainTrainer, **settings)
    return dataclasses.replace(setup, mistake=mistake, fix=fix or "class MyTrainer(ContrastiveTrainerMixin, Trainer)")


OWN_OPTIMIZER: dict[str, Any] = {"given_optimizer": True, "name": ", optimizer passed"}
SETUPS = [
    wrong("forward(**kwargs): loss × W", "loss in the model"),
    wrong("forward(**kwargs): loss not divided by the accumulation steps", "loss in the model", 2, False),
    wrong("forward(**kwargs): both", "loss in the model", 2, True),
    wrong("compute_loss_func: loss × W, loss parameters not in the optimizer", "compute_loss_func"),
    wrong("compute_loss_func: loss parameters not in the optimizer", "compute_loss_func", 1, False),
    wrong("compute_loss_func: loss parameters never zeroed", "compute_loss_func", 1, False, **OWN_OPTIMIZER),
    wrong("compute_loss_func: all three", "compute_loss_func", 2, True, **OWN_OPTIMIZER),
]
