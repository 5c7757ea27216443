"""A ring of one or two levels: the loss of one process, without all candidates on any rank."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import exchange, rowwise
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, error_message, local_shard
from tests.stateful_losses import LOSSES, can_ring, global_rows
from tests.stateful_rank import Action, limits, play

GENERAL_PATH = {
    "contrastive_zoo.wrapper.step:SMALL_BATCH": -1,
    "contrastive_zoo.engine.implementation:SMALL_BATCH_ELEMENTS": -1,
}
LOW_TILES = {"contrastive_zoo.engine.tiling:BLOCK_BYTES": 700, "contrastive_zoo.engine.tiling:TILE_BYTES": 700}


RINGS = [name for name in LOSSES if can_ring(name)]


def play_each(names: Sequence[str], thresholds: dict[str, int], program: list[Action]) -> None:
    for name in names:
        play(name, thresholds, program)


FLAT, TWO_BY_TWO, TWO_BY_THREE = True, ((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize(
    ("shards", "layout", "tiles"),
    [
        ((7, 0, 5), FLAT, LOW_TILES),
        ((4, 9), FLAT, {}),
        ((3, 0, 6, 4), TWO_BY_TWO, LOW_TILES),
        ((2, 5, 0, 3, 1, 4), TWO_BY_THREE, {}),
        ((3, 6), ((1,), (0,)), {}),
    ],
    ids=str,
)
def test_a_ring_is_one_process(shards: tuple[int, ...], layout: Any, tiles: dict[str, int], worlds: Worlds) -> None:
    names = RINGS if EVERY_CASE else RINGS[shards[0] % 3 :: 3]  # each in some layout
    program = [("set_option", {"ring": layout}), ("step", {"batches": [(shards, 1)]})]
    worlds.run(len(shards), play_each, names, {**GENERAL_PATH, **tiles}, program, timeout=60)


# ------------------------------------------------------------------------------------------------------- what is sent


def rows_sent(name: str, shards: Sequence[int], layout: Any) -> tuple[dict[int, int], int]:
    """Return how many embeddings this rank sends to each other rank, and how many it gathers."""
    sent: dict[int, int] = {}
    gathered = 0

    class Counted(exchange.SendReceive):
        def __init__(self, rows: Tensor, to: int, *rest: Any) -> None:
            sent[to] = sent.get(to, 0) + len(rows) * rows.is_floating_point()
            super().__init__(rows, to, *rest)

    def gather(rows: Tensor, *rest: Any) -> Tensor:
        nonlocal gathered
        gathered += len(rows) * (rows.ndim > 1)
        return GATHER(rows, *rest)

    counting = patch.object(exchange, "SendReceive", Counted), patch.object(rowwise, "gather_rows", gather)
    with counting[0], counting[1]:
        program = [("set_option", {"ring": layout}), ("evaluate", {"batch": (shards, 1), "how": "no_grad"})]
        play(name, GENERAL_PATH, program)
    return sent, gathered


GATHER = rowwise.gather_rows


@pytest.mark.parametrize("name", ["SigLIP", "Contrastive"])
def test_each_row_is_sent_once_to_each_machine(name: str, worlds: Worlds) -> None:
    shards = (3, 1, 2, 4)
    for rank, (sent, gathered) in enumerate(worlds.run(4, rows_sent, name, shards, ((0, 1), (2, 3)))):
        neighbour = rank ^ 1
        visiting = shards[(rank + 2) % 4]
        # its own embeddings, and those that visit its machine, inside; its own once between the machines
        assert sent == {neighbour: shards[rank] + visiting, (rank + 2) % 4: shards[rank]}
        assert gathered == 0


@pytest.mark.parametrize("name", ["NTXent", "SupCon"])
def test_one_tower_sends_rows_from_machine_to_machine_and_not_back(name: str, worlds: Worlds) -> None:
    shards = (3, 1, 2, 4, 1, 3)
    factor = 2 if LOSSES[name].compares == "views" else 1  # both views of a sample are sent
    for rank, (sent, _) in enumerate(worlds.run(6, rows_sent, name, shards, ((0, 1), (2, 3), (4, 5)))):
        behind = (rank - 2) % 6
        assert set(sent) == {rank ^ 1, behind}
        assert sent[behind] == factor * shards[rank]  # once to one of the two other machines


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "loss",
    [cz.Triplet(), cz.SmoothAP(), cz.Angular(), cz.VICReg(), cz.ArcFace(3, 2),
     cz.CrossBatchMemory(cz.InfoNCE(), 4, 2), torch.dist],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_a_loss_that_needs_whole_rows_says_why(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"with a ring, candidates pass from rank to rank. .* cannot be computed so: "):
        cz.DistributedLoss(loss, ring=True)


def test_a_subclass_with_its_own_rows_is_refused() -> None:
    class Mine(cz.MultiSimilarity):
        def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Any:
            return similarity.where(negative, -2).amax(1), negative.any(1)

    with pytest.raises(ValueError, match=r"Mine cannot be computed so: its rows\(\) needs whole rows"):
        cz.DistributedLoss(Mine(), ring=True)
    with pytest.raises(ValueError, match="WeightedSum cannot be computed so: VICReg: it sums statistics"):
        cz.DistributedLoss(cz.WeightedSum([cz.NTXent(), cz.VICReg()]), ring=True)


@pytest.mark.parametrize("option", [2, "all", torch.zeros(2), None], ids=str)
def test_what_is_no_mesh(option: Any) -> None:
    with pytest.raises(ValueError, match="ring is True, False, or a 2-d DeviceMesh"):
        cz.DistributedLoss(cz.SigLIP(), ring=option)


def messages_of_bad_meshes(per_rank: Sequence[Any]) -> str | None:
    loss = cz.DistributedLoss(cz.SigLIP(), ring=per_rank[dist.get_rank()])
    return error_message(lambda: loss(torch.eye(2), torch.eye(2)))


@pytest.mark.parametrize(
    ("per_rank", "words"),
    [
        ([((0,), (1,)), True], "ring"),
        ([((0,), (1,)), ((0, 1),)], "ring"),
        ([True, ((0,), (2,))], "does not hold each rank of the process group once"),
        ([((0, 0),), ((0, 0),)], "does not hold each rank of the process group once"),
    ],
    ids=str,
)
def test_ranks_that_differ_in_the_ring_raise_alike(per_rank: list[Any], words: str, worlds: Worlds) -> None:
    one, other = worlds.run(2, messages_of_bad_meshes, per_rank)
    assert one is not None
    assert one == other
    assert words in one


def value_with_mesh() -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    rows = [local_shard(x, (1, 2, 3, 1)) for x in global_rows("views", 7, 0, torch.float64)]
    with limits(GENERAL_PATH):
        values = [float(cz.DistributedLoss(cz.SigLIP(), ring=option)(*rows)) for option in (mesh, False)]
    return values[0], values[1]


def test_a_device_mesh_is_taken(worlds: Worlds) -> None:
    for found, expected in worlds.run(4, value_with_mesh):
        assert found == pytest.approx(expected, abs=1e-12)
