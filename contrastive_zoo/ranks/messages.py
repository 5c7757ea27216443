"""Messages between ranks that fail: the error says which loss waited in which message, and why another rank is missing.

A backend says only that a connection was closed or that a time-out passed. Here its error is raised again in words. A rank
that fails inside a loss leaves a note in the process group's store before it raises; ranks that wait for it find the note
within a second, and raise its sentence. The store is torch.distributed's own, through which ranks have found each other.
A note is text, never pickled. A message that arrives at once costs nothing more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from contrastive_zoo.ranks.compat import waiting_time
from contrastive_zoo.ranks.group_state import GroupState, state_of

if TYPE_CHECKING:
    from contrastive_zoo.ranks.world import World

FIRST_LOOK, LONGEST_WAIT = 0.5, 4.0
"""Seconds after which a waiting rank looks for a note: at first, and at most. Python also handles Ctrl-C then."""

STORE_TIMEOUT = 2.0  # seconds for one look into the store, whose host may be gone

_PAUSE = 0.05  # seconds between two looks of a rank that has failed and goes on

_GONE_ON = "gone on"  # what a rank writes in place of the number of the call in which it has failed

_LATE = (
    "Usually a rank has left the training loop earlier (epochs of different length), calls the loss less often, is "
    "stopped or slow (a debugger, a checkpoint, a stalled data loader), or cannot be reached (a link that is down). Give "
    "all ranks equally many steps, or raise the process group's timeout."
)
_GONE = (
    "Usually that rank raised an error, was killed (out of memory, a time limit) or ended early. Its log says which; read "
    "it first."
)
_FORKED = (
    "this process was forked from a rank, as a worker of a DataLoader is, and shares its connections: a message from here "
    "would corrupt the rank's own. Call the loss in the rank itself; World() as process_group means this process alone."
)


class CommunicationError(RuntimeError):
    """A message between ranks failed: another rank raised, died, is late or out of step.

    It says which loss waited, in which call and message, and what usually causes it, or what the failed rank said.
    ``__cause__`` is the backend's error, if there is one. The process group cannot be used afterwards.

    Examples:
        >>> isinstance(CommunicationError("rank 1 is gone"), RuntimeError)
        True
    """


def started(message: str, begin: Callable[[], Any], world: World, *, polled: bool) -> Callable[[], None]:
    """Start a message by ``begin``, which returns one or several works or None; the returned function waits for them.

    While a ``polled`` message does not arrive, a note is looked for: not for works on an accelerator, for which the host
    does not wait, and not for a transfer between two ranks, which cannot be waited for in parts.
    """
    status, since = _of_group(world), time.monotonic()
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise CommunicationError(f"{_who(world)}: {_FORKED}")
    if status.lost is not None:
        raise CommunicationError(f"{_who(world)}: the process group failed earlier. {status.lost}")
    try:
        begun = begin()
    except RuntimeError as error:
        raise _failed(message, world, error, since) from error

    works = begun if isinstance(begun, list) else [] if begun is None else [begun]

    def wait() -> None:
        try:
            for work in works:
                if polled:
                    _wait_and_look(work, message, world)
                else:
                    work.wait()
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise _failed(message, world, error, since) from error
        except BaseException as error:  # Ctrl-C, a test's time-out: the others go on
            report(error, world)
            raise

    return wait


def begun_handshake(world: World) -> int:
    """Count a handshake before anything of it is sent, and return its number."""
    status = _of_group(world)
    if status.failed_at == status.handshakes and status.lost is None:
        _settle(world)
    status.handshakes += 1
    return status.handshakes


def _settle(world: World) -> None:
    """Wait, without a message, until every other rank has failed in this call, too, or has gone on without this one."""
    status, key = _of_group(world), _key(world)
    until = time.monotonic() + waiting_time(world.process_group)
    waits_for = {rank for rank in range(world.size) if rank != world.rank}
    while waits_for:
        said = _in_store(lambda store: [_read(store, f"{key}/{rank}").split("\n", 1) for rank in range(world.size)])
        if said is None or any(text[0] == _GONE_ON for text in said) or time.monotonic() > until:
            words = "" if said is None else said[world.rank][-1]
            raise lost(f"{_who(world)} failed in its last call, and not all ranks did. {words}".strip(), world)
        waits_for = {rank for rank in waits_for if said[rank][0] != str(status.failed_at)}
        time.sleep(_PAUSE if waits_for else 0)


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


@contextmanager
def reported(world: World) -> Iterator[None]:
    """Tell ranks that wait for this one if the body raises. What all ranks raise alike disturbs none of them."""
    try:
        yield
    except BaseException as error:
        report(error, world)
        raise


def report(error: BaseException, world: World) -> None:
    """Leave a note for the ranks that wait for this one: it has failed after the last handshake."""
    if isinstance(error, CommunicationError) or world.size == 1:  # the rank that failed has left its own note
        return
    status = _of_group(world)
    status.failed_at = status.handshakes
    words = f"{type(error).__name__}: {error}".strip().rstrip(":.")
    of_loss = f" in {world.caller}" if world.caller else ""
    note = f"{status.handshakes}\n{world.rank}\nRank {world.rank} failed{of_loss}: {words}."
    message = f"{status.handshakes}\n{note.split(chr(10), 2)[2]}"

    def leave(store: Any) -> None:
        store.set(_key(world), note)
        store.set(f"{_key(world)}/{world.rank}", message)

    _in_store(leave)


def _wait_and_look(work: Any, message: str, world: World) -> None:
    """Wait for a work of the CPU; from time to time, look for a note of the rank that it waits for."""
    patience = FIRST_LOOK
    while not _arrived(work, patience):
        if (note := _note(world)) is not None:
            raise lost(f"{_who(world)} waited in {message} for a rank that has failed. {note}", world)
        patience = min(2 * patience, LONGEST_WAIT)


def _arrived(work: Any, seconds: float) -> bool:
    """Wait at most so long; return whether the message has arrived."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # at once; raises the backend's own error, if it failed
    return True


def _failed(message: str, world: World, error: RuntimeError, since: float) -> CommunicationError:
    """The error of a message that failed: the note of the rank that is missing, or what usually causes it."""
    who = _who(world)
    if (note := _note(world)) is not None:
        return lost(f"{who} waited in {message} for a rank that has failed. {note}", world)
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        waited = time.monotonic() - since
        return lost(f"{who} waited {waited:.0f} s in {message}, and not all ranks came. {_LATE}", world)
    return lost(f"{who} lost the connection to another rank in {message}. {_GONE}", world)


def lost(text: str, world: World) -> CommunicationError:
    """Return the error after which the group is not used any more; a rank that has failed and would go on hears of it."""
    _of_group(world).lost = text
    _in_store(lambda store: store.set(f"{_key(world)}/{world.rank}", f"{_GONE_ON}\n{text}"))
    return CommunicationError(text)


def _who(world: World) -> str:
    return f"{world.caller}: rank {world.rank}" if world.caller else f"rank {world.rank}"


def _of_group(world: World) -> GroupState:
    """The state of the group; its first message clears a note that an earlier group of this name has left."""
    state = state_of(world.process_group)
    if not state.has_sent:
        state.has_sent = True
        _in_store(lambda store: _clear(store, world))
    return state


def _clear(store: Any, world: World) -> None:
    store.set(f"{_key(world)}/{world.rank}", "")
    if world.rank == 0:
        store.set(_key(world), "")


def _note(world: World) -> str | None:
    """What another rank said when it failed after the same handshake as this rank's last; None if this rank failed, too."""
    status = _of_group(world)
    result = _in_store(lambda store: _read(store, _key(world)))
    if not result:
        return None
    handshakes, rank, note = result.split("\n", 2)
    # in this call, or in the one before, after which that rank sends no handshake of this call
    is_recent = status.handshakes - 1 <= int(handshakes) <= status.handshakes
    return note if is_recent and int(rank) != world.rank and status.failed_at != int(handshakes) else None


def _key(world: World) -> str:
    return f"contrastive_zoo/failure/{world.process_group.group_name}"


def _in_store(function: Callable[[Any], Any]) -> Any:
    """``function`` of the default group's store, in a thread: a store whose host is gone never answers. It is asked once."""
    global _silent
    result: list[Any] = []

    def run() -> None:
        with suppress(Exception):  # no store, or none that answers: the error does without a note
            result.append(function(store))

    thread = threading.Thread(target=run, daemon=True, name="contrastive_zoo note")
    with suppress(Exception):  # there is no store; no thread starts while the interpreter ends
        store = dist.distributed_c10d._get_default_store()
        if store is _silent:
            return None
        thread.start()
        thread.join(STORE_TIMEOUT)
        _silent = store if thread.is_alive() else _silent
    return result[0] if result else None


_silent: Any = None  # the store that has not answered

_inherited: Any = None  # the default group that this process has from the rank that it was forked from


def _remember_inherited() -> None:
    global _inherited
    _inherited = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_inherited)
