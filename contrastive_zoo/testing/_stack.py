"""The place where a rank waits, read from the stack that it writes on SIGUSR1, and why a job hangs."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

STACK_TIMEOUT = 1.0
"""Seconds that a rank has to write its stack."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_LIBRARY_FOLDERS = tuple(os.path.join(folder, "") for folder in (*torch.__path__, os.path.dirname(__file__)))
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


@dataclass(frozen=True)
class Where:
    """Where a rank was when the timeout ended.

    Attributes:
        collective: the collective it waited in, as ``torch.distributed`` names it; None outside of any.
        place: the line of the user's code, as in ``"loss.py:12 in my_loss"``.
    """

    collective: str | None
    place: str

    def __str__(self) -> str:
        return f"is at {self.place}" if self.collective is None else f"waits in {self.collective} ({self.place})"


def stack_file(directory: str, rank: int) -> str:
    """Return the path to which a rank writes its stack when it receives SIGUSR1."""
    return os.path.join(directory, f"rank{rank}.stack")


def read_stack(directory: str, rank: int) -> Where:
    """Read the stack of a rank that has just received SIGUSR1."""
    path, deadline, text = Path(stack_file(directory, rank)), time.monotonic() + STACK_TIMEOUT, ""
    while time.monotonic() < deadline:
        before, text = text, path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:  # faulthandler marks no end; it writes within microseconds
            break
        time.sleep(0.02)
    return parse_stack(text)


def parse_stack(text: str) -> Where:
    """Parse faulthandler's output: one stack per thread, the innermost frame first, the main thread last."""
    stacks = [
        frames for chunk in re.split(r"^(?:Current t|T)hread ", text, flags=re.M) if (frames := _FRAME.findall(chunk))
    ]
    for frames in stacks:
        # The outermost collective below the user's code: all_gather_object, not the all_gather that it calls.
        calls = itertools.takewhile(lambda frame: not _is_user_code(frame[0]), frames)
        names = [name for file, _, name in calls if file.endswith(_COLLECTIVES) and not name.startswith(("_", "<"))]
        if names:
            return Where(names[-1], _place(frames))
    return Where(None, _place(stacks[-1]) if stacks else "an unknown place")


def _place(frames: list[tuple[str, str, str]]) -> str:
    file, line, function = next((frame for frame in frames if _is_user_code(frame[0])), frames[0])
    return f"{os.path.basename(file)}:{line} in {function}"


def _is_user_code(file: str) -> bool:
    # typing_extensions.py wraps functions that are deprecated
    if file.startswith((*_LIBRARY_FOLDERS, "<frozen")) or file.endswith("typing_extensions.py"):
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)  # site-packages may be inside the stdlib's folder


def explain_hang(world_size: int, stuck: Mapping[int, Where]) -> str:
    """Explain why a job hangs, from the places of its stuck ranks."""
    waits = {rank: stuck[rank].collective if rank in stuck else None for rank in range(world_size)}
    absent = {name: [rank for rank in waits if waits[rank] != name] for name in waits.values() if name is not None}
    if not absent and len(stuck) < world_size:
        return "No Python frame shows a collective: the job is slow, or waits for a peer in C++ (DDP, Work.wait)."
    if not absent:
        return "No rank waits in a collective: the job loops, or needs a longer timeout."
    if not any(absent.values()):
        return f"Every rank is in {waits[0]}, but in different calls: another number of calls, another shape or group."
    return " ".join(
        f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} never entered {name}."
        for name, ranks in absent.items()
    )
