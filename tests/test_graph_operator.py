"""Losses inside a compiled graph: one graph for encoder, loss and backward pass, with eager's values and gradients."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import contrastive_zoo as cz
from contrastive_zoo.loss_base.graph_operator import GraphModule, loss_and_gradients, loss_gradients
from contrastive_zoo.ranks import compat
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
    with pytest.raises(ValueError, match="views must pair row by row"):
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
