"""Time, memory and errors of pytorch-metric-learning's wrapper and of DistributedLoss (replicated, native).

python benchmarks/third_party.py [--repeats 5] [--docs] [name …]

Two gloo ranks of one thread each, float32, forward and backward through a linear encoder whose gradient is averaged as DDP
does. Times are medians over interleaved repeats, of the slower rank; memory is that of the rank with more, in new processes.
Errors are those of a smaller batch in float64, against the loss without wrapper on one process.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from suite.harness import in_rounds, on_new_ranks, peak, program, progress, seconds_of
from torch import Tensor, nn

import contrastive_zoo as cz
from tools.pages import table

HEAD = ("loss", "implementation", "ms per step", "peak MB", "relative error, value", "relative error, gradient")
RANKS, WIDTH, OF_A_CLASS, ROWS_FOR_ERRORS = 2, 128, 4, 64


class Subject(NamedTuple):
    """A loss, its miner, and the number of samples of all ranks, which the wrapper limits."""

    rows: int
    loss: Callable[[], Any]
    miner: Callable[[], Any] | None = None


SUBJECTS = {
    "NTXentLoss": Subject(192, lambda: losses.NTXentLoss()),
    "SupConLoss": Subject(2048, lambda: losses.SupConLoss()),
    "TripletMarginLoss + semi-hard": Subject(
        384, lambda: losses.TripletMarginLoss(0.2), lambda: miners.TripletMarginMiner(0.2, "semihard")
    ),
    "MultiSimilarityLoss": Subject(2048, lambda: losses.MultiSimilarityLoss()),
}


class Wrapped(nn.Module):
    def __init__(self, loss: Any, miner: Any, efficient: bool = False) -> None:
        super().__init__()
        self.loss = DistributedLossWrapper(loss, efficient=efficient)
        self.miner = miner and DistributedMinerWrapper(miner, efficient=efficient)

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        return self.loss(z, labels, self.miner(z, labels) if self.miner else None)


IMPLEMENTATIONS: dict[str, Callable[[Any, Any], nn.Module]] = {
    "their wrapper": Wrapped,
    "their wrapper, efficient": lambda loss, miner: Wrapped(loss, miner, efficient=True),
    "replicated": lambda loss, miner: cz.DistributedLoss(loss, miner=miner),
    "native": lambda loss, miner: cz.DistributedLoss(loss, miner=miner, prefer_native=True),
}


def batch(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randperm(rows, generator=generator) // OF_A_CLASS
    classes = torch.randn(rows // OF_A_CLASS, WIDTH, generator=generator, dtype=dtype)
    x = classes[labels] + torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
    torch.manual_seed(1)
    return x, labels, nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)


def step(loss: Any, x: Tensor, labels: Tensor, encoder: nn.Linear) -> tuple[Tensor, Tensor]:
    encoder.zero_grad()
    value = loss(encoder(x), labels)
    value.backward()
    gradient = encoder.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    return value.detach(), gradient / RANKS


def local_inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Linear]:
    x, labels, encoder = batch(rows, dtype)
    return x.chunk(RANKS)[dist.get_rank()], labels.chunk(RANKS)[dist.get_rank()], encoder


def construct(name: str, implementation: str) -> nn.Module:
    subject = SUBJECTS[name]
    return IMPLEMENTATIONS[implementation](subject.loss(), subject.miner and subject.miner())


def times(name: str, repeats: int) -> dict[str, float]:
    """Return the seconds per step of each implementation, of the slower rank."""
    given = local_inputs(SUBJECTS[name].rows)
    losses_by_name = {x: construct(name, x) for x in IMPLEMENTATIONS}
    runners = {x: lambda loss=loss: step(loss, *given) for x, loss in losses_by_name.items()}
    return seconds_of(in_rounds(runners, rounds=repeats))


def memory(name: str, implementation: str) -> float:
    """Return the MB at the peak of one step (Linux)."""
    loss, given = construct(name, implementation), local_inputs(SUBJECTS[name].rows)
    step(loss, *local_inputs(16))
    return peak(lambda: step(loss, *given))[0]


def results(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    given = local_inputs(ROWS_FOR_ERRORS, torch.float64)
    return {implementation: step(construct(name, implementation), *given) for implementation in IMPLEMENTATIONS}


def truth(name: str) -> tuple[Tensor, Tensor]:
    """Return value and encoder gradient of the loss without wrapper on one process."""
    subject, (x, labels, encoder) = SUBJECTS[name], batch(ROWS_FOR_ERRORS, torch.float64)
    z = encoder(x)
    value = subject.loss()(z, labels, subject.miner()(z, labels) if subject.miner else None)
    (gradient,) = torch.autograd.grad(value, encoder.weight)
    return value.detach(), gradient


def relative_error(found: Tensor, expected: Tensor) -> str:
    error = ((found - expected).norm() / expected.norm()).item()
    return "0" if error == 0 else f"{error:.0e}" if error < 1e-6 else f"**{100 * error:.0f} %**"


def lines(name: str, repeats: int) -> list[list[str]]:
    seconds = on_new_ranks(RANKS, times, name, repeats)[0]
    found, expected = on_new_ranks(RANKS, results, name), truth(name)
    rows = []
    for implementation in IMPLEMENTATIONS:
        megabytes = max(on_new_ranks(RANKS, memory, name, implementation))
        value, gradient = (
            max((x[implementation][i] for x in found), key=lambda y: (y - expected[i]).norm()) for i in (0, 1)
        )
        errors = relative_error(value, expected[0]), relative_error(gradient, expected[1])
        title = f"`{name}`, {SUBJECTS[name].rows:,} rows" if not rows else ""
        rows.append([title, implementation, f"{1000 * seconds[implementation]:,.0f}", f"{megabytes:,.0f}", *errors])
        progress(*rows[-1])
    return rows


def main(given: Namespace) -> dict[str, str]:
    return {"times": table(HEAD, [line for name in given.names for line in lines(name, given.repeats)])}


if __name__ == "__main__":
    program(main, __doc__, page="pytorch-metric-learning.md", names=SUBJECTS, repeats=5)
