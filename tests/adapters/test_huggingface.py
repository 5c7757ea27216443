"""The Hugging Face Trainer on two processes computes the parameters of one process, in every configuration."""

from __future__ import annotations

import doctest
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
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


def trainers() -> dict[str, Any]:
    """Return three classes of trainers. Their library takes seconds to import, and only ranks need it."""
    from transformers import Trainer

    from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            """Return this rank's part of each batch, uneven or empty. The Trainer's own loader needs ``drop_last``."""
            loader = loader_of(self.args.gradient_accumulation_steps, self.args.process_index, self.args.world_size)
            collate = loader.collate_fn
            loader.collate_fn = lambda batch: dict(zip(("input", "labels"), collate(batch), strict=True))
            return loader

    class WithMixin(ContrastiveTrainerMixin, Plain):
        pass

    class OwnComputeLoss(WithMixin):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Any:
            return self.loss_function(model(inputs["input"]), inputs["labels"])

    return {"plain": Plain, "mixin": WithMixin, "mixin and a compute_loss": OwnComputeLoss}


def loader_of(steps: int, rank: int = 0, world_size: int = 1) -> Any:
    """Return batches of ten steps or less, of which the last one leaves a rank without samples."""
    samples, batch_size = (125, 31) if steps == 1 else (226, 25)
    return make_loader(rank, world_size, samples=samples, batch_size=batch_size)


class Setup(NamedTuple):
    in_model: bool = True
    steps: int = 1
    average: bool = True
    kind: str = "mixin"
    optimizer: str = ""


def trainer_of(setup: Setup, **settings: Any) -> tuple[Any, list[nn.Parameter]]:
    """Return the trainer and the parameters that it trains."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        max_steps=10, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True,
        dataloader_pin_memory=False, report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
        gradient_accumulation_steps=setup.steps, average_tokens_across_devices=setup.average,
        **{"output_dir": tempfile.mkdtemp(), **settings},
    )  # fmt: skip
    model: nn.Module = EncoderWithLoss() if setup.in_model else make_encoder()
    loss_fn = None if setup.in_model else OutputLoss()
    trained = [*nn.ModuleList(filter(None, [model, loss_fn])).parameters()]
    of_optimizer = {"": None, "all": trained, "the encoder": [*model.parameters()]}[setup.optimizer]
    optimizers = None if of_optimizer is None else SGD(of_optimizer), None
    return trainers()[setup.kind](model, arguments, compute_loss_func=loss_fn, optimizers=optimizers), trained


def train(setup: Setup, checkpoint: str | None = None, **settings: Any) -> list[nn.Parameter]:
    trainer, trained = trainer_of(setup, **settings)
    for x in trained if checkpoint else ():
        nn.init.zeros_(x)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trained


def one_process(steps: int) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Train in plain torch, without DistributedLoss; return the parameters before and after."""
    encoder, loss_fn = make_encoder(), make_loss()
    trained = [*encoder.parameters(), *loss_fn.parameters()]
    before, optimizer, loader = [x.detach().clone() for x in trained], SGD(trained), loader_of(steps)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            (loss_fn(encoder(images), labels) / steps).backward()
            if (i + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    return before, trained


def deviation(setup: Setup, *checkpoint: str, **settings: Any) -> float:
    """Return the largest distance of a parameter to that of one process, relative to the distance that it was moved."""
    as_torchrun()
    before, after = one_process(setup.steps)

    def norms(x: Iterable[Tensor], y: Iterable[Tensor]) -> Tensor:
        return torch.stack([(a - b).norm() for a, b in zip(x, y, strict=True)])

    return (norms(train(setup, *checkpoint, **settings), after) / norms(before, after)).max().item()


@pytest.fixture(scope="module")
def own() -> Iterator[Worlds]:
    """Yield worlds of their own: the Trainer changes the state of a process."""
    with Worlds(timeout=300.0) as pool:
        yield pool


ALL = [Setup(form, steps, average) for form in (True, False) for steps in (1, 2) for average in (True, False)]
ALL += [Setup(in_model=False, optimizer="all")]
# every two of form, accumulation and average_tokens occur together
DRAWN = ALL if EVERY_CASE else [ALL[index] for index in (0, 3, 5, 6, 8)]
DRAWN += [Setup(False, steps, average, "mixin and a compute_loss") for steps, average in ((1, True), (2, False))]


@pytest.mark.parametrize("how", [DRAWN[0], *(pytest.param(x, marks=pytest.mark.trainers) for x in DRAWN[1:])], ids=str)
def test_the_mixin_computes_the_parameters_of_one_process(how: Setup, own: Worlds) -> None:
    assert max(own.run(2, deviation, how)) <= 1e-9


@pytest.mark.trainers
def test_a_resumed_training_passes_on_the_other_batches(own: Worlds, tmp_path: Path) -> None:
    """The checkpoint is within the second epoch; a training that did not load it would begin with parameters of 0."""
    how: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 7}
    for checkpoint in ([], [f"{tmp_path}/checkpoint-7"]):
        assert max(own.run(2, deviation, Setup(), *checkpoint, **how)) <= 1e-9


# The mistake of a Trainer without the mixin, and the name that the audit has for it
WITHOUT_THE_MIXIN = {
    "times W": Setup(kind="plain"),
    "accumulation not divided": Setup(steps=2, average=False, kind="plain"),
    "not optimized": Setup(in_model=False, average=False, kind="plain"),
    "never zeroed": Setup(in_model=False, average=False, kind="plain", optimizer="all"),
}


@pytest.mark.trainers
@pytest.mark.parametrize("mistake", WITHOUT_THE_MIXIN)
def test_a_trainer_without_the_mixin_is_wrong(mistake: str, own: Worlds) -> None:
    assert max(own.run(2, deviation, WITHOUT_THE_MIXIN[mistake])) > 0.5


def run(mistake: str) -> None:
    train(WITHOUT_THE_MIXIN[mistake])


NAMED = [x for x in WITHOUT_THE_MIXIN if x != "accumulation not divided"]  # which the audit notes


@pytest.mark.audit
@pytest.mark.parametrize("mistake", NAMED[:: 1 if EVERY_CASE else 2])
def test_the_audit_names_it(mistake: str) -> None:
    report = audit_apart(__name__, mistake)
    assert mistake in [x.mistake for x in report.findings], str(report)


def evaluation_loss(kind: str) -> float:
    as_torchrun()
    samples = [{"input": x, "labels": y} for x, y in make_dataset(32)]
    each = 8 // dist.get_world_size()
    trainer, _ = trainer_of(Setup(kind=kind), per_device_eval_batch_size=each, label_names=["labels"])
    trainer.train()
    return trainer.evaluate(samples)["eval_loss"]


@pytest.mark.trainers
def test_the_evaluation_loss_is_that_of_one_process(own: Worlds) -> None:
    (expected,) = own.run(1, evaluation_loss, "mixin")
    for found in own.run(2, evaluation_loss, "mixin"):
        assert found == pytest.approx(expected, rel=1e-6)  # the Trainer gathers values in float32
    assert own.run(2, evaluation_loss, "plain")[0] > 1.5 * expected


def refusal() -> str | None:
    as_torchrun()
    return error_message(lambda: train(Setup(in_model=False, optimizer="the encoder")))


@pytest.mark.trainers
def test_an_optimizer_without_the_parameters_of_the_loss_is_refused(own: Worlds) -> None:
    (says,) = own.run(1, refusal)
    assert "lacks 2 parameters of compute_loss_func" in (says or "")


@pytest.mark.trainers
@pytest.mark.parametrize("name", ["huggingface", "sentence_transformers"])
def test_the_examples_of_the_adapters_run(name: str) -> None:
    """pytest does not collect them: it would import their libraries."""
    adapter = import_module(f"contrastive_zoo.adapters.{name}")
    failed, attempted = doctest.testmod(adapter, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert attempted
    assert not failed
