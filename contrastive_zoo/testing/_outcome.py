"""The outcome of a job on all ranks: the results in rank order, or one error that names the root cause first."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contrastive_zoo.ranks.messages import CommunicationError
from contrastive_zoo.testing._rank import Answer
from contrastive_zoo.testing._stack import Where, explain_hang


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
    """What the parent knows of a job: results, failures and stuck ranks."""

    world_size: int
    timeout: float
    returned: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)
    stuck: dict[int, Where] = field(default_factory=dict)
    steps: set[int | None] = field(default_factory=set)

    def add_death(self, rank: int, exitcode: int | None) -> None:
        """Record that a rank died."""
        text = f"died (exit code {exitcode})"
        self.failures[rank] = _Failure(DIED, text, "", ChildProcessError(f"rank {rank} {text}"))

    def add_answer(self, rank: int, answer: Answer) -> None:
        """Record the last answer of a rank: what it returned or raised."""
        self.steps.add(answer.step)
        if answer.kind == "returned":
            self.returned[rank] = answer.value
            return
        summary, traceback, pickled = answer.value
        error: BaseException = RuntimeError(summary)
        with contextlib.suppress(Exception):  # an exception class whose pickle does not load
            error = pickle.loads(pickled)
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
        """Return the results in rank order.

        Raises:
            RankError: a rank raised or died.
            WorldTimeout: a rank did not answer, and none failed.
        """
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
