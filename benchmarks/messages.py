"""Number of collectives of a step of typical losses on two ranks: forward and backward, small and large batch; one of
them is the handshake.

python benchmarks/messages.py
"""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from suite.harness import program

import contrastive_zoo as cz
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.step import splitting
from tools.pages import table

N, D, CLASSES = 16, 8, 4

LOSSES: dict[str, tuple[Any, int]] = {
    "NTXent": (cz.NTXent, 2),
    "Clip": (cz.Clip, 2),
    "SupCon": (cz.SupCon, 1),
    "SigLIP": (cz.SigLIP, 2),
    "Triplet": (cz.Triplet, 1),
    "ProxyAnchor": (partial(cz.ProxyAnchor, CLASSES, D), 1),
    "WeightedSum of NTXent and Clip": (lambda: cz.WeightedSum([cz.NTXent(), cz.Clip()]), 2),
    "NNCLR": (partial(cz.NNCLR, 4 * N, D), 4),
    "CrossBatchMemory of InfoNCE": (lambda: cz.CrossBatchMemory(cz.InfoNCE(), 4 * N, D), 2),
    "pml TripletMarginLoss, miner": (losses.TripletMarginLoss, 1),
}
"""How each is made, and how many tensors of embeddings it takes; labels follow a single one."""


def collectives(name: str) -> list[int]:
    """Return the numbers of a third step, with the final size of the inline payload: small batch, then large."""
    torch.manual_seed(0)
    make, count = LOSSES[name]
    loss = cz.DistributedLoss(make(), miner=miners.MultiSimilarityMiner() if name.startswith("pml") else None)
    found = []
    for large in (False, True):
        for _ in range(3):
            draw = torch.Generator().manual_seed(dist.get_rank())
            rows = [torch.randn(N, D, generator=draw).requires_grad_() for _ in range(count)]
            labels = [torch.arange(N) % CLASSES] if count == 1 else []
            with splitting(always=large), Messages() as messages:
                loss(*rows, *labels).backward()
        found.append(len(messages.sent))
    return found


def main(_: Namespace) -> dict[str, str]:
    with Worlds() as worlds:
        lines = [[name, *worlds.run(2, collectives, name)[0]] for name in LOSSES]
    return {"messages": table(["loss", "small batch", "large batch"], lines, 1)}


if __name__ == "__main__":
    program(main, __doc__)
