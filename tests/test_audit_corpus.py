"""The audit accuses no right training, in any trainer, precision, augmentation and validation, and names wrong ones."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from contrastive_zoo.testing.auditing import recorder
from contrastive_zoo.testing.auditing.launch import audit
from contrastive_zoo.testing.auditing.tensors import unit_of_rounding
from contrastive_zoo.testing.report import AuditReport, WorldReport
from contrastive_zoo.testing.worlds import Worlds
from tests.audit_corpus import RIGHT, TRAININGS, WRONG, judgement
from tests.audit_loops import Parts
from tests.audit_trainings import audit_apart, audit_here
from tests.helpers import EVERY_CASE

pytestmark = [pytest.mark.audit, pytest.mark.filterwarnings("ignore")]  # trainers warn when they are imported

CORPUS = "tests.audit_corpus"
PACKAGES = {"Accelerate": "accelerate", "Hugging Face": "transformers", "Lightning": "lightning", "Fabric": "lightning"}
DRAWN = [
    x for x in RIGHT if (x.precision, x.encoder) in (("", "residual"), ("bf16", "dropout"), ("", "bfloat16 parameters"))
]
"""What people write most, and what the audit got wrong."""
WITH_MISTAKE = [x for i, x in enumerate(WRONG) if EVERY_CASE or i % 3 == i // 3 % 3]
"""Each mistake once; in a search on top of all three trainings."""


def audited(parts: Parts, worlds: Worlds, processes: int) -> WorldReport:
    """Audit a training: a loop by hand in a pool, a trainer or sampler in new processes."""
    (name,) = (name for name, x in TRAININGS.items() if x is parts)
    package = next((x for trainer, x in PACKAGES.items() if parts.trainer.startswith(trainer)), None)
    # samplers are listed there, and a loss may raise on the ranks
    if package or parts.sampler != "sharded" or parts.mistake == "unequal parameters":
        pytest.importorskip(package or "torch")
        return audit_apart(CORPUS, name, processes=processes)
    return worlds.run(processes, audit_here, CORPUS, name)[0].worlds[0]


@pytest.mark.parametrize("processes", [2, 3] if EVERY_CASE else [2])
@pytest.mark.parametrize("parts", RIGHT if EVERY_CASE else DRAWN[::3], ids=str)
def test_a_right_training_is_not_called_wrong(parts: Parts, processes: int, worlds: Worlds) -> None:
    report = audited(parts, worlds, processes)
    reasons = {  # ranks leave out other layers; changes of parameters are lost in their rounding
        **dict.fromkeys(["noise inside", "LayerDrop"], "a module draws random numbers, besides those of dropout"),
        **dict.fromkeys(["bfloat16 parameters", "bf16-true"], "reruns in one process differ"),
    }
    reason = reasons.get(parts.encoder, reasons.get(parts.precision, "none"))
    is_explained = report.ok is None and all(x.startswith(reason) for x in report.not_compared)
    assert report.ok is True or is_explained, f"{judgement(parts, report)}\n{report}"


@pytest.mark.parametrize("processes", [2, 3] if EVERY_CASE else [2])
@pytest.mark.parametrize("parts", WITH_MISTAKE, ids=str)
def test_the_mistake_of_a_wrong_training_is_said(parts: Parts, processes: int, worlds: Worlds) -> None:
    word = judgement(parts, report := audited(parts, worlds, processes)).partition(":")[0]
    assert word == ("noted" if parts.mistake == "accumulation not divided" else "named"), str(report)


def without_precision(job: Callable[[], AuditReport]) -> AuditReport:
    with patch.object(recorder, "unit_of_rounding", lambda x: 0.0):
        return job()


def with_validations_in_the_step(job: Callable[[], AuditReport]) -> AuditReport:
    def call(self: recorder.Recorder, *args: Any) -> Any:
        with torch.enable_grad():
            return record_call(self, *args)

    record_call = recorder.Recorder._call
    with patch.object(recorder.Recorder, "_call", call):
        return job()


MUTANTS: dict[Callable[[Any], AuditReport], Parts] = {
    with_validations_in_the_step: Parts("DDP", validation="train mode, whole set"),
    without_precision: Parts("DDP", encoder="autocast inside of forward"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_audit_that_lacks_a_measurement_accuses_a_right_training(mutant: Any, worlds: Worlds) -> None:
    def job(change: Callable[[Any], AuditReport] = lambda job: job()) -> AuditReport:
        with patch.object(dist, "init_process_group"):
            return change(lambda: audit(MUTANTS[mutant].train))

    assert worlds.run(2, job)[0].ok is True
    assert worlds.run(2, job, mutant)[0].ok is False


def test_precision_is_that_of_the_values() -> None:
    x = torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert unit_of_rounding(x) == unit_of_rounding(torch.ones(4)) == unit_of_rounding(torch.zeros(20)) == 0
    for half in (torch.bfloat16, torch.float16):
        assert unit_of_rounding(x.to(half)) == unit_of_rounding(x.to(half).float()) == torch.finfo(half).eps
