"""The Hugging Face Trainer on two processes computes the parameters of one process, in every configuration."""

import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.audit_trainings import audit_apart
from tests.digits import make_dataset, make_encoder, make_loader, make_loss
from tests.helpers import EVERY_CASE, as_torchrun, error_message

pytest.importorskip("accelerate")  # the Trainer needs it
pytest.importorskip("sklearn")  # for the digits

from transformers import Trainer, TrainingArguments

from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin

SGD = partial(torch.optim.SGD, lr=0.1)


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


class PlainTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        """Return this rank's part of each global batch, uneven or empty. The Trainer's own loader needs ``drop_last``."""
        loader = loader_of(self.args.gradient_accumulation_steps, self.args.process_index, self.args.world_size)
        collate, loader.set_epoch = loader.collate_fn, loader.batch_sampler.set_epoch
        loader.collate_fn = lambda batch: dict(zip(("input", "labels"), collate(batch), strict=True))
        return loader


class DigitsTrainer(ContrastiveTrainerMixin, PlainTrainer):
    pass


class OwnComputeLoss(DigitsTrainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Any:
        return self.loss_function(model(inputs["input"]), inputs["labels"])


def loader_of(steps: int, rank: int = 0, world_size: int = 1) -> Any:
    """Return batches of ten steps or less, of which the last one leaves a rank without samples."""
    samples, batch_size = (125, 31) if steps == 1 else (226, 25)
    return make_loader(rank, world_size, samples=samples, batch_size=batch_size)


class Setup(NamedTuple):
    in_model: bool = True
    steps: int = 1
    average: bool = True
    kind: Any = DigitsTrainer
    with_optimizer: bool = False

    def __str__(self) -> str:
        form = "loss in the model" if self.in_model else "compute_loss_func"
        of_kind = f"{self.kind.__name__}{', optimizer passed' * self.with_optimizer}"
        return f"{form}, accumulation {self.steps}, average_tokens={self.average}, {of_kind}"


def parameters(*modules: nn.Module) -> list[nn.Parameter]:
    return [x for module in modules for x in module.parameters()]


def train(setup: Setup, **settings: Any) -> list[nn.Parameter]:
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=10, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, dataloader_pin_memory=False, report_to=[], disable_tqdm=True,
        ddp_find_unused_parameters=False, gradient_accumulation_steps=setup.steps,
        average_tokens_across_devices=setup.average, **settings,
    )  # fmt: skip
    model: nn.Module = EncoderWithLoss() if setup.in_model else make_encoder()
    loss_fn = None if setup.in_model else OutputLoss()
    trained = parameters(model, *filter(None, [loss_fn]))
    optimizer = SGD(trained) if setup.with_optimizer else None
    setup.kind(model, arguments, compute_loss_func=loss_fn, optimizers=(optimizer, None)).train()
    return trained


def one_process(steps: int) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Train in plain torch, without DistributedLoss; return the parameters before and after."""
    encoder, loss_fn = make_encoder(), make_loss()
    trained = parameters(encoder, loss_fn)
    before, optimizer, loader = [x.detach().clone() for x in trained], SGD(trained), loader_of(steps)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            (loss_fn(encoder(images), labels) / steps).backward()
            if (i + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return before, trained


def deviation(setup: Setup) -> float:
    """Return the largest distance of a parameter to that of one process, relative to the distance that it was moved."""
    as_torchrun()
    before, after = one_process(setup.steps)

    def norms(x: Iterable[Tensor], y: Iterable[Tensor]) -> Tensor:
        return torch.stack([(a - b).norm() for a, b in zip(x, y, strict=True)])

    return (norms(train(setup), after) / norms(before, after)).max().item()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Worlds]:
    """Yield worlds of their own: the Trainer changes the state of a process."""
    with Worlds(timeout=300.0) as own:
        yield own


ALL = [Setup(form, steps, average) for form in (True, False) for steps in (1, 2) for average in (True, False)]
ALL += [Setup(in_model=False, with_optimizer=True)]
# every two of form, accumulation and average_tokens occur together
DRAWN = ALL if EVERY_CASE else [ALL[index] for index in (0, 3, 5, 6, 8)]
OWN = [Setup(False, steps, average, OwnComputeLoss) for steps, average in ((1, True), (2, False))]


@pytest.mark.parametrize(
    "setup", [DRAWN[0], *(pytest.param(x, marks=pytest.mark.trainers) for x in [*DRAWN[1:], *OWN])], ids=str
)
def test_the_mixin_computes_the_parameters_of_one_process(setup: Setup, trainers: Worlds) -> None:
    assert max(trainers.run(2, deviation, setup)) <= 1e-9


WITHOUT_THE_MIXIN = {
    "loss × W": Setup(),
    "loss not divided by the accumulation steps": Setup(steps=2, average=False),
    "loss parameters not in the optimizer": Setup(in_model=False, average=False),
    "loss parameters never zeroed": Setup(in_model=False, average=False, with_optimizer=True),
}


@pytest.mark.trainers
@pytest.mark.parametrize("what", WITHOUT_THE_MIXIN)
def test_a_trainer_without_the_mixin_is_wrong(what: str, trainers: Worlds) -> None:
    assert max(trainers.run(2, deviation, WITHOUT_THE_MIXIN[what]._replace(kind=PlainTrainer))) > 0.5


NAMED = {
    "loss × W": "times W",
    "loss parameters never zeroed": "never zeroed",
    "loss parameters not in the optimizer": "not optimized",
}


def run(what: str) -> None:
    train(WITHOUT_THE_MIXIN[what]._replace(kind=PlainTrainer))


@pytest.mark.audit
@pytest.mark.filterwarnings("ignore")  # the Trainer warns when it is imported
@pytest.mark.parametrize("what", [*NAMED][:: 1 if EVERY_CASE else 2])
def test_the_audit_names_it(what: str) -> None:
    report = audit_apart(__name__, what)
    assert NAMED[what] in [x.mistake for x in report.findings], str(report)


def evaluation_loss(kind: Any) -> float:
    as_torchrun()
    samples, found = [{"input": x, "labels": y} for x, y in make_dataset(32)], []

    class Evaluated(kind):
        def train(self) -> None:
            super().train()
            found.append(self.evaluate(samples)["eval_loss"])

    each = 8 // dist.get_world_size()
    train(Setup(kind=Evaluated), per_device_eval_batch_size=each, label_names=["labels"])
    return found[0]


def test_the_evaluation_loss_is_that_of_one_process(trainers: Worlds) -> None:
    (expected,) = trainers.run(1, evaluation_loss, DigitsTrainer)
    for found in trainers.run(2, evaluation_loss, DigitsTrainer):
        assert found == pytest.approx(expected, rel=1e-6)  # the Trainer gathers values in float32
    assert trainers.run(2, evaluation_loss, PlainTrainer)[0] > 1.5 * expected


def test_an_optimizer_without_the_parameters_of_the_loss_is_refused(tmp_path: Path) -> None:
    model = make_encoder()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    options: dict[str, Any] = {"compute_loss_func": OutputLoss(), "optimizers": (SGD(model.parameters()), None)}
    trainer = DigitsTrainer(model, arguments, train_dataset=[*make_dataset(8)], **options)
    assert "lacks 2 parameters of compute_loss_func" in (error_message(trainer.train) or "")
