"""The error of the gradient of solved batches, ours and plain torch's, against float64, in docs/pages/measurements.md.

python benchmarks/accuracy.py [--docs] [--quick]    # --quick: few embeddings and one temperature

Without --quick 700 samples of 24 dimensions, three temperatures; the errors of one
machine differ from another's in the last digit, because matmuls add in another order.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from suite.harness import program, progress
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import plan
from contrastive_zoo.engine.tiling import memory_budget
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.world import ONE_PROCESS, World
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.test_solved_batches import LOSSES as SOLVED
from tests.test_solved_batches import gradient, relative_error, views
from tests.zoo import dense_sup_con
from tools.pages import table

ROWS = 700
NOISE = (0.3, 0.1)
TEMPERATURES = (0.05, 0.02, 0.01)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Loss = Callable[..., Tensor]


def plain_sup_con(a: Tensor, b: Tensor, *, temperature: float) -> Tensor:
    return dense_sup_con(torch.cat([a, b]), torch.arange(len(a)).repeat(2), temperature)


def of_pairs(n: int) -> tuple[Tensor, Tensor]:
    """Return the masks of positives and of negatives of two views, where two samples are a class."""
    labels = (torch.arange(n) // 2).repeat(2)
    same, itself = labels[:, None] == labels, torch.eye(2 * n, dtype=torch.bool)
    return same & ~itself, ~same


def plain_nca(a: Tensor, b: Tensor, *, temperature: float) -> Tensor:
    z, (positive, _) = F.normalize(torch.cat([a, b]), dim=1), of_pairs(len(a))
    squares = (2 - 2 * z @ z.T) / (2 * temperature)
    log_share = (-squares).fill_diagonal_(-torch.inf).log_softmax(1)
    return -log_share.masked_fill(~positive, -torch.inf).logsumexp(1).mean()


def exact_nca(a: Tensor, b: Tensor, *, temperature: float) -> Tensor:
    z = F.normalize(torch.cat([a, b]), dim=1)
    s = z @ z.T / temperature
    positives, negatives = (s.masked_fill(~mask, -torch.inf).logsumexp(1) for mask in of_pairs(len(a)))
    return F.softplus(negatives - positives, threshold=100).mean()


def per_class(samples: int, make: Callable[[float], Any], *, towers: bool = False) -> Loss:
    """Return a loss of this library whose labels are the numbers of samples, so many samples to a class."""

    def loss(*rows: Tensor, world: World, temperature: float) -> Tensor:
        shards = world.shards(rows[0])
        labels = (torch.arange(shards.total) // samples)[shards.local]
        inputs = (*rows, labels) if towers else (torch.cat(rows), labels.repeat(2))
        return make(temperature).forward(*inputs, world=world)

    return loss


def of_views(make: Callable[..., Any]) -> Loss:
    return lambda *rows, world, temperature: make(temperature=temperature).forward(*rows, world=world)


PLAIN = {name: loss.plain for name, loss in SOLVED.items()}
EXACT_NT_XENT, EXACT_CLIP = SOLVED["NTXent"].exact, SOLVED["CLIP"].exact
SUP_CON = per_class(1, lambda t: cz.SupCon(temperature=t))
MULTI_POSITIVE = per_class(1, lambda t: cz.MultiPositive(temperature=t, symmetric=True), towers=True)
LOSSES: dict[str, tuple[Loss, Loss, Loss]] = {
    "NTXent": (of_views(cz.NTXent), PLAIN["NTXent"], EXACT_NT_XENT),
    "CLIP": (of_views(cz.Clip), PLAIN["CLIP"], EXACT_CLIP),
    "SupCon": (SUP_CON, plain_sup_con, EXACT_NT_XENT),
    "NCA": (per_class(2, lambda t: cz.NCA(temperature=2 * t)), plain_nca, exact_nca),  # of squared distances
    "MultiPositive": (MULTI_POSITIVE, PLAIN["CLIP"], EXACT_CLIP),
}
"""By name: this library's loss, its plain definition, and the exact one in float64."""


up_to = partial(patch.object, plan, "SMALL_MATRIX")
PATHS: dict[str, tuple[int, bool, Callable[[], list[Any]]]] = {
    "tiled": (1, False, lambda: [up_to(-1), memory_budget(0)]),
    "cached": (1, False, lambda: [up_to(-1)]),
    "small batch": (1, False, lambda: [up_to(2**24)]),
    "2 ranks": (2, False, lambda: [splitting(always=True)]),
    "2 ranks, ring": (2, True, lambda: [splitting(always=True)]),
}
"""Number of ranks, whether they form a ring, and the contexts of each path through the engine."""


def our_gradient(name: str, path: str, rows: Sequence[Tensor], dtype: torch.dtype, temperature: float) -> Tensor:
    _, ring, contexts = PATHS[path]
    world: World = ONE_PROCESS
    if dist.is_initialized():
        world = Session.of(World.of(), ring=ring)
        first = 3 * len(rows[0]) // 5  # uneven shards
        rows = [x.split([first, len(x) - first])[world.rank] for x in rows]
    with ExitStack() as stack:
        for context in contexts():
            stack.enter_context(context)
        return gradient(LOSSES[name][0], rows, dtype, temperature=temperature, world=world)


def measured(n: int, temperatures: Sequence[float], worlds: Worlds) -> list[list[str]]:
    """Return the lines of the table: errors of each path and of plain torch, one line for each loss, t, noise and dtype."""
    lines = []
    for name, (_, plain, exact) in LOSSES.items():
        for dtype, t, noise in product(DTYPES, temperatures, NOISE):
            rows = [x.to(dtype) for x in views(n, noise)]
            truth = gradient(exact, rows, torch.float64, temperature=t)
            found = [relative_error(on(worlds, path, name, rows, dtype, t), truth) for path in PATHS]
            found.append(relative_error(gradient(plain, rows, dtype, temperature=t), truth))
            kind = str(dtype).removeprefix("torch.")
            lines.append([name, kind, f"{t:g}", f"{noise:g}", *(f"{x:.1e}" for x in found)])
            progress(*lines[-1])
    return lines


def on(worlds: Worlds, path: str, name: str, rows: Sequence[Tensor], dtype: torch.dtype, t: float) -> Tensor:
    ranks = PATHS[path][0]
    if ranks == 1:
        return our_gradient(name, path, rows, dtype, t)
    return torch.cat(worlds.run(ranks, lambda: our_gradient(name, path, rows, dtype, t)), 1)


def part(lines: list[list[str]]) -> str:
    """Return the table of the page: at the lowest temperature, in float32, the worst path and plain torch."""
    low = f"{min(TEMPERATURES):g}"
    first = [line for line in lines if line[1] == "float32" and line[2] == low]
    short = [[name, noise, max(paths, key=float), plain] for name, _, _, noise, *paths, plain in first]
    return table(["loss", "noise", "this library, worst path", "plain torch"], short)


def main(given: Namespace) -> dict[str, str]:
    with Worlds() as worlds:
        lines = measured(100 if given.quick else ROWS, TEMPERATURES[-1:] if given.quick else TEMPERATURES, worlds)
    return {"accuracy": part(lines)}


if __name__ == "__main__":
    program(main, __doc__, page="measurements.md", quick=False)
