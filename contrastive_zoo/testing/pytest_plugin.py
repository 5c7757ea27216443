"""The pytest plugin: ``@pytest.mark.world_sizes(1, 2, 4)`` runs a test on every rank of live process groups."""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from contrastive_zoo.testing.worlds import Worlds

MARKER = "world_sizes"


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "timeout in seconds of one test in one world of processes"
    parser.addini("world_timeout", f"{about} (--world-timeout takes precedence)", default="60")
    group = parser.getgroup("contrastive_zoo")
    group.addoption("--world-timeout", type=_seconds, metavar="SECONDS", help=f"{about}; 60 by default")
    of_threads = "run ranks as threads of the test's process, up to 64, in which a debugger works"
    parser.addini("world_threads", of_threads, type="bool", default=False)
    group.addoption("--world-threads", action="store_true", help=of_threads)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*sizes, timeout=None): run the test on every rank of live gloo worlds of these sizes; inside, "
        "torch.distributed is initialised. rank and world_size are fixtures; timeout is in seconds.",
    )
    try:
        _timeout(config)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"world_timeout: {error}") from None


def _seconds(text: str) -> float:
    seconds = math.nan
    with contextlib.suppress(ValueError):
        seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"a positive number of seconds was expected, got {text!r}.")
    return seconds


def _timeout(config: pytest.Config) -> float:
    option: float | None = config.getoption("world_timeout")
    return _seconds(config.getini("world_timeout")) if option is None else option


@pytest.fixture(scope="session")
def worlds(pytestconfig: pytest.Config) -> Iterator[Worlds]:
    """Provide a pool of live worlds for the whole session: ``worlds.run(2, function, *arguments)``."""
    from contrastive_zoo.testing.worlds import Worlds

    threads = pytestconfig.getoption("world_threads") or pytestconfig.getini("world_threads")
    with Worlds(timeout=_timeout(pytestconfig), threads=threads) as pool:
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
    # world_size is no fixture: Hypothesis would treat it as function-scoped, not made anew for each example.
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", sizes, ids=[f"W={size}" for size in sizes])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reject marked tests that would run in this process only, or not at all."""
    problem = ""
    if _size(item) is None:
        problem = f"{MARKER} marks test functions and methods of plain classes, not those of a unittest.TestCase."
    elif inspect.iscoroutinefunction(getattr(item, "obj", None)):
        problem = f"{MARKER}: an async test cannot run on ranks; start the event loop inside the test."
    if problem and item.get_closest_marker(MARKER) is not None:
        raise _failure(f"{item.nodeid}: {problem}")


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
    on_ranks = functools.partial(_on_ranks, pool, size, marker.kwargs.get("timeout"))
    test = pyfuncitem.obj
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if not getattr(test, "is_hypothesis_test", False):
        on_ranks(test, **arguments)
        return True
    # Hypothesis draws in this process, so that all ranks get the same example; inner_test is called with each.
    handle, body = test.hypothesis, test.hypothesis.inner_test

    @functools.wraps(body)
    def body_on_ranks(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        on_ranks(body, *args, **kwargs)

    handle.inner_test = body_on_ranks
    try:
        test(**arguments)
    except pytest.fail.Exception as failure:  # pytest omits the notes of a failure without a traceback
        example = getattr(failure, "__notes__", [])
        raise pytest.fail.Exception("\n".join([str(failure), *example]), pytrace=False) from None
    finally:
        handle.inner_test = body
    return True


def _on_ranks(
    pool: Worlds, size: int, timeout: float | None, body: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> None:
    __tracebackhide__ = True
    from contrastive_zoo.testing.worlds import RankError

    job: Any = OnRank(_unpickle_body, functools.partial(body, *args, **kwargs))
    try:
        pool.run(size, job, timeout=timeout)
        return
    except RankError as error:
        failure = _outcome(error)
    except TypeError as error:  # raised before anything ran
        failure = _failure(_pickling_problem(body, kwargs, error))
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


def _pickling_problem(body: Callable[..., Any], arguments: dict[str, Any], error: TypeError) -> str:
    from contrastive_zoo.testing._rank import dump_job

    problems = []
    for name, value in ({"self": getattr(body, "__self__", None)} | arguments).items():
        try:
            dump_job(value)
        except Exception as reason:
            problems.append(f"{name} ({type(value).__name__}: {str(reason).partition(chr(10))[0]})")
    if not problems:
        return str(error)
    return (
        f"{body.__name__}: its arguments are evaluated in this process and sent to the ranks, but these cannot be pickled: "
        f"{', '.join(problems)}. Make them inside the test, or leave the marker out and call worlds.run."
    )


def _failure(message: str) -> BaseException:
    return pytest.fail.Exception(message, pytrace=False)
