"""Memory and time of late interaction beside PyLate's formula and the dense one (Linux, gloo ranks on the CPU).

python benchmarks/late_interaction.py [--docs] [--pairs 512] [--query-tokens 32] [--document-tokens 128]

PyLate's way is written here as PyLate 1.6 computes it: all products of tokens by einsum, times the mask, maximum, sum,
cross-entropy; across ranks, local queries against documents that are gathered with gradient, and the loss times W.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from suite.harness import memory_and_time, program, progress, slowest_rank
from suite.report import number
from torch import Tensor

import contrastive_zoo as cz
from tools.pages import table

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


def measured(way: str, uneven: bool, sizes: tuple[int, int, int, int], threads: int) -> tuple[float, float]:
    """Return the extra MB of the largest step and the median seconds of a step, on a rank."""
    torch.set_num_threads(threads)
    rank, (pairs, query_tokens, document_tokens, width) = dist.get_rank(), sizes
    loss, share = WAYS[way](), 2 if uneven and rank == 1 else 1

    def draw(count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        lengths = (query_tokens // share, document_tokens // share)
        q, d = (torch.randn(count, x, width, generator=generator).requires_grad_() for x in lengths)
        return [q, d, torch.ones(d.shape[:2], dtype=torch.bool)]

    sizes_of_steps = 8, pairs // dist.get_world_size()
    megabytes, seconds, _ = memory_and_time(
        draw, lambda *inputs: loss(*inputs).backward(), sizes_of_steps, STEPS.get(way, 3)
    )
    return megabytes, seconds


def main(given: Namespace) -> dict[str, str]:
    sizes, lines = (given.pairs, given.query_tokens, given.document_tokens, given.width), []
    for ranks, way, uneven in CASES:
        figures = slowest_rank(ranks, measured, way, uneven, sizes, 2 // ranks)
        lines.append([ranks, way, "half on rank 1" if uneven else "equal", *map(number, figures)])
        progress(*lines[-1])
    return {"times": table(["ranks", "", "tokens", "extra MB", "seconds"], lines)}


if __name__ == "__main__":
    sizes = {"pairs": 512, "query_tokens": 32, "document_tokens": 128, "width": 128}
    program(main, __doc__, page="late_interaction.md", **sizes)
