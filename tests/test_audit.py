"""The audit names every mistake of the real trainers, and accuses no right training; a probe switched off is missed."""

import json
import math
import os
import pydoc
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing import mistakes
from contrastive_zoo.testing.auditing import diagnosis, recorder, rerun
from contrastive_zoo.testing.auditing.diagnosis import PROBES
from contrastive_zoo.testing.auditing.launch import audit, audit_script
from contrastive_zoo.testing.auditing.tensors import unit_of_rounding
from contrastive_zoo.testing.evidence import Comparison, Ratio
from contrastive_zoo.testing.mistakes import MISTAKES, Diagnosis
from contrastive_zoo.testing.report import AuditReport, Quantity, WorldReport
from contrastive_zoo.testing.worlds import Worlds
from tests import audit_trainings
from tests.audit_corpus import RIGHT, TRAININGS, WRONG, Parts
from tests.audit_trainings import audit_apart, setup
from tests.helpers import EVERY_CASE

pytestmark = [pytest.mark.audit, pytest.mark.filterwarnings("ignore")]  # trainers warn when they are imported

ROOT = Path(__file__).parent.parent
OWN, CORPUS = "tests.audit_trainings", "tests.audit_corpus"

IN_NEW_PROCESSES = (
    "a reference on one process before the group",
    "every rank draws from all samples",
    "one shard, with noise in the dataset",
    "a sampler that does not shuffle",
    "one rank has fewer batches",
    "no set_epoch",
    "a loader of each view, and a validation by an iterator",
)
"""Trainings that initialise a process group, or whose samplers are listed."""


def names(findings: list[Diagnosis]) -> list[str]:
    return [x.mistake for x in findings]


def require(found: AuditReport | WorldReport, mistake: str | None) -> None:
    """Require that the mistake is found; that a right training is accused of none and is compared in full."""
    assert mistake in names(found.findings) if mistake else not found.findings, str(found)
    assert found.ok is (mistake is None), str(found)


def audit_here(training: Callable[[], Any], *changed: tuple[Any, str, Any]) -> AuditReport:
    """Audit a training on this rank of a pool, with a process group, while attributes of the audit have other values."""
    with ExitStack() as stack:
        for target, attribute, value in [(dist, "init_process_group", lambda *_: None), *changed]:
            stack.enter_context(patch.object(target, attribute, value))
        return audit(training)


@pytest.mark.parametrize("name", [x for x in audit_trainings.TRAININGS if x not in IN_NEW_PROCESSES])
def test_plain_trainings_are_named_rightly(name: str, worlds: Worlds) -> None:
    for report in worlds.run(2, audit_here, setup(OWN, name)):  # every rank gets the report
        require(report, audit_trainings.TRAININGS[name][1])


@pytest.mark.parametrize("name", IN_NEW_PROCESSES if EVERY_CASE else IN_NEW_PROCESSES[::3])
def test_trainings_of_their_own_processes_are_named_rightly(name: str) -> None:
    require(audit_apart(OWN, name), audit_trainings.TRAININGS[name][1])


def test_a_script_that_does_not_reach_a_step_is_reported_as_that() -> None:
    report = audit_apart(OWN, "no such training")
    assert (report.ok, report.findings, report.quantities) == (None, [], [])
    assert "KeyError: 'no such training'; rank 1 raised" in report.problem
    assert "Traceback" in report.problem  # its last output
    assert AuditReport("", [report]).status == 2


def without_probe(name: str) -> tuple[Any, str, Any]:
    return diagnosis, "PROBES", tuple(x for x in PROBES if x.__name__ != name)


def without_signature(name: str) -> tuple[Any, str, Any]:
    others = {stage: {x: y for x, y in of.items() if x != name} for stage, of in mistakes.SIGNATURES.items()}
    return mistakes, "SIGNATURES", others


MISSED = {
    "never zeroed": without_probe("_of_optimizer"),
    "times W": without_probe("_of_factor"),
    "gathered first": without_probe("_of_gathering"),
    "same shard": (diagnosis, "_of_samples", lambda records, alone: ()),
    **{x: without_signature(x) for x in ("batch statistics", "local negatives", "trainer averages", "not reduced")},
    "trainer sums": without_signature("trainer sums"),
}
"""Mistakes of trainings, and the change with which an audit misses them."""
OF_OWN = {"same shard": "one shard, with noise in the loop", "trainer sums": '"mean" with a trainer that sums'}


@pytest.mark.parametrize("mistake", MISSED)
def test_an_audit_without_a_probe_misses_its_mistake(mistake: str, worlds: Worlds) -> None:
    of_corpus = (x.train for x in WRONG if x.mistake == mistake)
    training = setup(OWN, OF_OWN[mistake]) if mistake in OF_OWN else next(of_corpus)
    assert mistake in names(worlds.run(2, audit_here, training)[0].findings)
    assert mistake not in names(worlds.run(2, audit_here, training, MISSED[mistake])[0].findings)


def test_both_orders_of_views_are_tried_where_none_is_closer(worlds: Worlds) -> None:
    training = setup(OWN, "pairs with noise in an order that the loop draws, both views in one call")
    require(worlds.run(2, audit_here, training, (rerun, "_distance", lambda x, y: 1.0))[0], None)


def test_every_diagnosis_has_a_reason_and_a_fix_and_the_page_names_only_these() -> None:
    for name, mistake in MISTAKES.items():
        assert mistake.why.endswith("."), name
        assert mistake.fix.endswith("."), name
        assert all(map(pydoc.locate, re.findall(r"\bcontrastive_zoo(?:\.\w+)+", mistake.fix))), mistake.fix
    of_training = {name for name, x in MISTAKES.items() if x.of_training}
    assert {mistake for _, mistake in audit_trainings.TRAININGS.values() if mistake} <= of_training
    page = (ROOT / "docs" / "pages" / "audit-your-training.md").read_text(encoding="utf-8")
    rows = page.partition("| diagnosis | fix |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    assert rows
    assert {name for row in rows for name in row.split(" | ")[0].strip("| ").split(", ")} <= of_training


def train(loss_fn, *, add=lambda model: 0, groups=None, weight_decay=0.0, **options) -> AuditReport:
    model = nn.Linear(4, 3)
    parameters = groups(model, loss_fn) if groups else [*model.parameters(), *loss_fn.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, weight_decay=weight_decay)

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (loss_fn(model(torch.eye(4)).sigmoid(), torch.tensor([0, 0, 1, 1])) + add(model)).backward()
            optimizer.step()

    return audit(steps, steps=2, **options)


def test_a_term_besides_the_loss_and_a_loss_that_is_not_known_are_compared() -> None:
    assert train(cz.SupCon(), add=lambda model: model.weight.square().sum()).ok is True
    report = train(nn.CrossEntropyLoss())
    assert report.ok is True
    assert "the script calls no loss that the audit knows" in str(report)
    assert "no loss" not in str(train(nn.CrossEntropyLoss(), loss=nn.CrossEntropyLoss))


def test_a_temperature_that_decays_is_noted() -> None:
    loss = cz.SupCon(temperature=cz.LearnableTemperature())
    report = train(loss, weight_decay=0.2)
    assert report.ok is True
    assert "weight decay moves" in str(report)
    assert "log_scale of the loss" in str(report)
    assert "decay" not in str(train(loss))
    assert "decay" not in str(train(loss, groups=partial(cz.parameter_groups, weight_decay=0.2), weight_decay=0.2))


def test_what_raises_in_one_process_is_said() -> None:
    errors = iter([None, ZeroDivisionError("only once")])

    def once() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if error := next(errors):
            raise error
        model(torch.eye(2)).square().sum().backward()
        optimizer.step()

    report = audit(once, steps=1)
    assert report.ok is None
    assert "in one process the script raises ZeroDivisionError: only once" in str(report)


OF_DEEPSPEED = """
import torch

class DeepSpeedEngine(torch.nn.Linear):
    pass

torch.distributed.init_process_group("gloo")
DeepSpeedEngine(2, 2)(torch.eye(2))
raise AssertionError("the audit ends a process that it does not compare")
"""


def test_a_script_with_deepspeed_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    (tmp_path / "train.py").write_text(OF_DEEPSPEED)
    (report,) = audit_script([str(tmp_path / "train.py")]).worlds
    assert (report.ok, report.findings, AuditReport("", [report]).status) == (None, [], 2)
    assert report.problem.startswith("DeepSpeed keeps gradients in buffers")
    assert report.problem.endswith("instead")  # and no output of a process


def test_an_exception_of_the_training_is_raised_and_hooks_are_removed() -> None:
    call, forward = nn.Module._call_impl, torch.utils.data.DataLoader.__iter__
    with pytest.raises(ZeroDivisionError):
        audit(lambda: 1 / 0)
    assert torch.nn.utils.clip_grad_norm_.__module__ == "torch.nn.utils.clip_grad"
    assert (nn.Module._call_impl, torch.utils.data.DataLoader.__iter__) == (call, forward)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for words, call in {
        "a torch.nn.Module or its class, got <": lambda: audit(print, loss=torch.relu_),
        "at least 1, got 0": lambda: audit(print, steps=0),
        "does not exist": lambda: audit_script([str(tmp_path / "none.py")]),
        "at least 1 each, got": lambda: audit_script([__file__], world_sizes=[0]),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_the_status_says_not_compared() -> None:
    same, unknown = Quantity("value", Ratio(1.0, 1.0, 0.0), 1e-9), Quantity("value", reason="unknown")
    differs = Quantity("value", Ratio(2.0, 1.0, 1.0), 1e-9)
    expected = {0: [same], 1: [same, differs, unknown], 2: [same, unknown]}
    for status, quantities in expected.items():
        assert AuditReport("", [WorldReport(2, quantities=quantities)]).status == status
    assert AuditReport("", [WorldReport(2)]).status == 2


def test_a_small_value_in_a_low_precision_has_no_factor() -> None:
    values = torch.full((2, 1), 0.05, dtype=torch.float64)
    found = Comparison(values, values[0], None, None, tolerance=0.03)
    assert [found.has_values(x) for x in (0.5, 0.99, 1.0, 2.0)] == [False, True, True, False]


def test_the_report_in_plain_types() -> None:
    world = WorldReport(2, 3, quantities=[Quantity("value", Ratio(math.inf, 0.0, math.inf), 1e-9)])
    world.findings = [Diagnosis("times W")]
    (found,) = json.loads(json.dumps(AuditReport("train.py", [world]).as_dict(), allow_nan=False))["worlds"]
    assert (found["findings"][0]["mistake"], found["steps"], found["ok"]) == ("times W", 3, False)


OF_LIBRARIES = ("Accelerate", "Hugging Face", "Lightning", "Fabric")
USUAL = ("", "residual"), ("bf16", "dropout"), ("", "bfloat16 parameters")
DRAWN = [x for x in RIGHT if (x.precision, x.encoder) in USUAL]
"""What people write most, and what the audit got wrong."""
WITH_MISTAKE = [x for i, x in enumerate(WRONG) if EVERY_CASE or i % 3 == i // 3 % 3]
"""Each mistake once; in a search on top of all three trainings."""


def audited(parts: Parts, worlds: Worlds, processes: int) -> WorldReport:
    """Audit a training: a loop by hand in a pool, a trainer or sampler in new processes."""
    # samplers are listed there, and a loss may raise on the ranks
    if parts.trainer.startswith(OF_LIBRARIES) or parts.sampler != "sharded" or parts.mistake == "unequal parameters":
        (name,) = (name for name, x in TRAININGS.items() if x is parts)
        return audit_apart(CORPUS, name, processes=processes)
    return worlds.run(processes, audit_here, parts.train)[0].worlds[0]


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
    assert report.ok is True or is_explained, str(report)


@pytest.mark.parametrize("processes", [2, 3] if EVERY_CASE else [2])
@pytest.mark.parametrize("parts", WITH_MISTAKE, ids=str)
def test_the_mistake_of_a_wrong_training_is_said(parts: Parts, processes: int, worlds: Worlds) -> None:
    report = audited(parts, worlds, processes)
    if parts.mistake.startswith("accumulation"):
        assert any(x.startswith(parts.mistake) for x in report.notes), str(report)
    assert names(report.findings).count(parts.mistake) == (not parts.mistake.startswith("accumulation")), str(report)


record_call = recorder.Recorder._call


def with_gradient(self: recorder.Recorder, *args: Any) -> Any:
    with torch.enable_grad():
        return record_call(self, *args)


VIEWS = setup(OWN, "views that the loop draws, and samples that skip a layer")
LACKING = [  # validations are taken for the step; the precision is unknown; views are drawn again
    (Parts("DDP", validation="train mode, whole set").train, (recorder.Recorder, "_call", with_gradient)),
    (Parts("DDP", encoder="autocast inside of forward").train, (recorder, "unit_of_rounding", lambda x: 0.0)),
    (VIEWS, (rerun.Rerun, "_of_ranks", lambda self, calls, leaves, size, as_long: list(leaves))),
]


@pytest.mark.parametrize(("training", "change"), LACKING)
def test_an_audit_that_lacks_a_measurement_accuses_a_right_training(training, change, worlds: Worlds) -> None:
    assert worlds.run(2, audit_here, training)[0].ok is True
    report = worlds.run(2, audit_here, training, change)[0]
    assert report.ok is False
    assert training is not VIEWS or "dropout was switched off" in str(report)


def test_precision_is_that_of_the_values() -> None:
    x = torch.randn(20, generator=torch.Generator().manual_seed(0))
    assert unit_of_rounding(x) == unit_of_rounding(torch.ones(4)) == unit_of_rounding(torch.zeros(20)) == 0
    for half in (torch.bfloat16, torch.float16):
        assert unit_of_rounding(x.to(half)) == unit_of_rounding(x.to(half).float()) == torch.finfo(half).eps
