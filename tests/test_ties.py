"""Embeddings that repeat, within and across ranks: which of equal ones is hardest does not depend on the split."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import contrastive_zoo as cz
from contrastive_zoo.engine import anchor_block, masked, max_sim
from contrastive_zoo.losses import max_sim as max_sim_loss
from contrastive_zoo.losses import mnrl
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.measurement import set_float64_and_seed
from contrastive_zoo.testing.messages import allow_repeated_samples
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, EXACT, distance
from tests.losses.whole_zoo import EVERY
from tests.losses.zoo_pairs import dense_max_sim, tokens_of
from tests.losses.zoo_weights import ENTRIES as WEIGHTS
from tests.zoo import Entry, row

pytestmark = pytest.mark.figures

COMPARE = ("MaxSim", "GIST", "hard", "RowLoss", "KoLeo", "MegaBatch", "Dynamic", "Online", "NNCLR", "Ranked")
"""Names of losses that take an extreme, or compare with a threshold."""


def repeated_tokens(*views: Tensor) -> tuple[Tensor, ...]:
    """Documents whose tokens repeat, of an odd number of tokens: the last ones are at the edge of a matmul."""
    queries, documents, query_mask, _ = tokens_of(*views)
    documents = documents.repeat(1, 4, 1)[:, :-3]
    return queries, documents, query_mask, torch.ones(documents.shape[:2], dtype=torch.int64)


REPEATED_TOKENS = row("MaxSim, repeated tokens", dense_max_sim, "views", repeated_tokens, temperature=1.0)
IN_A_SUM = Entry("MaxSim in a sum", lambda **of: cz.Matryoshka(REPEATED_TOKENS.make(**of), (3, 50)), dense_max_sim)
ENTRIES = [*(x for x in EVERY if x not in WEIGHTS), REPEATED_TOKENS, IN_A_SUM]
DRAWN = [x for x in ENTRIES if EVERY_CASE or any(name in x.name for name in COMPARE)]
BY_NAME = {f"{x.name} {x.call}": x for x in ENTRIES}
Case = tuple[str, int, int, int]
Result = tuple[float, list[Tensor], dict[str, Tensor]]


class Rounded(TorchDispatchMode):
    """Products of matrices whose columns round in a way that depends on the shape, as on machines with wide registers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func.overloadpacket) in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"):
            columns = torch.arange(out.shape[-1], dtype=out.dtype)
            out.mul_(1 + 3 * torch.finfo(out.dtype).eps * torch.sin(7.0 * columns + out.shape[-2] + 3 * out.shape[-1]))
        return out


def repeated_rows(entry: Entry, n: int, d: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(n // 3, d, dtype=torch.float64, generator=generator)
    picks = torch.randint(len(few), (entry.views, n), generator=generator)
    labels = torch.randint(3, (n,), generator=generator)
    return [few[picks[0]], labels] if entry.call == "labels" else [few[pick] for pick in picks]


def results(cases: Sequence[Case], shards: Sequence[int], split: bool, rounds: bool) -> list[Result]:
    """The value, and the gradients after a mean over ranks, of each case; with ``rounds`` rounding decides again."""
    rank, found = torch.distributed.get_rank(), []
    with splitting(always=split), pytest.MonkeyPatch.context() as patch, Rounded():
        if rounds:
            for module in (anchor_block, max_sim):
                patch.setattr(module, "first_of_equals", lambda rows: None)
            for module in (masked, mnrl, max_sim_loss):
                patch.setattr(module, "tie_width", lambda x: 0.0)
        for name, *batch in cases:
            entry = BY_NAME[name]
            set_float64_and_seed()
            local = [x.split(list(shards))[rank].clone() for x in repeated_rows(entry, *batch)]
            leaves = [x.requires_grad_() for x in local if x.is_floating_point()]
            loss = cz.DistributedLoss(entry.make(temperature=0.3)).double()
            allow_repeated_samples(loss)
            value = loss(*local)
            value.backward()
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad / len(shards) for x in leaves]
            parameters = {key: x.grad for key, x in loss.named_parameters() if x.grad is not None}
            found.append((value.item(), gradients, parameters))
    return found


def differing(worlds: Worlds, cases: list[Case], shards: Sequence[int], *, split=True, rounds=False) -> set[str]:
    of_one = worlds.run(1, results, cases, (sum(shards),), False, rounds)[0]
    by_rank = worlds.run(len(shards), results, cases, shards, split, rounds)
    return {case[0] for case, one, *parts in zip(cases, of_one, *by_rank, strict=True) if _differ(one, parts)}


def _differ(one: Result, parts: Sequence[Result]) -> bool:
    pairs = [(torch.tensor(value), torch.tensor(one[0])) for value, _, _ in parts]
    pairs += [(torch.cat(of), whole) for *of, whole in zip(*(x[1] for x in parts), one[1], strict=True)]
    pairs += [(x[2][name], gradient) for x in parts for name, gradient in one[2].items()]
    return any(not distance(x, y) <= EXACT for x, y in pairs)


def cases_of(entries: Sequence[Entry], n: int, d: int, seeds: int = 1) -> list[Case]:
    return [(f"{x.name} {x.call}", n, d, seed) for x in entries for seed in range(seeds)]


NOTICED = ("GIST", "MaxSimPairwise", "Triplet, hard", "Triplet, semi-hard", "RowLoss, labels", "KoLeo")
NARROW, WIDE = (15, 50), (33, 128)


@pytest.mark.parametrize(
    ("shards", "size", "split"),
    [
        ((15,), NARROW, True), ((3, 12), NARROW, True), ((7, 8), NARROW, False), ((5, 0, 10), NARROW, True),
        ((16, 17), WIDE, True), ((30, 3), WIDE, True), ((1, 20, 12), WIDE, True),
    ],
    ids=str,
)  # fmt: skip
def test_equal_rows_get_the_gradients_of_one_process(shards, size, split, worlds: Worlds) -> None:
    entries = [x for x in DRAWN if EVERY_CASE or size == NARROW or x.name in NOTICED or x is REPEATED_TOKENS]
    assert differing(worlds, cases_of(entries, *size, 3 if EVERY_CASE else 1), shards, split=split) == set()


def test_the_comparison_notices_rounding(worlds: Worlds) -> None:
    """Without the comparison of embeddings, and without a width of ties."""
    chosen = [x for x in ENTRIES if x.name in NOTICED]
    narrow, wide = cases_of(chosen, *NARROW, 4), cases_of(chosen, *WIDE, 2)
    found = differing(worlds, wide, (3, 30), rounds=True)
    for shards in [(3, 12), (5, 5, 5)]:
        found |= differing(worlds, narrow, shards, rounds=True)
    assert found == {x[0] for x in narrow + wide}


@pytest.mark.parametrize("context", [contextlib.nullcontext, cz.engine.plain_formulas])
def test_equal_candidates_share_a_gradient_however_a_matmul_rounds_them(context: Any) -> None:
    class RoundedTriplet(cz.Triplet):
        """A matmul that rounds each column in a way of its own."""

        def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
            return super().similarity(anchors, candidates) + 1e-9 * torch.arange(len(candidates)).sin()

    labels = torch.tensor([0, 0, 1, 1, 1])
    rows = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.6, 0.8], [0.6, 0.8]], dtype=torch.float64)
    gradients = []
    for kind in (cz.Triplet, RoundedTriplet):
        z = rows.clone().requires_grad_()
        with context():
            gradients += torch.autograd.grad(kind(mining="hard", margin=0.5)(z, labels), z)
    assert torch.allclose(*gradients, atol=1e-6)
    assert torch.allclose(gradients[1][2:], gradients[1][2].expand(3, 2), atol=1e-6)
