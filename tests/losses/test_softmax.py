"""Softmax and sigmoid losses over pairs: torch's own functions, each other, numbers by hand, and over ranks."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.rowwise import reduce_pairs
from contrastive_zoo.losses import mnrl
from contrastive_zoo.losses.distillation import ClipDistillation
from contrastive_zoo.losses.info_nce import MILNCE, Clip
from contrastive_zoo.losses.mnrl import GIST, MNRL, FalseNegatives
from contrastive_zoo.losses.multi_positive import MultiPositive
from contrastive_zoo.losses.nt_xent import DCL
from contrastive_zoo.losses.sigmoid import SigLIP, SupSigmoid
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import step
from tests.helpers import Largest, close, numbers, split
from tests.losses.zoo_softmax import ALL, ENTRIES, ORDERED


def pairs(*shape: int) -> list[Tensor]:
    """Two towers of unit embeddings."""
    return [F.normalize(numbers(*shape, seed=seed), dim=1).requires_grad_() for seed in (1, 2)]


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


IDS = [torch.tensor(x) for x in ([1, 2, 3, 1, 4], [3, 9], [5, 6, 7, 8, 5])]  # of documents, negatives and queries


def per_rank(batch: Any, *arguments: Any, ids: Any, **named: Any) -> Tensor:
    """Compare the ids of one rank with each other only."""
    first = 100 * batch.samples.start
    return reduce_pairs(batch, *arguments, ids=[(x + first, None if y is None else y + first) for x, y in ids], **named)


def in_one_direction(margin: Any, relative: bool, directions: Any) -> FalseNegatives:
    return FalseNegatives(margin, relative, ["query_to_doc"])


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("reduce_pairs", reduce_pairs), ("reduce_pairs", per_rank), ("FalseNegatives", in_one_direction)],
    ids=["right", "ids per rank", "one direction"],
)
def test_false_negatives_are_those_of_all_ranks_and_directions(name: str, mutant: Any, worlds: Worlds) -> None:
    q, d, x = numbers(5, 3, seed=1), numbers(5, 3, seed=2), numbers(2, 3, seed=3)
    loss = MNRL(temperature=0.5, directions=ALL, false_negative_margin=0.3)

    def job() -> float:
        local = [split(rows, (3, 2) if len(rows) == 5 else (0, 2))[dist.get_rank()] for rows in (q, d, x, *IDS)]
        with patch.object(mnrl, name, mutant), patch.object(step, "SMALL_BATCH", -1):
            return cz.DistributedLoss(loss)(*local[:3], None, *local[3:]).item()

    found, expected = worlds.run(2, job), loss(q, d, x, None, *IDS).item()
    assert (found == pytest.approx([expected] * 2, abs=1e-12)) == (mutant is reduce_pairs)


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
    (lambda: SupSigmoid()(EYE, None), "SupSigmoid: labels are missing"),
    (lambda: Clip(temperature=cz.LearnableTemperature(0.001)), "at least 1 / max_scale"),
    (lambda: Clip(symmetric=False), "Clip has no setting 'symmetric'"),
    (lambda: DCL(denominators="both")(EYE, EYE), "DCL: denominators is 'joint' or 'per_view', got 'both'"),
    (lambda: MILNCE()(EYE, EYE), "MILNCE: texts are k >= 1 candidates per video"),
    (lambda: ClipDistillation()(EYE, EYE, EYE, EYE[:2]), "row i is one sample everywhere, got teacher_images"),
    (lambda: GIST()(EYE, EYE, EYE, EYE, EYE), "GIST: negatives and guide_negatives come together"),
    (lambda: GIST()(EYE, EYE, EYE, EYE, EYE, EYE[:2]), "GIST: negatives are rows like anchors"),
    (lambda: GIST()(EYE, EYE, EYE, EYE, query_ids=Y[:2]), "GIST: query_ids are one per row, got 2 for 3 rows"),
    (lambda: GIST()(EYE, EYE, EYE, EYE, negative_ids=Y), "GIST: negative_ids are compared with document_ids"),
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
    (lambda: MNRL()(EYE, EYE, document_ids=Y[:2]), "MNRL: document_ids are one per row, got 2 for 3 rows"),
    (lambda: MNRL()(EYE, EYE, query_ids=Y.double()), "MNRL: query_ids are one integer per row"),
    (lambda: MNRL()(EYE, EYE, EYE, None, None, Y), "MNRL: negative_ids are compared with document_ids"),
    (lambda: MNRL(false_negative_margin=torch.ones(1, requires_grad=True))(EYE, EYE), "a constant"),
    (lambda: MNRL(directions=("doc_to_query",))(EYE, EYE), "MNRL: directions are 'query_to_doc' and any of"),
    (
        lambda: MNRL(directions=("query_to_doc", "doc_to_doc"), partition_mode="per_direction")(EYE, EYE),
        "MNRL: query_to_query and doc_to_doc never hold the positive",
    ),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_refused_with_the_fix(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call()
