"""Under torch.compile the graph breaks at a loss, which runs eagerly: in a compiled encoder, a whole step, and by itself."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import learnt

pytestmark = pytest.mark.kernels

PACKAGE = f"{Path(cz.__file__).parent}/"
SIZES = [(5, 3), (2, 7), (6, 0), (4, 4)]

LOSSES: dict[str, Callable[[], Any]] = {
    "two views": lambda: cz.NTXent(**learnt(0.3)),
    "a row loss": lambda: cz.Margin(num_classes=3),
    "classes": lambda: cz.ArcFace(num_classes=3, embedding_size=4),
    "statistics": cz.VICReg,
    "third-party": lambda: ThirdParty(),
}
"""One for each engine that writes its backward pass by hand."""

TAKES_LABELS = ("a row loss", "classes")


class ThirdParty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.scale * a @ b.T).logsumexp(1).mean()


@contextmanager
def silence() -> Iterator[None]:
    # not simplefilter("error"): the compiler hides warnings of its own at their display
    with TestCase().assertNoLogs("torch", logging.WARNING), warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield
    assert not [str(x.message) for x in recorded]


def trained(name: str, compiled: str = "nothing", wrapped: bool = False, in_chunks: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    encoder, loss = nn.Linear(6, 4).double(), LOSSES[name]().double()
    loss_fn = cz.DistributedLoss(loss) if wrapped else loss
    graphs = list[Any]()

    def compile_if(part: str, function: Any) -> Any:
        if part != compiled:
            return function
        return torch.compile(function, backend=lambda graph, inputs: graphs.append(graph) or graph)

    model = compile_if("model", cz.GradCache(encoder, 2) if in_chunks else encoder)
    criterion = compile_if("loss", loss_fn)

    def step(x: Tensor, y: Tensor) -> Tensor:
        value = 2 * criterion(model(x), y if name in TAKES_LABELS else model(y))
        value.backward()
        return value.detach()

    run = compile_if("step", step)
    found = list[Tensor]()
    for number, sizes in enumerate(SIZES):
        draw = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, sum(sizes), 6, generator=draw, dtype=torch.float64)
        y = torch.randint(3, (sum(sizes),), generator=draw) if name in TAKES_LABELS else y
        if world_size == 2:
            x, y = x.split(sizes)[dist.get_rank()], y.split(sizes)[dist.get_rank()]
        encoder.zero_grad()
        loss.zero_grad()
        found.append(run(x, y))
        for p in encoder.parameters():
            if world_size == 2:
                dist.all_reduce(p.grad)
            found.append(p.grad / world_size)
        found += [p.grad.clone() for p in loss.parameters()]
    assert bool(graphs) == (compiled in ("model", "step"))
    assert not [x for graph in graphs for x in graph.graph.nodes if PACKAGE in (x.meta.get("stack_trace") or "")]
    return found


WRAPPED: list[Any] = [
    *((name, "step", True) for name in LOSSES),
    ("two views", "model", True),
    ("two views", "loss", True),
]
WRAPPED += [("two views", "step", True, True)]
BARE = [("two views", compiled, False) for compiled in ("model", "step", "loss")]


@pytest.mark.parametrize(("world_size", "cases"), [(1, WRAPPED + BARE), (2, WRAPPED)])
def test_compiled_steps_are_the_eager_ones_of_one_process(world_size: int, cases: Any, worlds: Worlds) -> None:
    def on_rank() -> list[list[Tensor]]:
        torch.compile(torch.sin, backend="eager")(torch.ones(2))  # the compiler warns as it loads
        with silence(), splitting(always=True):
            return [trained(*case) for case in cases]

    expected = [trained(name) for name, *_ in cases]
    for found in worlds.run(world_size, on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
