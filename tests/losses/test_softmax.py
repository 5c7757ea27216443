"""Softmax and sigmoid losses over pairs: torch's own functions, each other, numbers by hand, and over ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import tiling
from contrastive_zoo.losses.distillation import ClipDistillation
from contrastive_zoo.losses.info_nce import MILNCE, Clip
from contrastive_zoo.losses.mnrl import GIST, MNRL
from contrastive_zoo.losses.multi_positive import MultiPositive, NPairs
from contrastive_zoo.losses.nt_xent import DCL, DCLW, HCL, Debiased
from contrastive_zoo.losses.sigmoid import SigLIP, SupSigmoid
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon, TupletMargin
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import Largest, assert_same, close, numbers
from tests.losses.zoo_softmax import ENTRIES, ORDERED


def pairs(*shape: int) -> list[Tensor]:
    """Two towers of unit rows."""
    return [F.normalize(numbers(*shape, seed=seed), dim=1).requires_grad_() for seed in (1, 2)]


def test_towers_are_torchs_functions() -> None:
    """The one-liners of the docstrings; open_clip's ClipLoss and SigLipLoss are these on one process."""
    rows, t = pairs(6, 4), 0.3
    eye, y = torch.eye(6, dtype=torch.float64), torch.arange(6)

    def open_clip(a: Tensor, b: Tensor) -> Tensor:
        return (F.cross_entropy(a @ b.T / t, y) + F.cross_entropy(b @ a.T / t, y)) / 2

    def open_siglip(a: Tensor, b: Tensor) -> Tensor:
        return -F.logsigmoid((2 * eye - 1) * (a @ b.T / t - 3.0)).sum() / 6

    assert_same(Clip(temperature=t, normalize=False), open_clip, *rows)
    assert_same(
        lambda *x: MultiPositive(temperature=t, normalize=False)(*x, y),
        lambda a, b: F.cross_entropy(a @ b.T / t, y),
        *rows,
    )
    assert_same(SigLIP(temperature=t, logit_bias=-3.0, normalize=False), open_siglip, *rows)
    teacher = pairs(6, 3)
    taught = [ClipDistillation(temperature=t, weight=weight)(*rows, *teacher) for weight in (0.0, 0.5, 1.0)]
    close(taught[0], Clip(temperature=t)(*rows))
    close(2 * taught[1], taught[0] + taught[2])  # open_clip's sum of both


def test_families_are_added() -> None:
    """One loss at a setting is another one."""
    a, b = pairs(5, 3)
    for t in (1.0, 0.1):
        info_nce = cz.InfoNCE(temperature=t)(a, b)
        close(HCL(temperature=t, beta=0.0)(a, b), Debiased(temperature=t)(a, b))
        close(HCL(temperature=t, beta=0.0, tau_plus=0.0)(a, b), cz.NTXent(temperature=t)(a, b))
        close(MNRL(temperature=t)(a, b), info_nce)
        both = MNRL(temperature=t, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
        close(both(a, b), Clip(temperature=t)(a, b))
        alone = GIST(temperature=t, contrast_anchors=False, contrast_positives=False)
        close(alone(a, b, a, a), info_nce)  # a guide that agrees in all strikes out nothing
        kept = MultiPositive(temperature=t, duplicates="negative")
        close(kept(a, b, torch.tensor([0, 0, 1, 2, 1])), info_nce)
    z, labels = torch.cat([a, b]), torch.arange(5).repeat(2)
    inside = SupCon(variant="in")(z, labels)
    close(inside, SupCon()(z, labels))  # with one positive each, in and out are one
    close(NCA(temperature=0.2)(z, labels), inside)  # ‖a − b‖² = 2 − 2 a·b
    close(SINCERE()(z, labels), inside)
    close(NPairs()(z, labels), cz.InfoNCE(temperature=1.0, normalize=False)(a, b))


# ---------------------------------------------------------------------------------------------------- numbers by hand


def test_numbers_by_hand() -> None:
    eye, e = torch.eye(2, dtype=torch.float64), math.e
    one = {"temperature": 1.0}
    expected = {
        "dcl": (DCL(**one)(eye, eye), math.log(2) - 1),
        "dcl, per view": (DCL(denominators="per_view", **one)(eye, eye), -1.0),
        "dclw, equal pairs weigh 1": (DCL(sigma=0.5, **one)(eye, eye), math.log(2) - 1),
        "hcl, negatives alike": (HCL(tau_plus=0.1, **one)(eye, eye), math.log(1 + (2 - 0.2 * e) / 0.9 / e)),
        "hcl at its bound": (HCL(tau_plus=0.9, **one)(eye, eye), math.log(1 + 2 / e**2)),
        "mil-nce": (MILNCE()(eye, eye[:, None]), math.log(e + 2) - 1),
        "mil-nce, reference": (MILNCE(denominator="reference")(eye, eye[:, None]), math.log(2 * e + 2) - 1),
        "gist": (GIST(**one)(eye, eye, eye, eye), math.log(e + 3) - 1),
        "siglip": (SigLIP(logit_bias=0.0, **one)(eye, eye), math.log(1 + 1 / e) + math.log(2)),
    }
    for name, (ours, by_hand) in expected.items():
        assert abs(ours.item() - by_hand) < 1e-10, name
    # two queries, three keys; query 0 wants key 1 three times as much as key 0, query 1 has no key
    keys = torch.cat([eye, -eye[:1]])
    several = MultiPositive(**one)(
        eye,
        keys,
        torch.tensor([[0, 1], [7, 7]]),
        torch.tensor([0, 1, 2]),
        torch.tensor([[1.0, 3.0], [1.0, 1.0]]),
    )
    assert abs(several.item() - (math.log(e + 1 + 1 / e) - 1 / 4)) < 1e-6


def test_negatives_of_one_query_each_are_logits_beside_its_own_key() -> None:
    q, k, negatives = numbers(5, 4, seed=1), numbers(5, 4, seed=2), numbers(5, 3, 4, seed=3)
    logits = torch.einsum("nd,nmd->nm", q, torch.cat([k[:, None], negatives], 1)) / 0.3
    loss = cz.InfoNCE(temperature=0.3, in_batch_negatives=False, normalize=False)
    close(loss(q, k, negatives), F.cross_entropy(logits, torch.zeros(5).long()))


def test_hard_negatives_of_unequal_number() -> None:
    """Of nobody, of one query, of another; hardness counts a query's own, others', or all of them."""
    eye, far = torch.eye(2, dtype=torch.float64), -torch.eye(2, dtype=torch.float64)
    negatives, owners = torch.cat([far[:1], eye[:1], far[1:]]), torch.tensor([0, 1, -1])
    e, h = math.e, 2.0
    rows = [[e, 1, 1 / e, e, 1], [1, e, 1, 1, 1 / e]]  # documents 0 and 1, then the negatives of 0, 1 and nobody
    hard = {  # exp(h cos) where it counts
        None: [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
        "hard_negatives": [[1, 1, e**-h, 1, 1], [1, 1, 1, 1, 1]],
        "in_batch_negatives": [[1, 1, 1, e**h, 1], [1, 1, 1, 1, e**-h]],
        "all_negatives": [[1, 1, e**-h, e**h, 1], [1, 1, 1, 1, e**-h]],
    }
    for mode, factors in hard.items():
        loss = MNRL(temperature=1.0, hardness_mode=mode, hardness_strength=h, reduction="none")
        found = loss(eye, eye, negatives, owners)
        expected = [
            math.log(sum(x * f for x, f in zip(*row, strict=True))) - 1 for row in zip(rows, factors, strict=True)
        ]
        close(found, torch.tensor(expected, dtype=torch.float64))


def test_learnt_scales_start_where_they_are_told_and_keep_their_bounds() -> None:
    assert Clip().logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    assert SigLIP().logit_scale.item() == pytest.approx(math.log(10))
    assert {name for name, _ in SigLIP().named_parameters()} == {"temperature.log_scale", "logit_bias"}
    bounded, free = Clip(), SigLIP()
    rows = pairs(4, 3)
    for loss in (bounded, free):
        loss.logit_scale.data.fill_(7.0)
        loss(*rows).backward()
    assert bounded.logit_scale.item() == pytest.approx(math.log(100))
    assert free.logit_scale.item() == 7.0
    bias = free.get_parameter("logit_bias")
    assert bias.item() == -10.0
    assert bias.grad is not None


# --------------------------------------------------------------------------------------------------------- over ranks


def test_some_ranks_without_hard_negatives(worlds: Worlds) -> None:
    """The number of negatives may differ between ranks, down to none, apart from the number of queries."""
    q, d, x = (numbers(5, 3, seed=seed) for seed in range(3))
    whole = MNRL()(q, d, x[:3], torch.tensor([1, 3, 3])).item()

    def job() -> float:
        rank = torch.distributed.get_rank()
        mine, mined = slice(2 * rank, 2 * rank + 2 + rank), slice(rank, 1 + 2 * rank)
        owners = torch.ones(1 + rank, dtype=torch.int64)  # rows 1 and 3 of all
        return cz.DistributedLoss(MNRL())(q[mine], d[mine], x[mined], owners).item()

    assert worlds.run(2, job) == pytest.approx([whole, whole], abs=1e-12)

    def none_on_rank_0() -> float:
        rank = torch.distributed.get_rank()
        mine, mined = slice(2 * rank, 2 * rank + 2 + rank), x[:0] if rank == 0 else x
        return cz.DistributedLoss(MNRL())(q[mine], d[mine], mined).item()

    assert worlds.run(2, none_on_rank_0) == pytest.approx([MNRL()(q, d, x).item()] * 2, abs=1e-12)


def test_nothing_n_by_n_is_held() -> None:
    """In small blocks no tensor is nearly as large as the similarity matrix."""
    n, threads = 120, torch.get_num_threads()
    torch.set_num_threads(1)  # small operations, and many
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "BLOCK_BYTES", 2**15)
        patch.setattr(tiling, "TILE_BYTES", 2**13)
        for entry in [x for x in ENTRIES + ORDERED if "," not in x.name or "all" in x.name]:
            rows = [x.requires_grad_(x.is_floating_point()) for x in whole_batch(entry.case(), GlobalBatch((n,), d=4))]
            with Largest() as largest:
                entry.make(temperature=0.5).double()(*rows).backward()
            assert largest.elements < n * n / 3, entry
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------- bad input

EYE, Y = torch.eye(3), torch.arange(3)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: SigLIP()(EYE, EYE[:2]), "SigLIP: image i belongs to text i, got images"),
    (lambda: SigLIP(logit_bias=math.nan), "SigLIP: logit_bias must be finite, got nan"),
    (lambda: SupSigmoid()(EYE, None), "SupSigmoid: labels are missing"),
    (lambda: Clip(temperature=cz.LearnableTemperature(0.001)), "at least 1 / max_scale"),
    (lambda: Clip(symmetric=False), "Clip has no setting 'symmetric'"),
    (lambda: DCL(denominators="both")(EYE, EYE), "DCL: denominators is 'joint' or 'per_view', got 'both'"),
    (lambda: DCLW(sigma=0.0)(EYE, EYE), "DCLW: sigma must be positive, got 0.0"),
    (lambda: HCL(tau_plus=1.0)(EYE, EYE), r"HCL: tau_plus is a probability in \[0, 1\), got 1.0"),
    (lambda: HCL(beta=-1.0)(EYE, EYE), "HCL: beta must be non-negative and finite, got -1.0"),
    (lambda: Debiased(tau_plus=-0.1)(EYE, EYE), "Debiased: tau_plus is a probability"),
    (lambda: SupCon(variant="inside")(EYE, Y), "SupCon: variant is 'out' or 'in', got 'inside'"),
    (lambda: SINCERE(average="all")(EYE, Y), "SINCERE: average is 'anchors' or 'pairs', got 'all'"),
    (lambda: TupletMargin(margin=200.0)(EYE, Y), "TupletMargin: margin is an angle of 0 to 180 degrees, got 200.0"),
    (lambda: NCA(temperature=-1.0)(EYE, Y), "NCA: temperature must be positive"),
    (lambda: NPairs(l2=-1.0)(EYE, Y), "NPairs: l2 is a non-negative weight, got -1.0"),
    (lambda: MILNCE()(EYE, EYE), "MILNCE: texts are k >= 1 candidates per video"),
    (lambda: MILNCE(denominator="twice")(EYE, EYE[:, None]), "MILNCE: denominator is 'exact' or 'reference'"),
    (lambda: ClipDistillation(weight=2.0)(EYE, EYE, EYE, EYE), "ClipDistillation: weight is the teacher's share"),
    (lambda: ClipDistillation(teacher_temperature=0.0)(EYE, EYE, EYE, EYE), "teacher_temperature must be positive"),
    (lambda: ClipDistillation()(EYE, EYE, EYE, EYE[:2]), "row i is one sample everywhere, got teacher_images"),
    (lambda: GIST(margin_strategy="none")(EYE, EYE, EYE, EYE), "GIST: margin_strategy is 'absolute' or 'relative'"),
    (lambda: GIST()(EYE, EYE, EYE, EYE, EYE), "GIST: negatives and guide_negatives come together"),
    (lambda: GIST()(EYE, EYE, EYE, EYE, EYE, EYE[:2]), "GIST: negatives are rows like anchors"),
    (lambda: GIST()(EYE, EYE, EYE[:2], EYE[:2]), "GIST: row i is one pair everywhere, got guide_anchors"),
    (
        lambda: MultiPositive(duplicates="drop")(EYE, EYE, Y),
        "duplicates is one of 'positive', 'ignore', 'negative', got 'drop'",
    ),
    (lambda: MultiPositive()(EYE, EYE[:2], Y), "MultiPositive: key_ids are missing"),
    (lambda: MultiPositive()(EYE, EYE[:, :2], Y), "MultiPositive: queries and keys are of one width"),
    (lambda: MultiPositive()(EYE, EYE, Y.double()), "MultiPositive: ids are integers, one or k per query"),
    (lambda: MultiPositive(symmetric=True)(EYE, EYE, Y, Y), "are for paired rows: leave key_ids and weights out"),
    (lambda: MultiPositive()(EYE, EYE, Y, Y, -torch.ones(3)), "weights are non-negative, one per id"),
    (lambda: cz.InfoNCE(in_batch_negatives=False)(EYE, EYE), "InfoNCE: in_batch_negatives=False .* pass negatives"),
    (lambda: cz.InfoNCE(in_batch_negatives=False, symmetric=True)(EYE, EYE, EYE), "and not symmetric"),
    (lambda: MNRL()(EYE, EYE[:2]), "MNRL: row i of queries belongs to row i of documents"),
    (lambda: MNRL()(EYE, EYE, EYE[:, :2]), r"MNRL: negatives are \[m, d\], got float32 \[3, 2\]"),
    (lambda: MNRL()(EYE, EYE, EYE, Y + 1), r"MNRL: owners are rows of this rank's 3 queries, or -1, got 1 … 3"),
    (lambda: MNRL()(EYE, EYE, EYE, Y[:2]), "MNRL: owners are one per row"),
    (lambda: MNRL()(EYE, EYE, None, Y), "MNRL: owners say whose the negatives are, but there are no negatives"),
    (lambda: MNRL(directions=("doc_to_query",))(EYE, EYE), "MNRL: directions are 'query_to_doc' and any of"),
    (lambda: MNRL(partition_mode="split")(EYE, EYE), "MNRL: partition_mode is 'joint' or 'per_direction'"),
    (
        lambda: MNRL(directions=("query_to_doc", "doc_to_doc"), partition_mode="per_direction")(EYE, EYE),
        "MNRL: query_to_query and doc_to_doc never hold the positive",
    ),
    (lambda: MNRL(hardness_mode="soft")(EYE, EYE), "MNRL: hardness_mode is one of"),
    (lambda: MNRL(hardness_strength=-1.0)(EYE, EYE), "MNRL: hardness_strength is non-negative, got -1.0"),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_refused_with_the_fix(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call()
