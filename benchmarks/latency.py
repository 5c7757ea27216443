"""How many latencies a step waits for: local gloo ranks between which each packet takes 20 ms (Linux, root).

python benchmarks/latency.py [--ranks 2 4 8 16] [--seconds 0.02] [--docs]

Each rank has a host of its own. A message of gloo takes two latencies, since the receiver announces its buffer. The model
adds 2 · latency · rounds to the time of a step without the latency. --docs writes the table of docs/pages/scaling.md.
"""

import math
import os
import time
from argparse import Namespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from hosts import INTERFACE, Host, delayed_hosts
from one_rank import PATHS, made, run
from suite.harness import program, progress
from torch import nn

from contrastive_zoo.ranks import world
from contrastive_zoo.testing.worlds import Worlds
from tools.pages import table

ROWS, WIDTH, STEPS = 8, 16, 6
SMALL_GATHERS = {"gathered": 7, "ring": 6, "two-level ring": 6, "small batch": 1, "GradCache": 8, "third-party loss": 1}
"""Of a step: handshakes, all-reduces, statistics, and rows where they are few."""
MANY = "gathered, as of more than 64 ranks"


def rounds(path: str, ranks: int, *, direct: bool = True) -> float:
    """Return how many messages a step waits for, one after the other."""
    doublings = math.ceil(math.log2(ranks))
    small = SMALL_GATHERS[path] * (1 if direct else doublings)
    if path == "small batch":
        return small
    if path == "third-party loss":
        return small + (1 + doublings) / 2  # rank 0's random state: two latencies, one for each further level of a tree
    if path in ("ring", "two-level ring"):
        return small + 1 + 2 * ranks  # an exchange of statistics; candidates in two passes, and the last gradients
    return small + 2  # exchanges of statistics and of gradients


def on_rank(host: Host, paths: list[str]) -> dict[str, tuple[float, float]]:
    """Return the least seconds of steps without and with the latency."""
    before = dist.new_group()
    host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return {path: (seconds(path, before), seconds(path, dist.new_group())) for path in paths}


def seconds(path: str, group: Any) -> float:
    many, name = path == MANY, "gathered" if path == MANY else path
    torch.manual_seed(0)
    loss, encoder = made(name, group.size(), group.size() // 2, group), nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(group.rank())
    found = []
    with patch.object(world, "_FEW_RANKS", 0 if many else world._FEW_RANKS):
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            run(name, loss, encoder, ROWS, group)
            found.append(time.perf_counter() - start)
    return min(found[2:])  # by then a payload fits behind the header


def measured(ranks: int, latency: float, paths: list[str]) -> list[list[str]]:
    with Worlds(threads=1, timeout=600) as worlds, delayed_hosts(ranks, latency) as hosts:
        found = worlds.run(ranks, on_rank, each=[(host, paths) for host in hosts])
    lines = []
    for path in paths:
        without, with_latency = (max(of_rank[path][i] for of_rank in found) for i in (0, 1))
        count = rounds("gathered" if path == MANY else path, ranks, direct=path != MANY)
        predicted = without + 2 * latency * count
        numbers = [f"{count:g}", f"{1e3 * without:.0f}", f"{1e3 * with_latency:.0f}", f"{1e3 * predicted:.0f}"]
        lines.append([path, str(ranks), *numbers, f"{predicted / with_latency - 1:+.0%}"])
        progress(*lines[-1])
    return lines


def main(given: Namespace) -> dict[str, str]:
    paths = [*PATHS, MANY]
    lines = [line for ranks in given.ranks for line in measured(ranks, given.seconds, paths)]
    head = ["path", "ranks W", "rounds", "ms without latency", "ms", "ms, model", "error of the model"]
    by_path = table(head, sorted(lines, key=lambda line: paths.index(line[0])))
    return {"latency": f"{1e3 * given.seconds:g} ms a packet:\n\n{by_path}"}


if __name__ == "__main__":
    program(main, __doc__, page="scaling.md", ranks=[2, 4, 8, 16], seconds=0.02)
