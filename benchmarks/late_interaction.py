"""Memory and time of late interaction beside PyLate's formula and the dense one (Linux, gloo ranks on the CPU).

python benchmarks/late_interaction.py [case …] [--docs] [--pairs 512] [--query-tokens 32] [--document-tokens 128]

PyLate's way is written here as PyLate 1.6 computes it: all products of tokens by einsum, times the mask, maximum, sum,
cross-entropy; across ranks, local queries against documents that are gathered with gradient, and the loss times W.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from suite.harness import command_line, memory_and_time
from suite.report import number
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill, table

STEPS = {"PyLate's formula": 1, "dense": 1}
"""Measured steps of implementations that take most of a minute; others take 3."""
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def pylate(queries: Tensor, documents: Tensor, mask: Tensor) -> Tensor:
    """Return the contrastive loss of PyLate, of local queries and gathered documents."""
    world, rank = dist.get_world_size(), dist.get_rank()
    queries, documents = F.normalize(queries, dim=2), F.normalize(documents, dim=2)
    if world > 1:
        documents, mask = cz.collectives.all_gather(documents), cz.collectives.all_gather(mask)
    products = torch.einsum("ash,bth->abst", queries, documents) * mask[None, :, None]
    scores = products.max(3).values.sum(2)
    return world * F.cross_entropy(scores, rank * len(queries) + torch.arange(len(queries)))


def dense(queries: Tensor, documents: Tensor, mask: Tensor) -> Tensor:
    """Return MaxSim by all products of tokens, of one process."""
    queries, documents = F.normalize(queries, dim=2), F.normalize(documents, dim=2)
    products = torch.einsum("iad,jbd->ijab", queries, documents).masked_fill(~mask[:, None], -torch.inf)
    return F.cross_entropy(products.amax(3).sum(2), torch.arange(len(queries)))


def ours(*, ring: bool = False) -> Step:
    loss = cz.DistributedLoss(cz.MaxSim(), ring=ring)
    return lambda queries, documents, mask: loss(queries, documents, None, mask)


WAYS: dict[str, Callable[[], Step]] = {
    "contrastive_zoo": ours,
    "contrastive_zoo, ring": partial(ours, ring=True),
    "PyLate's formula": lambda: pylate,
    "dense": lambda: dense,
}
CASES = [(1, way, False) for way in WAYS if "ring" not in way] + [(2, way, False) for way in WAYS if way != "dense"]
CASES += [(2, way, True) for way in WAYS if way.startswith("contrastive_zoo")]
"""Ranks, implementation, and whether rank 1 has half as many tokens."""


def measured(way: str, uneven: bool, sizes: tuple[int, int, int, int], threads: int) -> tuple[float, float, float]:
    """Return the extra MB of the largest step, the median seconds of a step, and the value, on a rank."""
    torch.set_num_threads(threads)
    rank, (pairs, query_tokens, document_tokens, width) = dist.get_rank(), sizes
    loss, share = WAYS[way](), 2 if uneven and rank == 1 else 1

    def draw(count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        lengths = (query_tokens // share, document_tokens // share)
        q, d = (torch.randn(count, x, width, generator=generator).requires_grad_() for x in lengths)
        return [q, d, torch.ones(d.shape[:2], dtype=torch.bool)]

    def step(*inputs: Tensor) -> float:
        value = loss(*inputs)
        value.backward()
        return value.item()

    sizes_of_steps = 8, pairs // dist.get_world_size()
    megabytes, seconds, values = memory_and_time(draw, step, sizes_of_steps, STEPS.get(way, 3))
    return megabytes, seconds, values[-1]


def measure(ranks: int, way: str, uneven: bool, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return MB and seconds of the worst rank, and the mean value, in new processes."""
    with Worlds(threads=1, timeout=600) as worlds:
        megabytes, seconds, values = zip(*worlds.run(ranks, measured, way, uneven, sizes, 2 // ranks), strict=True)
    case = {"ranks": ranks, "way": way, "uneven": uneven}
    found = case | {"MB": max(megabytes), "seconds": max(seconds), "value": statistics.mean(values)}
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = command_line(__doc__, pairs=512, query_tokens=32, document_tokens=128, width=128, docs=False)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of cases, from 0; all by default")
    given = parser.parse_args()
    sizes = given.pairs, given.query_tokens, given.document_tokens, given.width
    results = [measure(*case, sizes) for case in [CASES[i] for i in given.cases] or CASES]
    print(json.dumps({"sizes": sizes, "results": results}, indent=1))
    if given.docs:
        tokens = {True: "half on rank 1", False: "equal"}
        lines = [
            [str(x["ranks"]), x["way"], tokens[x["uneven"]], number(x["MB"]), number(x["seconds"])] for x in results
        ]
        head = ["ranks", "", "tokens", "extra MB", "seconds"]
        fill(PAGES / "late_interaction.md", {"times": table(head, lines)})


if __name__ == "__main__":
    main()
