"""Compiled block functions: the loss of one process in every step, few graphs, and a warning where nothing compiles."""

import contextlib
import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.engine import anchor_block, compiled_sweep
from contrastive_zoo.testing.worlds import Worlds
from tests.engine.test_ring import GENERAL_PATH
from tests.helpers import EVERY_CASE, EXACT, distance, local_shard
from tests.stateful_losses import LOSSES as RINGS
from tests.stateful_losses import Compares, D, called, global_rows, local_rows
from tests.stateful_rank import limits
from tests.zoo import BatchHard, Tempered

Make = Callable[[], nn.Module]


class Breaking(cz.RowLoss):
    """A user's loss that reads a value, at which the graph breaks, and has a part of its own for it."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        temperature = 0.5 if similarity.detach().max().item() > 0.9 else 0.25
        logits = (similarity / temperature).masked_fill(~(positive | negative), -9.0)
        return logits.logsumexp(1) - similarity.where(positive, 0).sum(1), positive.any(1)


class Refusing(cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("what the user says")


class Drawing(cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.rand(similarity.shape[1], dtype=similarity.dtype) > 0.3
        return (similarity * kept).square().sum(1), positive.any(1)


def memory() -> nn.Module:
    return cz.CrossBatchMemory(cz.Triplet(mining="hard"), 6, D, dtype=torch.float64)


LOSSES: dict[str, tuple[Make, Compares]] = {
    **{name: (RINGS[name].make, RINGS[name].compares) for name in (
        "Circle", "MultiSimilarity", "Triplet", "Margin", "NCA", "SINCERE", "SupCon, mask", "DCLW", "HCL",
        "ClipDistillation", "MultiPositive", "MNRL with negatives", "MNRL, masked", "GIST",
    )},
    "a parameter": (BatchHard, "labels"),
    "a submodule": (Tempered, "labels"),
    "a graph break": (Breaking, "labels"),
    "semi-hard": (partial(cz.Triplet, mining="semi-hard"), "labels"),
    "SmoothAP": (partial(cz.SmoothAP, temperature=0.3), "labels"),
    "memory": (memory, "labels"),
}  # fmt: skip
batch = partial(global_rows, dtype=torch.float64)
STEPS = [(5, 3), (0, 6), (5, 3), (7, 2)]
"""Shard sizes of the steps on two ranks."""


@contextlib.contextmanager
def compiling(backend: Any = "eager") -> Iterator[None]:
    """Compile row losses with this backend, from new, in blocks of 3 anchors."""
    slices = [slice(top, top + 3) for top in range(0, 99, 3)]

    def anchor_slices(anchors: Tensor, candidates: int) -> list[slice]:
        return [slice(x.start, min(x.stop, len(anchors))) for x in slices if x.start < len(anchors)]

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(compiled_sweep, "BACKEND", backend))
        stack.enter_context(patch.object(compiled_sweep, "_compiled", type(compiled_sweep._compiled)()))
        stack.enter_context(patch.object(anchor_block, "anchor_slices", anchor_slices))
        stack.enter_context(limits(GENERAL_PATH))
        stack.enter_context(cz.engine.use_implementation("compiled"))
        yield


def outcome(loss: Any, call: Compares, rows: Sequence[Tensor], weight: float = 1.0) -> list[Tensor]:
    """Return the value, and the gradients of embeddings and parameters."""
    rows = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in rows]
    learnt = [x for x in [*rows, *loss.parameters()] if x.requires_grad]
    value = called(loss, call, *rows)
    weights = weight * torch.arange(1.0, 1 + value.numel(), dtype=value.dtype).reshape(value.shape)
    return [value.detach(), *torch.autograd.grad(value, learnt, weights, allow_unused=True, materialize_grads=True)]


def steps_of(name: str, reduction: str | None, **options: Any) -> float:
    """Return the largest difference between compiled and uncompiled steps of shards of changing size, on a rank."""
    make, call = LOSSES[name]
    losses = [make().double() for _ in range(2)]
    for loss in losses if reduction else []:
        next(x for x in loss.modules() if hasattr(x, "reduction")).reduction = reduction
    plain, compiled = (cz.DistributedLoss(x, **options) for x in losses)
    worst = 0.0
    for number, shards in enumerate(STEPS):
        total, rank = sum(shards), dist.get_rank()
        start, size = (sum(shards[:rank]), shards[rank]) if dist.get_world_size() == 2 else (0, total)
        rows = local_rows(call, batch(call, total, number), start, size)
        for loss in losses:
            if isinstance(loss, cz.Circle):  # a setting that changes
                loss.m = 0.1 + 0.1 * number
        with cz.engine.use_implementation("auto"):
            expected = outcome(plain, call, rows)
        found = outcome(compiled, call, rows)
        worst = max(worst, *(distance(x, y) for x, y in zip(found, expected, strict=True)))
    return worst


def errors_of(names: Sequence[str], backend: Any, reductions: Sequence[str | None], **options: Any) -> dict[str, float]:
    with compiling(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        warnings.filterwarnings("error", message="torch.compile cannot")
        cases = [(name, reductions[i % len(reductions)]) for i, name in enumerate(names)]
        return {name: steps_of(name, reduction, **options) for name, reduction in cases}


NAMES = list(LOSSES)
MASKS = ["MNRL, masked", "GIST"]
IN_A_SEARCH: list[tuple[int, str, list[str], dict[str, Any]]] = [
    (1, "aot_eager", NAMES, {}),
    (2, "aot_eager", NAMES, {}),
    (2, "eager", ["Circle", "NCA", *MASKS], {"ring": True}),
    (1, "inductor", ["Circle", "a parameter", "Margin", *MASKS], {}),
]


@pytest.mark.parametrize(
    ("ranks", "backend", "names", "options"),
    [
        (2, "eager", NAMES if EVERY_CASE else ["a parameter", "a graph break"], {}),
        *(IN_A_SEARCH if EVERY_CASE else []),
    ],
    ids=str,
)
def test_compiled_steps_are_the_uncompiled_ones(
    ranks: int, backend: str, names: list[str], options: dict[str, Any], worlds: Worlds
) -> None:
    reductions = [None, "sum", "none"]
    for found in worlds.run(ranks, errors_of, names, backend, reductions, timeout=600, **options):
        assert max(found.values()) <= EXACT, found


# ---------------------------------------------------------------------------------------------------------------- graphs


def graphs(sizes: Sequence[int]) -> list[int]:
    """Return how many graphs there are after each of these batches."""
    counter, loss, found = CompileCounterWithBackend("eager"), cz.Circle(), []
    with compiling(counter):
        for number, size in enumerate(sizes):
            outcome(loss, "labels", batch("labels", size, number))
            cz.Circle(m=0.1 * number)(*batch("labels", size, number))  # a loss of its own, with a graph
            found.append(counter.frame_count)
    return found


def test_the_number_of_graphs_is_bounded(worlds: Worlds) -> None:
    """Blocks of one anchor have a graph of their own, and those without gradient."""
    ((first, *rest),) = worlds.run(1, graphs, [6, 7, 5, 3, 1, 29, 2, 8])
    assert first == 2
    assert rest[-1] <= 6
    assert rest[-1] == rest[3]


def copies_and_pickles() -> tuple[bool, list[float]]:
    """Whether a compiled loss has the attributes of another, and the errors of its copies."""
    loss, rows = BatchHard().double(), batch("labels", 7, 0)
    before = list(vars(loss)), list(loss.state_dict())
    with compiling():
        expected = outcome(loss, "labels", rows)
        others = [copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]
        errors = [max(map(distance, outcome(x, "labels", rows), expected)) for x in others]
    return (list(vars(loss)), list(loss.state_dict())) == before, errors


def test_a_compiled_loss_is_copied_and_pickled(worlds: Worlds) -> None:
    assert worlds.run(1, copies_and_pickles) == [(True, [0.0, 0.0])]


def forgotten() -> bool:
    """Whether nothing is kept of a class that is gone."""
    with compiling():
        compiled_sweep.compiled_for(type("Short", (cz.RowLoss,), {}))
        gc.collect()
        return not compiled_sweep._compiled


def test_classes_that_are_gone_are_forgotten(worlds: Worlds) -> None:
    assert worlds.run(1, forgotten) == [True]


# -------------------------------------------------------------------------------------------------------------- failures


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler\nanywhere")


def one_rank_compiles() -> tuple[float, list[str]]:
    """Compile on rank 0 alone, twice; return the error and the warnings."""
    loss = cz.DistributedLoss(cz.Circle())
    rows = [local_shard(x, (5, 4)) for x in batch("labels", 9, 0)]
    with cz.engine.use_implementation("auto"):
        expected = outcome(loss, "labels", rows)
    with compiling("eager" if dist.get_rank() == 0 else broken), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome(loss, "labels", rows)
        found = outcome(loss, "labels", rows)
    return max(map(distance, found, expected)), [str(x.message) for x in caught]


def test_a_rank_that_cannot_compile_warns_once_and_computes(worlds: Worlds) -> None:
    (first, silent), (second, (warning,)) = worlds.run(2, one_rank_compiles)
    assert max(first, second) <= EXACT
    assert not silent
    assert warning.startswith("torch.compile cannot compile Circle, which is computed uncompiled.")
    assert warning.endswith("no compiler")


def error_of_a_loss() -> tuple[str, bool]:
    """Return the error, and whether the loss can still be compiled."""
    with compiling(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            Refusing()(*batch("labels", 5, 0))
        except ValueError as error:
            return str(error), compiled_sweep._compiled[Refusing] is not None
    raise AssertionError("no error")


def test_errors_of_a_loss_are_no_failures_of_the_compiler(worlds: Worlds) -> None:
    assert worlds.run(1, error_of_a_loss) == [("what the user says", True)]


# -------------------------------------------------------------------------------------------------------------- contexts


def in_contexts() -> dict[str, float]:
    """Return the error of a compiled loss within other contexts."""
    loss, rows = BatchHard().double(), batch("labels", 8, 0)
    expected = outcome(loss, "labels", rows)
    found: dict[str, list[Tensor]] = {}
    with compiling("aot_eager"):
        outer = torch.compile(lambda z, labels: 2 * loss(z, labels), fullgraph=True, backend="aot_eager")
        found["an outer graph"] = outcome(loss, "labels", rows)
        z = rows[0].clone().requires_grad_()
        value = outer(z, rows[1]) / 2
        found["an outer graph"] = [value.detach(), *torch.autograd.grad(value, [z, loss.margin])]
        found["a checkpoint"] = outcome(_Checkpointed(loss), "labels", rows)
        with cz.engine.plain_formulas():
            found["dense"] = outcome(loss, "labels", rows)
        with torch.autocast("cpu"):
            found["autocast"] = outcome(loss, "labels", rows)
    return {name: max(map(distance, x, expected)) for name, x in found.items()}


class _Checkpointed(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *rows: Tensor) -> Tensor:
        value: Tensor = checkpoint(self.loss, *rows, use_reentrant=False)
        return value


def test_a_compiled_loss_within_other_contexts(worlds: Worlds) -> None:
    ((found),) = worlds.run(1, in_contexts, timeout=60)
    assert max(found.values()) <= EXACT, found


def drawn_numbers(backend: str) -> tuple[Tensor, Tensor]:
    loss, rows = Drawing(), batch("labels", 6, 0)
    results = []
    for name in ("auto", "compiled"):
        torch.manual_seed(0)
        with compiling(backend), cz.engine.use_implementation(name):
            results.append(torch.stack([loss(*rows), loss(*rows)]))
    return results[0], results[1]


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if EVERY_CASE else [])])
def test_random_numbers_are_those_of_uncompiled_code(backend: str, worlds: Worlds) -> None:
    ((plain, compiled),) = worlds.run(1, drawn_numbers, backend, timeout=120)
    torch.testing.assert_close(plain, compiled)
