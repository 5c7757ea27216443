"""The pytest plugin: ``@pytest.mark.world_sizes(1, 2, 4)`` runs a test on every rank of live process groups."""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from contrastive_zoo.testing.worlds import Worlds

MARKER = "world_sizes"
ENVIRONMENT = pytest.StashKey[dict[str, str]]()
OF_ONE_PROCESS = (pytest.MonkeyPatch, pytest.WarningsRecorder, pytest.CaptureFixture, pytest.LogCaptureFixture)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contrastive_zoo")
    about = "timeout in seconds of one test in one world of processes; 60 by default"
    group.addoption("--world-timeout", type=float, default=60.0, metavar="SECONDS", help=about)
    of_threads = "run ranks as threads of the test's process, up to 64; for a debugger set --world-timeout=inf, too"
    group.addoption("--world-threads", action="store_true", help=of_threads)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*sizes, timeout=None): run the test on every rank of live gloo worlds of these sizes; inside, "
        "torch.distributed is initialised. rank and world_size are fixtures; timeout is in seconds.",
    )


@pytest.fixture(scope="session")
def worlds(pytestconfig: pytest.Config) -> Iterator[Worlds]:
    """Provide a pool of live worlds for the whole session: ``worlds.run(2, function, *arguments)``."""
    from contrastive_zoo.testing.worlds import Worlds

    timeout, threads = map(pytestconfig.getoption, ("world_timeout", "world_threads"))
    for kind in OF_ONE_PROCESS:
        copyreg.pickle(kind, _refuse)
    with Worlds(timeout=timeout, threads=threads) as pool:
        pool.environment = pytestconfig.stash[ENVIRONMENT]
        yield pool


def _refuse(fixture: object) -> NoReturn:
    raise TypeError(f"{type(fixture).__name__} acts on pytest's process; on ranks use unittest.mock or pytest.warns")


@pytest.fixture(scope="session")
def rank() -> OnRank:
    """Provide the rank to a marked test. In this process it is a placeholder; on a rank it is that rank's number."""
    return OnRank()


class OnRank:
    """An object that a rank unpickles as its number."""

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return _rank, ()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is None:
        return
    sizes, problem = marker.args, ""
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        problem = f"numbers of processes, at least 1 each, got {list(sizes)}."
    elif unknown := set(marker.kwargs) - {"timeout"}:
        problem = f"sizes and timeout, got {', '.join(sorted(unknown))} as well."
    if problem:
        raise _failure(f"{metafunc.definition.nodeid}: {MARKER} takes {problem}")
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", sizes, ids=[f"W={size}" for size in sizes])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep the environment of the ranks. Reject marked tests that would run in this process only, or not at all."""
    item.config.stash.setdefault(ENVIRONMENT, dict(os.environ))  # before the first fixture changes it
    problem = ""
    if _size(item) is None:
        problem = "marks test functions and methods of plain classes, not those of a unittest.TestCase."
    elif inspect.iscoroutinefunction(getattr(item, "obj", None)):
        problem = "cannot run an async test on ranks; start the event loop inside the test."
    elif getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        problem = "would draw another example on each rank. Use the fixture worlds instead, and worlds.run in the test."
    if problem and item.get_closest_marker(MARKER) is not None:
        raise _failure(f"{item.nodeid}: {MARKER} {problem}")


def _size(item: pytest.Item) -> int | None:
    return getattr(getattr(item, "callspec", None), "params", {}).get("world_size")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on the ranks instead of here."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    size = _size(pyfuncitem)
    if marker is None or size is None:
        return None
    pool: Worlds = pyfuncitem._request.getfixturevalue("worlds")
    pool.start(size)  # not part of the test's timeout
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    __tracebackhide__ = True
    from contrastive_zoo.testing.worlds import RankError

    job = _run_body, functools.partial(pyfuncitem.obj, **arguments), warnings.filters
    error, ended = None, {}
    try:
        ended = dict(enumerate(pool.run(size, *job, timeout=marker.kwargs.get("timeout"))))
    except RankError as raised:
        error, ended = raised, raised.returned
    except TypeError as raised:  # before anything ran
        raise _failure(
            f"{pyfuncitem.name}: its arguments are evaluated in this process and sent to the ranks, but cannot be pickled: "
            f"{raised.__cause__}. Make them inside the test, or leave the marker out and call worlds.run."
        ) from None
    if error or any(ended.values()):
        raise _outcome(pyfuncitem, size, ended, error)
    return True


def _run_body(body: Callable[[], Any], filters: Any) -> tuple[str, str] | None:
    """Run a test's body on a rank, with the test's warning filters; return its call of skip or xfail."""
    if _rank() > 0:  # rank 0 shows the same warning
        filters = [(action if action == "error" else "ignore", *rest) for action, *rest in filters]
    with warnings.catch_warnings():
        warnings.filters[:0] = filters  # type: ignore[index]  # a list
        try:
            body()
        except (pytest.skip.Exception, pytest.xfail.Exception) as call:
            return "skip" if isinstance(call, pytest.skip.Exception) else "xfail", str(call)
    return None


def _outcome(item: pytest.Item, size: int, ended: dict[int, tuple[str, str] | None], error: Any) -> BaseException:
    """Return the outcome of the test in this process: a skip or an expected failure of all ranks, or else a failure."""
    calls = {rank: call for rank, call in ended.items() if call}
    names = {name for name, _ in calls.values()}
    if len(calls) == size and len(names) == 1:
        outcome = getattr(pytest, names.pop()).Exception(calls[0][1])
        outcome._use_item_location = True
        return outcome
    said = "; ".join(f"rank {rank} called pytest.{name}: {reason}" for rank, (name, reason) in sorted(calls.items()))
    text = f"{error}\n{said}".rstrip() if error else f"W={size}: {said}. The other ranks returned."
    failure, raised = _failure(text), list(error.errors.values()) if error else []
    is_same = len(raised) == size and len(set(map(type, raised))) == 1 and isinstance(raised[0], Exception)
    if is_same and item.get_closest_marker("xfail"):  # its raises= is compared with the type
        raised[0].__cause__ = failure
        return raised[0]
    return failure


def _failure(message: str) -> BaseException:
    return pytest.fail.Exception(message, pytrace=False)
