"""Start the processes of an audited script (each runs this module), wait for them, and return the report."""

import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from contrastive_zoo.ranks.compat import default_group
from contrastive_zoo.ranks.one_process import this_process
from contrastive_zoo.testing.auditing import session
from contrastive_zoo.testing.auditing.diagnosis import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record, listed
from contrastive_zoo.testing.auditing.rerun import Rerun, Setting
from contrastive_zoo.testing.messages import replaced
from contrastive_zoo.testing.report import AuditReport, WorldReport, require_world_sizes
from contrastive_zoo.testing.stacks import explain_hang, where_are

# Ends the processes of an audit, and starts those of these names, commands and variables; returns their ids
StartProcesses = Callable[[list[tuple[str, list[str], dict[str, str]]]], list[int]]
# Seconds after which a rank ends that the others may need: after the last step, and after its script has ended
WAIT, GRACE = 120.0, 2.0
LOG_LINES = 12  # lines of a rank's output that are shown if there is no report
OF_OWN_PROCESSES = (
    "not audited: the script starts its own processes. Let it read RANK and WORLD_SIZE, as under torchrun, and start "
    'helpers below if __name__ == "__main__"'
)
WITHOUT_GPU = (
    'not audited: init_process_group("nccl") needs a GPU, and this machine has none; pass '
    '"nccl" if torch.cuda.is_available() else "gloo"'
)


def audit_script(
    command: Sequence[str],
    *,
    world_sizes: Sequence[int] = (2,),
    nodes: int = 1,
    steps: int = 3,
    losses: Sequence[str] = (),
    timeout: float = 300.0,
) -> AuditReport:
    """Run a script, or ``-m`` and a module, on local processes, and compare its first steps with one process."""
    require_world_sizes(world_sizes)
    if nodes < 1 or any(size % nodes for size in world_sizes):
        raise ValueError(f"nodes divides every number of processes, got {nodes} for {[*world_sizes]}.")
    if not command or (command[0] != "-m" and not Path(command[0]).is_file()):
        raise ValueError(f"the script {' '.join(command[:1]) or '(none)'} does not exist.")
    report = AuditReport(" ".join(command))
    arguments = [str(steps), json.dumps([*losses]), *command]
    for size in world_sizes:
        start = time.monotonic()
        with _session() as (folder, start_processes):
            world = judged(folder, size, partial(_run, folder, start_processes, arguments, timeout, nodes))
        world.seconds = time.monotonic() - start
        report.worlds.append(world)
    return report


@contextmanager
def _session() -> Iterator[tuple[Path, StartProcesses]]:
    """Context manager: the folder and processes of an audit, which end with it, or with this process, however it ends."""
    command = [sys.executable, "-IS", session.__file__]
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, start_new_session=True) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        to_supervisor, answers = supervisor.stdin, supervisor.stdout

        def start(processes: list[tuple[str, list[str], dict[str, str]]]) -> list[int]:
            print(json.dumps(processes), file=to_supervisor, flush=True)
            pids: list[int] = json.loads(answers.readline())
            return pids

        yield Path(answers.readline().rstrip("\n")), start


def _run(
    folder: Path, start: StartProcesses, arguments: Sequence[str], timeout: float, nodes: int, names: Sequence[str]
) -> str:
    """Run a script in processes of these names, one for each rank, until they have recorded its steps, or say why not."""
    store = local_store()
    command = [sys.executable, "-m", "contrastive_zoo.testing.auditing.launch", str(folder)]
    variables = [
        environment(rank, len(names), store.port, is_rank=x.startswith("rank"), nodes=nodes)
        for rank, x in enumerate(names)
    ]
    pids = start([(x, [*command, x, *arguments], y) for x, y in zip(names, variables, strict=True)])
    try:
        have_ended = [(folder / f"{name}.ended").exists for name in names]
        if wait_for_records(folder, names, lambda index: have_ended[index](), timeout):
            return without_record(folder, names)
        running = [i for i, x in enumerate(names) if not (have_ended[i]() or (folder / f"{x}.record").exists())]
        stuck = where_are({index: (pids[index], folder / f"{names[index]}.stack") for index in running})
        return f"no record within {timeout:g} s. {explain_hang(len(names), stuck, 'has recorded its steps')}"
    finally:
        start([])


def wait_for_records(folder: Path, names: Sequence[str], has_ended: Callable[[int], bool], timeout: float) -> bool:
    """Wait until processes of these names have written their records, or one has ended without; False after a timeout."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        # of this moment before it is looked for: a process may write its record and end in between
        ended = [has_ended(index) for index in range(len(names))]
        missing = [not (folder / f"{name}.record").exists() for name in names]
        if not any(missing):
            return True
        if any(x and y for x, y in zip(ended, missing, strict=True)):
            time.sleep(1.0)  # others may just be about to fail as well
            return True
        time.sleep(0.02)
    return False


def without_record(folder: Path, names: Sequence[str]) -> str:
    """Say how processes of these names ended without a record; "" if all have one."""
    missing = {i: folder / f"{x}.ended" for i, x in enumerate(names) if not (folder / f"{x}.record").exists()}
    codes = {i: int(x.read_text() or 0) for i, x in missing.items() if x.exists()}
    how = (f"rank {i} ended " + (f"by signal {-x}" if x < 0 else f"with exit status {x}") for i, x in codes.items())
    return f"no record: {', '.join(how)}." if codes else ""


def judged(folder: Path, world_size: int, run: Callable[[list[str]], str]) -> WorldReport:
    """Return the report of a script, which ``run`` runs in processes of these names; it says why one has no record."""
    problem = run([f"rank{rank}" for rank in range(world_size)])
    records = _records(folder)
    missing = sorted({*range(world_size)} - {x.rank for x in records})

    def run_again(setting: Setting) -> Record:
        name = f"one{len(list(folder.glob('one*.setting')))}"
        _write(setting, folder / f"{name}.setting")
        why = run([name]) or "no record."
        path = folder / f"{name}.record"
        if path.exists():
            return _read(path)
        return Record(error=f"no error, and leaves {why} Its last output:\n{_log(folder, name)}")

    refused = next((x.problem for x in records if x.problem), "")
    failed = WorldReport(world_size, problem=refused or problem or f"ranks {missing} ended without a record")
    report = failed if missing else assemble(records, run_again)
    rank = next((x.rank for x in records if x.error), missing[0] if missing else 0)
    log = "" if refused or (not missing and all(x.steps for x in records)) else _log(folder, f"rank{rank}")
    if log:
        report.problem = f"{report.problem.removesuffix('.')}. Last output of rank {rank}:\n{log}"
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


def environment(rank: int, world_size: int, port: int, is_rank: bool = True, nodes: int = 1) -> dict[str, str]:
    """Return the environment of one rank, with the variables that torchrun sets on one of several equal nodes."""
    of_node = max(1, world_size // nodes)  # a rerun in one process is one node
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback} | dict(os.environ)
    variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank % of_node), "GROUP_RANK": str(rank // of_node)}
    variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(of_node)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "contrastive-zoo-audit"}
    variables |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # trainers would compare the size of torchrun's world with the one that a rerun in one process is given
    return {key: x for key, x in variables.items() if is_rank or key != "TORCHELASTIC_RUN_ID"}


@contextmanager
def _refusing(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Context manager: call a function if a script starts processes that train, or NCCL without a GPU."""

    def start_process(original: Any, process: Any) -> Any:
        trains = getattr(process._target, "__module__", "") in ("__main__", "torch.multiprocessing.spawn")
        is_fork = (process._start_method or multiprocessing.get_start_method()) == "fork"
        file = getattr(sys.modules["__main__"], "__file__", None)
        # a process that is not forked runs a script without a guard again, in the place of the rank that started it
        is_guarded = is_fork or file is None or "__name__" in Path(file).read_text(errors="replace")
        if (trains and not process.daemon and not dist.is_initialized()) or not is_guarded:
            refuse(OF_OWN_PROCESSES)
        return original(process)

    def init_process_group(original: Any, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if "nccl" in str(backend) and not torch.cuda.is_available():
            refuse(WITHOUT_GPU)
        return original(backend, *args, **kwargs)

    with replaced(BaseProcess, "start", start_process), replaced(dist, "init_process_group", init_process_group):
        yield


def record_script(folder: Path, name: str, steps: int, losses: Sequence[str], script: Callable[[], object]) -> NoReturn:
    """Run a script, record its first steps into a folder, and end the process: no later step, checkpoint or clean-up."""
    is_of_several, setting = int(os.environ["WORLD_SIZE"]) > 1, folder / f"{name}.setting"
    rerun = Rerun(_records(folder), _read(setting)) if setting.exists() else None

    def finish(wait: float, error: str = "") -> NoReturn:
        try:
            record = recorder.stop()
            record.rank, record.error = int(os.environ["RANK"]), error
            if rerun is None:
                loaders = dict.fromkeys(recorder.loaders[i] for i in sorted(record.trained_on))
                record.samplers = [epoch for x in loaders if (epoch := listed(x)) is not None]
            sys.stdout.flush()
            _write(record, folder / f"{name}.record")
            time.sleep(wait)  # all processes are killed as soon as there are all records
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    recorder = Recorder(losses, steps, on_finish=lambda: finish(WAIT), needs_group=is_of_several, rerun=rerun)
    recorder.record.unknown_losses = set(losses)

    def refuse(problem: str) -> NoReturn:
        recorder.record.problem = problem
        finish(GRACE)

    recorder.start()
    os.register_at_fork(after_in_child=partial(setattr, recorder, "finished", True))
    error = ""
    try:
        with _refusing(refuse):
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
        ValueError: ``loss`` is not a module or a class of modules; ``steps`` is less than 1.

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
    if dist.is_initialized() and dist.get_world_size() > 1:
        record.rank, alone = dist.get_rank(), this_process(dist.distributed_c10d._get_default_group())
        records *= dist.get_world_size()
        dist.all_gather_object(records, record)

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


_kept: list[object] = []


def run_script(script: str, is_module: bool) -> None:
    """Run a script, or a module by name, as ``python`` does; its global variables live as long as the process.

    A DDP module that dies takes its gloo group with it. torch then waits for the group's threads and keeps the lock that
    they need to drop their last message: such a process would never end.
    """
    run = partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    try:
        _kept.append(run(script, run_name="__main__"))
    except BaseException as ended:  # by sys.exit() too: its traceback holds the variables
        _kept.append(ended)
        raise


def main() -> NoReturn:
    """Run ``script.py`` or ``-m module`` with its arguments as ``python`` does."""
    folder, name, steps, losses, *command = sys.argv[1:]
    is_module = command[0] == "-m"
    script, *arguments = command[1:] if is_module else command
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    stack = Path(folder, f"{name}.stack").open("w")  # noqa: SIM115 - stays open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    record_script(Path(folder), name, int(steps), json.loads(losses), lambda: run_script(script, is_module))


if __name__ == "__main__":
    main()
