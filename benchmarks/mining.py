"""Mining of hard negatives: time and peak memory beside sentence-transformers' mine_hard_negatives, on W = 1 and 2.

python benchmarks/mining.py [--corpus 200000] [--queries 20000] [--width 128] [--threads 2]

sentence-transformers gets a stand-in for the model whose ``encode`` returns the embeddings. Each measurement has a process
of its own; memory is the peak beyond queries and corpus (Linux). W = 2 has half of the threads on each rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from suite.harness import on_new_ranks, peak, program, progress
from torch import Tensor

from contrastive_zoo.data import mine_hard_negatives
from tools.pages import table

SETTINGS: dict[str, Any] = {"num_negatives": 5, "range_max": 50, "relative_margin": 0.05}


def rows(queries: int, corpus: int, width: int) -> tuple[Tensor, Tensor]:
    """Return unit embeddings; query i is near item i of the corpus."""
    generator = torch.Generator().manual_seed(0)
    them = F.normalize(torch.randn(corpus, width, generator=generator), dim=1)
    noise = torch.randn(queries, width, generator=generator) / width**0.5
    return F.normalize(them[:queries] + noise, dim=1), them


def measured(job: Callable[[], Any]) -> tuple[float, float, list[int]]:
    """Return the seconds, the MB at the peak beyond those before, and the negatives."""
    start = time.perf_counter()
    megabytes, result = peak(job)
    return time.perf_counter() - start, megabytes, [int(str(x).removeprefix("c")) for x in result["negative"]]


def ours(queries: int, corpus: int, width: int) -> tuple[float, float, list[int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [x.tensor_split(size)[rank].clone() for x in (*rows(queries, corpus, width), torch.arange(queries))]
    mine_hard_negatives(own[0][:64], own[1][:256], own[2][:64] * 0)  # libraries are loaded
    return measured(lambda: mine_hard_negatives(*own, **SETTINGS))


def theirs(queries: int, corpus: int, width: int, *, use_faiss: bool) -> tuple[float, float, list[int]]:
    import faiss
    import sentence_transformers
    from datasets import Dataset

    them = dict(zip("qc", (x.numpy() for x in rows(queries, corpus, width)), strict=True))

    class StandIn(sentence_transformers.SentenceTransformer):  # type: ignore[misc]  # an untyped base
        device = torch.device("cpu")

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def encode_query(self, texts: list[str], **_: Any) -> Any:
            return them[texts[0][0]][np.array([int(text[1:]) for text in texts])]

        encode_document = encode_query
        get_embedding_dimension = staticmethod(lambda: width)
        similarity = staticmethod(lambda a, b: torch.as_tensor(a) @ torch.as_tensor(b).T)
        similarity_pairwise = staticmethod(lambda a, b: (torch.as_tensor(a) * torch.as_tensor(b)).sum(1))

    faiss.omp_set_num_threads(torch.get_num_threads())
    texts = [f"c{i}" for i in range(corpus)]
    pairs = Dataset.from_dict({"query": [f"q{i}" for i in range(queries)], "answer": texts[:queries]})
    mine = sentence_transformers.util.mine_hard_negatives
    settings = SETTINGS | {"use_faiss": use_faiss, "verbose": False}
    return measured(lambda: mine(pairs, StandIn(), corpus=texts, **settings))


IMPLEMENTATIONS: dict[str, tuple[int, Callable[[int, int, int], tuple[float, float, list[int]]]]] = {
    "sentence-transformers, `use_faiss=True`": (1, partial(theirs, use_faiss=True)),
    "sentence-transformers, torch": (1, partial(theirs, use_faiss=False)),
    "`mine_hard_negatives`, W = 1": (1, ours),
    "`mine_hard_negatives`, W = 2": (2, ours),
}
"""By title the number of ranks and the function that each calls."""


def measure(given: argparse.Namespace) -> dict[str, str]:
    sizes, lines = (given.queries, given.corpus, given.width), []
    for title, (world_size, function) in IMPLEMENTATIONS.items():
        by_rank = on_new_ranks(world_size, function, *sizes, threads=max(1, given.threads // world_size))
        seconds, megabytes = max(x[0] for x in by_rank), max(x[1] for x in by_rank)
        negatives = [number for _, _, of_rank in by_rank for number in of_rank]
        lines.append([title, f"{seconds:.1f}", f"{megabytes:.0f}", str(len(negatives)), str(sum(negatives))])
        progress(*lines[-1])
    return {"mining": table(("", "s", "MB per rank", "negatives", "their sum"), lines, texts=1)}


if __name__ == "__main__":
    program(measure, __doc__, corpus=200_000, queries=20_000, width=128, threads=2)
