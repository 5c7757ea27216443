"""The outcome of a job on all ranks: the results in rank order, or one error that names the root cause first."""

import contextlib
import itertools
import os
import pickle
import re
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contrastive_zoo.ranks.messages import CommunicationError
from contrastive_zoo.testing._rank import Answer, Raised


@dataclass(frozen=True)
class Where:
    """Where a rank was when the timeout ended: a collective (None outside of any), and a line of the user's code."""

    collective: str | None
    place: str

    def __str__(self) -> str:
        return f"is at {self.place}" if self.collective is None else f"waits in {self.collective} ({self.place})"


class RankError(RuntimeError):
    """A job failed on some rank.

    Attributes:
        errors: rank -> the exception raised there, root causes first. ChildProcessError for a rank that died,
            RuntimeError with the same text for an exception that cannot be pickled.
        stuck: rank -> where it waited, for the ranks that had not answered.
    """

    def __init__(
        self, message: str, errors: dict[int, BaseException] | None = None, stuck: dict[int, Where] | None = None
    ) -> None:
        super().__init__(message)
        self.errors = errors or {}
        self.stuck = stuck or {}


class WorldTimeout(RankError):
    """A job timed out although no rank failed: usually one rank skipped a collective."""


DIED, RAISED, RAISED_BY_PEER = range(3)
"""Kinds of failure, root causes first. RAISED_BY_PEER: the rank lost its connection because another rank failed."""


class _Failure(NamedTuple):
    kind: int
    summary: str
    traceback: str
    error: BaseException


@dataclass
class Outcome:
    """What the parent process knows of a job."""

    world_size: int
    timeout: float
    returned: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)
    stuck: dict[int, Where] = field(default_factory=dict)
    steps: set[int | None] = field(default_factory=set)

    def add(self, rank: int, answer: Answer | str) -> None:
        """Add the answer of a rank, or how it died."""
        if isinstance(answer, str):
            self.failures[rank] = _Failure(DIED, answer, "", ChildProcessError(f"rank {rank} {answer}"))
            return
        self.steps.add(answer.step)
        if not isinstance(answer.value, Raised):
            self.returned[rank] = answer.value
            return
        summary, traceback, pickled = answer.value
        error: BaseException = RuntimeError(summary)
        with contextlib.suppress(Exception):  # an exception class whose pickle does not load
            error = pickle.loads(pickled or b"")
        by_peer = "gloo/" in summary or isinstance(error, CommunicationError)  # gloo's contain the path of its source
        kind = RAISED_BY_PEER if by_peer else RAISED
        self.failures[rank] = _Failure(kind, f"raised {summary}", traceback, error)

    def in_step(self) -> bool:
        """Return whether every rank is ready for the next job, with no collective unfinished.

        If all ranks raised, they must also have begun the same number of collectives. If all returned, the numbers may
        differ, because they include sends and receives.
        """
        if self.stuck or None in self.steps or (self.returned and self.failures):
            return False
        return not self.failures or (len(self.steps) == 1 and all(f.kind == RAISED for f in self.failures.values()))

    def results(self) -> list[Any]:
        if not self.failures and not self.stuck:
            return [self.returned[rank] for rank in range(self.world_size)]
        failures = dict(sorted(self.failures.items(), key=lambda item: (item[1].kind, item[0])))
        errors = {rank: failure.error for rank, failure in failures.items()}
        waits = {rank: f"rank {rank} {where}" for rank, where in self.stuck.items()}
        if not failures:
            ranks = "; ".join(waits.get(rank, f"rank {rank} has returned") for rank in range(self.world_size))
            why = explain_hang(self.world_size, self.stuck)
            raise WorldTimeout(
                f"W={self.world_size}: no answer within {self.timeout:g} s. {ranks}. {why}", {}, self.stuck
            )
        summaries = [f"rank {rank} {failure.summary.partition(chr(10))[0]}" for rank, failure in failures.items()]
        tracebacks = [f"\n\nrank {rank}:\n{f.traceback.rstrip()}" for rank, f in failures.items() if f.traceback]
        raise RankError(
            f"W={self.world_size}: {'; '.join([*summaries, *waits.values()])}{''.join(tracebacks)}", errors, self.stuck
        )


# --- stacks of ranks that have not answered -------------------------------------------------------------------------

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_LIBRARY_FOLDERS = tuple(os.path.join(folder, "") for folder in (*torch.__path__, os.path.dirname(__file__)))
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


def read_stack(file: str) -> Where:
    """Read where a rank is that has just received SIGUSR1.

    faulthandler writes one stack for each thread, the innermost frame first, and the main thread last.
    """
    path, deadline, text = Path(file), time.monotonic() + 1.0, ""
    while time.monotonic() < deadline:
        before, text = text, path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:  # faulthandler marks no end; it writes within microseconds
            break
        time.sleep(0.02)
    stacks = [
        frames for chunk in re.split(r"^(?:Current t|T)hread ", text, flags=re.M) if (frames := _FRAME.findall(chunk))
    ]
    for frames in stacks:
        # The outermost collective below the user's code: all_gather_object, not the all_gather that it calls.
        calls = itertools.takewhile(lambda frame: not is_user_code(frame[0]), frames)
        names = [name for file, _, name in calls if file.endswith(_COLLECTIVES) and not name.startswith(("_", "<"))]
        if names:
            return Where(names[-1], _place(frames))
    return Where(None, _place(stacks[-1]) if stacks else "an unknown place")


def _place(frames: list[tuple[str, str, str]]) -> str:
    file, line, function = next((frame for frame in frames if is_user_code(frame[0])), frames[0])
    return f"{os.path.basename(file)}:{line} in {function}"


def is_user_code(file: str) -> bool:
    """Return whether a file is neither torch's, nor the standard library's, nor one of this package's worlds."""
    # typing_extensions.py wraps functions that are deprecated
    if file.startswith((*_LIBRARY_FOLDERS, "<frozen")) or file.endswith("typing_extensions.py"):
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)  # site-packages may be inside the stdlib's folder


def explain_hang(world_size: int, stuck: Mapping[int, Where]) -> str:
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
