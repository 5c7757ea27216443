"""Start the processes of an audited script (each runs this module), wait for them, and return the report."""

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import this_process
from contrastive_zoo.testing.auditing.diagnosis import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record, listed
from contrastive_zoo.testing.auditing.rerun import Rerun, Setting
from contrastive_zoo.testing.report import AuditReport, WorldReport, require_world_sizes

# Seconds after which a rank ends that the others may need: after the last step, and after its script has ended
WAIT, GRACE = 120.0, 2.0
LOG_LINES = 12  # lines of a rank's output that are shown if there is no report


def audit_script(
    command: Sequence[str],
    *,
    world_sizes: Sequence[int] = (2,),
    steps: int = 3,
    losses: Sequence[str] = (),
    timeout: float = 300.0,
    on_run: Callable[[int], object] = lambda count: None,
) -> AuditReport:
    """Run a script, or ``-m`` and a module, on local processes, and compare its first steps with one process."""
    require_world_sizes(world_sizes)
    if steps < 1:
        raise ValueError(f"steps is the number of steps to compare, at least 1, got {steps}.")
    if not command or (command[0] != "-m" and not Path(command[0]).is_file()):
        raise ValueError(f"the script {' '.join(command[:1]) or '(none)'} does not exist.")
    report = AuditReport(" ".join(command))
    arguments = [str(steps), ",".join(losses), *command]
    for index, size in enumerate(world_sizes):
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="contrastive-zoo-audit-") as name:
            folder = Path(name)
            run = partial(_run, folder, arguments, timeout)
            run([f"rank{rank}" for rank in range(size)])
            on_run(2 * index + 1)
            world = judged(folder, size, run)
        world.seconds = time.monotonic() - start
        report.worlds.append(world)
        on_run(2 * index + 2)
    return report


def _run(folder: Path, arguments: Sequence[str], timeout: float, names: Sequence[str]) -> None:
    """Run a script in processes of these names, one for each rank, until they have recorded its steps."""
    store, processes = local_store(), []
    for rank, name in enumerate(names):
        with (folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "contrastive_zoo.testing.auditing.launch", str(folder), name, *arguments]
            variables = environment(rank, len(names), store.port, is_rank=name.startswith("rank"))
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            processes.append(process)
    try:
        wait_for_records(folder, names, lambda index: processes[index].poll() is not None, timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for_records(folder: Path, names: Sequence[str], has_ended: Callable[[int], bool], timeout: float) -> None:
    """Wait until processes of these names have written their records, or one has ended without."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        # of this moment before it is looked for: a process may write its record and end in between
        ended = [has_ended(index) for index in range(len(names))]
        missing = [not (folder / f"{name}.record").exists() for name in names]
        if not any(missing):
            return
        if any(x and y for x, y in zip(ended, missing, strict=True)):
            time.sleep(1.0)  # others may just be about to fail as well
            return
        time.sleep(0.02)


def judged(folder: Path, world_size: int, run: Callable[[list[str]], object]) -> WorldReport:
    """Return the report of what all ranks recorded in a folder; ``run`` runs the script in processes of these names."""
    records = _records(folder)
    missing = sorted({*range(world_size)} - {x.rank for x in records})

    def run_again(setting: Setting) -> Record:
        name = f"one{len(list(folder.glob('one*.setting')))}"
        _write(setting, folder / f"{name}.setting")
        run([name])
        path = folder / f"{name}.record"
        if path.exists():
            return _read(path)
        return Record(error=f"an error, or ends, without a record. Its last output:\n{_log(folder, name)}")

    failed = WorldReport(world_size, problem=f"ranks {missing} did not end")
    report = failed if missing else assemble(records, run_again)
    if missing or not all(x.steps or x.problem for x in records):
        rank = next((x.rank for x in records if x.error), missing[0] if missing else 0)
        report.problem += f". Last output of rank {rank}:\n{_log(folder, f'rank{rank}')}"
    return report


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


def torchrun_processes() -> int | None:
    """Return how many processes torchrun has started on this machine, 0 on all but the first; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or "LOCAL_RANK" not in os.environ:
        return None
    return int(os.environ["LOCAL_WORLD_SIZE"]) if os.environ["LOCAL_RANK"] == "0" else 0


def environment(rank: int, world_size: int, port: int, is_rank: bool = True) -> dict[str, str]:
    """Return the environment of one rank of this machine, with the variables that torchrun sets."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback} | dict(os.environ)
    variables |= dict.fromkeys(["RANK", "LOCAL_RANK"], str(rank)) | {"GROUP_RANK": "0"}
    variables |= dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(world_size))
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "contrastive-zoo-audit"}
    variables |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # trainers would compare the size of torchrun's world with the one that a rerun in one process is given
    return {key: x for key, x in variables.items() if is_rank or key != "TORCHELASTIC_RUN_ID"}


def record_script(folder: Path, name: str, steps: int, losses: Sequence[str], script: Callable[[], object]) -> NoReturn:
    """Run a script, record its first steps into a folder, and end the process: no later step, checkpoint or clean-up."""
    is_of_several, setting = int(os.environ["WORLD_SIZE"]) > 1, folder / f"{name}.setting"
    rerun = Rerun(_records(folder), _read(setting)) if setting.exists() else None

    def finish(wait: float, error: str = "") -> NoReturn:
        try:
            record = recorder.stop()
            record.rank, record.error = int(os.environ["RANK"]), error
            if rerun is None:
                record.samplers = listed(recorder.loaders)
            sys.stdout.flush()
            _write(record, folder / f"{name}.record")
            time.sleep(wait)  # all processes are killed as soon as there are all records
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    recorder = Recorder(losses, steps, on_finish=lambda: finish(WAIT), needs_group=is_of_several, rerun=rerun)
    recorder.record.unknown_losses = set(losses)
    recorder.start()
    error = ""
    try:
        script()
    except SystemExit as exit_:
        error = f"SystemExit: {exit_.code}" if exit_.code else ""
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    finish(GRACE, error)


def _write(content: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    temporary.rename(path)


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False, mmap=True)


def _records(folder: Path) -> list[Record]:
    return [_read(x) for x in sorted(folder.glob("rank*.record"), key=lambda x: int(x.stem[4:]))]


def audit(train: Callable[[], object], *, loss: Any = None, steps: int = 3, name: str = "the training") -> AuditReport:
    """Audit a training: is it the same on W processes as on one?

    Call it on every rank. Every rank calls ``train`` and records its first steps of the optimizer; then rank 0 calls it
    again, in a process group of its own, with the batches of all ranks, and compares: value, gradients, parameters after
    the step. Every rank gets the report.

    ``train`` builds model, loss, optimizer and DataLoader, and trains; it may also use those that exist. One process gets
    the state that they had on rank 0 before the first step, and afterwards they are left as its steps leave them.

    The samples are compared by their contents, within a step. The samplers are not listed, as
    ``contrastive-zoo audit`` does, because listing an epoch would draw from them.

    Args:
        train: a training of at least ``steps`` steps, without arguments.
        loss: a loss, or its class, that is not one of contrastive_zoo, pytorch-metric-learning or sentence-transformers:
            the factor by which the training multiplies it is then checked, too.
        steps: number of steps to compare.
        name: of the training in the report.

    Raises:
        ValueError: ``train`` cannot be called; ``loss`` is not a module or a class of modules; ``steps`` is less than 1.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> def train():
        ...     model, loss_fn = nn.Linear(3, 2), cz.DistributedLoss(cz.NTXent())
        ...     optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ...     loss_fn(model(torch.eye(3)), model(-torch.eye(3))).backward()
        ...     optimizer.step()
        >>> report = audit(train, steps=1)
        >>> report.ok, [x.name for x in report.worlds[0].quantities][:2]
        (True, ['value of the loss', 'gradient of the encoder'])
    """
    if not callable(train):
        raise ValueError(f"audit: train is a function that trains, got {train!r}.")
    if steps < 1:
        raise ValueError(f"audit: steps is the number of steps to compare, at least 1, got {steps}.")
    of = loss if isinstance(loss, type) else type(loss)
    if loss is not None and not issubclass(of, nn.Module):
        raise ValueError(
            f"audit: loss is a torch.nn.Module or its class, got {loss!r}. Its calls are found by their module: make a "
            "module of a function, or leave it out: what the training starts its backward pass at is compared anyway."
        )
    names = [] if loss is None else [f"{of.__module__}:{of.__qualname__}"]
    recorder = Recorder(names, steps, needs_group=False)
    start = time.monotonic()
    with recorder.watching():
        train()
    world = _compared(recorder, train)
    world.seconds = time.monotonic() - start
    return AuditReport(name, [world])


def _compared(recorder: Recorder, train: Callable[[], object]) -> WorldReport:
    """Gather the records of all ranks, run the training again on rank 0, and send its report to all."""
    record, alone = recorder.record, None
    records = [record]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        record.rank, alone = dist.get_rank(), this_process(dist.distributed_c10d._get_default_group())
        records *= dist.get_world_size()
        dist.all_gather_object(records, record)
    else:
        record.initialized = True  # one process needs no group

    def run_again(setting: Setting) -> Record:
        again = Recorder(recorder.loss_names, recorder.steps, needs_group=False, rerun=Rerun(records, setting))
        try:
            with nullcontext() if alone is None else default_group(alone), again.watching():
                train()
        except Exception as error:
            again.record.error = f"{type(error).__name__}: {error}"
        return again.record

    result = [assemble(records, run_again) if record.rank == 0 else None]
    if alone is not None:
        dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]


def main() -> NoReturn:
    """Run ``script.py`` or ``-m module`` with its arguments as ``python`` does."""
    folder, name, steps, losses, *command = sys.argv[1:]
    is_module = command[0] == "-m"
    script, *arguments = command[1:] if is_module else command
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    run = partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    further = [x for x in losses.split(",") if x]
    record_script(Path(folder), name, int(steps), further, lambda: run(script, run_name="__main__"))


if __name__ == "__main__":
    main()
