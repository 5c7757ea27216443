"""Sums of losses, and of one loss over prefixes."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.invariants import CONTRACT, INVARIANTS
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, common_error, numbers


class Hinge(cz.RowLoss):
    def __init__(self) -> None:
        super().__init__(normalize=False)
        self.margin = nn.Parameter(torch.tensor(0.25))

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(similarity + self.margin).where(negative, 0).sum(1), negative.any(1)


def nested_clip() -> cz.Matryoshka:
    clip = cz.InfoNCE(temperature=cz.LearnableTemperature(0.5), symmetric=True)
    return cz.Matryoshka(clip, dims=(1, 2, 3), weights=[0.5, 1.0, 2.0])


def nested_labels() -> cz.Matryoshka:
    return cz.Matryoshka(cz.SupCon(temperature=0.5), dims=(2, 3))


def shared_temperature() -> cz.WeightedSum:
    t = cz.LearnableTemperature(0.5)
    return cz.WeightedSum([cz.NTXent(temperature=t), cz.InfoNCE(temperature=t), Hinge()], weights=[1.0, 0.3, -0.1])


def of_both() -> cz.WeightedSum:
    return cz.WeightedSum([cz.Matryoshka(cz.SupCon(), dims=(2, 3)), Hinge()], weights=[1.0, 0.3])


MAKE: dict[str, tuple[Callable[[], Any], str]] = {
    "Matryoshka of CLIP": (nested_clip, "views"),
    "Matryoshka of SupCon": (nested_labels, "labels"),
    "three losses, one temperature": (shared_temperature, "views"),
    "a sum of a Matryoshka and a row loss": (of_both, "labels"),
}


def sent_rows(call: Callable[[], Tensor]) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return what this rank gives to the others, as (rows, bytes of a row), and the value; without rows it is padding."""
    with patch.object(cz.World, "start_gather", autospec=True, side_effect=cz.World.start_gather) as gather:
        value = call()
    messages = [x.args[1] for x in gather.call_args_list]
    return [
        tuple(x.shape) for x in messages if x.dtype == torch.uint8 and x.ndim == 2 and x.shape[1] > 8
    ], value.detach()


def nested_pairs() -> cz.Matryoshka:
    return cz.Matryoshka(cz.InfoNCE(), dims=(2, 3, 5))


def nested_views() -> cz.WeightedSum:
    """Whole rows, prefixes, and rows that are not normalised; one and two towers, by both engines."""
    prefixes = cz.Matryoshka(cz.NTXent(), dims=(2, 4))
    return cz.WeightedSum([cz.NTXent(), prefixes, cz.InfoNCE(normalize=False), cz.DCL(), cz.AlignUniform(), Hinge()])


def nested_classes() -> cz.WeightedSum:
    return cz.WeightedSum([cz.Matryoshka(cz.SupCon(), dims=(2, 3, 5)), cz.NCA(), cz.SupCon(normalize=False), Hinge()])


SHARDS = [(3, 3), (1, 4), (0, 3, 2), (0, 4)]
CONTRACTS = [
    *((make, call, 3, shards) for (make, call), shards in zip(MAKE.values(), SHARDS, strict=True)),
    *((make, "views", 5, shards) for make in (nested_pairs, nested_views) for shards in ((1, 4), (0, 3, 2))),
    *((nested_classes, "labels", 5, shards) for shards in ((1, 4), (0, 3, 2))),
]


@pytest.mark.parametrize(("make", "call", "d", "shards"), CONTRACTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_invariant_holds(
    make: Callable[[], Any], call: Any, d: int, shards: tuple[int, ...], worlds: Worlds
) -> None:
    case = Case(lambda: cz.DistributedLoss(make()), call=call, name=make.__name__)
    trial = Trial(case, GlobalBatch(shards, d=d, seed=5), worlds)
    for invariant in INVARIANTS if d == 3 else CONTRACT:
        invariant(trial)


ROW = 5 * 8  # bytes of a whole row of float64
GATHERS: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    "prefixes of pairs": (nested_pairs, "views", 1, 3),  # the keys alone are gathered
    "views": (nested_views, "views", 2, 9),
    "labelled rows": (nested_classes, "labels", 1, 6),
}


@pytest.mark.parametrize("shards", [(3, 3), (1, 4), (0, 3, 2)], ids=str)
@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("learns", [True, False], ids=["training", "validation"])
def test_embeddings_are_sent_once(name: str, learns: bool, shards: tuple[int, ...], worlds: Worlds) -> None:
    make, call, whole, _ = GATHERS[name]
    n = sum(shards)
    rows = [numbers(n, 5, seed=0), numbers(n, 5, seed=1) if call == "views" else torch.arange(n) % 2]

    def job(*mine: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
        loss = cz.DistributedLoss(make().double())
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in mine]
        with torch.set_grad_enabled(learns), splitting(always=True):
            return sent_rows(lambda: loss(*leaves))

    each = list(zip(*(x.split(list(shards)) for x in rows), strict=True))
    expected = make().double()(*rows)
    for messages, value in worlds.run(len(shards), job, each=each):
        assert messages == [(max(shards), ROW)] * whole
        close(value, expected.detach())


def test_without_the_roof_each_loss_gathers_by_itself(worlds: Worlds) -> None:
    rows = numbers(6, 5, seed=0), torch.arange(6) % 2

    def job(*mine: Tensor) -> int:
        with patch.object(Batch, "with_shared_rows", lambda batch: batch), splitting(always=True):
            return len(sent_rows(lambda: cz.DistributedLoss(nested_classes().double())(*mine))[0])

    each = list(zip(*(x.split([3, 3]) for x in rows), strict=True))
    assert worlds.run(2, job, each=each) == [GATHERS["labelled rows"][3]] * 2


def test_negatives_are_cut_as_well() -> None:
    q, k, shared, own = (numbers(*shape, seed=i) for i, shape in enumerate([(4, 3), (4, 3), (5, 3), (4, 2, 3)]))
    ours, plain = cz.Matryoshka(cz.InfoNCE(), (2, 3)), cz.InfoNCE()
    for x in (shared, own):
        close(ours(q, k, negatives=x), plain(q[:, :2], k[:, :2], x[..., :2]) + plain(q, k, x))


def test_anchors_may_be_kept_apart() -> None:
    a, b = numbers(5, 3, seed=0), numbers(5, 3, seed=1)
    losses = [cz.NTXent(reduction="none"), cz.NTXent(temperature=0.5, reduction="none")]
    close(cz.WeightedSum(losses)(a, b), losses[0](a, b) + losses[1](a, b))


def test_bad_rows_are_refused_on_every_rank(worlds: Worlds) -> None:
    def call(d: int) -> float:
        return cz.DistributedLoss(cz.Matryoshka(cz.SupCon(), (2, 4)))(torch.ones(2, d), torch.tensor([0, 0])).item()

    said, _ = common_error(worlds, 2, lambda: call(4 - dist.get_rank()), lambda: call(4))
    assert said == "Matryoshka: rank 1: a prefix of 4 does not fit into argument 0 float32 [2, 3]."
