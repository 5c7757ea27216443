"""Number of collectives of a step of typical losses on two ranks: forward and backward, small and large batch.

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
from contrastive_zoo.small_batch import splitting
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds

N, D, CLASSES = 16, 8, 4

LOSSES: dict[str, Callable[[], Any]] = {
    "NTXent": lambda: cz.DistributedLoss(cz.NTXent()),
    "Clip": lambda: cz.DistributedLoss(cz.Clip()),
    "SupCon": lambda: cz.DistributedLoss(cz.SupCon()),
    "SigLIP": lambda: cz.DistributedLoss(cz.SigLIP()),
    "Triplet": lambda: cz.DistributedLoss(cz.Triplet()),
    "ProxyAnchor": lambda: cz.DistributedLoss(cz.ProxyAnchor(CLASSES, D)),
    "WeightedSum of NTXent and Clip": lambda: cz.DistributedLoss(cz.WeightedSum([cz.NTXent(), cz.Clip()])),
    "pml TripletMarginLoss, miner": lambda: cz.DistributedLoss(
        losses.TripletMarginLoss(), miner=miners.MultiSimilarityMiner()
    ),
}
LABELLED = {"SupCon", "Triplet", "ProxyAnchor", "pml TripletMarginLoss, miner"}


def collectives(name: str) -> list[int]:
    """Return the numbers of a third step, with the final size of the inline payload: small batch, then large."""
    torch.manual_seed(0)
    loss = LOSSES[name]()
    found = []
    for large in (False, True):
        for _ in range(3):
            a, b = (torch.randn(N, D, generator=torch.Generator().manual_seed(2 * dist.get_rank() + k)) for k in (0, 1))
            second = torch.arange(N) % CLASSES if name in LABELLED else b.requires_grad_()
            with splitting(always=large), Messages() as messages:
                loss(a.requires_grad_(), second).backward()
        found.append(len(messages.sent))
    return found


def main() -> None:
    """Print a row for each loss."""
    table = Table("loss", "small batch", "large batch", box=None)
    with Worlds() as worlds:
        for name in LOSSES:
            (small, large), _ = worlds.run(2, collectives, name)
            table.add_row(name, str(small), str(large))
    Console().print(table)


if __name__ == "__main__":
    main()
