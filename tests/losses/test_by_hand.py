"""Numbers by hand, state, memory, sums of losses, and local statistics: what the tables of losses do not show."""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import statistics, tiling
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.temperature import bounded
from contrastive_zoo.losses import random_slices, sparse
from contrastive_zoo.losses.modalities import _scaled_bases, _volumes
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.invariants import CONTRACT, Broken, same_state
from contrastive_zoo.testing.measurement import Case, Trial, whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import Largest, Pools, close, numbers, rank
from tests.losses import zoo_labelled, zoo_margins, zoo_softmax
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.losses.zoo_statistics import WIDTH
from tests.losses.zoo_weights import ENTRIES as WEIGHTS
from tests.zoo import BatchHard, fed


def test_learnt_scales_start_where_they_are_told_and_keep_their_bounds() -> None:
    assert cz.Clip().logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    assert cz.SigLIP().logit_scale.item() == pytest.approx(math.log(10))
    assert {name for name, _ in cz.SigLIP().named_parameters()} == {"temperature.log_scale", "logit_bias"}
    bias = cz.SigLIP().get_parameter("logit_bias")
    assert bias.item() == -10.0
    assert bias.requires_grad


@pytest.mark.parametrize("low", [None, 3.0])
def test_beyond_a_bound_only_gradients_that_lead_back_pass(low: float | None) -> None:
    """The parameter is not clamped: FSDP and DeepSpeed would bring back their copy of it."""
    bound = 2.0 if low is None else low
    for x in (1.0, 2.0, 2.5, 3.0, 4.0):
        for slope in (-1.0, 1.0):
            theta = torch.tensor(x, requires_grad=True)
            value = bounded(theta, high=bound) if low is None else bounded(theta, low=bound, high=9.0)
            value.backward(torch.tensor(slope))
            is_beyond, leads_back = (x > bound, slope > 0) if low is None else (x < bound, slope < 0)
            assert (theta.item(), value.item()) == (x, bound if is_beyond else x)
            assert theta.grad == (0.0 if is_beyond and not leads_back else slope)


def test_the_scale_of_clip_is_at_most_100_and_comes_back() -> None:
    loss, rows = cz.Clip(), numbers(4, 3, seed=1).float()
    loss.logit_scale.data.fill_(7.0)
    for keys, comes_back in ((rows, False), (rows.flip(0), True)):
        loss.zero_grad()
        value = loss(rows, keys)
        value.backward()
        assert value.item() == pytest.approx(cz.Clip(temperature=0.01)(rows, keys).item())
        assert (loss.logit_scale.item(), loss.logit_scale.grad.item() > 0) == (7.0, comes_back)


HARD = ("Triplet, hard", "Triplet, semi-hard", "MultiSimilarity, mined", "Circle")
MARGINS = [x for x in zoo_margins.ENTRIES if x.name in HARD]


@pytest.mark.path("engines")
def test_nothing_n_by_n_is_held() -> None:
    """In small blocks no tensor is nearly as large as the similarity matrix."""
    n = 120
    with patch.object(tiling, "BLOCK_BYTES", 2**15), patch.object(tiling, "TILE_BYTES", 2**13):
        softmaxes = zoo_softmax.ENTRIES + zoo_labelled.ENTRIES + zoo_labelled.ORDERED + WEIGHTS
        # PaCo is called with logits of all classes
        for entry in [x for x in softmaxes if ("," not in x.name and x.name != "PaCo") or "all" in x.name] + MARGINS:
            rows = [x.requires_grad_(x.is_floating_point()) for x in whole_batch(entry.case(), GlobalBatch((n,), d=4))]
            with Largest() as largest:
                entry.make(temperature=0.5).double()(*rows).backward()
            assert largest.elements <= (8 * n if entry in MARGINS else n * n / 3), entry  # of these one block of 8 rows
        with cz.engine.plain_formulas(), Largest() as largest:
            entry.make(temperature=0.5).double()(*rows)
        assert largest.elements >= n * n, "the formula holds it"


@pytest.mark.parametrize(("loss", "whole"), [(cz.SIGReg(4, num_slices=9), 17 * 9), (cz.VISReg(4, num_slices=640), 640)])
def test_waves_and_sorted_projections_are_computed_some_at_a_time(loss: cz.SIGReg | cz.VISReg, whole: int) -> None:
    n = 120
    views = [numbers(n, 4, seed=seed).requires_grad_() for seed in range(1 if isinstance(loss, cz.SIGReg) else 2)]
    for tile_bytes, is_whole in ((2**13, False), (2**23, True)):
        with patch.object(tiling, "TILE_BYTES", tile_bytes), Largest() as largest:
            loss(*views).backward()
        assert (largest.elements >= whole * n) == is_whole
        assert is_whole or largest.elements <= whole * n / 4
    with patch.object(tiling, "TILE_BYTES", 2**13):
        with pytest.raises(RuntimeError, match="plain_formulas"):
            torch.autograd.grad(loss(*views), views, create_graph=True)[0].sum().backward()
        with cz.engine.plain_formulas():
            torch.autograd.grad(loss(*views), views, create_graph=True)[0].sum().backward()


def test_dependent_modalities_span_no_volume_and_have_finite_gradients() -> None:
    """Rounding would leave 1e-4. Anchors are in the span of their modalities; those of the last samples are parallel."""
    b, c, weights = (numbers(200, 8, seed=seed).float() for seed in (1, 2, 3))
    c[100:] = 2 * b[100:]
    modalities = [x.requires_grad_() for x in (weights[:, :1] * b + weights[:, 1:2] * c, b, c)]
    unit = [F.normalize(x, dim=1) for x in modalities]
    volumes = _volumes(unit[0], _scaled_bases(unit[1:]))
    assert not volumes.diagonal().any()
    assert not volumes[:, 100:].any()
    gradients = torch.autograd.grad(cz.GRAM()(*modalities), modalities)
    assert all(x.isfinite().all() for x in gradients)


def test_dino_moves_its_centre_while_training() -> None:
    teacher = torch.tensor([[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]])
    loss = cz.DINO(2, centre_momentum=0.75)
    loss(torch.zeros(2, 3, 2), teacher)
    close(loss.centre, torch.tensor([1.0, 1.25]))
    loss.eval()(torch.zeros(2, 2), teacher[:, 0])
    close(loss.centre, torch.tensor([1.0, 1.25]))


def test_margins_of_faces_move_their_averages_while_training() -> None:
    """Cosines of ½ and 1 with the class, and norms of 2 and 4: mean 3, and a deviation (over N − 1) of √2."""
    z, labels = torch.tensor([[1.0, 3**0.5], [4.0, 0.0]]), torch.tensor([0, 0])
    losses = cz.CurricularFace(2, 2, momentum=0.75), cz.AdaFace(2, 2, momentum=0.75)
    for loss in losses:
        loss.weights.data.copy_(torch.eye(2))
        loss(z, labels)
        loss.eval()(z[:1], labels[:1])
    curricular, ada = losses
    close(curricular.mean_cosine, torch.tensor(0.25 * 0.75))
    close(ada.mean_norm, torch.tensor(0.75 * 20 + 0.25 * 3), 1e-6)
    close(ada.std_norm, torch.tensor(0.75 * 100 + 0.25 * 2**0.5), 1e-6)


@pytest.mark.parametrize("centering", ["mean", "sinkhorn"])
def test_a_batch_without_masked_patches_has_no_loss_and_moves_no_centre(centering: Any) -> None:
    loss, none = cz.IBOT(2, centering=centering), torch.zeros(0, 2, requires_grad=True)
    loss.centre += 3.0
    loss(none, none, torch.zeros(4, dtype=torch.int64)).backward()
    assert none.grad is not None
    close(loss.centre, torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "dense"])
@pytest.mark.parametrize(("apart", "mean"), [(1e-4, 0), (0.5, 1000)])
def test_koleo_keeps_the_digits_of_near_neighbours(apart: float, mean: int, dense: bool) -> None:
    """Of neighbours 1e-4 apart, or of all points far from 0, a matmul in float32 keeps no digit of the distance."""
    generator = torch.Generator().manual_seed(0)
    far = torch.randn(6, 5, generator=generator)
    rows = mean + torch.cat([far, far + apart * torch.randn(6, 5, generator=generator)])
    single, double = rows.clone().requires_grad_(), rows.double().requires_grad_()
    with cz.engine.plain_formulas() if dense else torch.enable_grad():
        for z in (single, double):
            cz.KoLeo(normalize=False).double()(z).backward()
    torch.testing.assert_close(single.grad.double(), double.grad, rtol=1e-5, atol=0.0)


def test_a_number_of_prototypes_in_a_tensor_has_16_bits() -> None:
    """Eight bits do not hold 4,096, the number of prototypes that are drawn at a time."""
    assert cz.SwAV(torch.tensor(39, dtype=torch.int32), 3).prototypes.shape == (39, 3)


def nested_views() -> cz.WeightedSum:
    """Whole rows, prefixes, and rows that are not normalised; one and two towers, by both engines; one temperature."""
    t = cz.LearnableTemperature(0.5)
    prefixes = cz.Matryoshka(cz.InfoNCE(temperature=t, symmetric=True), dims=(2, 4), weights=[0.5, 2.0])
    losses = [cz.NTXent(temperature=t), prefixes, cz.InfoNCE(normalize=False), cz.DCL(), cz.AlignUniform(), BatchHard()]
    return cz.WeightedSum(losses, weights=[1.0, 0.3, 1.0, 1.0, 1.0, -0.1])


def nested_classes() -> cz.WeightedSum:
    prefixes = cz.Matryoshka(cz.SupCon(), dims=(2, 3, 5))
    return cz.WeightedSum([prefixes, cz.NCA(), cz.SupCon(normalize=False), BatchHard()])


def nested_teachers() -> cz.WeightedSum:
    """The arguments of a call of two views make the teacher's."""
    losses = [fed(kind, zoo_softmax.with_teacher)() for kind in (cz.GIST, cz.ClipDistillation)]
    return cz.WeightedSum([cz.Matryoshka(losses[0], (2, 5)), cz.Matryoshka(cz.WeightedSum(losses), (1, 3))])


@pytest.mark.parametrize(
    ("make", "call"), [(nested_views, "views"), (nested_classes, "labels"), (nested_teachers, "views")]
)
@pytest.mark.parametrize("shards", [(1, 4), (0, 3, 2)], ids=str)
def test_the_contract_holds_of_sums_of_sums(make: Any, call: Any, shards: tuple[int, ...], worlds: Worlds) -> None:
    """Of prefixes wider than those of the table of losses; tests/test_explain.py counts that rows are sent once."""
    trial = Trial(Case(lambda: cz.DistributedLoss(make()), call=call), GlobalBatch(shards, d=5, seed=5), worlds)
    for invariant in CONTRACT:
        invariant(trial)


def test_negatives_are_cut_as_well() -> None:
    q, k, shared, own = (numbers(*shape, seed=i) for i, shape in enumerate([(4, 3), (4, 3), (5, 3), (4, 2, 3)]))
    ours, plain = cz.Matryoshka(cz.InfoNCE(), (2, 3)), cz.InfoNCE()
    for x in (shared, own):
        close(ours(q, k, negatives=x), plain(q[:, :2], k[:, :2], x[..., :2]) + plain(q, k, x))


class OfTeacher(Loss):
    """A user's loss, whose annotations say which arguments are embeddings of the trained model."""

    def inputs(self, ids: Int[Tensor, " n"], z: Float[Tensor, "n w"], teacher: Float[Tensor, "n e"]) -> Inputs:
        return Inputs({"ids": ids, "z": z, "teacher": teacher})

    def compute(self, batch: Batch) -> Tensor:
        ids, z, teacher = batch.rows.values()
        return batch.reduce(z.sum(1) * (1 + ids) * teacher.sum(1))


class Called(cz.MarginMSE):
    """A loss with a forward of its own gets its arguments as they are called."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return 2 * super().forward(*args, **named)


# of 6 samples of 8 features: a loss, the shapes of its arguments, and how many of them are embeddings of the model
IDS = torch.tensor([0, 1, 0, 2, 1, 2])
WHOLE: list[tuple[Any, list[Any], int]] = [
    (cz.MarginMSE(), [(8,), (8,), (2, 8), (2,)], 3),
    (cz.MarginMSE(), [(8,), (8,), (8, 8), (8,)], 3),
    (Called(), [(8,), (8,), (8, 8), (8,)], 3),
    (cz.ScoreDistillation(), [(8,), (8, 8), (8,)], 2),
    (cz.MultiPositive(), [(8,), (8,), torch.stack([IDS, IDS.flip(0)], 1), IDS, (2,)], 2),
    (cz.RankNContrast(), [(8,), (3,)], 1),
    (cz.PaCo(), [(8,), IDS, (6,)], 1),
    (cz.GIST(), [(8,), (8,), (5,), (5,)], 2),
    (cz.WeightedSum([cz.GIST(), cz.ClipDistillation()]), [(8,), (8,), (9,), (9,)], 2),
    (cz.M3(), [(2, 8), (3, 8), (9,), (9,), (12,), (12,)], 4),
    (OfTeacher(), [IDS, (8,), (5,)], 2),
]


@pytest.mark.parametrize(("loss", "shapes", "count"), WHOLE, ids=lambda x: type(x).__name__)
def test_only_embeddings_of_the_model_are_cut(loss: cz.Matryoshka, shapes: list[Any], count: int) -> None:
    made = (x if isinstance(x, Tensor) else numbers(6, *x, seed=i).abs() for i, x in enumerate(shapes))
    args = [x.requires_grad_(x.is_floating_point() and i < count) for i, x in enumerate(made)]
    cut = [[x[..., :m] if x.requires_grad else x for x in args] for m in (3, 8)]
    trained = [x for x in args if x.requires_grad]
    values = cz.Matryoshka(loss, (3, 8))(*args), sum((loss(*x) for x in cut), torch.zeros(()))
    for found, expected in zip(*((x, *torch.autograd.grad(x, trained)) for x in values), strict=True):
        close(found, expected)


def test_anchors_may_be_kept_apart() -> None:
    a, b = numbers(5, 3, seed=0), numbers(5, 3, seed=1)
    losses = [cz.NTXent(reduction="none"), cz.NTXent(temperature=0.5, reduction="none")]
    close(cz.WeightedSum(losses)(a, b), losses[0](a, b) + losses[1](a, b))


def mean_of_rank_means(batch: Batch, names: list[str]) -> Tensor:
    rows = torch.cat([batch.rows[name].flatten(0, -2) for name in names])
    return rows.abs().mean(0) / len(batch.samples.sizes)


def without_sums_of(numbers: int) -> Callable[..., Tensor]:
    """Return a sum over ranks that leaves tensors of so many numbers as they are."""
    whole = Batch.sum
    return lambda self, x, *, gradient: x if x.numel() == numbers else whole(self, x, gradient=gradient)


def draws_of_rank(step: Tensor, *shape: int) -> Tensor:
    return numbers(*shape, seed=rank(), dtype=torch.float32)


MUTANTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "groups of the own rank": ("KoLeo, groups", Batch, "indices", lambda batch: torch.arange(batch.samples.size)),
    "clusters balanced on the own rank": ("DINO, Sinkhorn", Batch, "log_sum_exp", lambda _, x, **of: x),
    "patches balanced on the own rank": ("IBOT, Sinkhorn", Batch, "log_sum_exp", lambda _, x, **of: x),
    "directions of the own rank": ("RDMReg", random_slices, "_drawn", draws_of_rank),
    "projections of the own rank's embeddings": ("VISReg, three views", statistics, "all_gather", lambda x, **_: x),
    "a mean of the own rank": ("VISReg, three views", random_slices, "centered", lambda _, x: x - x.mean(0)),
    "a centre of the own rank's views": ("DINO", Batch, "sum", without_sums_of(WIDTH + 1)),
    "a centre of the own rank's patches": ("IBOT", Batch, "sum", without_sums_of(WIDTH + 1)),
    "mean of rank means": ("FLOPS", sparse, "_part_of_mean", mean_of_rank_means),
    "norms of the own rank": ("AdaFace", Batch, "sum", without_sums_of(3)),
    "cosines of the own rank": ("CurricularFace", Batch, "sum", without_sums_of(1)),
}
"""The row of the zoo, and what takes whose place."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_local_statistic_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch, pools: Pools) -> None:
    name, *planted = MUTANTS[mutant]
    case = next(x for x in WHOLE_ZOO if x.name == name).case()
    for is_planted, shards in itertools.product((False, True), ((2, 4), (1, 3, 2))):
        if is_planted:
            monkeypatch.setattr(*planted)
        trial = Trial(case, GlobalBatch(shards, d=3, seed=1), pools.threads)
        with splitting(always=True), pytest.raises(Broken) if is_planted else nullcontext():
            for invariant in (*CONTRACT, same_state):
                invariant(trial)
