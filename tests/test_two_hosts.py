"""Ranks on two hosts: the contract holds; a link that is cut ends as an error on both; a restart continues the training.

torchrun starts the ranks in two network namespaces with an address each; each runs this file. They need root, and are
skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import contrastive_zoo as cz
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import groups, numbers
from tests.stateful_rank import play

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import hosts

SAMPLES, BATCH, STEPS, SAVED, CUT_AT = 50, 12, 12, 7, 9
"""Two epochs of batches of 12, 12, 12, 12 and 2, and two steps of a third; the checkpoint is in the middle of the second."""

TIMEOUT = 6.0
"""Seconds of the training's process group: long enough for a rank that waits for a busy processor."""

WEIGHTS = {1: None, 2: (2, 1), 4: (3, 1, 0, 2)}
"""The shares of the ranks: uneven, and of one of four nothing."""

SHARDS = [(3, 0, 2, 4), (1, 5, 0, 0), (2, 2, 2, 2), (0, 0, 0, 3), (4, 1, 3, 0)]


class Training:
    """An encoder, a loss with a memory and a learnt temperature, one with random numbers, AdamW, and a sampler.

    Args:
        group: the ranks; None is this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        torch.manual_seed(0)
        self.group, self.world_size = group, dist.get_world_size(group) if group is not None else 1
        self.images, self.labels = numbers(SAMPLES, 6, seed=1), torch.arange(SAMPLES) % 7
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        memory = cz.CrossBatchMemory(cz.SupCon(temperature=cz.LearnableTemperature(0.5)), 20, 4, dtype=torch.float64)
        self.loss_fn = cz.DistributedLoss(memory.double(), process_group=group)
        self.random_loss = cz.DistributedLoss(projected, process_group=group)
        parameters = [*self.encoder.parameters(), *self.loss_fn.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.sampler = cz.data.GlobalBatchSampler(
            SAMPLES, batch_size=BATCH, seed=3, rank_weights=WEIGHTS[self.world_size], process_group=group
        )
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on; the random numbers are those of rank 0."""
        parts = {name: getattr(self, name).state_dict() for name in ("encoder", "loss_fn", "optimizer")}
        position = self.sampler.state_dict(step=self.steps - len(self.sampler) * self.sampler.epoch)
        return {**parts, "sampler": position, "random": torch.get_rng_state(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at this state."""
        for part in ("encoder", "loss_fn", "optimizer", "sampler"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(state["random"])
        self.steps = state["steps"]

    def run(self, until: int, before: Callable[[int], None] = lambda step: None) -> Iterator[float]:
        """Train, and yield the loss of each step."""
        while self.steps < until:
            self.sampler.set_epoch(self.steps // len(self.sampler))
            for indices in self.sampler:
                if self.steps == until:
                    return
                before(self.steps + 1)
                yield self.step(indices)
                self.steps += 1

    def step(self, indices: list[int]) -> float:
        """One step, on this rank's part of a batch."""
        self.optimizer.zero_grad()
        z = self.encoder(self.images[indices] + 0.1 * self.noise(indices))
        value = self.loss_fn(z, self.labels[indices]) + 0.1 * self.random_loss(z)
        value.backward()
        cz.average_gradients(self.encoder, self.group)
        self.optimizer.step()
        return value.item()

    def noise(self, indices: list[int]) -> Tensor:
        """An augmentation of each sample: a function of the sample and the epoch, whichever rank draws it."""
        keys = random_keys(5, self.sampler.epoch, torch.tensor(indices, dtype=torch.int64)[:, None], torch.arange(6))
        return torch.from_numpy(keys.astype(float)) / 2**63 - 1


def projected(embeddings: Tensor) -> Tensor:
    """A third-party loss with random numbers."""
    return (embeddings @ torch.randn(4, 3, dtype=embeddings.dtype)).square().mean()


def contract() -> None:
    """Compare losses with one process over several steps with uneven and empty shards; a difference is an error."""
    mesh = init_device_mesh("cpu", (2, 2))  # its rows are the hosts
    steps = [("step", {"batches": [(sizes, 10 * seed)]}) for seed, sizes in enumerate(SHARDS)]
    in_a_ring = [("set_option", {"ring": mesh}), *steps]
    for name, program in {"Clip": [*steps, *in_a_ring], "Triplet": in_a_ring}.items():
        for small_batch in (2**28, -1):
            play(name, {"contrastive_zoo.wrapper.step:SMALL_BATCH": small_batch}, program)


def train_until_cut_off(folder: Path) -> dict[str, Any]:
    """Check the contract; train, save a checkpoint, and go on until the link is cut."""
    contract()
    found: dict[str, Any] = {"values": []}
    training, began = Training(dist.new_group(timeout=timedelta(seconds=TIMEOUT))), 0.0

    def before(step: int) -> None:
        nonlocal began
        began = time.monotonic()
        if step == SAVED + 1 and dist.get_rank() == 0:
            torch.save(training.state_dict(), folder / "checkpoint.pt")
        if step == CUT_AT and dist.get_rank() == 3:
            subprocess.run(hosts.CUT, check=True)

    torch.manual_seed(dist.get_rank())  # each rank's own; those of rank 0 count
    try:
        for value in training.run(STEPS, before):
            found["values"].append(value)
    except BaseException as error:
        found |= {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return found


def continued(folder: Path) -> list[float]:
    """Train on from the checkpoint to the end, on the ranks of a world."""
    with groups(range(dist.get_world_size())) as group:
        training = Training(group)
        torch.manual_seed(100 + dist.get_rank())
        training.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True))
        values = list(training.run(STEPS))
        torch.save(training.state_dict(), folder / f"end-{dist.get_rank()}.pt")
    return values


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
        folders = str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        yield tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def cut_off(folder: Path) -> list[dict[str, Any]]:
    """Run the training on new hosts, after a check of the contract, and return what each rank found."""
    log, files, until = folder / "log", [folder / f"{rank}.json" for rank in range(4)], time.monotonic() + PATIENCE
    program = ("-m", "tests.test_two_hosts", str(folder))
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


@pytest.mark.usefixtures("folder")
def test_two_hosts_cannot_reach_others_and_leave_nothing() -> None:
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


def main() -> None:
    """Run the training that is cut off, and write what it found."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = train_until_cut_off(folder)
    file = folder / f"{dist.get_rank()}"
    file.write_text(json.dumps(found))
    file.rename(file.with_suffix(".json"))  # complete
    if "error" in found:
        os._exit(0)  # torchrun ends the other ranks of a host if one has failed; they have not written yet
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
