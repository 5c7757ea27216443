"""Start the processes of an audited script, wait for them, and return the report.

A process is one rank: ``python -m contrastive_zoo.testing.auditing.launch FOLDER STEPS LOSSES script.py [arguments]``.
"""

import importlib
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
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from contrastive_zoo.testing.auditing.assemble import assemble
from contrastive_zoo.testing.auditing.diagnosis import listed
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.report import AuditReport, WorldReport

WAIT, GRACE = 120.0, 2.0
"""Seconds that a rank waits for the others: after the last step, and after its script has ended."""

LOG_LINES = 12
"""Lines of a rank's output that are shown if there is no report."""


def audit_script(
    command: Sequence[str],
    *,
    world_sizes: Sequence[int] = (2,),
    steps: int = 3,
    losses: Sequence[str] = (),
    timeout: float = 300.0,
) -> AuditReport:
    """Run a script on several local processes and compare its first steps with one process.

    The command is the script and its arguments, or ``-m``, a module and its arguments. Losses that are not found by
    themselves are ``"module:Class"`` each. The timeout in seconds is that of each number of processes.
    """
    _require_valid(command, world_sizes, steps)
    for loss in losses:
        named_loss(loss)
    name = " ".join(command)
    report = AuditReport(name, [_audit(command, size, steps, losses, timeout) for size in world_sizes])
    without_weights(report.worlds)
    return report


def without_weights(worlds: Sequence[WorldReport]) -> None:
    """Drop findings of a factor that is equal for different numbers of processes: it is a weight."""
    if len(worlds) < 2 or len({tuple(round(y, 4) for y in x.factors) for x in worlds}) > 1:
        return
    for world in worlds:
        kept = [x for x in world.findings if x.mistake not in ("times W", "divided by W")]
        if len(kept) < len(world.findings):
            world.notes.append("the loss has the same factor for all numbers of processes: a weight, not a mistake")
        world.findings = kept


def _require_valid(command: Sequence[str], world_sizes: Sequence[int], steps: int) -> None:
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"world_sizes are numbers of processes, at least 1 each, got {list(world_sizes)}.")
    if steps < 1:
        raise ValueError(f"steps is the number of steps to compare, at least 1, got {steps}.")
    if not command or (command[0] != "-m" and not Path(command[0]).is_file()):
        raise ValueError(f"the script {' '.join(command[:1]) or '(none)'} does not exist.")


def _audit(command: Sequence[str], world_size: int, steps: int, losses: Sequence[str], timeout: float) -> WorldReport:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="contrastive-zoo-audit-") as name:
        folder = Path(name)
        store = local_store()
        arguments = [str(folder), str(steps), ",".join(losses), *command]
        processes = []
        for rank in range(world_size):
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "contrastive_zoo.testing.auditing.launch", *arguments],
                        env=os.environ | environment(rank, world_size, store.port),
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                    )
                )
        records = [folder / f"rank{rank}.record" for rank in range(world_size)]
        try:
            while time.monotonic() < start + timeout and processes[0].poll() is None:
                if any(
                    x.poll() is not None and not record.exists() for x, record in zip(processes, records, strict=True)
                ):
                    time.sleep(1.0)  # another rank died without a record, and rank 0 may just be about to fail as well
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        report = collected(folder, world_size)
    report.seconds = time.monotonic() - start
    return report


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

    def finish(report: WorldReport) -> int:
        shutil.rmtree(folder, ignore_errors=True)
        return show(AuditReport(" ".join(command), [report]))

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_script(command, Rank(folder, rank, world_size, steps, [named_loss(x) for x in losses], finish))


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets, for one rank of this machine.

    The store listens already, so that no port is chosen before it is used.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
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


def collected(folder: Path, world_size: int) -> WorldReport:
    """Return the report of rank 0; without it, one of what the ranks recorded."""
    if (folder / "report").exists():
        report: WorldReport = read(folder / "report")
        return report
    paths = [folder / f"rank{rank}.record" for rank in range(world_size)]
    records = [read(x) for x in paths if x.exists()]
    report = assemble(records, None) if len(records) == world_size else WorldReport(world_size)
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    tails = [path.read_text(errors="replace").splitlines()[-LOG_LINES:] for path in logs if path.exists()]
    shown = "\n".join(tails[missing[0] if missing and len(tails) > missing[0] else 0]) if tails else ""
    waiting = f"ranks {missing} did not end; " if missing else ""
    report.problem = f"{waiting}no report. {report.problem} Last output:\n{shown}"
    return report


# --- a rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """Run a script on this rank, record its steps into a folder, and end the process.

    Rank 0 waits for the records of all ranks, repeats the steps and writes the report. ``on_report`` then returns the exit
    status of the process.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        steps: int,
        losses: Sequence[Any] = (),
        on_report: Callable[[WorldReport], int] = lambda report: 0,
    ) -> None:
        self.folder, self.rank, self.world_size, self.on_report = folder, rank, world_size, on_report
        self.recorder = Recorder(losses, steps, on_finish=lambda: self.finish(WAIT), needs_group=world_size > 1)

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
        """Write the record, and on rank 0 the report; end the process without the script's clean-up."""
        status = 0
        try:
            record = self.recorder.stop()
            record.rank, record.error = self.rank, error
            record.samplers = listed(self.recorder.loaders)
            _write(record, self.folder / f"rank{self.rank}.record")
            paths = [self.folder / f"rank{rank}.record" for rank in range(self.world_size)]
            end = time.monotonic() + (wait if self.rank else WAIT)
            # a rank other than 0 must not end before the others, which may need it
            while not all(x.exists() for x in paths) and time.monotonic() < end:
                time.sleep(0.02)
            if self.rank == 0 and all(x.exists() for x in paths):
                report = assemble([read(x) for x in paths], self.recorder)
                _write(report, self.folder / "report")
                status = self.on_report(report)
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
    return torch.load(path, weights_only=False)


def named_loss(name: str) -> Any:
    """Return the loss or the class that ``module:name`` denotes; raise a ValueError if there is none."""
    module, separator, attribute = name.partition(":")
    try:
        result: Any = importlib.import_module(module)
        for part in attribute.split("."):
            result = getattr(result, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--loss takes module:Class or module:object, got {name!r}: {error}.") from error
    if not separator or not isinstance(result, (torch.nn.Module, type)):
        raise ValueError(f"--loss takes module:Class or module:object, a torch.nn.Module, got {name!r}.")
    return result


def run_script(command: Sequence[str], rank: Rank) -> NoReturn:
    """Run ``script.py`` or ``-m module`` with its arguments as ``python`` does."""
    is_module = command[0] == "-m"
    script, *arguments = command[1:] if is_module else command
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    if is_module:
        rank.run(lambda: runpy.run_module(script, run_name="__main__", alter_sys=True))
    rank.run(lambda: runpy.run_path(script, run_name="__main__"))


if __name__ == "__main__":
    folder, steps, losses, *command = sys.argv[1:]
    further = [named_loss(x) for x in losses.split(",") if x]
    run_script(command, Rank(Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(steps), further))
