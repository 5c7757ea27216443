"""Ranks on two hosts: the contract holds; a link that is cut ends as an error on both; a restart continues the training.

torchrun starts the ranks in two network namespaces with an address each. They need root, and are skipped elsewhere.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contrastive_zoo.testing.worlds import Worlds
from tests.two_hosts_rank import CUT_AT, SAVED, STEPS, TIMEOUT, Training, continued

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import hosts

ROOT = Path(__file__).parent.parent
PATIENCE = 100.0
"""Seconds for torchrun, its ranks and their imports, on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        with hosts.two_hosts():
            pass
    except OSError as error:
        pytest.skip(f"TWO HOSTS ARE NOT TESTED. They need Linux, root, ip, nsenter and unshare: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def cut_off(folder: Path) -> list[dict[str, Any]]:
    """Run the training on new hosts, after a check of the contract, and return what each rank found."""
    log, files, until = folder / "log", [folder / f"{rank}.json" for rank in range(4)], time.monotonic() + PATIENCE
    program = ("-m", "tests.two_hosts_rank", str(folder))
    with hosts.two_hosts() as both, hosts.torchrun(both, (2, 2), log, *program) as agents:
        while not all(file.exists() for file in files):
            failed = any(agent.poll() for agent in agents)
            if failed or time.monotonic() > until:
                pytest.fail(log.read_text()[-5000:])
            time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def one_process() -> tuple[list[float], dict[str, Any]]:
    """The losses of all steps, and the state at the end."""
    training = Training()
    torch.manual_seed(0)
    return list(training.run(STEPS)), training.state_dict()


def test_two_hosts_cannot_reach_others_and_leave_nothing(folder: Path) -> None:
    with hosts.two_hosts() as (one, other):
        assert os.readlink(one.namespace) != os.readlink(other.namespace) != os.readlink("/proc/self/ns/net")
        keepers = [one.namespace, other.namespace]
    assert not any(path.exists() for path in keepers)


def test_a_link_that_is_cut_is_an_error_on_both_hosts(cut_off: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(cut_off):
        assert len(found["values"]) in (CUT_AT - 2, CUT_AT - 1)  # the end of the step before may be on its way
        assert found["error"] == "CommunicationError", found
        assert f"rank {rank} " in found["text"]
        assert found["seconds"] < 2 * TIMEOUT, found


def test_a_restart_on_fewer_ranks_continues_the_training(cut_off, one_process, folder: Path, worlds: Worlds) -> None:
    values, state = one_process[0], dict(one_process[1])
    position = state.pop("sampler")
    for found in cut_off:
        assert found["values"] == pytest.approx(values[: len(found["values"])], rel=1e-9)
    for rank, continued_values in enumerate(worlds.run(2, continued, folder)):
        assert continued_values == pytest.approx(values[SAVED:], rel=1e-9)
        end = torch.load(folder / f"end-{rank}.pt", weights_only=True)
        if rank > 0:  # its own stream
            end["random"] = state["random"]
        assert end.pop("sampler") == position
        torch.testing.assert_close(end, state, rtol=1e-9, atol=1e-9)


def test_a_training_that_forgets_its_random_numbers_would_differ(one_process: tuple[list[float], Any]) -> None:
    values, _ = one_process
    training = Training()
    torch.manual_seed(1)
    assert list(training.run(2)) != pytest.approx(values[:2], rel=1e-6)
