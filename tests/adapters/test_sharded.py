"""pytorch-metric-learning's losses in shards: the number and the gradients of one process, from 1/W of the work."""

import functools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

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
from contrastive_zoo.wrapper.pml.sharded import anchor_batch, anchor_losses, sharded_loss
from contrastive_zoo.wrapper.pml.sharded.sharded_loss import TAKE_REFERENCES, call_problem, refusal
from contrastive_zoo.wrapper.pml.table import LOSSES
from tests.helpers import EVERY_CASE, EXACT, close, common_error, distance, drawn, error_message, numbers, split
from tools.comparison import Run, measure
from tools.pml_matrix.cases import CLASSES, WIDTH, Case, parts
from tools.pml_matrix.grid import EVALUATED, in_shards, verdicts

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of NumPy, in their constructors


@dataclass(frozen=True)
class Made(Case):
    """A loss with settings, and a miner."""

    make: Callable[[], Any] = L.ContrastiveLoss
    make_miner: Callable[[], Any] = lambda: None
    dtype: torch.dtype = torch.float64

    def construct(self) -> tuple[nn.Module, nn.Module | None]:
        torch.manual_seed(7)
        return self.make().to(self.dtype), self.make_miner()


MINED = (
    "LiftedStructureLoss", "FastAPLoss", "ThresholdConsistentMarginLoss", "ProxyNCALoss", "MultipleLosses",
    "MultiSimilarityLoss", "MarginLoss", "NCALoss", "SupConLoss",
)  # fmt: skip
REDUCERS = {"PerAnchorReducer, above 0", *parts(R)} - {"DivisorReducer", "DoNothingReducer"}
CASES = [
    *map(Case, (*EVALUATED, "MultipleLosses", "SelfSupervisedLoss")),
    *(Case(loss, miner) for miner, loss in drawn(parts(M), ("TripletMarginLoss", "ContrastiveLoss"), one_in=2)),
    *(Case(loss, "MultiSimilarityMiner") for loss in MINED),
    *(Case("ContrastiveLoss", parts=(("reducer", x),)) for x in sorted(REDUCERS)),
    Made("MarginLoss", make=L.MarginLoss),
    Made("NCALoss", make=lambda: L.NCALoss(softmax_scale=3), make_miner=M.MultiSimilarityMiner),
    Made("TripletMarginLoss", make=lambda: L.TripletMarginLoss(0.3, smooth_loss=True), make_miner=M.BatchHardMiner),
    Made("TripletMarginLoss", make=lambda: L.TripletMarginLoss(0.3, embedding_regularizer=G.LpRegularizer())),
    Made("TripletMarginLoss", make=lambda: L.TripletMarginLoss(0.3),
         make_miner=lambda: M.TripletMarginMiner(0.3, "semihard")),
    Made("MultiSimilarityLoss", make=L.MultiSimilarityLoss,
         make_miner=lambda: M.MultiSimilarityMiner(distance=D.LpDistance())),
    Made("ArcFaceLoss", make=lambda: L.ArcFaceLoss(CLASSES, WIDTH, weight_regularizer=G.RegularFaceRegularizer()),
         make_miner=M.MultiSimilarityMiner),
    Made("SelfSupervisedLoss", make=lambda: L.SelfSupervisedLoss(L.NTXentLoss(), symmetric=False)),
    *(Made("PNPLoss", make=lambda x=x: L.PNPLoss(b=3, alpha=2, anneal=0.3, variant=x)) for x in L.PNPLoss.VARIANTS),
    *(Made("RankedListLoss", make=lambda tn=tn, tp=tp: L.RankedListLoss(0.3, tn, imbalance=0.4, alpha=1.1, Tp=tp))
      for tn, tp in ((3, 1), (-1, -0.5))),
    # until the first call with embeddings of 64 bits the library's weights have 32, and are normalised before the cast
    Made("P2SGradLoss", make=lambda: L.P2SGradLoss(WIDTH, CLASSES), dtype=torch.float32),
    Made("MultipleLosses", make=lambda: L.MultipleLosses(
        {"a": L.NTXentLoss(), "b": L.TripletMarginLoss()}, {"b": M.BatchHardMiner()}, {"a": 1, "b": 0.5})),
]  # fmt: skip
"""Every loss, miner and reducer, and settings of some."""

STEPS = (((12,), (3,), (3,)), ((5, 7), (2, 1), (1, 2)), ((0, 9, 3), (1, 0, 2), (1, 2, 0)))
"""In the later steps a rank, or the batch, has no positives or no negatives."""

OF_TWELVE = ("DistanceWeightedMiner", "EmbeddingsAlreadyPackagedAsTriplets", "UniformHistogramMiner")
"""Miners that draw as many pairs as there are, or take rows in threes."""


def runs(case: Case) -> list[Run]:
    steps = [of[: 1 if case.miner in OF_TWELVE else 3] for of in STEPS]
    of_all = [Run(x, how) for x, how in zip(steps, ("mean", "sum", "mean"), strict=True)]
    if case == Case(case.loss):
        return of_all
    return of_all[1:] if EVERY_CASE else [of_all[1 + crc32(str(case).encode()) % 2]]


def wrong(
    cases: list[Case], worlds: Worlds, wrap: Any = in_shards, of: Callable[[Case], list[Run]] = runs
) -> list[str]:
    assert all(map(of, cases)), "nothing is compared"
    return [
        f"{case} on {run}: {why}"
        for case, compared in measure(worlds, cases, of, wrap)
        for run, x in compared.items()
        if (why := x.wrong(EXACT) or x.unsupported)
    ]


def test_value_and_gradients_are_those_of_one_process(worlds: Worlds) -> None:
    assert wrong(CASES, worlds) == []


def test_reference_rows_are_gathered_too(worlds: Worlds) -> None:
    of_pairs = {kind.__name__ for kind, meaning in LOSSES.items() if meaning.evaluate in TAKE_REFERENCES}
    pairs = [
        x for x in CASES if x.loss in of_pairs and "PerAnchor" not in str(x)
    ]  # it takes as many references as rows
    assert wrong([replace(x, references=True) for x in pairs], worlds, of=lambda case: runs(case)[-1:]) == []


def test_each_rank_evaluates_its_own_anchors_only(worlds: Worlds) -> None:
    def job(case: Case, z: Tensor, labels: Tensor) -> list[tuple[int, int]]:
        (loss, miner), seen = case.construct(), []

        def of_sizes(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
            seen.append((len(rows[0]), len(rows[1])))
            return compute(*rows)

        for module in (loss, miner):
            module.distance.compute_mat = functools.partial(of_sizes, module.distance.compute_mat)
        cz.DistributedLoss(loss, miner=miner, mode="sharded")(z, labels)
        return seen

    cases = [Case("MultiSimilarityLoss", "MultiSimilarityMiner"), Case("SupConLoss", "MultiSimilarityMiner")]
    for case in [
        *cases,
        *(x for x in CASES if isinstance(x, Made) and x.loss == "TripletMarginLoss" and x.construct()[1]),
    ]:
        found = worlds.run(2, job, case, each=EACH)
        assert found == [[(5, 12)] * 2, [(7, 12)] * 2]


Z, LABELS = numbers(12, WIDTH, seed=5), torch.tensor([0, 3, 1, 1, 4, 0, 2, 2, 2, 1, 0, 5])
EACH = list(zip(split(Z, (5, 7)), split(LABELS, (5, 7)), strict=True))


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


MINES_WITH_ITSELF = next(x for x in CASES if isinstance(x, Made) and x.make_miner is M.BatchHardMiner)
MUTANTS: dict[str, tuple[Any, str, Any, Case]] = {
    "an anchor is its own positive": (anchor_batch, "block_masks", with_itself, Case("NTXentLoss")),
    "columns without gradient": (anchor_batch, "all_gather", without_gradient, Case("ContrastiveLoss")),
    "a mean of the ranks' means": (sharded_loss, "summands", mean_of_ranks, Case("MultiSimilarityLoss")),
    "parameters of a rank's own": (sharded_loss, "replicated", lambda x, **_: x, Case("MarginLoss")),
    "a miner that sees the anchor": (
        anchor_batch, "MINERS", {M.BatchHardMiner: as_their_wrapper_mines}, MINES_WITH_ITSELF,
    ),
    "no padding": (anchor_losses, "padding_needed", lambda local, *_: [0] * len(local), Case("MultiSimilarityLoss")),
}  # fmt: skip
"""Module, attribute, replacement, and the case that detects it."""


def changed(loss: Any, changes: dict[tuple[Any, str], Any], **options: Any) -> Callable[..., Tensor]:
    """Return the loss in shards, which is made and computed with other attributes of modules."""

    def call(**arguments: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as change:
            for (module, attribute), value in changes.items():
                change.setattr(module, attribute, value)
            return in_shards(loss, **options)(**arguments)

    return call


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, worlds: Worlds) -> None:
    module, attribute, mutant, case = MUTANTS[name]
    small = [Run(((1, 2),)), Run(((5, 7),))]
    found = wrong([case], worlds, functools.partial(changed, changes={(module, attribute): mutant}), lambda _: small)
    assert any("differs by" in x and float(x.rpartition(" ")[2]) > 1e-4 for x in found), found


def test_any_other_miner_is_called_on_all_rows(worlds: Worlds) -> None:
    no_miners = functools.partial(changed, changes={(anchor_batch, "MINERS"): {}})
    mined = [Case("MultiSimilarityLoss", "MultiSimilarityMiner"), Case("TripletMarginLoss", "TripletMarginMiner")]
    assert wrong([*mined, *(replace(x, references=True) for x in mined)], worlds, no_miners) == []


# --------------------------------------------------------------------------------------------------------------- refusals


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
        (lambda: L.TripletMarginLoss(reducer=R.PerAnchorReducer()), "a number of each pair"),
        (lambda: L.AngularLoss(reducer=R.PerAnchorReducer()), "a number of each pair"),
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
    problem = call_problem(loss(), None, {"embeddings": Z, "labels": LABELS}) or ""
    assert re.search(f"cannot be evaluated in shards: .*{why}.* Leave mode='sharded' out", problem)


ONE_MINER = L.MultipleLosses([L.NTXentLoss()], miners=[M.BatchHardMiner()])


@pytest.mark.parametrize(
    ("loss", "miner", "more", "why"),
    [
        (L.NTXentLoss(), None, {"labels": None}, "labels are missing"),
        (L.NPairsLoss(), None, {"ref_emb": Z, "ref_labels": LABELS}, "takes no ref_emb"),
        (L.SelfSupervisedLoss(L.LiftedStructureLoss(), symmetric=False), None, {"ref_emb": Z}, "takes no ref_emb"),
        (L.InstanceLoss(), M.BatchHardMiner(), {}, "takes no indices_tuple"),
        (L.NPairsLoss(), M.BatchHardMiner(), {}, "first pair of each class"),
        (L.NPairsLoss(), None, {"indices_tuple": (LABELS,) * 3}, "first pair of each class"),
        (ONE_MINER, M.BatchHardMiner(), {}, "miners of its own"),
        (ONE_MINER, None, {"indices_tuple": (LABELS,) * 3}, "takes neither another one nor indices_tuple"),
    ],
)
def test_arguments_that_a_loss_does_not_take_are_refused(loss: Any, miner: Any, more: Any, why: str) -> None:
    assert why in (call_problem(loss, miner, {"embeddings": Z, "labels": LABELS} | more) or "")


def test_views_without_labels_may_differ_in_number_for_dynamic_soft_margin(worlds: Worlds) -> None:
    """The value alone: the library's own code changes its distances in place, and has no gradient here."""

    def job(z: Tensor, references: Tensor) -> Tensor:
        return cz.DistributedLoss(L.DynamicSoftMarginLoss())(z, ref_emb=references)

    references = numbers(13, WIDTH, seed=6)
    expected = L.DynamicSoftMarginLoss()(Z, ref_emb=references)
    each = list(zip(split(Z, (5, 7)), split(references, (9, 4)), strict=True))
    assert max(distance(x, expected) for x in worlds.run(2, job, each=each)) <= EXACT


def test_the_grid_of_losses_and_their_parts_is_right_or_refused(worlds: Worlds) -> None:
    seed, count = random.randrange(2**32), 6000 if EVERY_CASE else 200
    found = verdicts(worlds, count, seed)
    counts = Counter(verdict for *_, verdict in found)
    right = ("the same", "refused", "not accepted by the library")
    assert counts.keys() <= set(right), (seed, [x for x in found if x[2] not in right])
    assert counts["the same"] > count / 4


@pytest.mark.parametrize(
    "case",
    [
        Case("MultiSimilarityLoss", parts=(("reducer", "ClassWeightedReducer"),)),
        Case("LiftedStructureLoss", parts=(("reducer", "ClassWeightedReducer"),)),
        Case("NPairsLoss", "HDCMiner"),
    ],
    ids=str,
)
def test_what_is_refused_would_be_wrong(case: Case, worlds: Worlds) -> None:
    accepted = {(sharded_loss, name): lambda *_: None for name in ("call_problem", "refusal")}
    found = wrong([case], worlds, functools.partial(changed, changes=accepted), lambda _: [Run(((7, 5),))])
    assert "value differs by" in found[0]


USER_CODE: dict[str, Callable[[L.ContrastiveLoss, M.BatchHardMiner], Any]] = {
    "ContrastiveLoss": lambda loss, miner: loss.register_forward_hook(lambda module, inputs, value: value),
    "LpDistance": lambda loss, miner: loss.distance.register_forward_pre_hook(lambda module, inputs: None),
    "MultipleReducers": lambda loss, miner: loss.reducer.register_full_backward_hook(lambda module, *gradients: None),
    "BatchHardMiner": lambda loss, miner: setattr(miner, "forward", miner.forward),
}


@pytest.mark.parametrize("part", USER_CODE)
def test_code_of_the_user_that_shards_would_leave_out_is_refused(part: str, worlds: Worlds) -> None:
    def bad() -> None:
        """One rank's loss has a user's code from the second step on."""
        loss, miner = L.ContrastiveLoss(), M.BatchHardMiner()
        wrapper = cz.DistributedLoss(loss, miner=miner, mode="sharded")
        z, labels = numbers(3, 4, seed=dist.get_rank()).requires_grad_(), torch.tensor([0, 0, 1])
        wrapper(z, labels).backward()
        if dist.get_rank() == 1:
            USER_CODE[part](loss, miner)
        wrapper(z, labels)

    text, _ = common_error(worlds, 2, bad, good)
    assert f"{part} has hooks or a forward of its own" in text


@pytest.mark.parametrize("miner", [M.BatchHardMiner(), M.PairMarginMiner()], ids=lambda x: type(x).__name__)
def test_indices_of_all_rows_are_split_over_ranks(miner: Any, worlds: Worlds) -> None:
    indices = miner(Z, LABELS)

    def job(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, str | None]:
        of_all = cz.data.DistributedMiner(miner)(z, labels)
        loss_fn = cz.DistributedLoss(L.ContrastiveLoss(), mode="sharded")
        text = error_message(lambda: loss_fn(z, indices_tuple=of_all))
        return loss_fn(z, labels, of_all), cz.DistributedLoss(L.ContrastiveLoss())(z, indices_tuple=of_all), text

    expected = L.ContrastiveLoss()(Z, LABELS, indices)
    for value, without_labels, text in worlds.run(2, job, each=EACH):
        close(value, expected)
        close(without_labels, expected)
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
ON_ONE_RANK = ("ArcFace", "Margin", "P2SGrad", "P2SGrad, no rows", "weights", "miner")
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
    (two_miners, "it has miners of its own, and takes neither"),
    (lambda: cz.DistributedLoss(L.HistogramLoss(), mode="sharded"), "its histograms are of all pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_every_rank_raises_the_same_error_and_goes_on(call: Callable[[], Any], words: str, worlds: Worlds) -> None:
    text, after = common_error(worlds, 2, call, good)
    assert words in text
    assert after[0] == after[1]
    if getattr(call, "func", None) is beyond:
        assert "rank 1: " in text
        assert "rank 0: " not in text


def test_an_error_of_all_ranks_is_the_loss_s_own(worlds: Worlds) -> None:
    """A rank without samples evaluates one of the batch's labels, which is wrong there, too."""
    texts = worlds.run(2, lambda: error_message(lambda: beyond("ArcFace, no rows"), IndexError))
    assert texts[0] == texts[1] is not None
