"""Losses of pytorch-metric-learning with their miners, inside one another and with references, and how they are split."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.testing.batch import FEATURES
from tools.comparison import Batch, Run, Wrap

SAMPLES, CLASSES, WIDTH = 12, 3, 4

LABELS = torch.arange(CLASSES).repeat_interleave(SAMPLES // CLASSES)
"""The same number of samples in each class, sorted by class, as SmoothAPLoss requires."""


def _memory(loss: nn.Module | None = None) -> nn.Module:
    return losses.CrossBatchMemory(loss or losses.ContrastiveLoss(), WIDTH, memory_size=2 * SAMPLES - 4)


def _multiple() -> nn.Module:
    return losses.MultipleLosses([losses.TripletMarginLoss(), losses.ContrastiveLoss()], weights=[1.0, 0.5])


_OF_CLASSES = (
    "ArcFaceLoss", "CosFaceLoss", "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss", "ProxyNCALoss",
    "SphereFaceLoss", "SubCenterArcFaceLoss",
)  # fmt: skip
_CLASSES = {"num_classes": CLASSES, "embedding_size": WIDTH}
BUILT: dict[str, Callable[..., nn.Module]] = {
    "CrossBatchMemory": _memory,
    "DynamicSoftMarginLoss": partial(losses.DynamicSoftMarginLoss, min_val=-4.0, num_bins=20),
    "ManifoldLoss": partial(losses.ManifoldLoss, l=WIDTH, K=3),
    "MarginLoss": partial(losses.MarginLoss, learn_beta=True, num_classes=CLASSES, nu=0.1),
    "MultipleLosses": _multiple,
    "P2SGradLoss": partial(losses.P2SGradLoss, descriptors_dim=WIDTH, num_classes=CLASSES),
    "RankedListLoss": partial(losses.RankedListLoss, margin=0.5, Tn=1),
    "SelfSupervisedLoss": lambda loss=None: losses.SelfSupervisedLoss(loss or losses.NTXentLoss()),
    "SoftTripleLoss": partial(losses.SoftTripleLoss, **_CLASSES, centers_per_class=2),
    **{name: partial(getattr(losses, name), **_CLASSES) for name in _OF_CLASSES},
    "AngularMiner": partial(miners.AngularMiner, angle=10),
    "HDCMiner": partial(miners.HDCMiner, filter_percentage=0.3),
    "UniformHistogramMiner": partial(miners.UniformHistogramMiner, num_bins=5, pos_per_bin=3, neg_per_bin=3),
}

_BASES = "LossWrapper", "MetricLossFunction", "Miner"
BASES = ("EmbeddingRegularizerMixin", "GenericPairLoss", "WeightRegularizerMixin", *(f"Base{x}" for x in _BASES))
"""Exported base classes and mixins, which are not compared."""

AROUND_ANOTHER = ("CrossBatchMemory", "SelfSupervisedLoss")
WITHOUT_LABELS = ("ManifoldLoss", "SelfSupervisedLoss", "VICRegLoss")
OF_ITS_BATCH = ("LiftedStructureLoss", "ThresholdConsistentMarginLoss")
"""Losses that look up references among the anchors, which DistributedLoss refuses."""
ONE_STEP = ("DynamicSoftMarginLoss",)
"""Losses whose histogram holds the graph of the previous step: a second backward pass raises, on one process too."""
IN_FLOAT32 = ("ManifoldLoss", "SmoothAPLoss")
"""Losses that compute in float32 for every input dtype, so the factor 1/W of a trainer is rounded to 24 bits."""


def parts(module: ModuleType) -> list[str]:
    names = (name for name, x in vars(module).items() if inspect.isclass(x) and not name.startswith("_"))
    return sorted(name for name in names if name not in BASES)


@dataclass(frozen=True)
class Case:
    """A loss of the library, by name.

    Args:
        loss: name of the class.
        miner: name of the miner's class.
        mined: whether DistributedLoss calls the miner (``"inside"``) or the caller does (``"outside"``).
        references: whether there are reference embeddings.
        inner: name of the class of the loss inside it.
    """

    loss: str
    miner: str | None = None
    mined: str = "inside"
    references: bool = False
    inner: str | None = None

    width = WIDTH

    def __str__(self) -> str:
        parts = [self.miner, self.inner, "reference rows" if self.references else None]
        outside = " by itself" if self.mined == "outside" else ""
        return " + ".join([self.loss, *filter(None, parts)]) + outside

    def construct(self) -> tuple[nn.Module, nn.Module | None]:
        torch.manual_seed(7)
        make: Any = BUILT.get(self.loss, getattr(losses, self.loss, None))
        settings = {} if self.inner is None else {"loss": Case(self.inner).construct()[0]}
        loss: nn.Module = make(**settings).double()
        mining: Any = None if self.miner is None else BUILT.get(self.miner, getattr(miners, self.miner, None))
        return loss, None if mining is None else mining()

    def start(self, wrap: Wrap | None, **options: Any) -> tuple[nn.Module, Callable[[Batch], Any]]:
        loss, miner = self.construct()
        call: Any = (
            loss if wrap is None else wrap(loss, **options, **({"miner": miner} if self.mined == "inside" else {}))
        )
        if miner is not None and (wrap is None or self.mined == "outside"):
            call = _mined(call, miner if wrap is None else DistributedMiner(miner))
        return loss, lambda batch: call(**self.arguments(batch))

    @property
    def steps(self) -> int:
        """Return the number of steps: two for a loss by itself and for CrossBatchMemory, which may have state."""
        stateful = self == Case(self.loss) or self.loss == "CrossBatchMemory"
        return 2 if stateful and self.loss not in ONE_STEP else 1

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference, relative to the larger of 1 and the largest expected element."""
        return torch.finfo(torch.float32).eps if self.loss in IN_FLOAT32 else 1e-10

    @property
    def inapplicable(self) -> str | None:
        """Return in words why the library has no such case; None if it has."""
        cls: Any = getattr(losses, self.loss)
        if self.miner is not None and self.loss in WITHOUT_LABELS:
            return "takes no labels, which a miner needs"
        if self.references and not {"ref_emb", "ref_labels"} <= inspect.signature(cls.forward).parameters.keys():
            return "takes no reference rows"
        if self.references and self.loss in OF_ITS_BATCH:
            return "is wrong for other references than its batch"
        if self.inner is not None and self.inner not in cls.supported_losses():
            return f"is not among the losses that {self.loss} supports"
        return None

    def arguments(self, batch: Batch) -> dict[str, Tensor]:
        first, second = batch.normal(0, FEATURES), batch.normal(1, FEATURES)
        embeddings = {"embeddings": batch.encoder(first)}
        if self.loss in ("SelfSupervisedLoss", "VICRegLoss"):
            return embeddings | {"ref_emb": batch.encoder(first + 0.3 * second)}
        if self.loss == "ManifoldLoss":
            return embeddings
        embeddings["labels"] = batch.local(LABELS) if self.loss == "SmoothAPLoss" else _labels(batch)
        if not self.references:
            return embeddings
        others = replace(batch, shards=(*batch.shards[:-1], batch.shards[-1] + 1))  # there is one reference more
        return embeddings | {"ref_emb": batch.encoder(others.normal(2, FEATURES)), "ref_labels": _labels(others)}


def _labels(batch: Batch) -> Tensor:
    """Return drawn classes, of which the first and the last sample have the same one."""
    labels = torch.randint(CLASSES, (batch.total,), generator=torch.Generator().manual_seed(batch.step))
    labels[-1:] = labels[:1]
    return batch.local(labels)


def _mined(loss: Callable[..., Any], miner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: loss(**arguments, indices_tuple=miner(*arguments.values()))


def cases() -> Iterator[Case]:
    """Yield every loss with every miner, inside another, with references, and with a separate miner."""
    for loss in parts(losses):
        yield Case(loss)
        yield from (Case(loss, miner) for miner in parts(miners))
        yield from (Case(outer, inner=loss) for outer in AROUND_ANOTHER)
        yield Case(loss, references=True)
        yield Case(loss, "MultiSimilarityMiner", references=True)
        yield Case(loss, "BatchHardMiner", mined="outside")


SPLITS = ((12,), (6, 6), (4, 8), (12, 0), (4, 4, 4), (1, 8, 3), (5, 0, 7))
"""Samples of each rank: even, uneven, with an empty rank."""


def run_of(case: Case, shards: tuple[int, ...]) -> Run:
    """Return the steps of a split; uneven shards are tested with a trainer that sums gradients."""
    return Run((shards,) * case.steps, "sum" if len(set(shards)) > 1 and min(shards) > 0 else "mean")


def all_runs(case: Case) -> list[Run]:
    """Return every split for a loss and its miner; for others two uneven splits."""
    if case.inapplicable is not None:
        return []
    few = case.inner or case.references or case.mined == "outside"
    return [run_of(case, shards) for shards in ((4, 8), (5, 0, 7)) if few] or [run_of(case, x) for x in SPLITS]


def some_runs(case: Case) -> list[Run]:
    """Return a split over several ranks; for a loss by itself one with an empty rank, one without, and one process."""
    if case.inapplicable is not None:
        return []
    drawn = crc32(str(case).encode())
    if case != Case(case.loss):
        return [run_of(case, SPLITS[1 + drawn % (len(SPLITS) - 1)])]
    empty, full = ([x for x in SPLITS[1:] if (0 in x) == has_empty] for has_empty in (True, False))
    return [run_of(case, x) for x in (SPLITS[0], empty[drawn % len(empty)], full[drawn % len(full)])]
