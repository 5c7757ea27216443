"""Where a process waits: the stack that it writes when it receives SIGUSR1, in words."""

import itertools
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

NO_COLLECTIVE = "No rank waits in a collective: the job loops, or needs a longer timeout."
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_MESSAGES = os.path.join(_PACKAGE, "ranks", "messages.py")
_LIBRARY_FOLDERS = tuple(os.path.join(folder, "") for folder in (*torch.__path__, _PACKAGE))
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


@dataclass(frozen=True)
class Where:
    """Where a rank was when the timeout ended: a collective (None outside of any), and a line of the user's code."""

    collective: str | None
    place: str

    def __str__(self) -> str:
        return f"is at {self.place}" if self.collective is None else f"waits in {self.collective} ({self.place})"


AT_IMPORT = Where(None, "the import of torch")


def where_are(processes: Mapping[int, tuple[int | None, Path]]) -> dict[int, Where]:
    """Return where the processes of ranks are, from their ids and the files to which they write their stacks."""
    for pid, path in processes.values():
        with suppress(ProcessLookupError):
            if pid is not None and path.exists():  # the signal would end a process that imports torch
                os.kill(pid, signal.SIGUSR1)
    return {rank: _read_stack(x) if x.exists() else AT_IMPORT for rank, (_, x) in processes.items()}


def _read_stack(path: Path) -> Where:
    """Read where a process is that has just received SIGUSR1."""
    deadline, text = time.monotonic() + 10.0, ""
    while time.monotonic() < deadline:
        before, text = text, path.read_text(errors="replace")
        if text and text == before:  # faulthandler marks no end; it writes within microseconds
            break
        time.sleep(0.02)
    # a stack for each thread, the innermost frame first, and the main thread last
    chunks = re.split(r"^(?:Current t|T)hread ", text, flags=re.M)
    return locate([frames for frames in map(_FRAME.findall, chunks) if frames])


def locate(stacks: Sequence[Sequence[tuple[str, str, str]]]) -> Where:
    """Return where a rank is, from file, line and function of each call of its threads."""
    for frames in stacks:
        # The outermost collective below the user's code: all_gather_object, not the all_gather that it calls.
        calls = itertools.takewhile(lambda frame: not _is_user_code(frame[0]), frames)
        names = [name for file, _, name in calls if file.endswith(_COLLECTIVES) and not name.startswith(("_", "<"))]
        if names:
            return Where(names[-1], _place(frames))
        if any(file == _MESSAGES and name in ("wait", "_wait_and_look") for file, _, name in frames):
            return Where("a message of contrastive_zoo", _place(frames))
    return Where(None, _place(stacks[-1]) if stacks else "an unknown place")


def _place(frames: Sequence[tuple[str, str, str]]) -> str:
    file, line, function = next((frame for frame in frames if _is_user_code(frame[0])), frames[0])
    return f"{os.path.basename(file)}:{line} in {function}"


def _is_user_code(file: str) -> bool:
    """Return whether a file is neither torch's, nor the standard library's, nor one of this package."""
    # typing_extensions.py wraps functions that are deprecated
    if file.startswith((*_LIBRARY_FOLDERS, "<frozen")) or file.endswith("typing_extensions.py"):
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)  # site-packages may be inside the stdlib's folder


def explain_hang(world_size: int, stuck: Mapping[int, Where], done: str) -> str:
    """Return where each rank is, and which of them never entered a collective that another one waits in."""
    ranks = "; ".join(f"rank {rank} {stuck.get(rank, done)}" for rank in range(world_size))
    return f"{ranks}. {_why(world_size, stuck)}"


def _why(world_size: int, stuck: Mapping[int, Where]) -> str:
    waits = {rank: stuck[rank].collective if rank in stuck else None for rank in range(world_size)}
    absent = {name: [rank for rank in waits if waits[rank] != name] for name in waits.values() if name is not None}
    if not absent and len(stuck) < world_size:
        return "No Python frame shows a collective: the job is slow, or waits for a peer in C++ (DDP, Work.wait)."
    if not absent:
        return NO_COLLECTIVE
    if not any(absent.values()):
        return f"Every rank is in {waits[0]}, but in different calls: another number of calls, another shape or group."
    ranks = {name: f"Rank{'s' * (len(x) > 1)} {', '.join(map(str, x))}" for name, x in absent.items()}
    return " ".join(f"{who} never entered {name}." for name, who in ranks.items())
