"""Processes of the command line: none outlives it, however it ends; what cannot be audited is refused in words."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from contrastive_zoo.testing.auditing import launch, session
from contrastive_zoo.testing.auditing.diagnosis import assemble
from contrastive_zoo.testing.auditing.launch import OF_OWN_PROCESSES, WITHOUT_GPU, _refusing, audit_script, environment
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.report import AuditReport
from tests.helpers import drawn
from tests.interpreter import torchrun

ROOT = Path(__file__).parent.parent.parent
COMMAND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have the suite ignore it

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.optim" and "INTERRUPTED" in os.environ:
            os.kill(os.getpid(), signal.SIGINT)
            print("still imports", file=sys.stderr)  # an import that is called from C swallows the interrupt

sys.meta_path.insert(0, Interrupt())
from contrastive_zoo.__main__ import main
main()
"""
TRAINING = """
import os, pathlib, subprocess, sys, torch
torch.distributed.init_process_group("gloo")
size = os.environ["WORLD_SIZE"]
subprocess.Popen(["sleep", "1000"])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.eye(2)).square().sum().backward()
    pathlib.Path(f"begun{size}").touch()
    while size == sys.argv[1]:
        torch.distributed.barrier()
    optimizer.step()
"""
# Files of a moment at which an audit is interrupted, and the number of processes of the run that does not end
MOMENTS = {
    "the folder is there": ("tmp/contrastive-zoo-*", "2"),
    "a rank begins": ("tmp/contrastive-zoo-*/rank*.stack", "2"),
    "the script trains": ("begun2", "2"),
    "the rerun starts": ("tmp/contrastive-zoo-*/one0.log", "1"),
    "the rerun trains": ("begun1", "1"),
}
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def wait(condition: Callable[[], object], seconds: float = 240.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def started(folder: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, cwd=folder,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def processes_with(mark: str) -> list[psutil.Process]:
    """Return the processes that have inherited a variable of the environment."""
    running = psutil.process_iter(["environ"], ad_value={})  # empty for other users' processes and for ended ones
    return [x for x in running if x.info["environ"].get("AUDIT_MARK") == mark]


@pytest.mark.audit
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize(("moment", "number"), drawn(MOMENTS, SIGNALS, one_in=3))
def test_an_interrupted_audit_leaves_no_process_and_no_folder(moment, number, tmp_path: Path) -> None:
    pattern, size = MOMENTS[moment]
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "tmp").mkdir()
    mark = uuid.uuid4().hex
    with started(tmp_path, "audit", "train.py", size, AUDIT_MARK=mark, TMPDIR=str(tmp_path / "tmp")) as audit:
        assert wait(lambda: any(tmp_path.glob(pattern))), moment
        audit.send_signal(number)
        _, error = audit.communicate()
    wait(lambda: not processes_with(mark), 60)
    assert processes_with(mark) == []
    assert list((tmp_path / "tmp").glob("contrastive-zoo-*")) == []
    assert audit.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in error


def test_a_process_that_has_ended_is_not_killed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another program by then."""
    running = [session._start(tmp_path / "rank0", [sys.executable, "-IS", "-c", "raise SystemExit(3)"], {})]
    running[0][1].join()
    assert (tmp_path / "rank0.ended").read_text() == "3"
    killed: list[Any] = []
    monkeypatch.setattr(os, "killpg", lambda *arguments: killed.append(arguments))
    session._end(running)
    assert killed == running == []


def test_a_rank_that_is_killed_is_said_with_its_signal(tmp_path: Path) -> None:
    def start(processes: list[Any]) -> list[int]:
        for name, *_ in processes:
            (tmp_path / f"{name}.ended").write_text("-9" if name == "rank0" else "3")
        return []

    def run(names: list[str]) -> str:
        return launch._run(tmp_path, start, ["3", "", "train.py"], 60.0, 1, names)

    report = launch.judged(tmp_path, 2, run)
    assert report.problem == "no record: rank 0 ended by signal 9, rank 1 ended with exit status 3."


@pytest.mark.audit
def test_an_interrupt_of_the_import_of_torch_ends_the_command(tmp_path: Path) -> None:
    with started(tmp_path, "check", "nt-xent", INTERRUPTED="yes") as command:
        _, error = command.communicate()
    assert command.returncode == 130, error
    assert "still imports" in error
    assert "Traceback" not in error


@pytest.mark.audit
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the fork server is found in /proc")
def test_an_interrupt_while_ranks_start_prints_no_traceback(tmp_path: Path) -> None:
    def imports_in_fork_server(pid: int) -> bool:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        servers = [x for x in children if "forkserver" in Path(f"/proc/{x}/cmdline").read_text()]
        return any("libtorch" in Path(f"/proc/{x}/maps").read_text() for x in servers)

    with started(tmp_path, "check", "nt-xent") as command:
        while command.poll() is None and not imports_in_fork_server(command.pid):
            time.sleep(0.01)
        os.killpg(command.pid, signal.SIGINT)  # as the terminal does
        _, error = command.communicate()
    assert command.returncode == 130, error
    assert "Traceback" not in error


WAITING = """
import os, pathlib, sys, threading, torch, torch.distributed as dist
dist.init_process_group("gloo")
main = threading.get_ident()

def watch():
    names = set()
    while "all_reduce" not in names:
        frame, names = sys._current_frames()[main], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
    pathlib.Path("waits0").touch()

if dist.get_rank() == 0:
    threading.Thread(target=watch).start()
    dist.all_reduce(torch.ones(1))
pathlib.Path("waits1").touch()
while True:
    pass
"""


@pytest.mark.audit
def test_a_timeout_says_the_seconds_and_where_each_rank_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_they_wait(folder: Path, names: Sequence[str], has_ended: Callable[[int], bool], timeout: float) -> bool:
        assert wait(lambda: all((tmp_path / f"waits{rank}").exists() for rank in range(2)))
        return False

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "wait_for_records", until_they_wait)
    (tmp_path / "train.py").write_text(WAITING)
    report = audit_script(["train.py"], timeout=7.0)
    (world,) = report.worlds
    assert report.status == 2
    words = "no record within 7 s. rank 0 waits in all_reduce (train.py:17 in <module>); rank 1 is at "
    assert world.problem.startswith(words)
    assert "Rank 1 never entered all_reduce." in world.problem


def train() -> None:
    """Stand for a training of a process that a script starts."""


@pytest.mark.audit
@pytest.mark.parametrize("source", ["train()", 'if __name__ == "__main__":\n    train()'])
def test_a_script_that_starts_its_own_processes_is_refused(source: str, tmp_path: Path, monkeypatch: Any) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    Path(main.__file__).write_text(source)
    monkeypatch.setitem(sys.modules, "__main__", main)
    is_guarded = "__name__" in source
    with _refusing(sys.exit):
        with pytest.raises(SystemExit) as refused:
            torch.multiprocessing.spawn(train, nprocs=2)
        assert str(refused.value) == OF_OWN_PROCESSES
        monkeypatch.setattr(train, "__module__", "__main__")
        with pytest.raises(SystemExit):  # as PyTorch's tutorial does
            multiprocessing.get_context("fork").Process(target=train).start()
        started: list[object] = []
        context = multiprocessing.get_context("spawn")
        monkeypatch.setattr(context.Process, "_Popen", lambda self, process: started.append(process))
        helper = context.Process(target=math.sqrt, args=(1,), daemon=True)
        if not is_guarded:
            with pytest.raises(SystemExit):
                helper.start()
    assert started == []


def test_nccl_without_a_gpu_is_one_sentence() -> None:
    with _refusing(sys.exit), pytest.raises(SystemExit) as refused:
        dist.init_process_group("nccl")
    assert str(refused.value) == WITHOUT_GPU
    report = assemble([Record(problem=WITHOUT_GPU)] * 2, lambda setting: Record())
    assert (report.problem, report.ok, report.findings) == (WITHOUT_GPU, None, [])


@pytest.mark.parametrize("record", [Record(), Record(initialized=True)])
def test_a_script_that_trains_nothing_is_not_accused(record: Record) -> None:
    report = assemble([record, record], lambda setting: Record())
    found = AuditReport("train.py", [report])
    assert (found.status, report.findings) == (2, [])
    assert "nothing was compared" in found.verdict
    steps_alone = assemble([Record(skipped=3)] * 2, lambda setting: Record())
    assert [x.mistake for x in steps_alone.findings] == ["no process group"]


def test_ranks_of_several_nodes_have_a_number_in_their_node() -> None:
    names = "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    variables = [environment(rank, 4, 1, nodes=2) for rank in range(4)]
    assert [[int(x[name]) for name in names] for x in variables] == [[r, r % 2, r // 2, 4, 2] for r in range(4)]
    with pytest.raises(ValueError, match="nodes divides every number of processes"):
        audit_script([__file__], world_sizes=[2, 3], nodes=2)


# The loss's backward pass leaves a Python object to the thread of the all-reduce, which never gets the interpreter's lock.
ENDS_AT_ONCE = """
import sys, torch, torch.distributed as dist
import contrastive_zoo as cz
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
sys.setswitchinterval(1e6)
cz.SupCon()(model(torch.ones(4, 2)), torch.tensor([0, 0, 1, 1])).backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["", pytest.param("sys.exit()", marks=pytest.mark.audit)])
def test_a_script_whose_model_dies_with_its_group_ends(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_AT_ONCE + end)
    assert torchrun(2, str(script), timeout=120).returncode == 0
