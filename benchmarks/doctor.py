"""The doctor on losses that are right: every finding is a false alarm. How many seconds a check takes.

python -m benchmarks.doctor [--examples 12]    # batches of each check, on 1, 2 and 3 processes
"""

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.nn.functional import normalize

from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.check import examine
from contrastive_zoo.testing.measurement import Call
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.distributed import DistributedLoss
from tools.peer_losses.arguments import WIDTH, rows, targets, unit_rows
from tools.peer_losses.losses import PeerLoss, table
from tools.pml_matrix import constructors as pml

CLASSES = 64
"""The labels of a check are below it."""


class Right(NamedTuple):
    """A loss that is right, under DistributedLoss."""

    library: str
    name: str
    make: Callable[[], DistributedLoss]
    call: Call
    width: int | None = None


class OfViews(nn.Module):
    """A loss of another library that takes two views, by position."""

    def __init__(self, peer: PeerLoss) -> None:
        super().__init__()
        self.loss, self.arguments = peer.construct(), [*peer.takes.values()]

    def forward(self, view1: Tensor, view2: Tensor) -> Any:
        prepared: dict[Any, Callable[[Tensor], Tensor]] = {unit_rows: partial(normalize, dim=1), targets: Tensor.detach}
        views = zip((view1, view2), self.arguments, strict=True)
        return self.loss(*(prepared.get(of, Tensor.clone)(x) for x, of in views))


def _of_pml(name: str, settings: dict[str, Any]) -> DistributedLoss:
    return DistributedLoss(pml.BUILT.get(name, getattr(losses, name))(**settings))


def _of_peer(peer: PeerLoss) -> DistributedLoss:
    return DistributedLoss(OfViews(peer))


def right_losses() -> Iterator[Right]:
    """Yield the losses of this library, of pytorch-metric-learning, and of two views of others."""
    for entry in CATALOGUE.values():
        if entry.call != "other":
            yield Right("contrastive_zoo", entry.name, lambda entry=entry: DistributedLoss(entry.make()), entry.call)
    left_out = {*pml.ONE_STEP, *pml.WITHOUT_LABELS, "SmoothAPLoss"}  # SmoothAPLoss takes blocks of equal classes only
    composites = {"CrossBatchMemory", "MultipleLosses", "RankedListLoss"}
    for name in pml.parts(losses):
        settings = {"num_classes": CLASSES} if name in pml.BUILT.keys() - composites else {}
        if name not in left_out:
            yield Right("pytorch-metric-learning", name, partial(_of_pml, name, settings), "labels", pml.WIDTH)
    for peer in table():
        if len(peer.takes) == 2 and all(x in (rows, targets, unit_rows) for x in peer.takes.values()):
            yield Right(peer.package, str(peer), partial(_of_peer, peer), "views", WIDTH)


def main() -> None:
    """Check all, print what the doctor finds, and the times by library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=12, help="batches of each check")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    alarms = 0
    warnings.simplefilter("ignore")
    with Worlds(timeout=30.0) as worlds:
        for right in right_losses():
            try:
                report = examine(
                    right.make,
                    world_sizes=(1, 2, 3),
                    call=right.call,
                    width=right.width,
                    max_examples=options.examples,
                    worlds=worlds,
                    name=right.name,
                )
            except ValueError as error:
                print(f"{right.library} {right.name}: not checked. {error}", flush=True)
                continue
            seconds.setdefault(right.library, []).append(report.seconds)
            if not report.ok:
                alarms += 1
                print(f"{right.library} {right.name}: {report}", flush=True)
    for library, of_library in seconds.items():
        median, most = statistics.median(of_library), max(of_library)
        print(f"{library}: {len(of_library)} losses, median {median:.2f} s, most {most:.2f} s")
    print(f"{sum(map(len, seconds.values()))} losses, {alarms} false alarms")


if __name__ == "__main__":
    main()
