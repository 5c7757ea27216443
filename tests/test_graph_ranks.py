"""A whole step between several ranks is one graph: encoder, DistributedLoss and the backward pass."""

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import contrastive_zoo as cz
from contrastive_zoo.loss_base import graph_operator
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.batch import FEATURES
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, common_error, error_message, learnt

pytestmark = pytest.mark.skipif(not graph_operator.IN_ORDER, reason="torch before 2.10 breaks the graph between ranks")


@pytest.fixture(scope="module", autouse=True)
def compiler(worlds: Worlds) -> None:
    """Load the compiler on both ranks first, which takes seconds."""
    worlds.run(2, lambda: compiled(torch.sin)(torch.ones(2)), timeout=120)


SIZES = [(5, 2), (3, 6), (4, 4), (2, 7), (5, 2)]
"""Rows of each rank at each step."""


def two_views(**options: Any) -> Callable[[], nn.Module]:
    return lambda: cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.3)), **options)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    labels: bool = False
    sizes: list[tuple[int, ...]] = SIZES
    whole: bool = True  # whether a step is one graph
    sums: bool = False  # whether the gradients of ranks are summed


CASES = {
    "NTXent": Case(two_views()),
    "a ring, a sum": Case(two_views(ring=True, grad_reduction="sum"), sizes=[(3, 4)] * 4, sums=True),
    "an empty shard": Case(two_views(), sizes=[(4, 3), (6, 0), (5, 5), (0, 7)]),
    "Clip, unchecked": Case(lambda: cz.DistributedLoss(cz.Clip(), check_finite=False, check_equal=False)),
    "SigLIP": Case(lambda: cz.DistributedLoss(cz.SigLIP())),
    "Triplet": Case(lambda: cz.DistributedLoss(cz.Triplet()), labels=True),
    "ArcFace": Case(lambda: cz.DistributedLoss(cz.ArcFace(num_classes=3, embedding_size=4)), labels=True),
    "Margin": Case(lambda: cz.DistributedLoss(cz.Margin()), labels=True),
    "VICReg": Case(lambda: cz.DistributedLoss(cz.VICReg())),
    "WeightedSum": Case(lambda: cz.DistributedLoss(cz.WeightedSum([cz.NTXent(), cz.SigLIP()], weights=[1.0, 0.3]))),
    "WeightedSum, one temperature": Case(lambda: cz.DistributedLoss(with_one_temperature())),
    "Matryoshka": Case(lambda: cz.DistributedLoss(cz.Matryoshka(cz.InfoNCE(), dims=(2, 4)))),
    "DINO": Case(lambda: cz.DistributedLoss(cz.DINO(4))),
    "TiCo": Case(lambda: cz.DistributedLoss(cz.TiCo(4))),
    "SIGReg": Case(lambda: cz.DistributedLoss(cz.LeJEPA(4))),
    "NNCLR": Case(lambda: cz.DistributedLoss(cz.CrossBatchMemory(cz.InfoNCE(), size=8, embedding_size=4))),
    "a monitor": Case(lambda: monitored(cz.DistributedLoss(cz.NTXent()))),
    "third-party": Case(
        lambda: cz.DistributedLoss(losses.TripletMarginLoss(), miner=miners.MultiSimilarityMiner()), True, whole=False
    ),
    "by function": Case(lambda: ByFunction(), whole=False, sums=True),
    "by hand": Case(lambda: ByHand(), True, whole=False, sums=True),
}


class ByFunction(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return cz.NTXent()(a, b, world=World.of())


class ByHand(nn.Module):
    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        rest = cz.collectives.all_reduce(z.sum(0), gradient="complete")
        z, labels = (cz.collectives.all_gather(x, gradient="complete") for x in (z, labels))
        return z[labels == 0].square().sum() + rest.square().sum()


def with_one_temperature() -> cz.WeightedSum:
    settings = learnt(0.3)
    return cz.WeightedSum([cz.NTXent(**settings), cz.InfoNCE(**settings)])


def monitored(loss: cz.DistributedLoss) -> cz.DistributedLoss:
    cz.Monitor(loss, every=1)
    return loss


def trained(case: Case, *, compiled: bool, rank: int, ranks: int) -> tuple[list[Tensor], int]:
    """Train an encoder; ``rank`` of ``ranks`` holds its shard of every batch, and rank −1 all of it.

    Return value and gradients of each step, and parameters and buffers of the loss at the end; and the number of graphs.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    encoder, loss = nn.Linear(FEATURES, 4).double(), case.make().double()
    counter = CompileCounterWithBackend("aot_eager")
    learnt = [*encoder.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(learnt, lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return loss(encoder(x), y if case.labels else encoder(y))

    run = torch.compile(step, fullgraph=case.whole, backend=counter) if compiled else step
    draw, found = torch.Generator().manual_seed(1), list[Tensor]()
    for sizes in case.sizes:
        x, y = torch.randn(2, sum(sizes), FEATURES, generator=draw, dtype=torch.float64)
        y = torch.randint(3, (sum(sizes),), generator=draw) if case.labels else y
        if rank >= 0:
            x, y = x.split(sizes)[rank], y.split(sizes)[rank]
        optimizer.zero_grad()
        value = run(x, y)
        value.backward()
        for p in [] if rank < 0 else learnt if case.sums else encoder.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 1 if case.sums else ranks
        found += [value.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in learnt)]
        optimizer.step()
    torch._dynamo.reset()
    gc.collect()
    return [*found, *(x.detach().clone() for x in loss.state_dict().values())], counter.frame_count


@pytest.mark.parametrize("name", list(CASES)[:: 1 if EVERY_CASE else 3])
def test_a_compiled_step_of_two_ranks_is_that_of_one_process(name: str, worlds: Worlds) -> None:
    def on_rank() -> tuple[list[Tensor], int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            return trained(CASES[name], compiled=True, rank=dist.get_rank(), ranks=2)

    expected, _ = trained(CASES[name], compiled=False, rank=-1, ranks=2)
    for found, graphs in worlds.run(2, on_rank, timeout=60):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        assert not CASES[name].whole or graphs <= (1 if "static" in name else 4 if "empty" in name else 2)


# --------------------------------------------------------------------------------------------------------- messages


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as one graph, without the compiler's warnings."""
    torch._dynamo.reset()
    run = torch.compile(function, fullgraph=True, backend="aot_eager")

    def quiet(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(*args)

    return quiet


def views(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.randn(2, 3 + dist.get_rank(), 4, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in drawn]


def well() -> float:
    """Return a value that shows that messages are in step."""
    return cz.DistributedLoss(cz.NTXent())(*views()).item()


def one_rank_is_not_compiled(rows: list[Tensor], rank: int) -> Any:
    """Its backward pass would send messages later than those of the other ranks."""
    loss = cz.DistributedLoss(cz.NTXent())
    return (compiled(loss) if rank else loss)(*rows)


def one_rank_needs_other_gradients(rows: list[Tensor], rank: int) -> Any:
    return compiled(cz.DistributedLoss(cz.Clip(**learnt(0.5))))(rows[0], rows[1].detach() if rank else rows[1])


def one_rank_has_nan(rows: list[Tensor], rank: int) -> Any:
    rows[0].data[0] = torch.nan if rank else 1.0
    return compiled(cz.DistributedLoss(cz.NTXent()))(*rows)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (one_rank_is_not_compiled, ["by a compiled graph", "in the backward pass"]),
        (one_rank_needs_other_gradients, ["with gradient"]),
        (one_rank_has_nan, ["NaN"]),
    ],
)
def test_ranks_refuse_alike(bad: Callable[[list[Tensor], int], Any], words: list[str], worlds: Worlds) -> None:
    text, _ = common_error(worlds, 2, lambda: bad(views(), dist.get_rank()), well)
    assert all(word in text for word in words)


def test_without_gradients_compiled_and_other_ranks_agree(worlds: Worlds) -> None:
    def job() -> tuple[float, float]:
        loss = cz.DistributedLoss(cz.NTXent())
        with torch.no_grad():
            return (compiled(loss) if dist.get_rank() else loss)(*views()).item(), loss(*views()).item()

    for found, expected in worlds.run(2, job, timeout=60):
        assert found == pytest.approx(expected, rel=1e-12)


def test_operators_run_in_order_and_also_unused(worlds: Worlds) -> None:
    """Rank 1 drops the first of three losses, whose messages rank 0 waits for."""

    def job() -> tuple[list[float], list[float]]:
        losses = [cz.DistributedLoss(cz.NTXent(temperature=t)) for t in (0.1, 0.5, 2.0)]

        def step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            first, second, third = (loss(a, b) for loss in losses)
            return (third, second) if dist.get_rank() else (third, second, first)

        found = compiled(step)(*views())
        sum(found).backward()
        return [x.item() for x in found][:2], [loss(*views()).item() for loss in (losses[2], losses[1])]

    for found, expected in worlds.run(2, job, timeout=60):
        assert found == pytest.approx(expected, rel=1e-12)


def test_float16_on_two_ranks(worlds: Worlds) -> None:
    def outcome(run: Callable[..., Tensor]) -> list[Tensor]:
        rows = [x.detach().requires_grad_() for x in views(torch.float16)]
        value = run(*rows)
        return [value.detach(), *torch.autograd.grad(2.0**10 * value, rows)]

    def job() -> list[list[Tensor]]:
        loss = cz.DistributedLoss(cz.Clip(**learnt(0.5)))
        return [outcome(loss), outcome(compiled(loss))]

    for expected, found in worlds.run(2, job, timeout=60):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_torch_that_cannot_keep_the_order_breaks_the_graph(worlds: Worlds) -> None:
    def job() -> str | None:
        with patch.object(graph_operator, "IN_ORDER", False):
            step = compiled(cz.DistributedLoss(cz.NTXent()))
            return error_message(lambda: step(*views()), Exception)

    for text in worlds.run(2, job, timeout=60):
        assert "from 2.10 on" in str(text)
