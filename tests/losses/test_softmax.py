"""Softmax and sigmoid losses over pairs: torch's own functions, each other, numbers by hand, and over ranks."""

import math
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
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import Largest, close, numbers, split
from tests.losses import zoo_margins
from tests.losses.zoo_softmax import ALL, ENTRIES, ORDERED
from tests.losses.zoo_weights import ENTRIES as WEIGHTS


def pairs(*shape: int) -> list[Tensor]:
    return [F.normalize(numbers(*shape, seed=seed), dim=1).requires_grad_() for seed in (1, 2)]


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
        loss = cz.MNRL(temperature=1.0, hardness_mode=mode, hardness_strength=h, reduction="none")
        found = loss(eye, eye, negatives, owners)
        expected = [
            math.log(sum(x * f for x, f in zip(*row, strict=True))) - 1 for row in zip(rows, factors, strict=True)
        ]
        close(found, torch.tensor(expected, dtype=torch.float64))


def test_learnt_scales_start_where_they_are_told_and_keep_their_bounds() -> None:
    assert cz.Clip().logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    assert cz.SigLIP().logit_scale.item() == pytest.approx(math.log(10))
    assert {name for name, _ in cz.SigLIP().named_parameters()} == {"temperature.log_scale", "logit_bias"}
    bounded, free = cz.Clip(), cz.SigLIP()
    rows = pairs(4, 3)
    for loss in (bounded, free):
        loss.logit_scale.data.fill_(7.0)
        loss(*rows).backward()
    assert bounded.logit_scale.item() == pytest.approx(math.log(100))
    assert free.logit_scale.item() == 7.0
    bias = free.get_parameter("logit_bias")
    assert bias.item() == -10.0
    assert bias.grad is not None


IDS = [torch.tensor(x) for x in ([1, 2, 3, 1, 4], [3, 9], [5, 6, 7, 8, 5])]  # of documents, negatives and queries


def per_rank(batch: Any, *arguments: Any, ids: Any, **named: Any) -> Tensor:
    first = 100 * batch.samples.start
    return reduce_pairs(batch, *arguments, ids=[(x + first, None if y is None else y + first) for x, y in ids], **named)


def in_one_direction(block: Any, compared: Any, pair_losses: Any = mnrl._pair_losses, **settings: Any) -> Any:
    return (yield from pair_losses(block, compared=["query_to_doc"], **settings))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("reduce_pairs", reduce_pairs), ("reduce_pairs", per_rank), ("_pair_losses", in_one_direction)],
    ids=["right", "ids per rank", "one direction"],
)
def test_false_negatives_are_those_of_all_ranks_and_directions(name: str, mutant: Any, worlds: Worlds) -> None:
    q, d, x = numbers(5, 3, seed=1), numbers(5, 3, seed=2), numbers(2, 3, seed=3)
    loss = cz.MNRL(temperature=0.5, directions=ALL, false_negative_margin=0.3)

    def job() -> float:
        local = [split(rows, (3, 2) if len(rows) == 5 else (0, 2))[dist.get_rank()] for rows in (q, d, x, *IDS)]
        with patch.object(mnrl, name, mutant), splitting(always=True):
            return cz.DistributedLoss(loss)(*local[:3], None, *local[3:]).item()

    found, expected = worlds.run(2, job), loss(q, d, x, None, *IDS).item()
    assert (found == pytest.approx([expected] * 2, abs=1e-12)) == (mutant is reduce_pairs)


HARD = ("Triplet, hard", "Triplet, semi-hard", "MultiSimilarity, mined", "Circle")
MARGINS = [x for x in zoo_margins.ENTRIES if x.name in HARD]


@pytest.mark.path("engines")
def test_nothing_n_by_n_is_held() -> None:
    """In small blocks no tensor is nearly as large as the similarity matrix."""
    n, threads = 120, torch.get_num_threads()
    torch.set_num_threads(1)  # small operations, and many
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "BLOCK_BYTES", 2**15)
        patch.setattr(tiling, "TILE_BYTES", 2**13)
        for entry in [x for x in ENTRIES + ORDERED + WEIGHTS if "," not in x.name or "all" in x.name] + MARGINS:
            rows = [x.requires_grad_(x.is_floating_point()) for x in whole_batch(entry.case(), GlobalBatch((n,), d=4))]
            with Largest() as largest:
                entry.make(temperature=0.5).double()(*rows).backward()
            assert largest.elements <= (8 * n if entry in MARGINS else n * n / 3), entry  # of these one block of 8 rows
        with cz.engine.plain_formulas(), Largest() as largest:
            entry.make(temperature=0.5).double()(*rows)
        assert largest.elements >= n * n, "the formula holds it"
    torch.set_num_threads(threads)


def test_negatives_of_one_query_each_are_logits_beside_its_own_key() -> None:
    q, k, negatives = numbers(5, 4, seed=1), numbers(5, 4, seed=2), numbers(5, 3, 4, seed=3)
    logits = torch.einsum("nd,nmd->nm", q, torch.cat([k[:, None], negatives], 1)) / 0.3
    loss = cz.InfoNCE(temperature=0.3, in_batch_negatives=False, normalize=False)
    close(loss(q, k, negatives), F.cross_entropy(logits, torch.zeros(5).long()))
