"""The Hugging Face Trainer on two processes computes the parameters of one process, in every configuration."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, error_message, numbers

pytest.importorskip("accelerate")  # the Trainer needs it

from transformers import Trainer, TrainingArguments

from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin
from contrastive_zoo.testing.auditing.huggingface import AuditedTrainerMixin

STEPS, BATCH, D, LEARNING_RATE = 10, 8, 4, 0.1
SAMPLES = STEPS * BATCH * 2
"""Enough for two accumulation steps."""


class Encoder(nn.Module):
    """An encoder without its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, D).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"embeddings": self.linear(x)}


class OutputLoss(nn.Module):
    """A ``compute_loss_func`` with a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5))).double()

    def forward(self, outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self.loss(outputs["embeddings"], labels)


class Closed(Encoder):
    """An encoder that contains its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = OutputLoss()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x)
        return {"loss": self.criterion(outputs, labels), **outputs}


class Open(Closed):
    """The same, with a ``forward`` of open signature."""

    def forward(self, x: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


class OwnComputeLoss:
    """A method ``compute_loss``, with the loss outside the model."""

    criterion: OutputLoss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"])
        loss = self.criterion(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def build(form: str, mixin: bool) -> tuple[Callable[..., Trainer], nn.Module, OutputLoss]:
    """Return a Trainer class with its extra arguments bound, the model, and its loss."""
    bases: tuple[type, ...] = (ContrastiveTrainerMixin, Trainer) if mixin else (Trainer,)
    if form in ("closed", "open"):
        model = {"closed": Closed, "open": Open}[form]()
        return type("InModel", bases, {}), model, model.criterion
    loss = OutputLoss()
    if form == "override":
        return type("Override", (OwnComputeLoss, *bases), {"criterion": loss}), Encoder(), loss
    kind = type("Function", bases, {})
    return lambda *args, **kwargs: kind(*args, compute_loss_func=loss, **kwargs), Encoder(), loss


def data() -> list[dict[str, Any]]:
    return [{"x": x, "labels": i % 3} for i, x in enumerate(numbers(SAMPLES, 3, seed=0))]


def arguments(folder: str, **settings: Any) -> TrainingArguments:
    if (world_size := dist.get_world_size() if dist.is_initialized() else 1) > 1:  # what torchrun sets
        rank = dist.get_rank()
        os.environ.update(
            RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world_size}", LOCAL_WORLD_SIZE=f"{world_size}"
        )
    return TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH // world_size,
        per_device_eval_batch_size=BATCH // world_size, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
        label_names=["labels"], train_sampling_strategy="sequential", **settings,
    )  # fmt: skip


def parameters(model: nn.Module, loss: nn.Module) -> list[nn.Parameter]:
    return list(dict.fromkeys([*model.parameters(), *loss.parameters()]))


def train(
    folder: str, form: str, accumulation: int, average_tokens: bool, *, own_optimizer: bool = False, mixin: bool = True
) -> tuple[list[Tensor], float]:
    """Return all parameters after ten steps, and the value of the loss on the first batches."""
    make, model, loss = build(form, mixin)
    optimizer = torch.optim.SGD(parameters(model, loss), lr=LEARNING_RATE) if own_optimizer else None
    trainer = make(
        model,
        arguments(folder, gradient_accumulation_steps=accumulation, average_tokens_across_devices=average_tokens),
        train_dataset=data(),
        eval_dataset=data()[: 4 * BATCH],
        optimizers=(optimizer, None),
    )
    trainer.train()
    return [x.detach() for x in parameters(model, loss)], trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that runs ``train`` in worlds of their own: the Trainer changes the state of a process."""
    folder = str(tmp_path_factory.mktemp("trainer"))
    with Worlds(timeout=120.0) as own:
        yield lambda world_size, *args, job=train, **kwargs: own.run(world_size, job, folder, *args, **kwargs)


@pytest.fixture(scope="module")
def one_process() -> dict[int, list[Tensor]]:
    """Return the parameters of a loop without a Trainer, by number of accumulation steps."""
    return {accumulation: loop(accumulation) for accumulation in (1, 2)}


def loop(accumulation: int) -> list[Tensor]:
    model = Closed()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    x, labels = numbers(SAMPLES, 3, seed=0), torch.arange(SAMPLES) % 3
    batches = zip(x.split(BATCH), labels.split(BATCH), strict=True)
    for _ in range(STEPS):
        for batch in itertools.islice(batches, accumulation):
            (model(*batch)["loss"] / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.detach() for x in parameters(model, model.criterion)]


@pytest.mark.parametrize(
    ("form", "own_optimizer", "average_tokens", "accumulation"),
    [  # every pair of settings; make examples trains further combinations
        ("function", False, True, 1), ("function", False, False, 2), ("function", True, True, 2),
        ("open", False, True, 2), ("open", False, False, 1), ("closed", False, True, 1),
        ("closed", True, False, 2), ("override", True, True, 1), ("override", True, False, 2),
    ],
)  # fmt: skip
def test_the_mixin_computes_the_parameters_of_one_process(
    form: str,
    own_optimizer: bool,
    average_tokens: bool,
    accumulation: int,
    trainers: Callable[..., Any],
    one_process: dict[int, list[Tensor]],
) -> None:
    found = trainers(2, form, accumulation, average_tokens, own_optimizer=own_optimizer)
    for by_rank, _ in found:
        for x, expected in zip(by_rank, one_process[accumulation], strict=True):
            close(x, expected)


def test_the_evaluation_loss_is_that_of_one_process(trainers: Callable[..., Any]) -> None:
    ((_, expected),) = trainers(1, "open", 1, True)
    for by_rank in trainers(2, "open", 1, True):
        assert by_rank[1] == pytest.approx(expected, rel=1e-6)  # the Trainer gathers values in float32
    assert trainers(2, "open", 1, True, mixin=False)[0][1] > 1.5 * expected


def test_an_optimizer_without_the_parameters_of_the_loss_is_refused(tmp_path: Path) -> None:
    make, model, _ = build("function", mixin=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = make(model, arguments(str(tmp_path)), train_dataset=data(), optimizers=(optimizer, None))
    assert "lacks 1 parameters of compute_loss_func" in (error_message(trainer.train) or "")


def audited(folder: str, form: str, accumulation: int, mixin: bool, every: int) -> tuple[list[Tensor], Any]:
    """Return all parameters after ten steps with an audit, and its last report."""
    make, model, loss = build(form, mixin)
    settings = {"gradient_accumulation_steps": accumulation, "average_tokens_across_devices": True}
    kind = type("Audited", (AuditedTrainerMixin, make), {})
    trainer = kind(model, arguments(folder, **settings), train_dataset=data(), audit_every=every)
    trainer.train()
    return [x.detach() for x in parameters(model, loss)], trainer.online_audit.report.worlds[0]


@pytest.mark.parametrize(
    ("form", "accumulation", "mixin", "mistakes"),
    [("closed", 2, True, []), ("open", 1, False, ["times W"])],
)
def test_an_audited_training_goes_on_as_without(
    form: str, accumulation: int, mixin: bool, mistakes: list[str], trainers: Callable[..., list[Any]]
) -> None:
    plain = trainers(2, form, accumulation, True, mixin=mixin)
    found = trainers(2, form, accumulation, mixin, 6, job=audited)
    for (expected, _), (actual, report) in zip(plain, found, strict=True):
        assert all(map(torch.equal, expected, actual))
        assert [x.mistake for x in report.findings] == mistakes, str(report)
        assert report.ok is (not mistakes), str(report)
