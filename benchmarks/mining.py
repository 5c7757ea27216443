"""Mining of hard negatives: time and peak memory beside sentence-transformers' mine_hard_negatives, on W = 1 and 2.

python benchmarks/mining.py [--corpus 200000] [--queries 20000] [--width 128] [--threads 2]

sentence-transformers gets a stand-in for the model whose ``encode`` returns the embeddings. Each measurement has a process
of its own; memory is the peak beyond queries and corpus (Linux). W = 2 has half of the threads on each rank.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from suite.harness import command_line, in_new_process, peak
from torch import Tensor

from contrastive_zoo.data import mine_hard_negatives
from contrastive_zoo.testing.worlds import Worlds

SETTINGS: dict[str, Any] = {"num_negatives": 5, "range_max": 50, "relative_margin": 0.05}


def rows(queries: int, corpus: int, width: int) -> tuple[Tensor, Tensor]:
    """Return unit embeddings; query i is near item i of the corpus."""
    generator = torch.Generator().manual_seed(0)
    them = F.normalize(torch.randn(corpus, width, generator=generator), dim=1)
    noise = torch.randn(queries, width, generator=generator) / width**0.5
    return F.normalize(them[:queries] + noise, dim=1), them


def measured(job: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the seconds, the MB at the peak beyond those before, and the result."""
    start = time.perf_counter()
    megabytes, result = peak(job)
    return time.perf_counter() - start, megabytes, result


def ours(queries: int, corpus: int, width: int) -> tuple[float, float, str]:
    """Mine this rank's part; return seconds, MB, and the sum of the negatives."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = [x.tensor_split(size)[rank].clone() for x in (*rows(queries, corpus, width), torch.arange(queries))]
    mine_hard_negatives(own[0][:64], own[1][:256], own[2][:64] * 0)  # libraries are loaded
    seconds, megabytes, found = measured(lambda: mine_hard_negatives(*own, **SETTINGS))
    return seconds, megabytes, f"{len(found['negative'])} {found['negative'].sum()}"


def theirs(queries: int, corpus: int, width: int, use_faiss: bool) -> tuple[float, float, str]:
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

    texts = [f"c{i}" for i in range(corpus)]
    pairs = Dataset.from_dict({"query": [f"q{i}" for i in range(queries)], "answer": texts[:queries]})
    seconds, megabytes, found = measured(
        lambda: sentence_transformers.util.mine_hard_negatives(
            pairs, StandIn(), corpus=texts, use_faiss=use_faiss, verbose=False, **SETTINGS
        )
    )
    negatives = [int(text[1:]) for text in found["negative"]]
    return seconds, megabytes, f"{len(negatives)} {sum(negatives)}"


def in_a_process(name: str, threads: int, *sizes: int) -> tuple[float, float, str]:
    """Measure one implementation with so many threads; runs in a new process."""
    import faiss

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    return ours(*sizes) if name == "ours" else theirs(*sizes, use_faiss=name == "faiss")


def main() -> None:
    given = command_line(__doc__, corpus=200_000, queries=20_000, width=128, threads=2).parse_args()
    sizes = given.queries, given.corpus, given.width
    print(f"{given.queries:,} queries, corpus of {given.corpus:,} × {given.width}, {given.threads} threads together.")
    print("| | s | MB per rank | negatives |\n|---|---:|---:|---:|")
    for title, name in (
        ("sentence-transformers, `use_faiss=True`", "faiss"),
        ("sentence-transformers, torch", "torch"),
        ("`mine_hard_negatives`, W = 1", "ours"),
    ):
        seconds, megabytes, found = in_new_process(in_a_process, name, given.threads, *sizes)
        print(f"| {title} | {seconds:.1f} | {megabytes:.0f} | {found.split()[0]} |", flush=True)
    with Worlds(timeout=900.0, threads=max(1, given.threads // 2)) as worlds:
        by_rank = worlds.run(2, ours, *sizes)
    number = sum(int(text.split()[0]) for _, _, text in by_rank)
    seconds, megabytes = max(x[0] for x in by_rank), max(x[1] for x in by_rank)
    print(f"| `mine_hard_negatives`, W = 2 | {seconds:.1f} | {megabytes:.0f} | {number} |")
    same = sum(int(text.split()[1]) for _, _, text in by_rank) == int(found.split()[1])
    print(f"\nW = 1 and 2 have the same negatives: {same}")


if __name__ == "__main__":
    main()
