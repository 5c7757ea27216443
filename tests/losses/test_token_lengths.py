"""Numbers of tokens on an accelerator: the host reads them once a step, for all sets, blocks of sets and ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import max_sim, tiling
from contrastive_zoo.losses.max_sim import LateInteractionLoss
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, distance
from tests.losses.test_late_interaction import MASKS, NAMES, Shard, largest_error, rows_of, whole
from tests.simulated import device, on_cpu, put_by, value_and_gradients

ORDER = [*NAMES[:2], *MASKS[:2], NAMES[2], MASKS[2]]


def step(make: Callable[[], Any], rows: dict[str, Tensor]) -> tuple[list[Any], list[str]]:
    """Return value and gradients of embeddings on a simulated device, and what the host reads in the third step."""
    with device() as mode, cz.engine.memory_budget(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "TILE_BYTES", 400)  # several blocks of documents
        put = put_by(mode)
        loss = cz.DistributedLoss(make(), check_finite=False, check_equal=False)
        moved = [put(rows[name]) for name in ORDER if name in rows]
        for _ in range(3):
            mode.reads.clear()
            mode.uploads.clear()
            found = value_and_gradients(loss, moved)
        reads = [*mode.reads, *mode.uploads]
        return on_cpu(found), reads


def whole_step(make: Callable[[], Any], rows: dict[str, Tensor]) -> list[Any]:
    return value_and_gradients(make(), [rows[name] for name in ORDER if name in rows])


@pytest.mark.parametrize(
    "make", [lambda: cz.MaxSim(symmetric=True), lambda: composition(), lambda: cz.Matryoshka(cz.MaxSim(), (2, 4))]
)
def test_lengths_are_read_once(make: Callable[[], Any]) -> None:
    rows = rows_of(Shard(7, 4), seed=1)
    found, reads = step(make, rows)
    assert len(reads) == 1
    torch.testing.assert_close(found, whole_step(make, rows), rtol=1e-10, atol=1e-10)


def composition() -> Any:
    """Two losses of the same sets of tokens."""
    return cz.WeightedSum([cz.MaxSim(), cz.MaxSimPairwise()])


def test_nothing_is_read_without_masks() -> None:
    rows = {name: x for name, x in rows_of(Shard(7), seed=1).items() if name in NAMES[:2]}
    found, reads = step(cz.MaxSim, rows)
    assert not reads
    torch.testing.assert_close(found, whole_step(cz.MaxSim, rows), rtol=1e-10, atol=1e-10)


SHARDS = (Shard(3, 2), Shard(5, 0, (2, 7, 1)))


def single_tokens(sets: max_sim.TokenSets, world: World) -> tuple[Tensor, list[int]]:
    """The mutant: the documents of other ranks have one token each."""
    lengths, local = gather_rows(sets.lengths, sets.shards, world), sets.shards.local
    return lengths, [*[1] * local.start, *sets.read, *[1] * (sets.shards.total - local.stop)]


def error_of_rank(mutant: str = "") -> tuple[float, int]:
    """Return the largest error of a rank's value and gradients, and how often the host reads."""
    by_rank = [rows_of(shard, seed=20 * rank) for rank, shard in enumerate(SHARDS)]
    rank, inputs = dist.get_rank(), LateInteractionLoss.inputs
    with pytest.MonkeyPatch.context() as patch:
        if mutant == "reads again":
            patch.setattr(LateInteractionLoss, "inputs", lambda loss, *args: inputs(*args))
        if mutant == "single tokens":
            patch.setattr(max_sim.TokenSets, "all_lengths", single_tokens)
        (value, *gradients), reads = step(composition, by_rank[rank])
    expected, *by_rows = whole_step(composition, whole(by_rank))
    errors = [distance(value, expected)]
    for name, found, every in zip(NAMES, gradients, by_rows, strict=True):
        own = every.split([len(x[name]) for x in by_rank])[rank]
        errors.append(distance(found, 2 * own[:, : found.shape[1]]))
    return max(errors), len(reads)


def test_ranks_read_their_own_lengths(device_worlds: Worlds) -> None:
    for error, reads in device_worlds.run(2, error_of_rank):
        assert error <= EXACT
        assert reads == 1


def test_a_ring_of_ranks_that_read_their_own_lengths(worlds: Worlds) -> None:
    """With what is computed on accelerators: the simulated device has no ring."""

    def job() -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "on_cpu", lambda x: False)
            return largest_error("MaxSim, symmetric", [SHARDS, (Shard(0), Shard(2, 1))], True, 0)

    assert max(worlds.run(2, job)) <= EXACT


@pytest.mark.parametrize("mutant", ["single tokens", "reads again"])
def test_wrong_lengths_and_reads_by_each_member_would_be_noticed(mutant: str, device_worlds: Worlds) -> None:
    errors, reads = zip(*device_worlds.run(2, error_of_rank, mutant), strict=True)
    assert max(errors) > 1e-3 if mutant == "single tokens" else min(reads) > 1
