"""Messages between ranks that fail: the error says which loss waited in which message, and why another rank is missing.

A rank that fails inside a loss leaves a note in torch.distributed's store, which ranks that wait for it read in a second.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from contrastive_zoo.ranks.compat import pause, waiting_time

FIRST_LOOK, LONGEST_WAIT = 0.5, 4.0
"""Seconds after which a waiting rank looks for a note: at first, and at most. Python also handles Ctrl-C then."""

STORE_TIMEOUT = 10.0  # seconds that one look into the store is waited for: its host may be gone, or busy

FIRST_CALLS = 64  # of wrappers, whose order is compared: a wrapper that is made anew in each step adds one a step

_PAUSE = 0.05  # seconds between two looks of a rank that has failed and goes on

_LATE = (
    "Usually a rank has left the training loop earlier (epochs of different length), calls the loss less often, is "
    "stopped or slow (a debugger, a checkpoint, a stalled data loader), or cannot be reached (a link that is down). Give "
    "all ranks equally many steps, or raise the process group's timeout."
)
_GONE = (
    "Usually that rank raised an error, was killed (out of memory, a time limit) or ended early. Its log says which; read "
    "it first."
)


class CommunicationError(RuntimeError):
    """A message between ranks failed: another rank raised, died, is late or out of step.

    It says which loss waited, in which call and message, and what usually causes it, or what the failed rank said.
    ``__cause__`` is the backend's error, if there is one. The process group cannot be used afterwards.

    Examples:
        >>> isinstance(CommunicationError("rank 1 is gone"), RuntimeError)
        True
    """


@dataclass
class GroupState:
    """What this process knows of one process group."""

    handshakes: int = 0  # how many have been begun; equal on all ranks, since a handshake involves all of them
    messages: int = 0  # how many that are polled have been begun since; equal on all ranks
    failed_at: int = -1  # the number of handshakes at which this rank itself failed last
    lost: str | None = None  # why the group cannot be used any more
    conversation: tuple[int, int] = (0, -1)  # the handshake that opened the step, and the backward pass that sends
    # of the last first calls of wrappers: what was called, and how many wrappers each rank had made until then
    first_calls: "deque[tuple[int, tuple[int, ...]]]" = field(default_factory=lambda: deque(maxlen=FIRST_CALLS))
    # by the number of the handshake of its first call, the histories of the wrappers that this rank holds
    wrappers: "WeakValueDictionary[int, Any]" = field(default_factory=WeakValueDictionary)
    reserved: int = 0  # bytes of a payload in the next handshake; equal on all ranks
    idle: int = 0  # how many handshakes in a row had no payload that fits
    on_accelerators: bool | None = None  # whether its backend sends from accelerators only; None until it is read
    host_group: dist.ProcessGroup | None = None  # the same ranks, which send from the CPU; None until it is made
    alone: dist.ProcessGroup | None = None  # this process, the default group in third-party losses; None until then


STATES: "WeakKeyDictionary[dist.ProcessGroup, GroupState]" = WeakKeyDictionary()
"""By group: several wrappers share a group, and a wrapper may be copied, loaded or made anew between two of its calls."""


@dataclass(frozen=True)
class Member:
    """One rank of a process group, as errors name it: the base of a World, which says what the fields are."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    caller: str = field(default="", repr=False, compare=False, kw_only=True)
    opened: int = field(default=0, repr=False, compare=False, kw_only=True)

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        """The process group itself, also where ``group`` is None."""
        return dist.distributed_c10d._get_default_group() if self.group is None else self.group

    @cached_property
    def state(self) -> GroupState:
        group = self.process_group
        return STATES.get(group) or state_of(group)


def started(message: str, begin: Callable[[], Any], member: Member, *, polled: bool) -> Callable[[], None]:
    """Start a message by ``begin``, which returns one or several works or None; the returned function waits for them."""
    status, since = member.state, time.monotonic()
    if status.lost is not None:
        raise CommunicationError(f"{_who(member)}: the process group failed earlier. {status.lost}")
    try:
        begun = begin()
    except RuntimeError as error:
        raise _failed(message, member, error, since) from error

    works = begun if isinstance(begun, list) else [] if begun is None else [begun]
    status.messages += polled
    number = status.messages

    def wait() -> None:
        try:
            for work in works:
                _wait_and_look(work, message, number, member) if polled else work.wait()
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise _failed(message, member, error, since) from error
        except BaseException as error:  # Ctrl-C, a test's time-out: the others go on
            report(error, member)
            raise

    return wait


def begun_handshake(member: Member) -> int:
    """Count a handshake before anything of it is sent, and return its number."""
    status = member.state
    if status.failed_at == status.handshakes and status.lost is None:
        _settle(member)
    status.handshakes, status.messages = status.handshakes + 1, 0
    return status.handshakes


def _settle(member: Member) -> None:
    """Wait, without a message, until every other rank has failed in this call, too, or has gone on without this one."""
    status, key = member.state, _key(member.process_group)
    until = time.monotonic() + waiting_time(member.process_group)
    waits_for = {rank for rank in range(member.size) if rank != member.rank}
    while waits_for:
        said, is_silent = _ask(lambda store: (_read(store, f"{key}/gone on"), _notes(store, member)))
        is_late = time.monotonic() > until
        if is_silent and not is_late:  # its host is busy
            pause(member.process_group, _PAUSE)
            continue
        if said is None or said[0] or is_late:
            words = "" if said is None else said[1][member.rank][-1]
            raise lost(f"{_who(member)} failed in its last call, and not all ranks did. {words}".strip(), member)
        waits_for = {rank for rank in waits_for if said[1][rank][0] != str(status.failed_at)}
        pause(member.process_group, _PAUSE if waits_for else 0)


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _notes(store: Any, member: Member) -> list[list[str]]:
    """By rank: the handshake after which it failed last, after which message since then, and a sentence."""
    return [_read(store, f"{_key(member.process_group)}/{rank}").split("\n", 2) for rank in range(member.size)]


@contextmanager
def reported(member: Member) -> Iterator[None]:
    """Context manager: tells ranks that wait for this one if the body raises."""
    try:
        yield
    except BaseException as error:
        report(error, member)
        raise


def report(error: BaseException, member: Member) -> None:
    """Leave a note for the ranks that wait for this one: it has failed after the last handshake."""
    if isinstance(error, CommunicationError) or member.size == 1:  # the rank that failed has left its own note
        return
    status = member.state
    status.failed_at = status.handshakes
    words = f"{type(error).__name__}: {error}".strip().rstrip(":.")
    of_loss = f" in {member.caller}" if member.caller else ""
    note = f"{status.handshakes}\n{status.messages}\nRank {member.rank} failed{of_loss}: {words}."

    def leave(store: Any) -> None:
        store.set(f"{_key(member.process_group)}/{member.rank}", note)
        store.set(_key(member.process_group), str(status.handshakes))  # one key to look at while no rank has failed

    _ask(leave)


def _wait_and_look(work: Any, message: str, number: int, member: Member) -> None:
    """Wait for a work of the CPU; from time to time, look for a note of a rank that has failed before it."""
    patience = FIRST_LOOK
    while True:
        try:
            work.wait(timedelta(seconds=patience))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # at once; raises the backend's own error, if it failed
                return
        if (note := _note(member, number)) is not None:
            raise lost(f"{_who(member)} waited in {message} for a rank that has failed. {note}", member)
        patience = min(2 * patience, LONGEST_WAIT)


def _failed(message: str, member: Member, error: RuntimeError, since: float) -> CommunicationError:
    """The error of a message that failed: the note of the rank that is missing, or what usually causes it."""
    who, waited = _who(member), time.monotonic() - since
    if (note := _note(member)) is not None:
        return lost(f"{who} waited in {message} for a rank that has failed. {note}", member)
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return lost(f"{who} waited {waited:.0f} s in {message}, and not all ranks came. {_LATE}", member)
    return lost(f"{who} lost the connection to another rank in {message}. {_GONE}", member)


def lost(text: str, member: Member) -> CommunicationError:
    """Return the error after which the group is not used any more; a rank that has failed and would go on hears of it."""
    member.state.lost = text
    _ask(lambda store: store.set(f"{_key(member.process_group)}/gone on", "1"))
    return CommunicationError(text)


def _who(member: Member) -> str:
    return f"{member.caller}: rank {member.rank}" if member.caller else f"rank {member.rank}"


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The state of a group; its first use clears a note that an earlier group of this name has left."""
    state = STATES.get(group)
    if state is None:
        state = STATES[group] = GroupState()
        names = [f"/{group.rank()}", *(["", "/gone on"] if group.rank() == 0 else [])]
        _ask(lambda store: [store.set(f"{_key(group)}{name}", "") for name in names])
    return state


def _note(member: Member, before: float = math.inf) -> str | None:
    """What a rank said that failed after the last handshake or the one before, and will not send message ``before``."""
    status = member.state

    def recent(store: Any) -> list[list[str]]:
        last = _read(store, _key(member.process_group))
        return _notes(store, member) if last and int(last) >= status.handshakes - 1 else []

    for rank, (handshake, *rest) in enumerate(_ask(recent)[0] or []):
        # a rank that failed after the same handshake as this one waits for a call in which both go on
        if handshake and rank != member.rank and int(handshake) != status.failed_at:
            place = int(handshake), int(rest[0])
            if (status.handshakes - 1, 0) <= place < (status.handshakes, before):
                return rest[1]
    return None


def _key(group: dist.ProcessGroup) -> str:
    return f"contrastive_zoo/failure/{group.group_name}"


def _ask(function: Callable[[Any], Any]) -> tuple[Any, bool]:
    """Ask the default group's store; return its answer, or None, and whether it has not answered yet.

    A thread asks, because a store whose host is gone never answers. Nothing else is asked until it has answered.
    """
    global _asked
    result: list[Any] = []

    def run() -> None:
        with suppress(Exception):  # a store that is closed: the error does without a note
            result.append(function(store))

    is_silent = False
    with suppress(Exception):  # there is no store; no thread starts while the interpreter ends
        store = dist.distributed_c10d._get_default_store()
        is_silent = _asked is not None and _asked[0] is store and _asked[1].is_alive()
        if not is_silent:
            thread = threading.Thread(target=run, daemon=True, name="contrastive_zoo note")
            thread.start()
            _asked = store, thread
            thread.join(STORE_TIMEOUT)
            is_silent = thread.is_alive()
            _asked = _asked if is_silent else None  # a store that is held keeps its server from a group to come
    return (result[0], False) if result else (None, is_silent)


_asked: tuple[Any, threading.Thread] | None = None  # the store of the last question, and its thread
