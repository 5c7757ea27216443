"""The audit on every set-up of the examples and of tests/audit_trainings.py, on random right steps, and its memory.

python -m benchmarks.audit                 the table set-up, diagnosis
python -m benchmarks.audit --random 1000   random right steps: every finding is a false alarm
python -m benchmarks.audit --memory        peak memory of a process, beside the plain run
python -m benchmarks.audit --online        seconds of an audited step of a running training, beside a plain one
python -m benchmarks.audit --pictures      what a terminal shows, as docs/pages/figures/audit-*.svg
"""

import argparse
import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing import console
from contrastive_zoo.testing._rank import prepared_forkserver
from contrastive_zoo.testing.auditing.launch import audit_script, environment
from contrastive_zoo.testing.auditing.running import OnlineAudit
from contrastive_zoo.testing.worlds import Worlds
from examples.run import EXAMPLES
from tests.audit_random import audit_random_training
from tests.audit_runner import audit_apart

ROOT = Path(__file__).parent.parent
PICTURES = {
    "audit-torchrun": ("mistakes", "local loss, parameters in DDP"),
    "audit-lightning": ("lightning_module", "training and validation"),
    "audit-huggingface": ("huggingface_mistakes", "compute_loss_func, accumulation 1, average_tokens=True"),
}
"""Examples and their set-ups whose audit the documentation shows."""


def trainings() -> Iterator[tuple[str, str, str, int]]:
    for example in EXAMPLES:
        with contextlib.suppress(ModuleNotFoundError):  # of an optional library
            for setup in importlib.import_module(f"examples.{example}").SETUPS:
                yield f"examples.{example}", setup.name, setup.mistake, setup.processes
    for name, (_, mistake) in importlib.import_module("tests.audit_trainings").TRAININGS.items():
        yield "tests.audit_trainings", name, mistake or "", 2


def table() -> None:
    rows = list(trainings())
    with prepared_forkserver(sorted({module for module, *_ in rows})):
        forkserver.ensure_running()
    print("| script | set-up | mistake | verdict | diagnosis |\n| --- | --- | --- | --- | --- |")
    for module, name, mistake, processes in rows:
        report = audit_apart(module, name, processes=processes)
        verdict = {True: "same", False: "not the same", None: "not known"}[report.ok]
        found = ", ".join(x.mistake for x in report.findings) or "–"
        what = mistake if module.startswith("examples.") else name if mistake else ""
        cells = (module.rpartition(".")[2], name, what or "–", verdict, found)
        print(f"| {' | '.join(cells)} |", flush=True)


def random_steps(steps: int) -> int:
    """Audit random right trainings of three steps; return the number of those that are accused or not compared."""
    counts: Counter[str] = Counter()
    with Worlds(timeout=120.0) as worlds:
        for seed in range(-(-steps // 3)):
            drawn, report = worlds.run(2 + seed % 2, audit_random_training, seed)[0]
            counts[str(report.ok)] += report.worlds[0].steps
            if report.ok is not True:
                print(f"seed {seed}: {drawn}\n{report}", flush=True)
    print(f"steps by verdict: {dict(counts)}")
    return counts["False"]


def memory() -> None:
    print("| script | parameters | plain run, MB | audited, MB | one process, MB |")
    print("| --- | --- | --- | --- | --- |")
    for width in (64, 4096, 10_000):
        script = [str(ROOT / "benchmarks" / "audit_script.py"), str(width)]
        plain = max(_plain_peaks(script))
        world = audit_script(script, steps=3).worlds[0]
        audited, repeating = world.peak_bytes
        parameters = f"{(64 * width + width * width + width * 64) / 1e6:.1f} M"
        numbers = (f"{x / 1e6:.0f}" for x in (plain, audited, repeating))
        print(f"| plain torchrun script | {' | '.join((parameters, *numbers))} |", flush=True)


def _plain_peaks(script: list[str]) -> list[int]:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # where torch has distributed
    started = [
        subprocess.Popen([sys.executable, *script], env=os.environ | environment(rank, 2, store.port))
        for rank in range(2)
    ]
    return [1024 * os.wait4(process.pid, 0)[2].ru_maxrss for process in started]


def online() -> None:
    print("| processes | parameters | plain step, ms | audited step, ms | audited / plain | added at every=100 |")
    print("| --- | --- | --- | --- | --- | --- |")
    with Worlds(timeout=600.0) as worlds:
        for world_size in (1, 2, 3):
            count, plain, audited = worlds.run(world_size, _seconds_of_steps)[0]
            cells = [f"{world_size}", f"{count / 1e6:.1f} M", f"{1e3 * plain:.0f}", f"{1e3 * audited:.0f}"]
            cells += [f"{audited / plain:.1f}", f"{(audited / plain - 1) / 100:.1%}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def _seconds_of_steps() -> tuple[int, float, float]:
    """Return a model's number of parameters, and the median seconds of plain and of audited steps of a training."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 128))
    loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
    optimizer = torch.optim.AdamW(encoder.parameters(), 1e-3)

    def step(view1: Tensor, view2: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(encoder(view1), encoder(view2)).backward()
        cz.average_gradients(encoder)
        optimizer.step()

    audited, seconds = OnlineAudit(step, every=5), list[float]()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for _ in range(26):
        views = torch.randn(2, 256, 1024)
        start = time.perf_counter()
        audited(*views)
        seconds.append(time.perf_counter() - start)
    plain = [x for i, x in enumerate(seconds) if i % 5]
    return sum(x.numel() for x in encoder.parameters()), median(plain), median(seconds[5::5])


def pictures() -> None:
    for name, (example, setup) in PICTURES.items():
        command = ["-m", "examples", example, "--setup", setup]
        terminal = Console(record=True, width=110, file=open(os.devnull, "w"))  # noqa: SIM115 - open to the end
        terminal.print(f"$ contrastive-zoo audit {' '.join(repr(x) if ' ' in x else x for x in command)}")
        start = time.monotonic()
        console.show(audit_script(command, steps=3), terminal)
        print(f"{name}: {time.monotonic() - start:.1f} s")
        picture = terminal.export_svg(title="contrastive-zoo audit")
        picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # nothing is fetched from elsewhere
        (ROOT / "docs" / "pages" / "figures" / f"{name}.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, metavar="STEPS")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--online", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    given = parser.parse_args()
    if given.random:
        sys.exit(min(random_steps(given.random), 1))
    (memory if given.memory else online if given.online else pictures if given.pictures else table)()


if __name__ == "__main__":
    main()
