"""The benchmarks for GPUs without a GPU: errors, the process of an implementation, tables and targets."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
pytest.importorskip("triton")

import gpu
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


def test_a_step_gives_gradients_of_rotated_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "ROTATED", 3 * 4 * 8 * 4)
    seen: list[Tensor] = []
    step = measure.steps("SigLIP", lambda *inputs: seen.append(inputs[0]) or DENSE["SigLIP"](*inputs), 8, 4)
    found = [step() for _ in range(4)]
    assert len(found[0]) == 5  # value, two towers, scale and bias
    assert all(x is not None for x in found[0])
    assert len({id(x) for x in seen}) == 3
    assert seen[0] is seen[3]
    measure.steps("NT-Xent", lambda a, b, scale: seen.append(a) or DENSE["NT-Xent"](a, b, scale), 8, 4)()
    assert seen[-1].shape == (4, 4)  # rows of NT-Xent are those of both views
    assert seen[-1].dtype == torch.bfloat16


def program(*lines: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", "\n".join(lines)


def test_a_process_that_dies_or_hangs_gives_reasons_and_what_it_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, done = [(8, 4), (16, 4)], Measurement("CLIP", "peer", 8, 4, 1.0, 2.0, 0.01)
    lines = (
        "import os, sys, time",
        "print('noise')",
        f"print({measure.MARK + json.dumps(asdict(done))!r}, flush=True)",
        "print('first\\nan illegal | access', file=sys.stderr, flush=True)",
    )
    died = measure.measured("CLIP", "peer", sizes, command=program(*lines, "os._exit(3)"))
    assert died[0] == done
    assert died[1].reason == "the process ended with status 3: an illegal / access"
    os.mkfifo(waits := tmp_path / "waits")
    late = f"open({str(waits)!r}, 'w').close(); import signal; signal.pause()"
    waiting = "import subprocess", f"subprocess.run([sys.executable, '-S', '-c', {late!r}])"  # which has the pipes, too
    communicate = subprocess.Popen.communicate

    def late_in_no_time(process: Any, timeout: float | None = None) -> Any:
        if timeout is None:
            return communicate(process)
        waits.read_text()  # until it waits
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", late_in_no_time)
    hung = measure.measured("CLIP", "peer", sizes, command=program(*lines, *waiting), seconds=1.0)
    assert hung[0] == done
    assert hung[1] == Measurement("CLIP", "peer", 16, 4, reason="not finished within 1 s")


def test_the_tables_have_each_implementation_beside_ours() -> None:
    found = []
    for loss, implementations in IMPLEMENTATIONS.items():
        for name, implementation in implementations.items():
            ms = {"ours": 30.0, "dense": 45.0, "peer": 60.0}[implementation.kind]
            sizes = gpu.sizes_of(loss, name, quick=False)
            if name == "memeff":
                found += [Measurement(loss, name, *x, reason="out of memory") for x in sizes]
            else:
                found += [Measurement(loss, name, *x, ms, 900.0, 0.004) for x in sizes]
    ceilings = dict.fromkeys(IMPLEMENTATIONS, gpu.Ceilings(*(1e12 * x for x in gpu.H100)))
    kernels, table, notes = (part.split("\n") for part in gpu.page("a GPU", found, ceilings).split("\n\n")[2:])
    assert "| CLIP | 65,536 | 768 | ours | 30 | 1.00 | 900 | 4.0e-03 |" in table
    assert "| CLIP | 65,536 | 768 | Inf-CL | 60 | 2.00 | 900 | 4.0e-03 |" in table
    assert "| CLIP | 65,536 | 768 | memeff | out of memory | – | – | – |" in table
    assert "| SigLIP | 65,536 | 768 | 30 | 26.9 | 90% | 900 |" in kernels
    assert all(row.count("|") == head[0].count("|") for head in (table, kernels) for row in head)
    assert any("no gradient of the scale" in line for line in notes)
