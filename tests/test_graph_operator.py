"""Compiled losses have eager's values and gradients: in one graph, or after a break where the compiler leaves them alone."""

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import contrastive_zoo as cz
from contrastive_zoo.loss_base.graph_operator import GraphModule, loss_and_gradients, loss_gradients
from contrastive_zoo.ranks import compat
from contrastive_zoo.ranks.compiling import Function, uncompiled
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from tests.helpers import EVERY_CASE
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.zoo import Entry

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


LOSSES: list[Callable[[], nn.Module]] = [
    lambda: cz.NTXent(temperature=0.2),
    lambda: cz.InfoNCE(symmetric=True, check_finite=False),
    lambda: cz.DistributedLoss(cz.Clip(temperature=cz.LearnableTemperature(0.01))),
]


@pytest.mark.parametrize("make", LOSSES)
def test_one_graph_for_every_batch_size(make: Callable[[], nn.Module]) -> None:
    """A first graph for the first size, and a second for all sizes."""
    torch.manual_seed(0)
    encoder, loss, counter = nn.Linear(6, 4), make(), CompileCounterWithBackend("aot_eager")
    learnt = [*encoder.parameters(), *loss.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        return 3 * loss(encoder(x), encoder(y))

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in (7, 9, 12, 13):
        x, y = torch.randn(2, n, 6)
        found, expected = compiled(x, y), step(x, y)
        torch.testing.assert_close(found, expected)
        found, expected = (torch.autograd.grad(value, learnt) for value in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)  # gradients of a bias cancel
    assert counter.frame_count == 2


@pytest.mark.parametrize("dtype", [torch.float32] + [torch.float16] * (compat._TORCH >= (2, 7)))
def test_compiled_autograd_has_the_gradients_of_eager(dtype: torch.dtype) -> None:
    """The backward pass is compiled, too: it multiplies the gradients that the operator stores."""
    torch.manual_seed(0)
    encoder, loss = nn.Linear(6, 4), cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.3)))
    learnt, (x, y) = [*encoder.parameters(), *loss.parameters()], torch.randn(2, 9, 6)

    def step() -> list[Tensor]:
        for parameter in learnt:
            parameter.grad = None
        loss(encoder(x).to(dtype), encoder(y).to(dtype)).backward()
        return [parameter.grad for parameter in learnt]

    expected, counters = step(), torch._dynamo.utils.counters["compiled_autograd"]
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = torch.compile(step, backend="aot_eager")()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-3)
    assert counters["captures"]


def has_operator(loss: nn.Module) -> bool:
    """Only losses of the tests have none: they override forward."""
    return all(x.graph_problem() is None for x in loss.modules() if isinstance(x, GraphModule))


IN_GRAPHS = [entry for entry in WHOLE_ZOO if has_operator(entry.case().make())]


@pytest.mark.parametrize("entry", IN_GRAPHS[:: 1 if EVERY_CASE else 4], ids=str)
def test_every_loss_is_its_operator(entry: Entry) -> None:
    torch.manual_seed(0)
    rows = [x.float() if x.is_floating_point() else x for x in whole_batch(entry.case(), GlobalBatch((7,), d=3))]
    rows = [x.requires_grad_() if x.is_floating_point() else x for x in rows]
    loss = entry.case(temperature=0.3).make()
    loss(*rows)  # those of any width make their weights
    twin = copy.deepcopy(loss)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        found, expected = (
            [value, *gradients(value, [*rows, *module.parameters()]), *module.buffers()]
            for module, value in [(loss, compiled(*rows)), (twin, twin(*rows))]
        )
        torch.testing.assert_close(found, expected)


def gradients(value: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    learnt = [x for x in of if x.requires_grad]
    return torch.autograd.grad(value, learnt, allow_unused=True, materialize_grads=True)


def clip_call(loss: cz.Clip, dtype: torch.dtype, learns: tuple[bool, ...]) -> tuple[list[Tensor], str, list[bool]]:
    """The second tower is passed by name."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(5, 3, generator=draw).to(dtype).requires_grad_(x) for x in learns[:2]]
    tensors.append(loss.logit_scale.detach().clone().requires_grad_(learns[2]))
    return tensors, repr((id(loss), [True], ["texts"], ["temperature.log_scale"])), list(learns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learns", [(True, True, True), (False, True, False)])
def test_operators_are_what_they_declare(dtype: torch.dtype, learns: tuple[bool, ...]) -> None:
    loss = cz.Clip(temperature=cz.LearnableTemperature(0.2))
    schema = str(loss_and_gradients._opoverload._schema)
    assert "(Tensor[] tensors, str call, bool[] learns)" in schema  # in words: torch 2.6 infers none from list[Tensor]
    torch.library.opcheck(loss_and_gradients, clip_call(loss, dtype, learns))
    tensors, *rest = clip_call(loss, dtype, learns)
    torch.library.opcheck(loss_gradients, (torch.tensor(2.0), [x.detach() for x in tensors], *rest))


def test_float16_gradients_are_computed_after_the_scale_of_the_loss() -> None:
    """The smallest gradients are 0 in float16 unless they are scaled first."""
    rows = [x.detach().requires_grad_() for x in torch.randn(2, 40, 8).mul(1e3).half()]
    loss = cz.Clip(temperature=cz.LearnableTemperature(0.5))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(2.0**20 * f(*rows), rows) for f in (compiled, loss))
    torch.testing.assert_close(found, expected)
    assert all((x != 0).float().mean() > 0.99 for x in found)


def test_compiled_code_refuses_what_the_loss_refuses_and_computes_no_gradients_without_autograd() -> None:
    compiled = torch.compile(cz.NTXent(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert not compiled(*torch.randn(2, 3, 3).requires_grad_()).requires_grad
    bad = torch.eye(3).index_fill(0, torch.tensor(1), torch.nan)
    with pytest.raises(ValueError, match="NTXent"):
        compiled(torch.eye(3), bad)
    with pytest.raises(ValueError, match="row i of view 1 belongs to row i of view 0"):
        compiled(torch.eye(3), torch.eye(4, 3))


def test_a_module_is_read_when_it_runs() -> None:
    """A changed margin needs no new graph, and a copy is another loss."""
    z, labels = torch.randn(6, 3).requires_grad_(), torch.arange(6) // 2
    first = cz.Triplet(margin=0.1)
    second = copy.deepcopy(first)
    second.margin = 0.7
    for loss in (first, second):
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(z, labels), loss(z, labels))
        loss.margin = 0.3
        torch.testing.assert_close(compiled(z, labels), loss(z, labels))


# --------------------------------------------------------------------------------------------- what is left alone


ENTRANCES = [
    getattr(room, name)
    for room in (cz, cz.collectives, cz.data, cz.engine, cz.metrics)
    for name in getattr(room, "__all__", ())
    if name[:1].islower() and inspect.isfunction(getattr(room, name))
] + [kind.forward for name in cz.__all__ if isinstance(kind := getattr(cz, name), type) and issubclass(kind, nn.Module)]
TRACED = {
    cz.LearnableTemperature.forward, cz.MomentumEncoder.forward, cz.MemoryQueue.forward, cz.GradCache.forward,
    cz.cached_step, cz.engine.plain_formulas, cz.engine.use_implementation, cz.engine.memory_budget, cz.engine.pair_masks,
    cz.engine.global_sample_ids, cz.data.token_chunks,
}  # fmt: skip
"""Arithmetic, and what calls encoders, which are compiled."""


def test_every_loss_and_message_is_left_alone() -> None:
    functions = [*ENTRANCES, cz.MemoryQueue.enqueue]
    traced = [x for x in functions if x.__code__ is not uncompiled(len).__code__]
    assert [x.__qualname__ for x in traced] == [x.__qualname__ for x in functions if x in TRACED]


def plain(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


@pytest.mark.parametrize(("function", "graphs"), [(plain, 1), (uncompiled(plain), 0), (cz.NTXent(reduction="none"), 0)])
def test_the_compiler_sees_nothing_of_what_is_left_alone(function, graphs) -> None:
    found = []
    compiled = torch.compile(lambda *views: function(*views), backend=lambda graph, _: found.append(graph) or graph)
    compiled(torch.eye(2), torch.eye(2))
    assert len(found) == graphs


def test_a_graph_breaks_without_a_reason_before_torch_2_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_TORCH", (2, 6))
    rows, loss = torch.randn(2, 5, 3), cz.NTXent(reduction="none")
    torch.testing.assert_close(torch.compile(loss, backend="eager")(*rows), loss(*rows))


# ------------------------------------------------------------------------------- with the backward pass inside the step


PACKAGE = Path(cz.__file__).parent
AROUND_THE_OPERATOR = ("ranks/compiling.py", "wrapper/distributed.py", "loss_base/")
"""What leads to the operator of a loss on one process: settings, among them the value of a learnable temperature."""


def three_steps(entry: Entry, rows: list[Tensor], backend: Any) -> list[Tensor]:
    """Values, gradients of the encoder and of the loss, of a step that ends with backward()."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    encoder, loss = nn.Linear(3, 4), entry.case(temperature=cz.LearnableTemperature(0.3)).make()

    def step(*rows):
        value = 2 * loss(*(encoder(x) if x.is_floating_point() else x for x in rows))
        value.backward()
        return value.detach()

    run = step if backend is None else torch.compile(step, backend=backend)
    found = []
    for _ in range(3):
        encoder.zero_grad()
        loss.zero_grad()
        found.append(run(*rows))
        learnt = [*encoder.parameters(), *loss.parameters()]
        found += [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in learnt]
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("entry", "backend"),
    [(x, ("eager", "aot_eager")[i % 2]) for i, x in enumerate(WHOLE_ZOO[:: 1 if EVERY_CASE else 12])],
    ids=str,
)
def test_a_compiled_step_with_its_backward_pass(entry: Entry, backend: str) -> None:
    traced = set()
    rows = [x.float() if x.is_floating_point() else x for x in whole_batch(entry.case(), GlobalBatch((7,), d=3))]

    def looked_at(graph: Any, inputs: Any) -> Any:
        stacks = [node.meta.get("stack_trace") or "" for node in graph.graph.nodes]
        lines = [line for stack in stacks for line in stack.splitlines() if f"{PACKAGE}/" in line]
        traced.update(line for line in lines if not any(f"{PACKAGE}/{name}" in line for name in AROUND_THE_OPERATOR))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    expected, found = three_steps(entry, rows, None), three_steps(entry, rows, looked_at)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not traced


def test_backward_passes_are_left_alone() -> None:
    """Every hand-written one of the library, also those of modules that are imported when they are asked for."""
    written = torch.autograd.Function.__subclasses__() + Function.__subclasses__()
    own = [kind for kind in written if kind.__module__.startswith("contrastive_zoo.")]
    theirs = ("contrastive_zoo.testing.", "examples.demo.")  # mistakes to be found, as people write them
    own = [kind for kind in own if not kind.__module__.startswith(theirs) and kind is not Function]
    assert len(own) > 15
    for kind in own:
        assert kind.backward.__code__ is uncompiled(len).__code__, kind
