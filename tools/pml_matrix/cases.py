"""The cases of the table: every loss with every miner, reducer, distance and regularizer; and how they are split."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from tools.pml_matrix.constructors import (
    AROUND_ANOTHER,
    BUILT,
    CENTERS,
    CLASSES,
    IN_FLOAT32,
    LABELS,
    MODULES,
    ONE_STEP,
    SAMPLES,
    SETTINGS,
    WITHOUT_LABELS,
    parts,
)

EXACT = 1e-10
"""Largest allowed difference of results in float64."""

SPLITS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((12,),),
    2: ((6, 6), (4, 8), (12, 0)),
    3: ((4, 4, 4), (1, 8, 3), (5, 0, 7)),
}
"""Samples of each rank by world size: even, uneven, with an empty rank."""


@dataclass(frozen=True)
class Case:
    """A loss of the library with its parts, by name.

    Args:
        loss: name of the class.
        miner: name of the miner's class.
        mined: whether DistributedLoss calls the miner (``"inside"``) or the caller does (``"outside"``).
        references: whether there are reference embeddings.
        parts: settings of the loss, and the name of the class of each.
    """

    loss: str
    miner: str | None = None
    mined: str = "inside"
    references: bool = False
    parts: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        with_parts = [self.miner, *(name for _, name in self.parts), "reference rows" if self.references else None]
        outside = " by itself" if self.mined == "outside" else ""
        return " + ".join([self.loss, *filter(None, with_parts)]) + outside

    def construct(self) -> tuple[nn.Module, nn.Module | None]:
        """Construct the loss and its miner, with the same parameters at each call."""
        torch.manual_seed(7)
        settings = {setting: self._part(setting, name) for setting, name in self.parts}
        loss = BUILT.get(self.loss, getattr(losses, self.loss))(**settings).double()
        return loss, None if self.miner is None else self._part("miner", self.miner)

    def _part(self, setting: str, name: str) -> nn.Module:
        settings = SETTINGS.get(name, {})
        if name == "SparseCentersRegularizer":  # its setting is the number of rows
            views = 2 if self.loss == "SelfSupervisedLoss" else 1
            of_weights = CLASSES * CENTERS.get(self.loss, 1)
            rows = views * SAMPLES if setting == "embedding_regularizer" else of_weights
            settings = {"num_classes": 1, "centers_per_class": rows}
        part: nn.Module = getattr(MODULES[setting], name)(**settings)
        return part

    @property
    def steps(self) -> int:
        """Return the number of steps: two for a loss without parts and for CrossBatchMemory, which may have state."""
        stateful = self == Case(self.loss) or self.loss == "CrossBatchMemory"
        return 2 if stateful and self.loss not in ONE_STEP else 1

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference, relative to the larger of 1 and the largest expected element."""
        return torch.finfo(torch.float32).eps if self.loss in IN_FLOAT32 else EXACT

    @property
    def inapplicable(self) -> str | None:
        """Return in words why the library has no such case; None if it has."""
        cls = getattr(losses, self.loss)
        if self.miner is not None and self.loss in WITHOUT_LABELS:
            return "takes no labels, which a miner needs"
        if self.references and not {"ref_emb", "ref_labels"} <= inspect.signature(cls.forward).parameters.keys():
            return "takes no reference rows"
        if (
            self.parts
            and self.parts[0][0] == "weight_regularizer"
            and not issubclass(cls, losses.WeightRegularizerMixin)
        ):
            return "takes no weight regularizer"
        if self.parts and self.parts[0][0] == "loss" and self.parts[0][1] not in cls.supported_losses():
            return f"is not among the losses that {self.loss} supports"
        return None

    def arguments(self, seed: int) -> dict[str, Tensor]:
        """Return the features of all samples, and labels if the loss takes them, by argument name."""
        generator = torch.Generator().manual_seed(seed)
        first, second = torch.randn(2, SAMPLES, 3, dtype=torch.float64, generator=generator)
        if self.loss in ("SelfSupervisedLoss", "VICRegLoss"):
            return {"embeddings": first, "ref_emb": first + 0.3 * second}
        labelled = {} if self.loss == "ManifoldLoss" else {"labels": LABELS}
        if not self.references:
            return {"embeddings": first, **labelled}
        return {"embeddings": first, **labelled, "ref_emb": second, "ref_labels": LABELS.flip(0)}


def inside(outer: str, loss: str) -> Case:
    return Case(outer, parts=(("loss", loss),))


def cases() -> Iterator[Case]:
    """Yield every loss with every miner, reducer, distance and regularizer, with references, and with a separate miner."""
    for loss in parts(losses):
        yield Case(loss)
        for miner in parts(miners):
            yield Case(loss, miner)
        yield Case(loss, references=True)
        yield Case(loss, "MultiSimilarityMiner", references=True)
        yield Case(loss, "BatchHardMiner", mined="outside")
        for outer in AROUND_ANOTHER:
            yield inside(outer, loss)
        for setting in ("reducer", "distance", "embedding_regularizer", "weight_regularizer"):
            for name in parts(MODULES[setting]):
                yield Case(loss, parts=((setting, name),))


Splits = Callable[[Case], Sequence[tuple[int, ...]]]


def all_splits(case: Case) -> Sequence[tuple[int, ...]]:
    """Return every split for a loss and its miner; for other parts, which do not depend on ranks, two uneven splits."""
    if case.parts or case.references or case.mined == "outside":
        return [SPLITS[2][1], SPLITS[3][2]]
    return [shards for splits in SPLITS.values() for shards in splits]


def some_splits(case: Case) -> Sequence[tuple[int, ...]]:
    """Return every split for a loss without parts; for other cases one split over several ranks."""
    if case == Case(case.loss):
        return all_splits(case)
    several = [*SPLITS[2], *SPLITS[3]]
    return [several[crc32(str(case).encode()) % len(several)]]
