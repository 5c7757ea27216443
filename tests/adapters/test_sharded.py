"""pytorch-metric-learning's losses in shards: the number and the gradients of one process, from 1/W of the work."""

import functools
import inspect
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
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
from contrastive_zoo.wrapper.loss_call import paired_problem
from contrastive_zoo.wrapper.pml import meaning
from contrastive_zoo.wrapper.pml.sharded import anchor_batch, anchor_losses, refusals, sharded_loss
from contrastive_zoo.wrapper.pml.sharded.refusals import EVALUATED, REFUSED, refusal
from contrastive_zoo.wrapper.pml.sharded.sharded_loss import sharded
from tests.adapters import sharded_grid
from tests.helpers import EXACT, common_error, distance, error_message, split

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of NumPy, in their constructors

CLASSES, WIDTH = 6, 4


class Case(NamedTuple):
    """A loss and a miner, made anew on every rank."""

    loss: Callable[[], Any]
    miner: Callable[[], Any] | None = None


def margin_of_classes() -> Any:
    return L.MarginLoss(learn_beta=True, nu=0.1, num_classes=CLASSES)


PAIRS = {
    "Contrastive": Case(lambda: L.ContrastiveLoss()),
    "Contrastive, pair margins": Case(lambda: L.ContrastiveLoss(), lambda: M.PairMarginMiner()),
    "Contrastive, easy positives": Case(lambda: L.ContrastiveLoss(), lambda: M.BatchEasyHardMiner()),
    "Contrastive, hardest half": Case(lambda: L.ContrastiveLoss(), lambda: M.HDCMiner()),
    "Contrastive, drawn": Case(lambda: L.ContrastiveLoss(), lambda: M.UniformHistogramMiner(num_bins=5)),
    "SignalToNoise": Case(lambda: L.SignalToNoiseRatioContrastiveLoss()),
    "Triplet": Case(lambda: L.TripletMarginLoss()),
    "Triplet, smooth, hardest": Case(lambda: L.TripletMarginLoss(0.3, smooth_loss=True), lambda: M.BatchHardMiner()),
    "Triplet, semi-hard": Case(lambda: L.TripletMarginLoss(0.3), lambda: M.TripletMarginMiner(0.3, "semihard")),
    "Triplet, hard": Case(lambda: L.TripletMarginLoss(0.3), lambda: M.TripletMarginMiner(0.3, "hard")),
    "Triplet, drawn": Case(lambda: L.TripletMarginLoss(), lambda: M.DistanceWeightedMiner()),
    "Triplet, cosine, regularised": Case(
        lambda: L.TripletMarginLoss(
            distance=D.CosineSimilarity(), embedding_regularizer=G.LpRegularizer(), embedding_reg_weight=0.3
        )
    ),
    "MultiSimilarity": Case(lambda: L.MultiSimilarityLoss()),
    "MultiSimilarity, mined": Case(lambda: L.MultiSimilarityLoss(), lambda: M.MultiSimilarityMiner()),
    "MultiSimilarity, by distance": Case(
        lambda: L.MultiSimilarityLoss(), lambda: M.MultiSimilarityMiner(distance=D.LpDistance())
    ),
    "Circle": Case(lambda: L.CircleLoss()),
    "NTXent": Case(lambda: L.NTXentLoss()),
    "NTXent, hardest": Case(lambda: L.NTXentLoss(), lambda: M.BatchHardMiner()),
    "SupCon": Case(lambda: L.SupConLoss()),
    "SupCon, mined": Case(lambda: L.SupConLoss(reducer=R.MeanReducer()), lambda: M.MultiSimilarityMiner()),
    "GeneralizedLifted": Case(lambda: L.GeneralizedLiftedStructureLoss()),
    "Tuplet": Case(lambda: L.TupletMarginLoss()),
    "Angular, mined": Case(lambda: L.AngularLoss(), lambda: M.AngularMiner()),
    "Margin": Case(lambda: L.MarginLoss()),
    "Margin, learnt": Case(lambda: L.MarginLoss(learn_beta=True, nu=0.1)),
    "Margin, learnt by class, mined": Case(margin_of_classes, lambda: M.MultiSimilarityMiner()),
    "IntraPairVariance": Case(lambda: L.IntraPairVarianceLoss()),
    "NCA": Case(lambda: L.NCALoss()),
    "NCA, mined": Case(lambda: L.NCALoss(softmax_scale=3), lambda: M.MultiSimilarityMiner()),
    "sum": Case(lambda: L.ContrastiveLoss(reducer=R.SumReducer())),
    "threshold": Case(lambda: L.ContrastiveLoss(reducer=R.ThresholdReducer(low=0.1, high=0.6))),
    "class weights": Case(lambda: L.ContrastiveLoss(reducer=R.ClassWeightedReducer(torch.arange(1.0, 1 + CLASSES)))),
    "several reducers": Case(
        lambda: L.ContrastiveLoss(reducer=R.MultipleReducers({"pos_loss": R.MeanReducer()}, R.SumReducer()))
    ),
}
"""Also against reference rows."""

ONE_PROCESS = {
    "Lifted": Case(lambda: L.LiftedStructureLoss()),
    "Lifted, mined": Case(lambda: L.LiftedStructureLoss(), lambda: M.MultiSimilarityMiner()),
    "FastAP, mined": Case(lambda: L.FastAPLoss(), lambda: M.MultiSimilarityMiner()),
    "Instance": Case(lambda: L.InstanceLoss(gamma=4)),
    "NPairs": Case(lambda: L.NPairsLoss()),
    "P2SGrad": Case(lambda: L.P2SGradLoss(WIDTH, CLASSES)),
    **{f"PNP, {x}": Case(lambda x=x: L.PNPLoss(b=3, alpha=2, anneal=0.3, variant=x)) for x in L.PNPLoss.VARIANTS},
    "RankedList": Case(lambda: L.RankedListLoss(0.3, 3, imbalance=0.4, alpha=1.1, Tp=1)),
    "ThresholdConsistent": Case(lambda: L.ThresholdConsistentMarginLoss(lambda_plus=2, margin_minus=0.1)),
    "ThresholdConsistent, mined": Case(lambda: L.ThresholdConsistentMarginLoss(), lambda: M.MultiSimilarityMiner()),
    "per anchor": Case(lambda: L.ContrastiveLoss(reducer=R.PerAnchorReducer())),
    "per anchor, nonzero": Case(
        lambda: L.ContrastiveLoss(reducer=R.PerAnchorReducer(R.AvgNonZeroReducer())), lambda: M.PairMarginMiner()
    ),
    "ArcFace, regularised, mined": Case(
        lambda: L.ArcFaceLoss(CLASSES, WIDTH, weight_regularizer=G.RegularFaceRegularizer()),
        lambda: M.MultiSimilarityMiner(),
    ),
    "CosFace": Case(lambda: L.CosFaceLoss(CLASSES, WIDTH)),
    "LargeMarginSoftmax": Case(lambda: L.LargeMarginSoftmaxLoss(CLASSES, WIDTH)),
    "NormalizedSoftmax": Case(lambda: L.NormalizedSoftmaxLoss(CLASSES, WIDTH)),
    "ProxyNCA, mined": Case(lambda: L.ProxyNCALoss(CLASSES, WIDTH), lambda: M.MultiSimilarityMiner()),
    "SoftTriple": Case(lambda: L.SoftTripleLoss(CLASSES, WIDTH)),
    "SphereFace": Case(lambda: L.SphereFaceLoss(CLASSES, WIDTH)),
    "SubCenterArcFace": Case(lambda: L.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=WIDTH)),
    "two losses, one with a miner": Case(
        lambda: L.MultipleLosses(
            {"a": L.NTXentLoss(), "b": L.TripletMarginLoss()}, {"b": M.BatchHardMiner()}, {"a": 1, "b": 0.5}
        )
    ),
    "two losses, one miner": Case(
        lambda: L.MultipleLosses([L.NTXentLoss(), L.TripletMarginLoss()]), lambda: M.MultiSimilarityMiner()
    ),
}

LABELS = {
    (12,): [0, 3, 1, 1, 4, 0, 2, 2, 2, 1, 0, 5],
    (5, 7): [0, 3, 1, 1, 4, 0, 2, 2, 2, 1, 0, 5],
    (0, 9, 3): [0, 3, 1, 1, 0, 0, 2, 2, 2, 1, 4, 5],  # the last rank's rows have no positive
    (2, 2): [0, 0, 1, 1],
    (1, 2): [0, 0, 1],
    (2, 1): [3, 3, 3],
}
"""Labels by shard sizes; classes differ in size."""


class Rows(NamedTuple):
    """Embeddings and labels, with or without reference embeddings and labels."""

    z: Tensor
    labels: Tensor
    references: Tensor | None = None
    reference_labels: Tensor | None = None

    @classmethod
    def of(cls, shards: tuple[int, ...], references: bool) -> "Rows":
        labels, generator = torch.tensor(LABELS[shards]), torch.Generator().manual_seed(5)
        z, others = (torch.randn(len(labels) + k, WIDTH, generator=generator, dtype=torch.float64) for k in (0, 1))
        return cls(z, labels, others, torch.cat([labels.flip(0), torch.tensor([2])])) if references else cls(z, labels)

    def split(self, shards: tuple[int, ...]) -> list[tuple[Tensor | None, ...]]:
        more = (*shards[:-1], shards[-1] + 1)
        parts = [split(x, shards if i < 2 else more) for i, x in enumerate(self) if x is not None]
        return list(zip(*parts, strict=True))


class Result(NamedTuple):
    value: Tensor
    gradients: list[Tensor]
    parameters: list[Tensor]


def result(loss: nn.Module, value: Tensor, rows: list[Tensor]) -> Result:
    wanted = [*rows, *loss.parameters()]
    found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    return Result(value.detach(), list(found[: len(rows)]), list(found[len(rows) :]))


def whole(case: Case, rows: Rows) -> Result:
    """Return what pytorch-metric-learning computes on one process."""
    torch.manual_seed(0)
    loss, miner = case.loss().double(), case.miner and case.miner()
    leaves = [x.clone().requires_grad_() for x in (rows.z, rows.references) if x is not None]
    others = [] if rows.references is None else [leaves[1], rows.reference_labels]
    torch.manual_seed(3)
    indices = miner(leaves[0], rows.labels, *others) if miner else None
    value = loss(leaves[0], rows.labels, indices, *others)
    return result(loss, value, leaves)


def a_rank(case: Case, *rows: Tensor) -> Result:
    world = World.of()
    torch.manual_seed(0)
    loss, miner = case.loss().double(), case.miner and case.miner()
    leaves = [x.clone().requires_grad_() for x in rows[::2]]
    named = dict(zip(("embeddings", "ref_emb"), leaves, strict=False))
    named |= dict(zip(("labels", "ref_labels"), rows[1::2], strict=False))
    shards = {name: world.shards(x) for name, x in named.items()}
    torch.manual_seed(3 if world.rank == 0 else 77)  # dropout and augmentation differ between ranks
    return result(loss, sharded(loss, miner, named, shards, world), leaves)


def error(case: Case, shards: tuple[int, ...], worlds: Worlds, job: Any = a_rank, references: bool = False) -> float:
    """Return the largest difference of value and gradients from one process's."""
    rows = Rows.of(shards, references)
    expected, found = whole(case, rows), worlds.run(len(shards), job, case, each=rows.split(shards), timeout=10.0)
    errors = [distance(x.value, expected.value) for x in found]
    for nth, gradient in enumerate(expected.gradients):
        errors.append(distance(torch.cat([x.gradients[nth] for x in found]), gradient))
    for nth, gradient in enumerate(expected.parameters):
        errors += [distance(x.parameters[nth], gradient) for x in found]
    return max(float("inf") if x != x else x for x in errors)


@pytest.mark.parametrize("name", [*PAIRS, *ONE_PROCESS])
def test_value_and_gradients_are_those_of_one_process(name: str, worlds: Worlds) -> None:
    case = (PAIRS | ONE_PROCESS)[name]
    for shards in [(12,), (5, 7), (0, 9, 3)]:
        assert error(case, shards, worlds) <= EXACT, shards


@pytest.mark.parametrize("name", PAIRS)
def test_reference_rows_are_gathered_too(name: str, worlds: Worlds) -> None:
    assert error(PAIRS[name], (0, 9, 3), worlds, references=True) <= EXACT


MINERS = [x for x in vars(M).values() if inspect.isclass(x) and x is not M.BaseMiner]


@pytest.mark.parametrize("miner", MINERS, ids=lambda x: x.__name__)
def test_every_miner_mines_for_the_local_anchors(miner: Any, worlds: Worlds) -> None:
    settings = {"num_bins": 5} if miner is M.UniformHistogramMiner else {}
    for loss in (lambda: L.TripletMarginLoss(0.3), lambda: L.ContrastiveLoss()):
        assert error(Case(loss, lambda: miner(**settings)), (5, 7), worlds) <= EXACT


FEW = [name for name in [*PAIRS, *ONE_PROCESS] if not name.endswith("drawn")]


@pytest.mark.parametrize("shards", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_a_rank_without_pairs_takes_the_branch_of_the_batch(shards: tuple[int, ...], worlds: Worlds) -> None:
    wrong = {name: e for name in FEW if (e := error((PAIRS | ONE_PROCESS)[name], shards, worlds)) > EXACT}
    assert not wrong


def test_views_are_rows_of_the_same_sample(worlds: Worlds) -> None:
    def job(symmetric: bool, view1: Tensor, view2: Tensor) -> Result:
        world, leaves = World.of(), [view1.clone().requires_grad_(), view2.clone().requires_grad_()]
        named = dict(zip(("embeddings", "ref_emb"), leaves, strict=True))
        loss = L.SelfSupervisedLoss(L.NTXentLoss(), symmetric=symmetric)
        return result(loss, sharded(loss, None, named, dict.fromkeys(named, world.shards(view1)), world), leaves)

    rows = Rows.of((5, 7), references=True)
    for symmetric in (True, False):
        leaves = [rows.z.clone().requires_grad_(), rows.references[:12].clone().requires_grad_()]
        loss = L.SelfSupervisedLoss(L.NTXentLoss(), symmetric=symmetric)
        expected = result(loss, loss(*leaves), leaves)
        each = zip(*(split(x.detach(), (5, 7)) for x in leaves), strict=True)
        found = worlds.run(2, job, symmetric, each=list(each))
        assert max(distance(x.value, expected.value) for x in found) <= EXACT
        for nth in (0, 1):
            assert distance(torch.cat([x.gradients[nth] for x in found]), expected.gradients[nth]) <= EXACT


@pytest.mark.parametrize("trainer", ["mean", "sum"])
def test_distributed_loss_in_shards(trainer: str, worlds: Worlds) -> None:
    def job(z: Tensor, labels: Tensor) -> Result:
        torch.manual_seed(0)
        loss = margin_of_classes().double()
        z = z.clone().requires_grad_()
        loss_fn = cz.DistributedLoss(loss, miner=M.MultiSimilarityMiner(), mode="sharded", grad_reduction=trainer)
        return result(loss, loss_fn(z, labels), [z])

    case, rows = PAIRS["Margin, learnt by class, mined"], Rows.of((5, 7), references=False)
    expected, found = whole(case, rows), worlds.run(2, job, each=rows.split((5, 7)))
    rows_scale, own_scale = (2, 1) if trainer == "mean" else (1, 0.5)
    assert max(distance(x.value, expected.value) for x in found) <= EXACT
    assert distance(torch.cat([x.gradients[0] for x in found]), rows_scale * expected.gradients[0]) <= EXACT
    assert max(distance(x.parameters[0], own_scale * expected.parameters[0]) for x in found) <= EXACT


def test_each_rank_evaluates_its_own_anchors_only(worlds: Worlds) -> None:
    def job(case: Case, z: Tensor, labels: Tensor) -> list[tuple[int, int]]:
        world, seen = World.of(), []
        loss, miner = case.loss(), case.miner()

        def of_sizes(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
            seen.append((len(rows[0]), len(rows[1])))
            return compute(*rows)

        for module in (loss, miner):
            module.distance.compute_mat = functools.partial(of_sizes, module.distance.compute_mat)
        named = {"embeddings": z, "labels": labels}
        sharded(loss, miner, named, {name: world.shards(x) for name, x in named.items()}, world)
        return seen

    rows = Rows.of((5, 7), references=False)
    for name in ("MultiSimilarity, mined", "Triplet, semi-hard", "Triplet, smooth, hardest", "SupCon, mined"):
        assert worlds.run(2, job, PAIRS[name], each=rows.split((5, 7))) == [[(5, 12)] * 2, [(7, 12)] * 2]


# --------------------------------------------------------------------------------------------------------------- mutants


def with_itself(ids: Tensor, all_ids: Tensor, start: int) -> tuple[None, Tensor, Tensor]:
    alike = ids[:, None] == all_ids
    return None, alike, ~alike


def mean_of_ranks(reducer: Any, info: Any, batch: Any) -> tuple[Tensor, float]:
    count = max(1, len(info["losses"]))
    return info["losses"].sum() / count, 1.0


def as_their_wrapper_mines(miner: Any, batch: Any) -> Any:
    return miner(batch.anchors, batch.labels, batch.candidates, batch.candidate_labels)


MUTANTS: dict[str, tuple[Any, str, Any, str, tuple[int, ...]]] = {
    "an anchor is its own positive": (anchor_batch, "block_masks", with_itself, "NTXent", (5, 7)),
    "columns without gradient": (
        anchor_batch,
        "all_gather",
        lambda x, **_: cz.collectives.all_gather(x.detach()),
        "Contrastive",
        (5, 7),
    ),
    "a mean of the ranks' means": (sharded_loss, "summands", mean_of_ranks, "MultiSimilarity", (5, 7)),
    "parameters of a rank's own": (sharded_loss, "replicated", lambda x, **_: x, "Margin, learnt", (5, 7)),
    "a miner that sees the anchor": (
        anchor_batch,
        "MINERS",
        {M.BatchHardMiner: as_their_wrapper_mines},
        "Triplet, smooth, hardest",
        (5, 7),
    ),
    "no padding": (anchor_losses, "padding_needed", lambda local, *_: [0] * len(local), "MultiSimilarity", (1, 2)),
}
"""Module, attribute, replacement, and the case and shards that detect it."""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, worlds: Worlds) -> None:
    module, attribute, wrong, case, shards = MUTANTS[name]

    def job(case: Case, *rows: Tensor) -> Result:
        right = getattr(module, attribute)
        with patch.object(module, attribute, {**right, **wrong} if isinstance(wrong, dict) else wrong):
            return a_rank(case, *rows)

    assert error(PAIRS[case], shards, worlds, job) > 1e-4


def test_any_other_miner_is_called_on_all_rows(worlds: Worlds) -> None:
    def job(case: Case, *rows: Tensor) -> Result:
        with patch.object(anchor_batch, "MINERS", {}):
            return a_rank(case, *rows)

    for name in ("MultiSimilarity, mined", "Triplet, semi-hard"):
        assert error(PAIRS[name], (5, 7), worlds, job) <= EXACT
        assert error(PAIRS[name], (5, 7), worlds, job, references=True) <= EXACT


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


def test_every_rank_refuses(worlds: Worlds) -> None:
    def rows() -> tuple[Tensor, Tensor]:
        rank = World.of().rank
        return torch.eye(3)[: 2 + rank], torch.arange(2 + rank)

    text, values = common_error(
        worlds,
        2,
        lambda: cz.DistributedLoss(L.HistogramLoss(), mode="sharded")(*rows()),
        lambda: cz.DistributedLoss(L.ContrastiveLoss(), mode="sharded")(*rows()),
    )
    assert "its histograms are of all pairs" in text
    assert values[0] == values[1]


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

    rows = Rows.of((5, 7), references=True)
    expected = L.DynamicSoftMarginLoss()(rows.z, ref_emb=rows.references)
    each = zip(split(rows.z, (5, 7)), split(rows.references, (9, 4)), strict=True)
    assert max(distance(x, expected) for x in worlds.run(2, job, each=list(each))) <= EXACT


GRID = [*sharded_grid.combinations()]


def drawn_from_the_grid(count: int, world_size: int, seed: int) -> list[Any]:
    """Combinations, each with uneven shards, one of which may be empty, and a seed."""
    draw = random.Random(seed)
    shards = {2: [(7, 5), (0, 11), (3, 1)], 3: [(4, 0, 8), (6, 2, 3)]}[world_size]
    return [(GRID[i], draw.choice(shards), i) for i in draw.sample(range(len(GRID)), count)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_grid_of_losses_and_their_parts_is_right_or_refused(world_size: int, worlds: Worlds) -> None:
    whole_grid = os.environ.get("HYPOTHESIS_PROFILE") == "long"
    if whole_grid:
        chosen = drawn_from_the_grid(len(GRID), world_size, 0)[:: 1 if world_size == 2 else 10]
    else:
        chosen = drawn_from_the_grid(400, world_size, random.randrange(2**32))
    counts: Counter[str] = Counter()
    for start in range(0, len(chosen), 200):
        part = chosen[start : start + 200]
        of_ranks = worlds.run(world_size, sharded_grid.verdicts, part, timeout=120.0)
        wrong = [(x, verdict) for x, verdict in zip(part, of_ranks[0], strict=True) if verdict[0] == "not the same"]
        assert not wrong
        counts.update(verdict for verdict, _ in of_ranks[0])
    assert counts["the same"] > len(chosen) / 4
    print(dict(counts))


def _without_refusals(chosen: list[Any]) -> list[sharded_grid.Verdict]:
    with pytest.MonkeyPatch.context() as change:
        for module, name in ((sharded_loss, "call_problem"), (refusals, "call_problem"), (refusals, "refusal")):
            change.setattr(module, name, lambda *_: None)
        return sharded_grid.verdicts(chosen)


def test_the_grid_catches_what_is_refused(worlds: Worlds) -> None:
    wrong = [
        sharded_grid.Combination("MultiSimilarity", None, "class weights", None, None),
        sharded_grid.Combination("Lifted", None, "class weights", None, None),
        sharded_grid.Combination("NPairs", "dot", None, None, "HDC"),
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


def test_indices_of_all_rows_are_split_over_ranks(worlds: Worlds) -> None:
    rows = Rows.of((5, 7), references=False)
    for miner in (M.BatchHardMiner(), M.PairMarginMiner()):
        indices = miner(rows.z, rows.labels)

        def job(z: Tensor, labels: Tensor, indices: tuple[Tensor, ...] = indices) -> Tensor:
            world = World.of()
            named = {"embeddings": z, "labels": labels}
            shards = {name: world.shards(x) for name, x in named.items()}
            return sharded(L.ContrastiveLoss(), None, named | {"indices_tuple": indices}, shards, world)

        expected = L.ContrastiveLoss()(rows.z, rows.labels, indices)
        assert max(distance(x, expected) for x in worlds.run(2, job, each=rows.split((5, 7)))) <= EXACT


# ------------------------------------------------------------------------------------- what one rank alone has wrong


def good() -> float:
    loss = cz.DistributedLoss(L.ContrastiveLoss(), mode="sharded", check_distinct=False)
    return loss(torch.eye(3), torch.tensor([0, 0, 1])).item()


def rows_of_rank(counts: Sequence[int], seed: int = 0) -> Tensor:
    rank = World.of().rank
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(counts[rank], WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


MODES = ("sharded", "replicated")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [(3, 5), (2, 4)], ids=str)
def test_views_of_unequal_length_are_refused_on_every_rank(mode: Any, counts: tuple[int, int], worlds: Worlds) -> None:
    """(3, 5) and (5, 3) have equal totals, but rows would be paired with those of other samples."""
    for symmetric in (True, False):

        def bad(symmetric: bool = symmetric) -> Any:
            loss = L.SelfSupervisedLoss(L.NTXentLoss(), symmetric=symmetric)
            return cz.DistributedLoss(loss, mode=mode)(rows_of_rank(counts), rows_of_rank((5, 3), seed=7))

        text, after = common_error(worlds, 2, bad, good)
        assert "ref_emb holds another view of each row of embeddings" in text
        assert after[0] == after[1]


def shifted(name: str) -> Any:
    z, labels = rows_of_rank((3, 5)), torch.arange(8)[: (3, 5)[World.of().rank]] % 3
    n = (5, 3)[World.of().rank]
    if name == "reference labels":
        return cz.DistributedLoss(L.ContrastiveLoss())(z, labels, None, rows_of_rank((4, 4)), torch.arange(n) % 3)
    if name == "mask":
        memory = L.CrossBatchMemory(L.ContrastiveLoss(), WIDTH, memory_size=9).double()
        return cz.DistributedLoss(memory)(z, labels, enqueue_mask=torch.arange(n) % 2 == 0)
    if name == "miner":
        return cz.data.DistributedMiner(M.BatchHardMiner())(z, labels, rows_of_rank((4, 4)), torch.arange(n) % 3)
    if name == "views":
        return cz.DistributedLoss(lambda view1, view2: (view1.sum(0) * view2.sum(0)).sum())(z, rows_of_rank((5, 3)))
    return cz.DistributedLoss(L.VICRegLoss())(z, ref_emb=rows_of_rank((5, 3)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reference labels", "ref_labels are one per row of ref_emb"),
        ("miner", "ref_labels are one per row of ref_emb"),
        ("mask", "enqueue_mask is one per row of embeddings"),
        ("views", "view2 is another view of each row of view1"),
        ("VICReg", "ref_emb holds another view of each row of embeddings"),
    ],
)
def test_rows_that_are_shifted_between_ranks_are_refused(name: str, words: str, worlds: Worlds) -> None:
    text, after = common_error(worlds, 2, lambda: shifted(name), good)
    assert words in text
    assert after[0] == after[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"embeddings": torch.eye(3), "labels": torch.arange(3), "ref_emb": torch.eye(2), "ref_labels": torch.arange(2)},
        {"embeddings": torch.eye(3), "indices_tuple": (), "ref_emb": torch.eye(2)},
        {"embeddings": torch.eye(3), "labels": torch.arange(3), "enqueue_mask": torch.ones(3).bool()},
        {"queries": torch.eye(2), "keys": torch.eye(4)},
        {"embeddings": torch.eye(3), "labels": None, "temperature": torch.tensor(1.0), "ref_emb": None},
    ],
)
def test_matching_arguments_are_no_problem(arguments: dict[str, Any]) -> None:
    assert paired_problem(arguments) is None


def test_three_dimensions_and_a_rank_without_rows(worlds: Worlds) -> None:
    for loss in (L.ContrastiveLoss, L.InstanceLoss, L.NPairsLoss):

        def bad(loss: Any = loss) -> Any:
            n = 3 * World.of().rank
            return cz.DistributedLoss(loss(), mode="sharded")(torch.ones(n, 2, WIDTH), torch.arange(n))

        text, after = common_error(worlds, 2, bad, good)
        assert "embeddings are [n, d], got 3 dimensions" in text
        assert after[0] == after[1]


def beyond(name: str) -> Any:
    """Call a loss that raises on rank 1 only, for its rows or labels."""
    rank = World.of().rank
    torch.manual_seed(0)  # the same weights everywhere
    z, labels = rows_of_rank((0, 4) if name.endswith("no rows") else (3, 4)), torch.tensor([0, 1, 2, 0])
    labels = labels[: len(z)] + (0 if rank == 0 else 40)
    miner = None
    if name.startswith("ArcFace"):
        loss: Any = L.ArcFaceLoss(CLASSES, WIDTH).double()
    elif name.startswith("Margin"):
        loss = L.MarginLoss(num_classes=CLASSES, learn_beta=True).double()
    elif name.startswith("P2SGrad"):
        loss = L.P2SGradLoss(WIDTH, CLASSES).double()
    elif name.startswith("weights"):
        loss = L.ContrastiveLoss(reducer=R.ClassWeightedReducer(torch.ones(CLASSES)))
    else:
        loss, miner = L.TripletMarginLoss(), RaisesOnOneRank()
    if name.startswith(("Margin", "weights")):
        labels[-1:] = labels[:1]  # a positive
    return cz.DistributedLoss(loss, miner=miner, mode="sharded")(z, labels)


class RaisesOnOneRank(M.BaseMiner):
    def mine(self, *rows: Tensor) -> Any:
        if World.of().rank == 1:
            raise RuntimeError("out of luck")
        return (torch.tensor([], dtype=torch.long),) * 3


@pytest.mark.parametrize(
    "name", ["ArcFace", "ArcFace, no rows", "Margin", "P2SGrad", "P2SGrad, no rows", "weights of classes", "miner"]
)
def test_every_rank_raises_the_error_of_one(name: str, worlds: Worlds) -> None:
    text, after = common_error(worlds, 2, lambda: beyond(name), good)
    assert "rank 1: " in text
    # a rank without rows evaluates one of the batch's labels, which is wrong there, too
    assert ("rank 0: " in text) == (name == "ArcFace, no rows")
    assert "Error: " in text
    assert after[0] == after[1]


def test_weights_are_normalised_before_they_are_cast(worlds: Worlds) -> None:
    """The library's weights have 32 bits until the first call with 64-bit embeddings."""

    def steps(wrap: Callable[[Any], Any], z: Tensor, labels: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        loss = L.P2SGradLoss(WIDTH, 6)
        loss_fn, found = wrap(loss), []
        for _ in range(2):
            x = z.clone().requires_grad_()
            value = loss_fn(x, labels)
            loss.weight.grad = None
            value.backward()
            found += [value.detach(), loss.weight.grad.clone()]
            loss.weight.data -= 0.3 * loss.weight.grad
        return found

    rows = Rows.of((5, 7), references=False)
    expected = steps(lambda x: x, rows.z, rows.labels)
    sharded_loss = lambda x: cz.DistributedLoss(x, mode="sharded")  # noqa: E731 - one line beside its like
    for shards in [(5, 7), (0, 9, 3)]:
        each = list(zip(split(rows.z, shards), split(rows.labels, shards), strict=True))
        for found in worlds.run(len(shards), lambda z, y: steps(sharded_loss, z, y), each=each):
            for x, y in zip(found, expected, strict=True):
                assert distance(x, y) <= EXACT


def test_losses_with_miners_take_no_indices(worlds: Worlds) -> None:
    def bad() -> Any:
        z, labels = rows_of_rank((4, 4)), torch.arange(4) % 2
        indices = cz.data.DistributedMiner(M.BatchHardMiner())(z, labels)
        loss = L.MultipleLosses([L.TripletMarginLoss()], [M.BatchHardMiner()])
        return cz.DistributedLoss(loss, mode="sharded")(z, labels, indices)

    text, after = common_error(worlds, 2, bad, good)
    assert "has miners of its own, and takes no indices_tuple" in text
    assert after[0] == after[1]


def test_indices_without_labels(worlds: Worlds) -> None:
    rows = Rows.of((5, 7), references=False)
    expected = L.TripletMarginLoss()(rows.z, indices_tuple=M.BatchHardMiner()(rows.z, rows.labels))

    def job(z: Tensor, labels: Tensor) -> tuple[Tensor, str | None]:
        indices = cz.data.DistributedMiner(M.BatchHardMiner())(z, labels)
        loss = L.TripletMarginLoss()
        text = error_message(lambda: cz.DistributedLoss(loss, mode="sharded")(z, indices_tuple=indices))
        return cz.DistributedLoss(loss)(z, indices_tuple=indices), text

    for value, text in worlds.run(2, job, each=rows.split((5, 7))):
        assert distance(value, expected) <= EXACT
        assert "call loss(embeddings, labels), also with indices_tuple" in (text or "")
