"""Soak: 10,000 steps on two ranks whose shapes change, two wrappers of different budgets; nothing may grow.

python benchmarks/soak.py                # resident memory, file descriptors, threads and live tensors of rank 0
python benchmarks/soak.py --steps 1000
"""

import gc
import sys
from argparse import Namespace

import psutil
import torch
import torch.distributed as dist
from suite.harness import program
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.step import splitting
from tools.pages import table

READINGS = 10

ALLOWED = 4.0
"""MiB by which resident memory may grow after the second reading: what the allocator keeps for another order of shapes."""


def reading(step: int) -> dict[str, float]:
    gc.collect()
    process = psutil.Process()
    return {
        "step": step,
        "RSS MiB": process.memory_info().rss / 2**20,
        "file descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "live tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
    }


def train(steps: int) -> list[dict[str, float]]:
    """Train with a queue and two losses, at other shard sizes in each step; return the readings of rank 0."""
    rank, readings = dist.get_rank(), list[dict[str, float]]()
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    encoder = nn.Linear(16, 8)
    first = cz.DistributedLoss(cz.Clip(temperature=cz.LearnableTemperature()))
    second = cz.DistributedLoss(cz.CrossBatchMemory(cz.SupCon(), size=64, embedding_size=8))
    parameters = [*encoder.parameters(), *first.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for step in range(1, steps + 1):
        n = 1 + int(torch.randint(0, 24, (), generator=generator)) if step % 7 or rank else 0
        x, labels = torch.randn(n, 16, generator=generator), torch.randint(0, 4, (n,), generator=generator)
        z = encoder(x)
        with splitting(always=step % 3 == 0):
            with cz.engine.memory_budget(2**20):
                loss = first(z, z + 0.1 * torch.randn(n, 8, generator=generator))
            with cz.engine.memory_budget(2**10):
                loss = loss + second(z, labels)
        optimizer.zero_grad()
        loss.backward()
        cz.average_gradients(encoder)
        optimizer.step()
        if rank == 0 and step % (steps // READINGS) == 0:
            readings.append(reading(step))
    return readings


def main(given: Namespace) -> dict[str, str]:
    with Worlds(timeout=600.0) as worlds:
        readings = worlds.run(2, train, given.steps)[0]
    forms = {"RSS MiB": ".1f"}
    lines = [[format(x, forms.get(name, ",.0f")) for name, x in of.items()] for of in readings]
    first, last = readings[1], readings[-1]  # when all shapes have been seen
    grown = {name: last[name] - first[name] for name in first if name != "step"}
    growth = "growth since the second reading: " + ", ".join(f"{name} {x:+.1f}" for name, x in grown.items())
    text = f"{table([*readings[0]], lines, texts=0)}\n\n{growth}"
    if any(x > (ALLOWED if name == "RSS MiB" else 0) for name, x in grown.items()):
        sys.exit(text)
    return {"soak": text}


if __name__ == "__main__":
    program(main, __doc__, steps=10_000)
