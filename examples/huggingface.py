"""The Hugging Face Trainer: ``torchrun --standalone --nproc-per-node 2 -m examples huggingface``."""

import tempfile
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin
from examples.digits import LEARNING_RATE, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, one_process

SGD = partial(torch.optim.SGD, lr=LEARNING_RATE)


class OutputLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = cz.DistributedLoss(make_loss())

    def forward(self, outputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self.loss_fn(outputs, labels)


class EncoderWithLoss(nn.Module):
    """A model that returns its loss; its signature is open."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.criterion = make_encoder(), OutputLoss()

    def forward(self, input: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.criterion(self.encoder(input), labels)}


def get_train_dataloader(trainer: transformers.Trainer) -> Any:
    """Return this rank's part of each global batch, uneven or empty. The Trainer's own loader needs ``drop_last``."""
    args = trainer.args
    samples, batch_size = (125, 31) if args.gradient_accumulation_steps == 1 else (226, 25)
    loader = make_loader(args.process_index, args.world_size, samples=samples, batch_size=batch_size)
    loader.collate_fn = lambda batch: dict(zip(("input", "labels"), batch, strict=True))
    loader.set_epoch = loader.sampler.set_epoch
    return loader


class DigitsTrainer(ContrastiveTrainerMixin, transformers.Trainer):
    get_train_dataloader = get_train_dataloader


def train(loss: str, kind: Any = DigitsTrainer, given_optimizer: bool = False, **settings: Any) -> Trained:
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=10, optim="sgd", learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, dataloader_pin_memory=False, report_to=[], disable_tqdm=True,
        ddp_find_unused_parameters=False, **settings,
    )  # fmt: skip
    loss_fn = None if loss == "loss in the model" else OutputLoss()
    model: Any = make_encoder() if loss_fn else EncoderWithLoss()
    optimizer = SGD([*model.parameters(), *(loss_fn.parameters() if loss_fn else [])]) if given_optimizer else None
    kind(model, args, compute_loss_func=loss_fn, optimizers=(optimizer, None)).train()
    return Trained.of(model, loss_fn) if loss_fn else Trained.of(model.encoder, model.criterion)


def make_setup(loss: str, steps: int = 1, average: bool = True, name: str = "", **settings: Any) -> Setup:
    chosen: dict[str, Any] = {"gradient_accumulation_steps": steps, "average_tokens_across_devices": average}
    data: dict[str, Any] = {"samples": 226, "batch_size": 25, "accumulate": 2} if steps == 2 else {}
    described = f"{loss}{name}, accumulation {steps}, average_tokens={average}"
    return Setup(described, partial(train, loss, **settings, **chosen), reference=partial(one_process, SGD, **data))


FORMS = ("loss in the model", "compute_loss_func")
SETUPS = [make_setup(form, steps, average) for form in FORMS for steps in (1, 2) for average in (True, False)]
SETUPS += [make_setup("compute_loss_func", name=", optimizer passed", given_optimizer=True)]
