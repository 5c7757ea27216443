"""Shapes are checked in this run, and Hypothesis searches briefly. The pool of worlds is the plugin's."""

import gc
import multiprocessing.forkserver
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# shapes that the engines and the masks promise are checked at every call of the run: before anything imports these
install_import_hook(["contrastive_zoo.engine", "contrastive_zoo.engine.masks"], "beartype.beartype")
gc.disable()  # while tests are collected: it would visit all imported modules, and take a sixth of the time

from contrastive_zoo.engine import plan, precision
from contrastive_zoo.testing._rank import prepared_forkserver
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, Pools

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # threads of several workers would wait for each other's cores

# the same examples on every machine; a search draws others each time
common: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=3, derandomize=True, **common)
settings.register_profile("long", max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "2000")), **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

IMPORTED_ON_RANKS = [f"pytorch_metric_learning.{x}" for x in ("losses", "miners", "utils.distributed")]
"""Modules besides the package's own that many ranks of `make test` use: each of its workers imports them once more."""
OF_TRAINERS = [
    "accelerate",
    "lightning",
    "sentence_transformers.sentence_transformer.losses",
    "sklearn.datasets",
    "transformers.trainer",
]
"""Modules that take seconds to import, and that the ranks of tests of trainers use."""


collect_ignore = ["typing/user.py"]  # type checkers read it; it is full of mistakes
collect_ignore_glob = ["audit_*.py"]  # no tests, and no examples


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose marker ``-m "not (…)"`` names: each worker would import libraries for nothing."""
    left_out = re.fullmatch(r"not \((.*)\)", config.getoption("markexpr"))
    if left_out is None or collection_path.suffix != ".py":
        return None
    of_file = re.search(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", collection_path.read_text(), re.MULTILINE)
    return True if of_file and of_file[1] in left_out[1].split(" or ") else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector from visiting all tests and imported modules again and again."""
    if session.config.getoption("markexpr").startswith("not ("):
        loaded = [x for x in OF_TRAINERS if x in sys.modules]
        assert not loaded, f"import {', '.join(loaded)} where it is used: it takes each worker seconds"
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small batches of this process take the engines of large ones, or the path that users get, by the test's name.

    A search takes the other one. Ranks in processes always take the path that users get.
    """
    marker, drawn = request.node.get_closest_marker("path"), crc32(request.node.nodeid.encode()) % 2
    name = marker.args[0] if marker else ["engines", "users"][drawn ^ EVERY_CASE]
    smallest = {(plan, "SMALL_MATRIX"), (plan, "SMALL_PLAIN"), (precision, "SMALL_ELEMENTS")}
    smallest |= {(plan, "SMALL_ON_ACCELERATORS")}
    with ExitStack() as stack:
        for module, constant in smallest if name == "engines" else ():
            stack.enter_context(patch.object(module, constant, -1))
        yield


@pytest.fixture(scope="session", autouse=True)
def forkserver(request: pytest.FixtureRequest) -> None:
    """Start the process that all ranks are forked from, so that they import nothing; whichever test has ranks first."""
    markers = {marker.name for item in request.session.items for marker in item.iter_markers()}
    of_trainers = OF_TRAINERS if markers & {"trainers", "audit", "pages"} else []
    with prepared_forkserver(["contrastive_zoo.public", *IMPORTED_ON_RANKS, *of_trainers]):
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session")
def impatient() -> Iterator[Worlds]:
    """Worlds in which a hang is found soon: of jobs that take some milliseconds."""
    with Worlds(timeout=10.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def pools(worlds: Worlds) -> Iterator[Pools]:
    with Worlds(timeout=300.0, threads=True) as threads:
        yield Pools(threads, worlds)


@pytest.fixture(scope="session")
def device_worlds() -> Iterator[Worlds]:
    """Worlds whose backend sends tensors of the simulated device only, as NCCL does."""
    from tests.simulated import send_from_device

    with Worlds(timeout=300.0) as pool:
        pool.run(2, send_from_device)
        yield pool
