"""Shapes are checked in this run, and Hypothesis searches briefly. The pool of worlds is the plugin's."""

import gc
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# shapes that the engines and the masks promise are checked at every call of the run
install_import_hook(["contrastive_zoo.engine", "contrastive_zoo.engine.masks"], "beartype.beartype")

# the same examples on every machine; a search draws others each time
quick = settings(max_examples=3, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", quick)
long = int(os.environ.get("HYPOTHESIS_EXAMPLES", "2000"))
settings.register_profile("long", max_examples=long, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
EVERY_CASE = os.environ.get("HYPOTHESIS_PROFILE") == "long"


IMPORTED_ON_RANKS = [
    "pytorch_metric_learning.losses",
    "pytorch_metric_learning.miners",
    "pytorch_metric_learning.utils.distributed",
    "sentence_transformers.sentence_transformer.losses",
    "transformers.trainer",
]
"""Modules besides the package's own that many ranks of `make test` use: each of its workers imports them once more."""


collect_ignore = ["typing/user.py"]  # type checkers read it; it is full of mistakes


gc.disable()  # while tests are collected: it would visit all imported modules, and take a sixth of the time


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting all tests and imported modules again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small batches of this process take the engines of large ones, or the path that users get, by the test's name.

    A search takes the other one. Ranks in processes always take the path that users get.
    """
    from contrastive_zoo.engine import plan, precision

    marker, drawn = request.node.get_closest_marker("path"), crc32(request.node.nodeid.encode()) % 2
    name = marker.args[0] if marker else ["engines", "users"][drawn ^ EVERY_CASE]
    smallest = {(plan, "SMALL_MATRIX"), (plan, "SMALL_ON_ACCELERATORS"), (precision, "SMALL_ELEMENTS")}
    with ExitStack() as stack:
        for module, constant in smallest if name == "engines" else ():
            stack.enter_context(patch.object(module, constant, -1))
        yield


@pytest.fixture(scope="session", autouse=True)
def threads() -> None:
    """One thread for each worker of pytest-xdist: threads of several workers would wait for each other's cores."""
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> None:
    """Start the process that all ranks are forked from, so that they import nothing; whichever test has ranks first."""
    from contrastive_zoo.testing._rank import prepared_forkserver

    with prepared_forkserver(["contrastive_zoo.public", *IMPORTED_ON_RANKS]):
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session")
def impatient() -> Iterator[Any]:
    """Worlds in which a hang is found soon: of jobs that take some milliseconds."""
    from contrastive_zoo.testing.worlds import Worlds  # not before the hook is in

    with Worlds(timeout=10.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def pools(worlds: Any) -> Iterator[Any]:
    from contrastive_zoo.testing.worlds import Worlds
    from tests.helpers import Pools

    with Worlds(timeout=300.0, threads=True) as threads:
        yield Pools(threads, worlds)


@pytest.fixture(scope="session")
def device_worlds() -> Iterator[Any]:
    """Worlds whose backend sends tensors of the simulated device only, as NCCL does."""
    from contrastive_zoo.testing.worlds import Worlds
    from tests.simulated import send_from_device

    with Worlds(timeout=300.0) as pool:
        pool.run(2, send_from_device)
        yield pool
