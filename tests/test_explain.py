"""What ``explain`` says of a step is what the real code of one rank does: messages, bytes, multiplications, memory."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.cost import UserCode, cost_of
from contrastive_zoo.engine.ledger import Cost, Ledger
from contrastive_zoo.engine.plan import Needs, Rows, Situation, choose
from contrastive_zoo.loss_base.loss import CallInputs, Inputs
from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.ranks.randomness import StateWatch
from contrastive_zoo.ranks.world import Shards
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.wrapper.step import FROM_ELSEWHERE
from tests.counted import Step, counted
from tests.helpers import drawn, numbers

pytestmark = pytest.mark.figures

WIDTH = 16
Case = tuple[Any, list[Tensor]]


def embeddings(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # short, so that no sum of exponentials loses precision and is computed again
    return (0.2 * torch.randn(*shape)).to(dtype).requires_grad_()


def labels(n: int) -> Tensor:
    """Two samples of each class."""
    return torch.arange(n) % max(1, n // 2)


BF16 = torch.bfloat16
KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda n, d: embeddings(n, d),
    "rows of 16 bits": lambda n, d: embeddings(n, d, dtype=BF16),
    "rows of 64 bits": lambda n, d: embeddings(n, d, dtype=torch.float64),
    "5 tokens": lambda n, d: embeddings(n, 5, d),
    "7 tokens": lambda n, d: embeddings(n, 7, d),
    "labels": lambda n, d: labels(n),
    "5 labels": lambda n, d: torch.ones(n, 5).long(),
    "short labels": lambda n, d: labels(n).int(),
    "labels of captions": lambda n, d: labels(2 * n),
    "hierarchy": lambda n, d: torch.stack([labels(n) // 2, labels(n)], 1),
    "binary": lambda n, d: torch.arange(n) % 2,
    "counts": lambda n, d: torch.ones(n, dtype=torch.int64),
    "several": lambda n, d: embeddings(n, 3, d),
    "negatives": lambda n, d: embeddings(2 * n, d),
    "token mask": lambda n, d: torch.ones(n, 3, dtype=torch.int64),
    "scores": lambda n, d: torch.rand(n),
    "several scores": lambda n, d: torch.randn(n, 3),
}


def case_of(name: str, n: int, d: int) -> Case:
    if name in OPTIONS:
        loss, *kinds = OPTIONS[name]
        return loss if isinstance(loss, nn.Module) else loss(n, d), [KINDS[kind](n, d) for kind in kinds]
    entry = CATALOGUE[name]
    sizes = {"embedding_size": d, "out_dim": d, "num_classes": n, "num_samples": n}
    settings = {key: sizes.get(key, x) for key, x in entry.settings.items()}
    return entry.loss(**settings), [KINDS[kind](n, d) for kind in entry.kinds.values()]


class Drawing(cz.RowLoss):
    """A user's loss, which may draw random numbers."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (similarity * negative).sum(1), negative.any(1)


def of_negatives(queries: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
    return torch.cat([(queries * keys).sum(1, keepdim=True), queries @ negatives.T], 1).logsumexp(1).mean()


LEARNT = cz.LearnableTemperature(0.2)
ALL_DIRECTIONS = "query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"
VIEWS, LABELLED, NEGATIVES = ("rows", "rows"), ("rows", "labels"), ("rows", "rows", "negatives")

OPTIONS: dict[str, tuple[Any, ...]] = {
    "three views": (cz.NTXent(), "rows", "rows", "rows"),
    "learnt temperature": (cz.NTXent(temperature=LEARNT), *VIEWS),
    "a low temperature": (cz.NTXent(temperature=0.01), *VIEWS),
    "no unit length": (cz.NTXent(normalize=False), *VIEWS),
    "views of 16 bits": (cz.NTXent(), "rows of 16 bits", "rows of 16 bits"),
    "towers of 16 bits": (cz.Clip(), "rows of 16 bits", "rows of 16 bits"),
    "towers of 64 bits": (cz.Clip().double(), "rows of 64 bits", "rows of 64 bits"),
    "losses of samples": (cz.Clip(reduction="none"), *VIEWS),
    "sigmoids of samples": (cz.SigLIP(reduction="none"), *VIEWS),
    "rows of samples": (cz.Triplet(reduction="none"), *LABELLED),
    "negatives of all queries": (cz.InfoNCE(), *NEGATIVES),
    "negatives of a query": (cz.InfoNCE(), "rows", "rows", "several"),
    "symmetric": (cz.InfoNCE(symmetric=True), *VIEWS),
    "smoothed": (cz.Clip(label_smoothing=0.1), *VIEWS),
    "views of a sample": (cz.SupCon(temperature=LEARNT), "several", "labels"),
    "several labels": (cz.SupCon(), "several", "5 labels"),
    "all directions": (cz.MNRL(directions=ALL_DIRECTIONS), *VIEWS),
    "a masked MNRL": (cz.MNRL(false_negative_margin=0.1), *NEGATIVES),
    "captions": (cz.SigLIP(), "rows", "negatives", "labels", "labels of captions"),
    "own negatives": (cz.MNRL(in_batch_negatives=False), *NEGATIVES, "labels of captions"),
    "GIST": (cz.GIST(), *VIEWS, *VIEWS),
    "a teacher of 64 bits": (lambda n, d: cz.DINO(d, centering="sinkhorn"), "rows", "rows of 64 bits"),
    "symmetric ids": (cz.MultiPositive(symmetric=True), "rows", "rows", "labels"),
    "rows of 16 bits": (cz.Circle(), "rows of 16 bits", "labels"),
    "a user's loss": (Drawing(), *LABELLED),
    "a learnt margin": (cz.Triplet(margin=LEARNT), *LABELLED),
    "tokens": (cz.MaxSim(), "5 tokens", "7 tokens"),
    "the best tokens": (cz.MaxSim(top_k=4), "5 tokens", "7 tokens"),
    "a sum": (cz.WeightedSum([cz.SupCon(), cz.Triplet(), cz.Circle()]), *LABELLED),
    "a sum of views": (cz.WeightedSum([cz.NTXent(), cz.BarlowTwins(), cz.DCL()]), *VIEWS),
    "prefixes": (lambda n, d: cz.Matryoshka(cz.NTXent(), (d // 4, d)), *VIEWS),
    "prefixes of statistics": (lambda n, d: cz.Matryoshka(cz.VICReg(), (d // 4, d)), *VIEWS),
    "prefixes beside a guide": (lambda n, d: cz.Matryoshka(cz.GIST(), (d // 4, d)), *VIEWS, *VIEWS),
    "prefixes of M3": (lambda n, d: cz.Matryoshka(cz.M3(), (d // 4, d)), "5 tokens", "7 tokens", *VIEWS, *VIEWS),
    "a sum of short labels": (cz.WeightedSum([cz.NCA(), cz.Triplet(), cz.ProxyNCA(4, WIDTH)]), "rows", "short labels"),
    "a memory of labels": (lambda n, d: cz.CrossBatchMemory(cz.SupCon(), 2 * n, d), *LABELLED),
    "a memory of keys": (lambda n, d: cz.CrossBatchMemory(cz.InfoNCE(), 2 * n, d), *VIEWS),
    "a smoothed memory": (lambda n, d: cz.CrossBatchMemory(cz.InfoNCE(label_smoothing=0.1), 2 * n, d), *VIEWS),
    "a memory of a function": (lambda n, d: cz.CrossBatchMemory(of_negatives, 2 * n, d), *VIEWS),
    "a third-party loss": (lambda n, d: lambda z: z.var(0).sum(), "rows"),
    "classes": (lambda n, d: cz.NormalizedSoftmax(4 * n, d), *LABELLED),
    "drawn classes": (lambda n, d: cz.NormalizedSoftmax(8 * n, d, sample_rate=0.5), *LABELLED),
    "proxies": (lambda n, d: cz.ProxyAnchor(4 * n, d), *LABELLED),
    "a learnt scale": (lambda n, d: cz.CosFace(4 * n, d, margin=LEARNT, scale=LEARNT), *LABELLED),
    "learnt proxies": (lambda n, d: cz.ProxyAnchor(4 * n, d, alpha=LEARNT), *LABELLED),
    "a learnt margin of pairs": (cz.OnlineContrastive(margin=LEARNT), *VIEWS, "binary"),
}
"""Losses, or functions of the numbers of samples and features that return one, and the kinds of their arguments."""


def expected(loss: Any, args: Sequence[Tensor], sizes: Sequence[int], rank: int, *, payload: bool, ring: bool) -> Cost:
    """Return the cost of a rank whose shards have these sizes."""
    wrapper = cz.DistributedLoss(loss, ring=ring)
    call = wrapper._call(loss, tuple(args), {})
    is_own = isinstance(call, CallInputs)
    rows = {
        name: Rows.of(Shards(tuple(len(x) * size // sizes[rank] for size in sizes), rank), x.shape[1:], x.dtype)
        for name, x in call.inputs.rows.items()
    }
    situation = Situation(len(sizes), rows, ring=ring, payload=payload)
    of_step = choose("a loss", call.needs if is_own else FROM_ELSEWHERE, situation)
    entries = [*loss.entries(call)] if is_own else []
    if LossModules(loss).runs_third_party_code or not is_own:
        entries.append(UserCode(is_own and any(True for _ in loss.buffers())))
    return cost_of(of_step, situation, entries, classes=max(1, sizes[rank] // 2))


def compared(case: Case, sizes: list[int], rank: int, *, split=True, steps=1, ring=False) -> tuple[Step, Cost]:
    loss, args = case
    wrapper = cz.DistributedLoss(loss, check_distinct=False, ring=ring)
    # this run's checks of types draw random numbers, which a user's loss seems to have drawn
    with splitting(always=split), patch.object(StateWatch, "has_changed", lambda self: False):
        found = counted(wrapper, args, sizes, rank, steps=steps)
        return found, expected(loss, args, sizes, rank, payload=steps > 2, ring=ring)


def assert_sent(*step_and_formula: Step | Cost) -> None:
    found, expected = ((x.messages, x.backward_messages, x.bytes_sent) for x in step_and_formula)
    assert found == expected, step_and_formula


UNEVEN = [4, 8, 0, 6]
# whose anchors or candidates are chosen by their labels: at most what the formula says
DATA_DEPENDENT = {"n-pairs", "ge2e", "angular-prototypical", "hmlc"}


@pytest.mark.parametrize(("name", "sizes"), drawn(CATALOGUE, [UNEVEN, [8, 8]], one_in=2), ids=str)
def test_every_loss_sends_what_its_entries_say(name: str, sizes: list[int]) -> None:
    found, formula = compared(case_of(name, 8, WIDTH), sizes, 1)
    if name in DATA_DEPENDENT:
        assert found.messages == formula.messages
        assert found.bytes_sent <= formula.bytes_sent
    else:
        assert_sent(found, formula)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_sharded_weights(rate: float) -> None:
    settings = {"shard_over": cz.World(1, 4), "sample_rate": rate}
    for loss in (cz.CosFace(512, WIDTH, label_smoothing=0.1, **settings), cz.CurricularFace(512, WIDTH, **settings)):
        found, formula = compared((loss, [embeddings(64, WIDTH), labels(64)]), [64] * 4, 1)
        assert_sent(found, formula)
        assert found.matmul_flop == pytest.approx(formula.matmul_flop, rel=0.2)  # others draw other classes of a rank


RINGS = ("three views", "views of 16 bits", "towers of 64 bits", "losses of samples", "sigmoids of samples",
         "negatives of all queries", "views of a sample", "all directions", "tokens", "prefixes")  # fmt: skip
SMALL = ("three views", "towers of 16 bits", "a sum", "prefixes", "a third-party loss")
MANY = ("three views", "towers of 64 bits", "views of a sample", "a sum", "a third-party loss")
SENT: list[tuple[str, list[int], int, dict[str, Any]]] = [
    *(
        (name, sizes, min(1, len(sizes) - 1), {"steps": 4} if "memory" in name else {})  # until it is full
        for name, sizes in drawn(OPTIONS, [[8], [8, 8], [8] * 4, UNEVEN], one_in=2)
    ),
    *((name, *of, {"ring": True}) for name in RINGS for of in (([8, 8], 0), ([8, 8], 1), ([8] * 4, 3), (UNEVEN, 1))),
    # a small batch: gathered, and with the handshake
    *(
        (name, *of, {"split": False, "steps": steps})
        for name, steps, of in itertools.product(SMALL, (1, 3), (([4, 8, 2, 6], 1), ([8] * 4, 0)))
    ),
    *((name, [8, 4] * half, 20, {}) for name in MANY for half in (32, 48)),
]


@pytest.mark.parametrize(("name", "sizes", "rank", "how"), SENT, ids=str)
def test_messages_and_bytes(name: str, sizes: list[int], rank: int, how: dict[str, Any]) -> None:
    assert_sent(*compared(case_of(name, 8, WIDTH), sizes, rank, **how))


FAMILIES = ("nt-xent", "clip", "sup-con", "siglip")
HELD: list[tuple[tuple[str, ...], int, list[int], int, dict[str, Any]]] = [
    (
        ("three views", "views of 16 bits", "towers of 16 bits", "negatives of all queries", "views of a sample",
         "rows of 16 bits", "symmetric ids", "a masked MNRL", "a sum", "prefixes", "tokens", *FAMILIES,
         "dcl", "circle"), 1024, [128] * 8, 2, {},
    ),
    ((*FAMILIES, "circle"), 512, [128, 256, 64, 0, 256, 256, 0, 128], 1, {}),
    ((*FAMILIES, "views of 16 bits"), 512, [256] * 8, 2, {"ring": True}),
    (("nt-xent", "clip", "sup-con", "circle", "rank-n-contrast", "max-sim", "m3", "lejepa", "swav"), 256, [1024], 0, {}),
    (("classes", "drawn classes", "proxies"), 256, [1024] * 2, 1, {}),
    (("drawn classes",), 512, [256] * 2, 1, {}),
    (("m3",), 256, [64] * 8, 2, {}),
    (FAMILIES, 128, [240], 0, {"split": False}),
    (FAMILIES, 128, [60, 64, 56, 60], 1, {"split": False}),
]  # fmt: skip
"""Losses, their width, the sizes of all shards, and the rank that is counted."""


def assert_near(found: Step, formula: Cost) -> None:
    assert found.matmul_flop == pytest.approx(formula.matmul_flop, rel=0.05)
    assert found.peak_bytes == pytest.approx(formula.peak_bytes, rel=0.2)


@pytest.mark.path("users")
@pytest.mark.parametrize(
    ("name", "d", "sizes", "rank", "how"), [(name, *of) for names, *of in HELD for name in names], ids=str
)
def test_memory_and_multiplications(name: str, d: int, sizes: list[int], rank: int, how: dict[str, Any]) -> None:
    assert_near(*compared(case_of(name, sizes[rank], d), sizes, rank, **how))


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "paco"])  # whose classes are features here
def test_every_loss_holds_what_its_entries_say(name: str) -> None:
    found, formula = compared(case_of(name, 1024, 64), [1024], 0)
    if name in DATA_DEPENDENT:
        assert found.peak_bytes <= formula.peak_bytes
    else:
        assert found.peak_bytes == pytest.approx(formula.peak_bytes, rel=0.2)


def test_a_wrong_number_of_matrices_fails() -> None:
    with patch.object(cz.NCA, "matrices", 8.0), pytest.raises(AssertionError):
        test_every_loss_holds_what_its_entries_say("nca")


@pytest.mark.parametrize("name", ["clip", "prefixes"])
def test_cached_logits(name: str) -> None:
    for budget in (0, 2**20, 2**21, 2**30):
        with cz.engine.memory_budget(budget):
            assert_near(*compared(case_of(name, 256, 256), [256] * 8, 2))


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "padded gather": ("to_all", lambda real, self, name, size, **how: real(self, name, size + 1, **how)),
    "every all-reduce is a ring": ("sum", lambda real, self, name, size, **how: self.send(name, 2 * size, **how)),
    "a gather a member": ("gather_once", lambda real, self, *args: (self.gathered.clear(), real(self, *args))),
    "gradients by all": ("give_back", lambda real, self, name, of, row, **how: real(self, name, of, 2 * row, **how)),
    "no bounds": ("bound", lambda real, self, *args, **how: None),
    "candidates come once": ("bring", lambda real, self, *args, **how: how.get("backward") or real(self, *args, **how)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_fails(name: str) -> None:
    method, change = MUTANTS[name]
    changed = functools.partial(change, getattr(Ledger, method))
    as_it_is_sent()
    with patch.object(Ledger, method, lambda *args, **how: changed(*args, **how)), pytest.raises(AssertionError):
        as_it_is_sent()


def as_it_is_sent() -> None:
    for x in ("a sum", "no unit length", "towers of 64 bits"):
        for ring in (False, x != "a sum"):
            assert_sent(*compared(case_of(x, 8, WIDTH), [8] * 4, 1, ring=ring))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_it_prints_at_most_twenty_lines_in_plain_words() -> None:
    x = meta(4096, 768)
    found = cz.explain(cz.DistributedLoss(cz.NTXent()), x, x, world_size=64, device="cuda", dtype=torch.bfloat16)
    lines = str(found).splitlines()
    assert len(lines) <= 20
    assert lines[0] == "NTXent, 64 ranks × 4,096 samples of 768 features, 2 views, bfloat16, CUDA"
    first = "work embeddings arithmetic messages matmuls memory"
    assert [line.split()[0] for line in lines[1:7]] == first.split()
    assert "ring=True" in str(found)
    assert "GradCache" in str(found)
    assert (found.plan.arithmetic, found.messages) == ("kernel", 7)


def test_more_memory_saves_matmuls() -> None:
    x = meta(4096, 768)
    found = cz.explain(cz.Clip(), x, x, world_size=64)
    (changed,) = [name for name in found.changes if name.startswith("memory_budget")]
    with cz.engine.memory_budget(eval(changed.removeprefix("memory_budget"))):
        fewer = cz.explain(cz.Clip(), x, x, world_size=64).matmul_flop
    assert fewer == pytest.approx(found.matmul_flop * 3 / 4, rel=0.03)


@pytest.mark.parametrize("mask", [None, torch.ones(6, 9, dtype=torch.bool).tril()], ids=["all tokens", "a mask"])
def test_tokens(mask: Tensor | None) -> None:
    found = cz.explain(cz.MaxSim(), meta(6, 4, 16), meta(6, 9, 16), document_mask=mask, world_size=2)
    tokens = 54 if mask is None else int(mask.sum())
    assert found.situation.rows["tokens of documents"].shards.total == 2 * tokens


def test_labels_without_values_have_two_samples_a_class() -> None:
    z = meta(512, 64)
    assumed = cz.explain(cz.SupCon(), z, meta(512, dtype=torch.int64), world_size=8)
    assert "2,048 classes, of two samples each" in str(assumed)
    known = cz.explain(cz.SupCon(), z, torch.arange(512) % 10, world_size=8)
    assert "10 classes" in str(known)
    assert known.bytes_sent < assumed.bytes_sent


def test_negatives_count_as_candidates() -> None:
    x = meta(8, 4)
    assert "8 × 13 similarities" in str(cz.explain(cz.InfoNCE(), x, x, meta(5, 4)))


def test_frozen_embeddings_are_said_to_have_gradients() -> None:
    q, k, guide = embeddings(8, 4), embeddings(8, 4).detach(), torch.randn(8, 3)
    assert "gradients of keys, which need none" in str(cz.explain(cz.InfoNCE(), q, k, world_size=2))
    for call in ((cz.InfoNCE(), k, k), (cz.InfoNCE(), q, meta(8, 4)), (cz.GIST(), q, q, guide, guide)):
        assert "which need none" not in str(cz.explain(*call, world_size=2))


def test_nothing_is_computed() -> None:
    loss = cz.TiCo(embedding_size=16)
    cz.explain(loss, meta(8, 16), meta(8, 16), world_size=4)
    assert not loss.covariance.any()


class ListedNeeds(cz.NTXent):
    def needs(self, inputs: Inputs) -> Needs:
        return super().needs(inputs)._replace(anchors=[*inputs.rows], candidates=[*inputs.rows])  # type: ignore[arg-type]  # a user's


def test_needs_may_list_tensors() -> None:
    """A user's loss may return lists where this library returns tuples; plans are kept by what they hold."""
    x, y = numbers(8, 4, seed=0), numbers(8, 4, seed=1)
    assert torch.equal(ListedNeeds()(x, y), cz.NTXent()(x, y))
