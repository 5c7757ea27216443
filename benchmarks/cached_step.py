"""A step of GradCache and MNRL with masks beside sentence-transformers' cached loss: the same encoder, chunks and processes.

python benchmarks/cached_step.py [--ranks 2] [--pairs 128] [--tokens 64] [--chunk 32] [--rounds 9]

Each rank has --pairs queries and documents. Steps of both take turns; a figure is the median of the times of rank 0.
sentence-transformers gathers from all ranks, too; its gradient and ours are averaged over ranks afterwards.
"""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from suite.harness import command_line
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import contrastive_zoo as cz

WIDTH, LAYERS, WORDS = 256, 4, 1000


class Encoder(nn.Module):
    """The mean of BERT's tokens."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "intermediate_size": 4 * WIDTH,
        }
        self.bert = BertModel(BertConfig(vocab_size=WORDS, **sizes), add_pooling_layer=False)
        self.max_seq_length = 512

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None]
        tokens = self.bert(features["input_ids"], features["attention_mask"]).last_hidden_state
        return features | {"sentence_embedding": (tokens * mask).sum(1) / mask.sum(1)}


class Embeddings(nn.Module):
    """The encoder as a function of tensors."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        embeddings: Tensor = self.encoder({"input_ids": input_ids, "attention_mask": attention_mask})[
            "sentence_embedding"
        ]
        return embeddings


def measured(rank: int, ranks: int, port: int, pairs: int, tokens: int, chunk: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    encoder = Encoder()
    model = SentenceTransformer(modules=[encoder], device="cpu")
    peer = CachedMultipleNegativesRankingLoss(model, mini_batch_size=chunk, gather_across_devices=True)
    mnrl = cz.MNRL(temperature=0.05, false_negative_margin=0.1)
    embed, loss_fn = Embeddings(encoder), cz.DistributedLoss(mnrl)
    torch.manual_seed(1 + rank)
    ids = [torch.randint(1, WORDS, (pairs, tokens)) for _ in range(2)]
    mask, document_ids = torch.ones_like(ids[0]), torch.arange(rank * pairs, (rank + 1) * pairs) // 2

    def theirs() -> None:
        peer([{"input_ids": x, "attention_mask": mask} for x in ids], None).backward()
        cz.average_gradients(model)

    def ours() -> None:
        chunks = [list(zip(x.split(chunk), mask.split(chunk), strict=True)) for x in ids]
        cz.cached_step((embed, embed), chunks, lambda q, d: loss_fn(q, d, document_ids=document_ids))
        cz.average_gradients(embed)

    seconds: dict[Callable[[], None], list[float]] = {theirs: [], ours: []}
    for _ in range(rounds + 1):
        for step, times in seconds.items():
            encoder.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
    if rank == 0:
        first, second = (statistics.median(x[1:]) for x in seconds.values())
        texts = f"Cached…Loss {1000 * first:.0f} ms", f"GradCache and MNRL with masks {1000 * second:.0f} ms"
        print(f"{', '.join(texts)}: {second / first:.2f} ×")
    dist.destroy_process_group()


def main() -> None:
    given = command_line(__doc__, ranks=2, pairs=128, tokens=64, chunk=32, rounds=9).parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = given.ranks, port, given.pairs, given.tokens, given.chunk, given.rounds
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=measured, args=(rank, *arguments)) for rank in range(given.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
