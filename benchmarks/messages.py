"""Number of collectives of a step of typical losses on two ranks: forward and backward, small and large batch; one of
them is the handshake.

python benchmarks/messages.py
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from rich.console import Console
from rich.table import Table

import contrastive_zoo as cz
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.step import splitting

N, D, CLASSES = 16, 8, 4

LOSSES: dict[str, Callable[[], Any]] = {
    "NTXent": lambda: cz.DistributedLoss(cz.NTXent()),
    "Clip": lambda: cz.DistributedLoss(cz.Clip()),
    "SupCon": lambda: cz.DistributedLoss(cz.SupCon()),
    "SigLIP": lambda: cz.DistributedLoss(cz.SigLIP()),
    "Triplet": lambda: cz.DistributedLoss(cz.Triplet()),
    "ProxyAnchor": lambda: cz.DistributedLoss(cz.ProxyAnchor(CLASSES, D)),
    "WeightedSum of NTXent and Clip": lambda: cz.DistributedLoss(cz.WeightedSum([cz.NTXent(), cz.Clip()])),
    "NNCLR": lambda: cz.DistributedLoss(cz.NNCLR(4 * N, D)),
    "CrossBatchMemory of InfoNCE": lambda: cz.DistributedLoss(cz.CrossBatchMemory(cz.InfoNCE(), 4 * N, D)),
    "pml TripletMarginLoss, miner": lambda: cz.DistributedLoss(
        losses.TripletMarginLoss(), miner=miners.MultiSimilarityMiner()
    ),
}
TENSORS = {"NNCLR": 4}  # number of arguments, where it is not 2
LABELLED = {"SupCon", "Triplet", "ProxyAnchor", "pml TripletMarginLoss, miner"}


def collectives(name: str) -> list[int]:
    """Return the numbers of a third step, with the final size of the inline payload: small batch, then large."""
    torch.manual_seed(0)
    loss = LOSSES[name]()
    found = []
    for large in (False, True):
        for _ in range(3):
            count = TENSORS.get(name, 2)
            seeds = (count * dist.get_rank() + k for k in range(count))
            rows = [torch.randn(N, D, generator=torch.Generator().manual_seed(x)).requires_grad_() for x in seeds]
            given = [rows[0], torch.arange(N) % CLASSES] if name in LABELLED else rows
            with splitting(always=large), Messages() as messages:
                loss(*given).backward()
        found.append(len(messages.sent))
    return found


def main() -> None:
    table = Table("loss", "small batch", "large batch", box=None)
    with Worlds() as worlds:
        for name in LOSSES:
            (small, large), _ = worlds.run(2, collectives, name)
            table.add_row(name, str(small), str(large))
    Console().print(table)


if __name__ == "__main__":
    main()
