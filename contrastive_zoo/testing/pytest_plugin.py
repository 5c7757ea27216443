"""The pytest plugin: ``@pytest.mark.world_sizes(1, 2, 4)`` runs a test on every rank of live process groups."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from contrastive_zoo.testing.worlds import Worlds

MARKER = "world_sizes"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contrastive_zoo")
    about = "timeout in seconds of one test in one world of processes; 60 by default"
    group.addoption("--world-timeout", type=float, default=60.0, metavar="SECONDS", help=about)
    of_threads = "run ranks as threads of the test's process, up to 64, in which a debugger works"
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
    with Worlds(timeout=timeout, threads=threads) as pool:
        yield pool


@pytest.fixture(scope="session")
def rank() -> OnRank:
    """Provide the rank to a marked test. In this process it is a placeholder; on a rank it is that rank's number."""
    return OnRank(_rank)


class OnRank:
    """An object that a rank unpickles as the result of a function."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self.made_by = make, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.made_by


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
    """Reject marked tests that would run in this process only, or not at all."""
    problem = ""
    if _size(item) is None:
        problem = "marks test functions and methods of plain classes, not those of a unittest.TestCase."
    elif inspect.iscoroutinefunction(getattr(item, "obj", None)):
        problem = "cannot run an async test on ranks; start the event loop inside the test."
    elif getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        problem = (
            "would draw another example on each rank. Use the fixture worlds instead: worlds.run inside of the test."
        )
    if problem and item.get_closest_marker(MARKER) is not None:
        raise _failure(f"{item.nodeid}: {MARKER} {problem}")


def _size(item: pytest.Item) -> int | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("world_size")


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

    job: Any = OnRank(_unpickle_body, functools.partial(pyfuncitem.obj, **arguments))
    try:
        pool.run(size, job, timeout=marker.kwargs.get("timeout"))
        return True
    except RankError as error:
        failure = _outcome(error)
    except TypeError as error:  # raised before anything ran
        failure = _failure(
            f"{pyfuncitem.name}: its arguments are evaluated in this process and sent to the ranks, but cannot be pickled: "
            f"{error.__cause__}. Make them inside the test, or leave the marker out and call worlds.run."
        )
    raise failure


def _unpickle_body(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a test's body itself, so that tracebacks omit this file."""
    # Skipped.__module__ is "builtins", where pickle does not find it.
    copyreg.pickle(pytest.skip.Exception, lambda skipped: (_skipped, (str(skipped),)))
    return call


def _skipped(reason: str) -> Any:
    return pytest.skip.Exception(reason)


def _outcome(error: Any) -> BaseException:
    """Return the outcome of the test in this process: a skip or an expected failure of all ranks, or else a failure."""
    errors = list(error.errors.values())
    if errors and all(isinstance(x, pytest.skip.Exception) for x in errors):
        return pytest.skip.Exception(str(errors[0]), _use_item_location=True)
    if errors and all(isinstance(x, pytest.xfail.Exception) for x in errors):
        return errors[0]
    return _failure(str(error))


def _failure(message: str) -> BaseException:
    return pytest.fail.Exception(message, pytrace=False)
