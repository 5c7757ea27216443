"""A step that is compiled is the step: the graph breaks off at what is left alone, and goes on after it."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.ranks import compat
from contrastive_zoo.ranks.compiling import Function, uncompiled
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from tests.helpers import EVERY_CASE
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.zoo import Entry

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


def plain(a, b):
    return (a * b).sum()


@pytest.mark.parametrize(("function", "graphs"), [(plain, 1), (uncompiled(plain), 0), (cz.NTXent(reduction="none"), 0)])
def test_the_compiler_sees_nothing_of_what_is_left_alone(function, graphs) -> None:
    found = []
    torch._dynamo.reset()
    compiled = torch.compile(lambda *views: function(*views), backend=lambda graph, _: found.append(graph) or graph)
    compiled(torch.eye(2), torch.eye(2))
    torch._dynamo.reset()
    assert len(found) == graphs


def test_a_graph_breaks_without_a_reason_before_torch_2_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_TORCH", (2, 6))
    torch._dynamo.reset()
    rows, loss = torch.randn(2, 5, 3), cz.NTXent(reduction="none")
    torch.testing.assert_close(torch.compile(loss, backend="eager")(*rows), loss(*rows))
    torch._dynamo.reset()


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


@pytest.mark.filterwarnings("ignore")  # the compiler's own
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
