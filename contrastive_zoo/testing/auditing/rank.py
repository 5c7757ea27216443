"""One rank of an audited script: ``python -m … FOLDER STEPS LOSSES script.py [arguments]``."""

import importlib
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from contrastive_zoo.testing.auditing.assemble import assemble
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.samples import listed
from contrastive_zoo.testing.report import WorldReport

WAIT, GRACE = 120.0, 2.0
"""Seconds that a rank waits for the others: after the last step, and after its script has ended."""


class Rank:
    """Run a script on this rank, record its steps, and end the process.

    Rank 0 waits for the records of all ranks, repeats the steps and writes the report.

    Args:
        folder: where records and the report are written.
        rank: of this process.
        world_size: number of processes.
        steps: number of steps to record.
        losses: further losses, modules or classes.
        on_report: called with the report on rank 0; returns the exit status of the process.
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
            records = self._records(wait if self.rank else WAIT)
            if self.rank == 0 and len(records) == self.world_size:
                report = assemble(records, self.recorder)
                _write(report, self.folder / "report")
                status = self.on_report(report)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _records(self, wait: float) -> list[Record]:
        """Wait for the records of all ranks; a rank other than 0 must not end before, since the others may need it."""
        paths = [self.folder / f"rank{rank}.record" for rank in range(self.world_size)]
        end = time.monotonic() + wait
        while not all(x.exists() for x in paths) and time.monotonic() < end:
            time.sleep(0.02)
        return [read(x) for x in paths if x.exists()] if self.rank == 0 else []


def _write(content: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    temporary.rename(path)


def read(path: Path) -> Any:
    """Read a record or a report that this audit has written."""
    return torch.load(path, weights_only=False)


def named_loss(name: str) -> Any:
    """Return the loss or the class that ``module:name`` denotes.

    Raises:
        ValueError: there is none.
    """
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
