"""Start the processes of an audited script, wait for them, and return the report.

A process is a rank, or the training in one process: ``python -m contrastive_zoo.testing.auditing.launch FOLDER NAME STEPS
LOSSES script.py [arguments]``.
"""

import os
import runpy
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from contrastive_zoo.testing.auditing.assemble import assemble
from contrastive_zoo.testing.auditing.diagnosis import listed
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.rerun import Rerun, Setting
from contrastive_zoo.testing.report import AuditReport, WorldReport

WAIT, GRACE = 120.0, 2.0
"""Seconds that a rank waits for the others: after the last step, and after its script has ended."""

TIMEOUT = 300.0
"""Seconds of a run in one process, under torchrun."""

LOG_LINES = 12
"""Lines of a rank's output that are shown if there is no report."""


def audit_script(
    command: Sequence[str],
    *,
    world_sizes: Sequence[int] = (2,),
    steps: int = 3,
    losses: Sequence[str] = (),
    timeout: float = 300.0,
    on_run: Callable[[int], object] = lambda count: None,
) -> AuditReport:
    """Run a script on several local processes and compare its first steps with one process.

    The command is the script and its arguments, or ``-m``, a module and its arguments. Losses that are not found by
    themselves are ``"module:Class"`` each. The timeout in seconds is that of each run. ``on_run`` gets how many runs have
    ended, of two for each number of processes: theirs, and those in one process.
    """
    _require_valid(command, world_sizes, steps)
    report = AuditReport(" ".join(command))
    for index, size in enumerate(world_sizes):
        report.worlds.append(_audit(command, size, steps, losses, timeout, partial(on_run, 2 * index + 1)))
        on_run(2 * index + 2)
    return report


def _require_valid(command: Sequence[str], world_sizes: Sequence[int], steps: int) -> None:
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"world_sizes are numbers of processes, at least 1 each, got {list(world_sizes)}.")
    if steps < 1:
        raise ValueError(f"steps is the number of steps to compare, at least 1, got {steps}.")
    if not command or (command[0] != "-m" and not Path(command[0]).is_file()):
        raise ValueError(f"the script {' '.join(command[:1]) or '(none)'} does not exist.")


def _audit(
    command: Sequence[str],
    world_size: int,
    steps: int,
    losses: Sequence[str],
    timeout: float,
    on_recorded: Callable[[], object],
) -> WorldReport:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="contrastive-zoo-audit-") as name:
        folder = Path(name)
        arguments = [str(steps), ",".join(losses), *command]
        _run(folder, [rank_name(rank) for rank in range(world_size)], arguments, timeout)
        on_recorded()
        report = judged(folder, world_size, lambda name: _run(folder, [name], arguments, timeout))
    report.seconds = time.monotonic() - start
    return report


def _run(folder: Path, names: Sequence[str], arguments: Sequence[str], timeout: float) -> None:
    """Run a script in processes of these names, one for each rank, until all have written their records or one ends."""
    store, processes = local_store(), []
    for rank, name in enumerate(names):
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "contrastive_zoo.testing.auditing.launch", str(folder), name, *arguments],
                    env=environment(rank, len(names), store.port, is_rank=name.startswith("rank")),
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )
    end = time.monotonic() + timeout
    records = [folder / f"{name}.record" for name in names]
    try:
        while time.monotonic() < end and any(x.poll() is None for x in processes):
            ended = [x.poll() is not None for x in processes]
            if any(x and not record.exists() for x, record in zip(ended, records, strict=True)):
                time.sleep(1.0)  # another rank died without a record, and others may just be about to fail as well
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rank_name(rank: int) -> str:
    """Return the name of the files of a rank."""
    return f"rank{rank}"


def judged(folder: Path, world_size: int, run: Callable[[str], None]) -> WorldReport:
    """Return the report of what all ranks recorded in a folder; ``run`` runs the script in one process of a name."""
    paths = [folder / f"{rank_name(rank)}.record" for rank in range(world_size)]
    records: list[Record] = [read(x) for x in paths if x.exists()]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]

    def run_again(setting: Setting) -> Record:
        name = f"one{len(list(folder.glob('one*.setting')))}"
        _write(setting, folder / f"{name}.setting")
        run(name)
        path = folder / f"{name}.record"
        if path.exists():
            result: Record = read(path)
            return result
        return Record(error=f"an error, or ends, without a record. Its last output:\n{_log(folder, name)}")

    if missing or not all(x.steps for x in records):
        failed = next((x.rank for x in records if x.error), missing[0] if missing else 0)
        report = assemble(records, None) if not missing else WorldReport(world_size)
        waiting = f"ranks {missing} did not end; " if missing else ""
        report.problem = f"{waiting}{report.problem}. Last output of rank {failed}:\n{_log(folder, rank_name(failed))}"
        return report
    return assemble(records, run_again)


def _log(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:]) if path.exists() else ""


def local_store() -> dist.TCPStore:
    """Return a store that listens on this machine only: by itself it would on all addresses."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it where it has distributed
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def own_folder(path: Path) -> Path:
    """Create a folder that only this user can read, or take the one that another rank has created.

    Its files are unpickled, so a folder of somebody else is refused.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{path} exists and others can write to it. Remove it, and start the audit again.")
    return path


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def audit_under_torchrun(
    command: Sequence[str], show: Callable[[AuditReport], int], *, steps: int = 3, losses: Sequence[str] = ()
) -> NoReturn:
    """Audit a script on the processes of one machine that torchrun has started; this process is one of them.

    Rank 0 calls ``show`` with the report and ends with the exit status that it returns.
    """
    _require_valid(command, [1], steps)
    run = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}"  # the parent of all ranks of a machine
    folder = own_folder(Path(tempfile.gettempdir()) / f"contrastive-zoo-audit-{run}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    arguments = [str(steps), ",".join(losses), *command]

    def finish() -> int:
        report = judged(folder, world_size, lambda name: _run(folder, [name], arguments, TIMEOUT))
        shutil.rmtree(folder, ignore_errors=True)
        return show(AuditReport(" ".join(command), [report]))

    run_script(command, Process(folder, rank_name(rank), steps, losses, world_size, finish if rank == 0 else lambda: 0))


def environment(rank: int, world_size: int, port: int, is_rank: bool = True) -> dict[str, str]:
    """Return the environment of one rank of this machine, with the variables that torchrun sets.

    The store listens already, so that no port is chosen before it is used. One process that runs a training again does not
    say that torchrun has started it: trainers would compare its number of processes with the one that they are given.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "contrastive-zoo-audit",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
    }
    return {key: x for key, x in (os.environ | variables).items() if is_rank or key != "TORCHELASTIC_RUN_ID"}


# --- a process ---------------------------------------------------------------------------------------------------------


class Process:
    """Run a script in this process, record its steps into a folder, and end the process.

    A process with a setting in the folder gets the inputs of all ranks from there. ``on_finish`` returns the exit status,
    once all ranks have written their records.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        steps: int,
        losses: Sequence[str] = (),
        world_size: int = 1,
        on_finish: Callable[[], int] = lambda: 0,
    ) -> None:
        self.folder, self.name, self.world_size, self.on_finish = folder, name, world_size, on_finish
        rerun = None
        if (folder / f"{name}.setting").exists():
            inputs = [read(x) for x in sorted(folder.glob("rank*.inputs"), key=lambda x: int(x.stem[4:]))]
            rerun = Rerun(inputs, read(folder / f"{name}.setting"))
        self.recorder = Recorder(
            losses, steps, on_finish=lambda: self.finish(WAIT), needs_group=world_size > 1, rerun=rerun
        )

    def run(self, script: Callable[[], object]) -> NoReturn:
        """Run a script. Its later steps, checkpoints and evaluations do not take place."""
        self.recorder.start()
        error = ""
        try:
            script()
        except SystemExit as exit_:
            error = f"SystemExit: {exit_.code}" if exit_.code else ""
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            traceback.print_exc()
        self.finish(GRACE, error)

    def finish(self, wait: float, error: str = "") -> NoReturn:
        """Write what was recorded; end the process without the script's clean-up."""
        status = 0
        try:
            record = self.recorder.stop()
            record.rank, record.error = int(os.environ["RANK"]), error
            if self.recorder.rerun is None:
                record.samplers = listed(self.recorder.loaders)
                _write(self.recorder.inputs, self.folder / f"{self.name}.inputs")
            _write(record, self.folder / f"{self.name}.record")
            # a rank must not end before the others, which may need it
            end = time.monotonic() + wait
            while len(list(self.folder.glob("rank*.record"))) < self.world_size and time.monotonic() < end:
                time.sleep(0.02)
            status = self.on_finish()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _write(content: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    temporary.rename(path)


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False, mmap=True)


def run_script(command: Sequence[str], process: Process) -> NoReturn:
    """Run ``script.py`` or ``-m module`` with its arguments as ``python`` does."""
    is_module = command[0] == "-m"
    script, *arguments = command[1:] if is_module else command
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    if is_module:
        process.run(lambda: runpy.run_module(script, run_name="__main__", alter_sys=True))
    process.run(lambda: runpy.run_path(script, run_name="__main__"))


if __name__ == "__main__":
    folder, name, steps, losses, *command = sys.argv[1:]
    further = [x for x in losses.split(",") if x]
    run_script(command, Process(Path(folder), name, int(steps), further, int(os.environ["WORLD_SIZE"])))
