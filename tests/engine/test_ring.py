"""A ring of one or two levels: the loss of one process, without all candidates on any rank."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import exchange, row_statistics, rowwise
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, EXACT, distance, error_message, learnt, local_shard
from tests.stateful_rank import limits


class YieldingHard(cz.RowLoss):
    """The example of the docs."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> row_statistics.Rows:
        farthest, nearest = yield (
            row_statistics.Minimum(similarity, positive),
            row_statistics.Maximum(similarity, negative),
        )
        return (nearest - farthest + 0.5).relu(), farthest.isfinite() & nearest.isfinite()


Call = Literal["views", "labels", "teachers", "ids", "texts", "stacked views", "mask", "negatives", "whole numbers"]
CLASSES = 4

LOSSES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "SigLIP": (lambda: cz.SigLIP(**learnt(0.5, -1.0)), "views"),
    "SigLIP, sum": (lambda: cz.SigLIP(**learnt(0.02, 3.0), reduction="sum"), "views"),
    "SupSigmoid": (lambda: cz.SupSigmoid(**learnt(0.5, -1.0)), "labels"),
    "the user's own": (YieldingHard, "labels"),
    "Contrastive": (cz.Contrastive, "labels"),
    "SignalToNoise": (cz.SignalToNoise, "labels"),
    "MultiSimilarity": (cz.MultiSimilarity, "labels"),
    "MultiSimilarity, mined": (lambda: cz.MultiSimilarity(epsilon=0.1), "labels"),
    "Circle": (lambda: cz.Circle(gamma=3.0), "labels"),
    "Triplet, hard": (lambda: cz.Triplet(mining="hard"), "labels"),
    "Triplet, soft": (lambda: cz.Triplet(mining="hard", metric="similarity", soft=True), "labels"),
    "Triplet, ties": (
        lambda: cz.Triplet(mining="hard", metric="squared distance", soft=True, normalize=False),
        "whole numbers",
    ),
    "GeneralizedLiftedStructure": (cz.GeneralizedLiftedStructure, "labels"),
    "LiftedStructure": (cz.LiftedStructure, "labels"),
    "Margin": (lambda: cz.Margin(nu=0.3, num_classes=CLASSES), "labels"),
    "RankedList": (lambda: cz.RankedList(t_p=2.0, epsilon=1e-3), "labels"),
    "NCA": (lambda: cz.NCA(temperature=0.5), "labels"),
    "SINCERE": (lambda: cz.SINCERE(temperature=cz.LearnableTemperature(0.5)), "labels"),
    "TupletMargin": (lambda: cz.TupletMargin(temperature=0.5, average="pairs"), "labels"),
    "SupCon, in": (lambda: cz.SupCon(temperature=0.5, variant="in"), "labels"),
    "SupCon, first views": (lambda: cz.SupCon(temperature=0.5, contrast_mode="one"), "stacked views"),
    "SupCon, mask": (lambda: cz.SupCon(temperature=0.5), "mask"),
    "FastAP": (cz.FastAP, "labels"),
    "NPairs": (cz.NPairs, "labels"),
    "DCLW": (lambda: cz.DCLW(temperature=0.5, denominators="per_view"), "views"),
    "HCL": (lambda: cz.HCL(temperature=0.5), "views"),
    "ClipDistillation": (lambda: cz.ClipDistillation(temperature=0.5, teacher_temperature=0.3), "teachers"),
    "MultiPositive": (lambda: cz.MultiPositive(temperature=0.5, duplicates="ignore", symmetric=True), "ids"),
    "Clip": (lambda: cz.Clip(**learnt(0.5)), "views"),
    "InfoNCE": (lambda: cz.InfoNCE(temperature=cz.LearnableTemperature(0.5)), "views"),
    "NTXent": (lambda: cz.NTXent(temperature=0.5), "views"),
    "NTXent, learnt": (lambda: cz.NTXent(temperature=cz.LearnableTemperature(0.5), normalize=False), "views"),
    "SupCon": (lambda: cz.SupCon(temperature=0.5), "labels"),
    "MILNCE": (lambda: cz.MILNCE(temperature=2.0, normalize=True), "texts"),
    "MNRL": (lambda: cz.MNRL(temperature=0.5), "views"),
    "MNRL, both": (
        lambda: cz.MNRL(temperature=0.5, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
        "negatives",
    ),
    "AlignUniform": (cz.AlignUniform, "views"),
    "WeightedSum": (lambda: cz.WeightedSum([cz.SigLIP(), cz.NTXent()], weights=[1.0, 0.5]), "views"),
}

GENERAL_PATH = {
    "contrastive_zoo.wrapper.step:SMALL_BATCH": -1,
    "contrastive_zoo.engine.implementation:SMALL_BATCH_ELEMENTS": -1,
}
LOW_TILES = {"contrastive_zoo.engine.tiling:BLOCK_BYTES": 700, "contrastive_zoo.engine.tiling:TILE_BYTES": 700}


def batch(call: Call, total: int, seed: int) -> list[Tensor]:
    """Return the arguments of one process; of whole numbers, whose dot products are exact, many are equal."""
    generator = torch.Generator().manual_seed(seed)
    count = {"views": 2, "teachers": 4, "ids": 2, "texts": 4, "stacked views": 3, "mask": 2, "negatives": 3}.get(
        call, 1
    )
    rows = [torch.randn(total, 5, dtype=torch.float64, generator=generator) for _ in range(count)]
    if call == "whole numbers":
        rows = [x[:, :2].round() for x in rows]
    if call == "texts":  # three for each video
        return [rows[0], torch.stack(rows[1:], 1)]
    if call in ("stacked views", "mask"):
        mask = torch.rand(total, total, generator=generator) < 0.3
        return [torch.stack(rows, 1), *([mask] if call == "mask" else [])]
    labelled = call in ("labels", "ids", "whole numbers")
    return [*rows, *([torch.randint(CLASSES, (total,), generator=generator)] if labelled else [])]


def called(loss: Callable[..., Tensor], call: Call, rows: Sequence[Tensor]) -> Tensor:
    return loss(rows[0], mask=rows[1]) if call == "mask" else loss(*rows)


def error_of(name: str, shards: Sequence[int], option: Any, *, learning: bool = True) -> float:
    """Return the largest difference between the ring and one process: value, gradients of embeddings and of parameters."""
    make, call = LOSSES[name]
    rows, world = batch(call, sum(shards), seed=len(name)), dist.get_world_size()
    mine = [local_shard(x, shards).requires_grad_(x.is_floating_point()) for x in rows]
    rows = [x.requires_grad_() if x.is_floating_point() else x for x in rows]
    alone, loss = make().double(), make().double()
    with cz.engine.plain_formulas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it sees its own embeddings only
        expected = called(alone, call, rows)
    value = called(cz.DistributedLoss(loss, ring=option), call, mine)
    errors = [distance(value.detach(), expected.detach())]
    if learning:
        expected.backward()
        value.backward()
        for x, local in zip(rows, mine, strict=True):
            if x.grad is not None:
                assert local.grad is not None
                errors.append(distance(local.grad, world * local_shard(x.grad, shards)))
        for x, y in zip(alone.parameters(), loss.parameters(), strict=True):
            if x.grad is not None:
                assert y.grad is not None
                errors.append(distance(y.grad, x.grad))
    return max(errors)


def errors_of(names: Sequence[str], shards: Sequence[int], layout: Any, tiles: dict[str, int]) -> dict[str, float]:
    """Return the error of each loss, on a rank."""
    with limits({**GENERAL_PATH, **tiles}):
        return {name: error_of(name, shards, layout) for name in names}


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
    names = list(LOSSES) if EVERY_CASE else list(LOSSES)[shards[0] % 2 :: 2]  # of each kind of layout once
    for found in worlds.run(len(shards), errors_of, names, shards, layout, tiles, timeout=60):
        assert max(found.values()) <= EXACT, {name: x for name, x in found.items() if x > EXACT}


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
    with limits(GENERAL_PATH), counting[0], counting[1], torch.no_grad():
        error_of(name, shards, layout, learning=False)
    return sent, gathered


GATHER = rowwise.gather_rows


@pytest.mark.parametrize("name", ["SigLIP", "Contrastive", "MultiSimilarity"])
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
    factor = 2 if LOSSES[name][1] == "views" else 1  # both views of a sample are sent
    for rank, (sent, _) in enumerate(worlds.run(6, rows_sent, name, shards, ((0, 1), (2, 3), (4, 5)))):
        behind = (rank - 2) % 6
        assert set(sent) == {rank ^ 1, behind}
        assert sent[behind] == factor * shards[rank]  # once to one of the two other machines


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "loss",
    [cz.Triplet(), cz.SmoothAP(), cz.Angular(), cz.GIST(), cz.MNRL(directions=("query_to_doc", "doc_to_doc")),
     cz.VICReg(), cz.ArcFace(3, 2), cz.CrossBatchMemory(cz.InfoNCE(), 4, 2), torch.dist],
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
    rows = [local_shard(x, (1, 2, 3, 1)) for x in batch("views", 7, seed=0)]
    with limits(GENERAL_PATH):
        values = [float(cz.DistributedLoss(cz.SigLIP(), ring=option)(*rows)) for option in (mesh, False)]
    return values[0], values[1]


def test_a_device_mesh_is_taken(worlds: Worlds) -> None:
    for found, expected in worlds.run(4, value_with_mesh):
        assert found == pytest.approx(expected, abs=1e-12)
