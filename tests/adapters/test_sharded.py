"""pytorch-metric-learning's losses in shards: the number and the gradients of one process, from 1/W of the work."""

import functools
import inspect
import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances as D
from pytorch_metric_learning import losses as L
from pytorch_metric_learning import miners as M
from pytorch_metric_learning import reducers as R
from pytorch_metric_learning import regularizers as G
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.pml import meaning
from contrastive_zoo.wrapper.pml.sharded import anchor_batch, anchor_losses, sharded_loss
from contrastive_zoo.wrapper.pml.sharded.sharded_loss import EVALUATED, REFUSED, refusal, sharded
from tests.adapters import sharded_grid
from tests.adapters.sharded_grid import CLASSES, WIDTH, Case, Combination, Rows, Shards, in_shards, largest_difference
from tests.helpers import EVERY_CASE, EXACT, common_error, distance, error_message, split

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of NumPy, in their constructors


def of_grid(*names: str) -> dict[str, Case]:
    """Cases of the grid by name: a loss, or a loss and a miner."""
    return {
        name: Combination(loss, miner=miner or None).case()
        for name in names
        for loss, _, miner in [name.partition(" + ")]
    }


PAIRS = {
    **of_grid(
        "Contrastive", "Contrastive + pair margins", "Contrastive + easy", "Contrastive + HDC", "Contrastive + histogram",
        "SignalToNoiseRatioContrastive", "TripletMargin", "TripletMargin + semihard", "TripletMargin + weighted",
        "MultiSimilarity", "MultiSimilarity + multi-similarity", "Circle", "NTXent", "NTXent + hardest", "SupCon",
        "GeneralizedLiftedStructure", "TupletMargin", "Angular + angular", "Margin + multi-similarity",
        "IntraPairVariance", "NCA",
    ),
    "Triplet, smooth, hardest": Case(lambda: L.TripletMarginLoss(0.3, smooth_loss=True), M.BatchHardMiner),
    "Triplet, hard": Case(lambda: L.TripletMarginLoss(0.3), lambda: M.TripletMarginMiner(0.3, "hard")),
    "Triplet, cosine, regularised": Combination("TripletMargin", "cosine", regularizer="norm").case(),
    "MultiSimilarity, by distance": Case(
        L.MultiSimilarityLoss, lambda: M.MultiSimilarityMiner(distance=D.LpDistance())
    ),
    "SupCon, mined": Combination("SupCon", reducer="mean", miner="multi-similarity").case(),
    "Margin": Case(L.MarginLoss),
    "Margin, learnt": Case(lambda: L.MarginLoss(learn_beta=True, nu=0.1)),
    "NCA, mined": Case(lambda: L.NCALoss(softmax_scale=3), M.MultiSimilarityMiner),
    **{x: Combination("Contrastive", reducer=x).case() for x in ("sum", "threshold", "class weights", "several")},
}  # fmt: skip
"""Also against reference embeddings."""

ONE_PROCESS = {
    **of_grid(
        "LiftedStructure", "LiftedStructure + multi-similarity", "FastAP + multi-similarity", "NPairs", "P2SGrad",
        "ThresholdConsistentMargin + multi-similarity", "CosFace", "LargeMarginSoftmax", "NormalizedSoftmax",
        "ProxyNCA + multi-similarity", "SoftTriple", "SphereFace", "SubCenterArcFace", "MultipleLosses + multi-similarity",
    ),
    "Instance": Case(lambda: L.InstanceLoss(gamma=4)),
    **{f"PNP, {x}": Case(lambda x=x: L.PNPLoss(b=3, alpha=2, anneal=0.3, variant=x)) for x in L.PNPLoss.VARIANTS},
    "RankedList": Case(lambda: L.RankedListLoss(0.3, 3, imbalance=0.4, alpha=1.1, Tp=1)),
    "RankedList, other numbers": Case(lambda: L.RankedListLoss(0.3, -1, imbalance=0.4, alpha=1.1, Tp=-0.5)),
    "ThresholdConsistent": Case(lambda: L.ThresholdConsistentMarginLoss(lambda_plus=2, margin_minus=0.1)),
    "per anchor": Combination("Contrastive", reducer="each anchor").case(),
    "per anchor, nonzero": Combination("Contrastive", reducer="each anchor above 0", miner="pair margins").case(),
    "ArcFace, regularised, mined": Case(
        lambda: L.ArcFaceLoss(CLASSES, WIDTH, weight_regularizer=G.RegularFaceRegularizer()), M.MultiSimilarityMiner
    ),
    "two losses, one with a miner": Case(
        lambda: L.MultipleLosses(
            {"a": L.NTXentLoss(), "b": L.TripletMarginLoss()}, {"b": M.BatchHardMiner()}, {"a": 1, "b": 0.5}
        )
    ),
}  # fmt: skip
ALL = PAIRS | ONE_PROCESS

LABELS = {
    (12,): [0, 3, 1, 1, 4, 0, 2, 2, 2, 1, 0, 5],
    (5, 7): [0, 3, 1, 1, 4, 0, 2, 2, 2, 1, 0, 5],
    (0, 12): [0, 3, 1, 1, 4, 0, 2, 2, 2, 1, 0, 5],
    (0, 9, 3): [0, 3, 1, 1, 0, 0, 2, 2, 2, 1, 4, 5],  # the last rank's embeddings have no positive
    (2, 2): [0, 0, 1, 1],
    (1, 2): [0, 0, 1],
    (2, 1): [3, 3, 3],
}
"""Labels by shard sizes; classes differ in size."""


def rows_of(shards: Shards, references: bool = False) -> Rows:
    labels, generator = torch.tensor(LABELS[shards]), torch.Generator().manual_seed(5)
    z, others = (torch.randn(len(labels) + k, WIDTH, generator=generator, dtype=torch.float64) for k in (0, 1))
    return Rows(z, labels, others, torch.cat([labels.flip(0), torch.tensor([2])])) if references else Rows(z, labels)


def each_of(rows: Rows, shards: Shards) -> list[tuple[Tensor, ...]]:
    return list(zip(split(rows.z, shards), split(rows.labels, shards), strict=True))


def errors(
    names: list[str], shards: Shards, worlds: Worlds, compute: Any = in_shards, references: bool = False
) -> dict[str, float]:
    """Return the largest difference of value and gradients from one process's, where it is more than a rounding."""
    rows, cases = rows_of(shards, references), ALL
    found = worlds.run(len(shards), lambda: [compute(cases[name], rows, shards) for name in names], timeout=60.0)
    worst = {
        name: max(largest_difference(of_rank[nth], sharded_grid.whole(ALL[name], rows)) for of_rank in found)
        for nth, name in enumerate(names)
    }
    return {name: difference for name, difference in worst.items() if not difference <= EXACT}


@pytest.mark.parametrize("shards", [(12,), (5, 7), (0, 9, 3)], ids=str)
def test_value_and_gradients_are_those_of_one_process(shards: Shards, worlds: Worlds) -> None:
    assert errors([*ALL], shards, worlds) == {}


def test_reference_rows_are_gathered_too(worlds: Worlds) -> None:
    assert errors([*PAIRS], (0, 9, 3), worlds, references=True) == {}


MINERS = [x for x in vars(M).values() if inspect.isclass(x) and x is not M.BaseMiner]


def test_every_miner_mines_for_the_local_anchors(worlds: Worlds) -> None:
    assert {type(make()) for make in sharded_grid.MINERS.values()} == {*MINERS}
    rows, shards = rows_of((5, 7)), (5, 7)
    for loss, miner in itertools.product(("TripletMargin", "Contrastive"), sharded_grid.MINERS):
        case = Combination(loss, miner=miner).case()
        for found in worlds.run(2, in_shards, case, rows, shards):
            assert largest_difference(found, sharded_grid.whole(case, rows)) <= EXACT, (loss, miner)


@pytest.mark.parametrize("shards", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_a_rank_without_pairs_takes_the_branch_of_the_batch(shards: Shards, worlds: Worlds) -> None:
    names = [name for name in ALL if not name.endswith(("histogram", "weighted"))]  # these draw as many as there are
    assert errors(names, shards, worlds) == {}


def test_views_are_rows_of_the_same_sample(worlds: Worlds) -> None:
    def step(loss_fn: Callable[..., Tensor], *views: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in views]
        value = loss_fn(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    rows = rows_of((5, 7), references=True)
    views = [rows.z, rows.references[:12]]
    for symmetric in (True, False):
        loss = L.SelfSupervisedLoss(L.NTXentLoss(), symmetric=symmetric)
        value, *gradients = step(loss, *views)
        each = list(zip(*(split(x, (5, 7)) for x in views), strict=True))
        found = worlds.run(2, lambda *mine, loss=loss: step(cz.DistributedLoss(loss, mode="sharded"), *mine), each=each)
        whole = [torch.cat([x[1 + nth] for x in found]) / 2 for nth in (0, 1)]
        assert largest_difference([found[0][0], found[1][0], *whole], [value, value, *gradients]) <= EXACT


def test_a_trainer_that_sums(worlds: Worlds) -> None:
    case, rows = ALL["Margin + multi-similarity"], rows_of((5, 7))

    def job(z: Tensor, labels: Tensor) -> list[Tensor]:
        loss, z = case.loss().double(), z.clone().requires_grad_()
        loss_fn = cz.DistributedLoss(loss, miner=case.miner(), mode="sharded", grad_reduction="sum")
        value = loss_fn(z, labels)
        return [value.detach(), *torch.autograd.grad(value, [z, *loss.parameters()])]

    value, gradient, of_loss = sharded_grid.whole(case, rows)
    first, second = worlds.run(2, job, each=each_of(rows, (5, 7)))
    assert distance(torch.cat([first[1], second[1]]), gradient) <= EXACT
    for found in (first, second):
        assert largest_difference([found[0], found[2]], [value, of_loss / 2]) <= EXACT


def test_each_rank_evaluates_its_own_anchors_only(worlds: Worlds) -> None:
    def job(case: Case, z: Tensor, labels: Tensor) -> list[tuple[int, int]]:
        loss, miner, seen = case.loss(), case.miner(), []

        def of_sizes(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
            seen.append((len(rows[0]), len(rows[1])))
            return compute(*rows)

        for module in (loss, miner):
            module.distance.compute_mat = functools.partial(of_sizes, module.distance.compute_mat)
        cz.DistributedLoss(loss, miner=miner, mode="sharded")(z, labels)
        return seen

    for name in (
        "MultiSimilarity + multi-similarity",
        "TripletMargin + semihard",
        "Triplet, smooth, hardest",
        "SupCon, mined",
    ):
        found = worlds.run(2, job, ALL[name], each=each_of(rows_of((5, 7)), (5, 7)))
        assert found == [[(5, 12)] * 2, [(7, 12)] * 2]


# --------------------------------------------------------------------------------------------------------------- mutants


def with_itself(ids: Tensor, all_ids: Tensor, start: int) -> tuple[None, Tensor, Tensor]:
    alike = ids[:, None] == all_ids
    return None, alike, ~alike


def without_gradient(x: Tensor, **_: Any) -> Tensor:
    return cz.collectives.all_gather(x.detach())


def mean_of_ranks(reducer: Any, info: Any, batch: Any) -> tuple[Tensor, float]:
    count = max(1, len(info["losses"]))
    return info["losses"].sum() / count, 1.0


def as_their_wrapper_mines(miner: Any, batch: Any) -> Any:
    return miner(batch.anchors, batch.labels, batch.candidates, batch.candidate_labels)


MUTANTS: dict[str, tuple[Any, str, Any, str, Shards]] = {
    "an anchor is its own positive": (anchor_batch, "block_masks", with_itself, "NTXent", (5, 7)),
    "columns without gradient": (anchor_batch, "all_gather", without_gradient, "Contrastive", (5, 7)),
    "a mean of the ranks' means": (sharded_loss, "summands", mean_of_ranks, "MultiSimilarity", (5, 7)),
    "parameters of a rank's own": (sharded_loss, "replicated", lambda x, **_: x, "Margin, learnt", (5, 7)),
    "a miner that sees the anchor": (
        anchor_batch, "MINERS", {M.BatchHardMiner: as_their_wrapper_mines}, "Triplet, smooth, hardest", (5, 7)
    ),
    "no padding": (anchor_losses, "padding_needed", lambda local, *_: [0] * len(local), "MultiSimilarity", (1, 2)),
}  # fmt: skip
"""Module, attribute, replacement, and the case and shards that detect it."""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, worlds: Worlds) -> None:
    module, attribute, wrong, case, shards = MUTANTS[name]

    def compute(*args: Any) -> list[Tensor]:
        with patch.object(module, attribute, wrong):
            return in_shards(*args)

    assert errors([case], shards, worlds, compute)[case] > 1e-4


def test_any_other_miner_is_called_on_all_rows(worlds: Worlds) -> None:
    def compute(*args: Any) -> list[Tensor]:
        with patch.object(anchor_batch, "MINERS", {}):
            return in_shards(*args)

    for references in (False, True):
        names = ["MultiSimilarity + multi-similarity", "TripletMargin + semihard"]
        assert errors(names, (5, 7), worlds, compute, references) == {}


# --------------------------------------------------------------------------------------------------------------- refusals

NOT_LOSSES = {"BaseLossWrapper", "BaseMetricLossFunction", "GenericPairLoss", "EmbeddingRegularizerMixin"}
NOT_LOSSES |= {"WeightRegularizerMixin"}
WRAPPERS = {"MultipleLosses", "SelfSupervisedLoss"}


def test_every_export_is_evaluated_or_refused_with_a_reason() -> None:
    exported = {name for name, x in vars(L).items() if inspect.isclass(x)} - NOT_LOSSES - WRAPPERS
    assert exported == {x.__name__ for x in [*EVALUATED, *REFUSED]}
    assert not set(EVALUATED) & set(REFUSED)
    known = {*meaning.REDUCTIONS, R.BaseReducer, R.MultipleReducers, R.DoNothingReducer}
    assert {x for x in vars(R).values() if inspect.isclass(x)} == known


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda: L.VICRegLoss(), "variances"),
        (lambda: L.ProxyAnchorLoss(CLASSES, WIDTH), "proxies"),
        (lambda: L.TripletMarginLoss(swap=True), "swap"),
        (lambda: L.TripletMarginLoss(triplets_per_anchor=3), "draws 3 triplets"),
        (lambda: L.ContrastiveLoss(distance=D.BatchedDistance(D.LpDistance())), "BatchedDistance"),
        (lambda: L.ContrastiveLoss(reducer=R.DoNothingReducer()), "DoNothingReducer"),
        (lambda: L.NTXentLoss(reducer=R.DivisorReducer()), "gives none"),
        (lambda: L.TripletMarginLoss(reducer=R.PerAnchorReducer()), "no triplets"),
        (lambda: L.AngularLoss(reducer=R.PerAnchorReducer()), "gives it a column"),
        (lambda: L.NTXentLoss(reducer=R.PerAnchorReducer(aggregation_func=max)), "aggregation_func"),
        (lambda: L.NTXentLoss(reducer=R.PerAnchorReducer(R.DoNothingReducer())), "DoNothing"),
        (lambda: L.MultipleLosses([L.NTXentLoss(), L.HistogramLoss()]), "HistogramLoss: its histograms"),
        (lambda: L.CircleLoss(reducer=R.ClassWeightedReducer(torch.ones(2))), "its column of losses"),
        (lambda: L.MultipleLosses([L.SelfSupervisedLoss(L.NTXentLoss())]), "takes two views"),
        (lambda: type("Mine", (L.NTXentLoss,), {})(), "none of the losses"),
        (lambda: nn.Identity(), "none of the losses"),
    ],
)
def test_a_loss_that_cannot_be_sharded_is_refused_with_a_reason(loss: Callable[[], Any], why: str) -> None:
    assert why in (refusal(loss()) or "")
    with pytest.raises(ValueError, match=f"cannot be evaluated in shards: .*{why}.* Leave mode='sharded' out"):
        sharded(loss(), None, {"embeddings": torch.eye(2), "labels": torch.arange(2)}, {}, World())


def test_views_without_labels_may_differ_in_number_for_dynamic_soft_margin(worlds: Worlds) -> None:
    """The value alone: the library's own code changes its distances in place, and has no gradient here."""

    def job(z: Tensor, references: Tensor) -> Tensor:
        return cz.DistributedLoss(L.DynamicSoftMarginLoss())(z, ref_emb=references)

    rows = rows_of((5, 7), references=True)
    expected = L.DynamicSoftMarginLoss()(rows.z, ref_emb=rows.references)
    each = zip(split(rows.z, (5, 7)), split(rows.references, (9, 4)), strict=True)
    assert max(distance(x, expected) for x in worlds.run(2, job, each=list(each))) <= EXACT


@pytest.mark.parametrize(("world_size", "count"), [(2, 120), (3, 80)])
def test_the_grid_of_losses_and_their_parts_is_right_or_refused(world_size: int, count: int, worlds: Worlds) -> None:
    seed, in_search = random.randrange(2**32), {2: None, 3: 6000}
    chosen = sharded_grid.drawn(world_size, in_search[world_size] if EVERY_CASE else count, seed)
    counts, wrong = sharded_grid.compared(chosen, world_size, worlds)
    assert not wrong, f"seed {seed}: {wrong}"
    assert counts["the same"] > len(chosen) / 4


def _without_refusals(chosen: list[sharded_grid.Chosen]) -> list[sharded_grid.Verdict]:
    with pytest.MonkeyPatch.context() as change:
        for name in ("call_problem", "refusal"):
            change.setattr(sharded_loss, name, lambda *_: None)
        return sharded_grid.verdicts(chosen)


def test_the_grid_catches_what_is_refused(worlds: Worlds) -> None:
    wrong = [
        Combination("MultiSimilarity", reducer="class weights"),
        Combination("LiftedStructure", reducer="class weights"),
        Combination("NPairs", "dot", miner="HDC"),
    ]
    found = worlds.run(2, _without_refusals, [(x, (7, 5), 1) for x in wrong])
    assert [verdict for verdict, _ in found[0]] == ["not the same"] * 3


HOOKED: dict[str, Callable[[nn.Module], Any]] = {
    "a forward hook": lambda x: x.register_forward_hook(lambda module, inputs, value: value),
    "a forward pre-hook": lambda x: x.register_forward_pre_hook(lambda module, inputs: None),
    "a backward hook": lambda x: x.register_full_backward_hook(lambda module, before, after: None),
    "a patched forward": lambda x: setattr(x, "forward", x.forward),
}
PARTS: dict[str, Callable[[L.ContrastiveLoss, M.BatchHardMiner], nn.Module]] = {
    "ContrastiveLoss": lambda loss, miner: loss,
    "LpDistance": lambda loss, miner: loss.distance,
    "MultipleReducers": lambda loss, miner: loss.reducer,
    "BatchHardMiner": lambda loss, miner: miner,
}


def _hooked(hook: str, part: str) -> str:
    """One rank's loss has a user's code from the second step on."""
    loss, miner = L.ContrastiveLoss(), M.BatchHardMiner()
    wrapper = cz.DistributedLoss(loss, miner=miner, mode="sharded")
    torch.manual_seed(dist.get_rank())
    z, labels = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 0, 1])
    wrapper(z, labels).backward()
    if dist.get_rank() == 1:
        HOOKED[hook](PARTS[part](loss, miner))
    with pytest.raises(ValueError, match="has hooks or a forward of its own") as caught:
        wrapper(z, labels)
    return str(caught.value)


@pytest.mark.parametrize(("hook", "part"), [*zip(HOOKED, PARTS, strict=True)])
def test_code_of_the_user_that_shards_would_leave_out_is_refused(hook: str, part: str, worlds: Worlds) -> None:
    said = worlds.run(2, _hooked, hook, part)
    assert said[0] == said[1]
    assert part in said[0]


def test_arguments_that_a_loss_does_not_take_are_refused() -> None:
    z, labels = torch.eye(2), torch.arange(2)
    shards = dict.fromkeys(("embeddings", "labels", "ref_emb", "ref_labels"), World().shards(2))
    for loss, miner, more, why in [
        (L.NTXentLoss(), None, {"labels": None}, "labels are missing"),
        (L.NPairsLoss(), None, {"ref_emb": z, "ref_labels": labels}, "takes no ref_emb"),
        (L.InstanceLoss(), M.BatchHardMiner(), {}, "takes no indices_tuple"),
        (L.NPairsLoss(), M.BatchHardMiner(), {}, "first mined pair of each class"),
        (L.NPairsLoss(), None, {"indices_tuple": (labels,) * 3}, "first pair of each class"),
        (L.MultipleLosses([L.NTXentLoss()], miners=[M.BatchHardMiner()]), M.BatchHardMiner(), {}, "miners of its own"),
    ]:
        with pytest.raises(ValueError, match=why):
            sharded(loss, miner, {"embeddings": z, "labels": labels} | more, shards, World())


@pytest.mark.parametrize("miner", [M.BatchHardMiner(), M.PairMarginMiner()], ids=lambda x: type(x).__name__)
def test_indices_of_all_rows_are_split_over_ranks(miner: Any, worlds: Worlds) -> None:
    rows = rows_of((5, 7))
    indices = miner(rows.z, rows.labels)

    def job(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, str | None]:
        of_all = cz.data.DistributedMiner(miner)(z, labels)
        loss_fn = cz.DistributedLoss(L.ContrastiveLoss(), mode="sharded")
        text = error_message(lambda: loss_fn(z, indices_tuple=of_all))
        return loss_fn(z, labels, of_all), cz.DistributedLoss(L.ContrastiveLoss())(z, indices_tuple=of_all), text

    expected = L.ContrastiveLoss()(rows.z, rows.labels, indices)
    for value, without_labels, text in worlds.run(2, job, each=each_of(rows, (5, 7))):
        assert largest_difference([value, without_labels], [expected] * 2) <= EXACT
        assert "call loss(embeddings, labels), also with indices_tuple" in (text or "")


# ------------------------------------------------------------------------------------- what one rank alone has wrong


def good() -> float:
    loss = cz.DistributedLoss(L.ContrastiveLoss(), mode="sharded", check_distinct=False)
    return loss(torch.eye(3), torch.tensor([0, 0, 1])).item()


def rows_of_rank(*counts: int, seed: int = 0) -> Tensor:
    rank = World.of().rank
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(counts[rank], WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def labels_of_rank(*counts: int) -> Tensor:
    return torch.arange(counts[World.of().rank]) % 3


def views(mode: Any, first: tuple[int, int], *, symmetric: bool) -> Any:
    loss = L.SelfSupervisedLoss(L.NTXentLoss(), symmetric=symmetric)
    return cz.DistributedLoss(loss, mode=mode)(rows_of_rank(*first), rows_of_rank(5, 3, seed=7))


def shifted(name: str) -> Any:
    """The totals over ranks are equal, but embeddings would be paired with those of other samples."""
    z, labels, n = rows_of_rank(3, 5), labels_of_rank(3, 5), (5, 3)[World.of().rank]
    if name == "reference labels":
        return cz.DistributedLoss(L.ContrastiveLoss())(z, labels, None, rows_of_rank(4, 4), labels_of_rank(5, 3))
    if name == "mask":
        memory = L.CrossBatchMemory(L.ContrastiveLoss(), WIDTH, memory_size=9).double()
        return cz.DistributedLoss(memory)(z, labels, enqueue_mask=torch.arange(n) % 2 == 0)
    if name == "miner":
        return cz.data.DistributedMiner(M.BatchHardMiner())(z, labels, rows_of_rank(4, 4), labels_of_rank(5, 3))
    if name == "views":
        return cz.DistributedLoss(lambda view1, view2: (view1.sum(0) * view2.sum(0)).sum())(z, rows_of_rank(5, 3))
    return cz.DistributedLoss(L.VICRegLoss())(z, ref_emb=rows_of_rank(5, 3))


def three_dimensions(kind: Any) -> Any:
    n = 3 * World.of().rank
    return cz.DistributedLoss(kind(), mode="sharded")(torch.ones(n, 2, WIDTH), torch.arange(n))


def two_miners() -> Any:
    z, labels = rows_of_rank(4, 4), labels_of_rank(4, 4)
    indices = cz.data.DistributedMiner(M.BatchHardMiner())(z, labels)
    loss = L.MultipleLosses([L.TripletMarginLoss()], [M.BatchHardMiner()])
    return cz.DistributedLoss(loss, mode="sharded")(z, labels, indices)


def beyond(name: str) -> Any:
    """Call a loss that raises on rank 1 only, for its embeddings or labels."""
    rank = World.of().rank
    torch.manual_seed(0)  # the same weights everywhere
    z, labels = rows_of_rank(*((0, 4) if name.endswith("no rows") else (3, 4))), torch.tensor([0, 1, 2, 0])
    labels = labels[: len(z)] + (0 if rank == 0 else 40)
    miner = RaisesOnOneRank() if name == "miner" else None
    loss: Any = {
        "ArcFace": lambda: L.ArcFaceLoss(CLASSES, WIDTH),
        "Margin": lambda: L.MarginLoss(num_classes=CLASSES, learn_beta=True),
        "P2SGrad": lambda: L.P2SGradLoss(WIDTH, CLASSES),
        "weights": lambda: L.ContrastiveLoss(reducer=R.ClassWeightedReducer(torch.ones(CLASSES))),
        "miner": L.TripletMarginLoss,
    }[name.partition(",")[0]]()
    if name in ("Margin", "weights"):
        labels[-1:] = labels[:1]  # a positive
    return cz.DistributedLoss(loss.double(), miner=miner, mode="sharded")(z, labels)


class RaisesOnOneRank(M.BaseMiner):
    def __init__(self) -> None:
        super().__init__()
        self.raises = World.of().rank == 1  # in its call it sees one process

    def mine(self, *rows: Tensor) -> Any:
        if self.raises:
            raise RuntimeError("out of luck")
        return (torch.tensor([], dtype=torch.long),) * 3


ANOTHER_VIEW = "ref_emb holds another view of each row of embeddings"
ON_ONE_RANK = ("ArcFace", "ArcFace, no rows", "Margin", "P2SGrad", "P2SGrad, no rows", "weights", "miner")
WRONG: list[tuple[Callable[..., Any], str]] = [
    *(
        (functools.partial(views, mode, first, symmetric=symmetric), ANOTHER_VIEW)
        for mode in ("sharded", "replicated") for first in ((3, 5), (2, 4)) for symmetric in (True, False)
    ),
    (functools.partial(shifted, "reference labels"), "ref_labels are one per row of ref_emb"),
    (functools.partial(shifted, "miner"), "ref_labels are one per row of ref_emb"),
    (functools.partial(shifted, "mask"), "enqueue_mask is one per row of embeddings"),
    (functools.partial(shifted, "views"), "view2 is another view of each row of view1"),
    (functools.partial(shifted, "VICReg"), ANOTHER_VIEW),
    *((functools.partial(three_dimensions, x), "embeddings are [n, d], got 3 dimensions")
      for x in (L.ContrastiveLoss, L.InstanceLoss, L.NPairsLoss)),
    *((functools.partial(beyond, name), "Error: ") for name in ON_ONE_RANK),
    (two_miners, "has miners of its own, and takes no indices_tuple"),
    (lambda: cz.DistributedLoss(L.HistogramLoss(), mode="sharded"), "its histograms are of all pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_every_rank_raises_the_same_error_and_goes_on(call: Callable[[], Any], words: str, worlds: Worlds) -> None:
    text, after = common_error(worlds, 2, call, good)
    assert words in text
    assert after[0] == after[1]
    if getattr(call, "func", None) is beyond:
        assert "rank 1: " in text
        # a rank without samples evaluates one of the batch's labels, which is wrong there, too
        assert ("rank 0: " in text) == (call.args == ("ArcFace, no rows",))


def test_weights_are_normalised_before_they_are_cast(worlds: Worlds) -> None:
    """The library's weights have 32 bits until the first call with 64-bit embeddings."""

    def steps(z: Tensor, labels: Tensor, **settings: Any) -> list[Tensor]:
        torch.manual_seed(0)
        loss = L.P2SGradLoss(WIDTH, 6)
        loss_fn, found = cz.DistributedLoss(loss, **settings) if settings else loss, []
        for _ in range(2):
            x = z.clone().requires_grad_()
            value = loss_fn(x, labels)
            loss.weight.grad = None
            value.backward()
            found += [value.detach(), loss.weight.grad.clone()]
            loss.weight.data -= 0.3 * loss.weight.grad
        return found

    rows = rows_of((5, 7))
    for shards in [(5, 7), (0, 9, 3)]:
        for found in worlds.run(len(shards), lambda *mine: steps(*mine, mode="sharded"), each=each_of(rows, shards)):
            assert largest_difference(found, steps(rows.z, rows.labels)) <= EXACT
