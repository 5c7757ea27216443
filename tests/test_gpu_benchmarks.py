"""The benchmarks for GPUs without a GPU: errors, the process of an implementation, tables and targets."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
pytest.importorskip("triton")

from gpu_suite import measure
from gpu_suite.implementations import DENSE, EAGER, IMPLEMENTATIONS, MODULES, PUBLIC, normalised
from gpu_suite.measure import LIMIT, SCALE, Measurement, relative_error

CPU: dict[str, Any] = {"n": 48, "device": "cpu", "dtype": torch.float64}


@pytest.mark.parametrize("loss", MODULES)
def test_the_loss_as_it_is_called_gives_the_dense_value_of_normalised_rows(loss: str) -> None:
    function = IMPLEMENTATIONS[loss][PUBLIC].construct(SCALE)
    assert relative_error(loss, function, 256, normalizes=True, **CPU) < 1e-6
    assert relative_error(loss, function, 256, **CPU) > LIMIT, "the gradient of the norm"
    assert relative_error(loss, normalised(DENSE[loss]), 64, normalizes=True, n=48, device="cpu") < LIMIT


def other_positive(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return DENSE["CLIP"](a, b.roll(1, 0), scale)


WRONG_CALLS = {
    "one direction": ("CLIP", DENSE["InfoNCE"]),
    "both directions": ("InfoNCE", DENSE["CLIP"]),
    "another positive": ("CLIP", other_positive),
    "a sum": ("CLIP", lambda a, b, scale: DENSE["CLIP"](a, b, scale) * len(a)),
    "the scale as a temperature": ("CLIP", lambda a, b, scale: DENSE["CLIP"](a, b, 1 / scale)),
    "rows normalised twice": ("CLIP", normalised(DENSE["CLIP"])),
    "a constant tower": ("CLIP", lambda a, b, scale: DENSE["CLIP"](a, b.detach(), scale)),
    "nothing learns": ("CLIP", lambda a, b, scale: DENSE["CLIP"](a, b, scale).detach() + 0 * a.sum()),
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_a_wrong_call_is_noticed_before_it_is_timed(what: str) -> None:
    loss, function = WRONG_CALLS[what]
    assert not relative_error(loss, function, 256, **CPU) <= LIMIT


@pytest.mark.parametrize("loss", DENSE)
def test_the_limit_is_above_the_rounding_of_bfloat16(loss: str) -> None:
    assert 1e-4 < relative_error(loss, DENSE[loss], 64, n=48, device="cpu") < LIMIT / 2


def test_a_peer_without_a_time_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(loss: str, name: str) -> Measurement:
        return next(measure.measure(loss, name, [(8, 256)]))

    def failing(_: Any) -> float:
        raise ValueError("a | b\nmore")

    monkeypatch.setitem(sys.modules, "memeff", None)
    assert "memeff" in first("CLIP", "memeff").reason
    for error, reason in ((0.5, "relative error 0.5, which is more than 0.02"), (float("nan"), "relative error nan")):
        monkeypatch.setattr(measure, "relative_error", lambda *_, error=error, **__: error)
        assert reason in first("CLIP", EAGER).reason
    monkeypatch.setattr(measure, "relative_error", lambda *_, **__: 0.01)
    monkeypatch.setattr(measure, "steps", lambda *_: int)
    monkeypatch.setattr(measure, "peak_mb", lambda _: 2.0)
    monkeypatch.setattr(measure, "median_ms", lambda _: 3.0)
    assert first("CLIP", EAGER) == Measurement("CLIP", EAGER, 8, 256, 3.0, 2.0, 0.01)
    monkeypatch.setattr(measure, "median_ms", failing)
    assert first("CLIP", EAGER) == Measurement("CLIP", EAGER, 8, 256, error=0.01, reason="ValueError: a / b")
