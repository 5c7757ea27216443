"""The Hugging Face Trainer on two processes computes the parameters of one process, in every configuration."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, as_torchrun, error_message

pytest.importorskip("accelerate")  # the Trainer needs it
pytest.importorskip("sklearn")  # for the digits

from transformers import Trainer, TrainingArguments

from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin
from examples.digits import LEARNING_RATE, make_dataset, make_encoder
from examples.huggingface import SETUPS, DigitsTrainer, OutputLoss, make_setup, train
from examples.huggingface_mistakes import PlainTrainer
from examples.setup import Deviation, Setup


class OwnComputeLoss(DigitsTrainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Any:
        return self.loss_function(model(inputs["input"]), inputs["labels"])


def deviation(setup: Setup) -> Deviation:
    as_torchrun()
    return Deviation.between(setup.train(), *setup.reference())


@pytest.fixture(scope="module")
def trainers() -> Iterator[Worlds]:
    """Yield worlds of their own: the Trainer changes the state of a process."""
    with Worlds(timeout=300.0) as own:
        yield own


OWN = [
    make_setup("compute_loss_func", steps, average, kind=OwnComputeLoss) for steps, average in ((1, True), (2, False))
]


# every two of form, accumulation and average_tokens occur together
DRAWN = SETUPS if EVERY_CASE else [SETUPS[index] for index in (0, 3, 5, 6, 8)]


@pytest.mark.parametrize(
    "setup",
    [DRAWN[0], *(pytest.param(x, marks=pytest.mark.trainers) for x in [*DRAWN[1:], *OWN])],
    ids=lambda x: x.name,
)
def test_the_mixin_computes_the_parameters_of_one_process(setup: Setup, trainers: Worlds) -> None:
    assert max(map(max, trainers.run(2, deviation, setup))) <= setup.bound


def evaluation_loss(kind: Any) -> float:
    as_torchrun()
    samples, found = [{"input": x, "labels": y} for x, y in make_dataset(32)], []

    class Evaluated(kind):
        def train(self) -> None:
            super().train()
            found.append(self.evaluate(samples)["eval_loss"])

    train(
        "loss in the model",
        Evaluated,
        per_device_eval_batch_size=8 // dist.get_world_size(),
        label_names=["labels"],
    )
    return found[0]


def test_the_evaluation_loss_is_that_of_one_process(trainers: Worlds) -> None:
    (expected,) = trainers.run(1, evaluation_loss, DigitsTrainer)
    for found in trainers.run(2, evaluation_loss, DigitsTrainer):
        assert found == pytest.approx(expected, rel=1e-6)  # the Trainer gathers values in float32
    assert trainers.run(2, evaluation_loss, PlainTrainer)[0] > 1.5 * expected


def test_an_optimizer_without_the_parameters_of_the_loss_is_refused(tmp_path: Path) -> None:
    model = make_encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    kind = type("Mixed", (ContrastiveTrainerMixin, Trainer), {})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = kind(
        model, arguments, train_dataset=[*make_dataset(8)], compute_loss_func=OutputLoss(), optimizers=(optimizer, None)
    )
    assert "lacks 2 parameters of compute_loss_func" in (error_message(trainer.train) or "")
