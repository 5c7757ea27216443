"""Compare every loss of pytorch-metric-learning under DistributedLoss with the same loss on one process, in a table.

``python -m tools.pml_matrix --docs docs/pages/pytorch-metric-learning.md`` measures and writes it.

The table covers every loss, miner, reducer, distance and regularizer that the library exports. ``BUILT`` holds constructors
of losses with required arguments, ``BASES`` the exports that are not compared. An export that is in neither and cannot be
constructed without arguments is a row with the error.
"""

import argparse
import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from contrastive_zoo.distributed import DistributedLoss
from contrastive_zoo.mining import DistributedMiner
from contrastive_zoo.testing.trial import Encoder
from contrastive_zoo.testing.worlds import Worlds

EXACT = 1e-10
"""Largest allowed difference of results in float64."""

SAMPLES, CLASSES, WIDTH = 12, 3, 4

SPLITS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((12,),),
    2: ((6, 6), (4, 8), (12, 0)),
    3: ((4, 4, 4), (1, 8, 3), (5, 0, 7)),
}
"""Samples of each rank by world size: even, uneven, with an empty rank."""

LABELS = torch.arange(CLASSES).repeat_interleave(SAMPLES // CLASSES)
"""The same number of samples in each class, sorted by class, as SmoothAPLoss requires."""

_CLASSES = {"num_classes": CLASSES, "embedding_size": WIDTH}
_Build = Callable[..., nn.Module]


def _with(cls: Any, **settings: Any) -> _Build:
    return lambda **more: cls(**{**settings, **more})


def _self_supervised(loss: nn.Module | None = None, **more: Any) -> nn.Module:
    return losses.SelfSupervisedLoss(loss or losses.NTXentLoss(**more))


def _memory(loss: nn.Module | None = None, **more: Any) -> nn.Module:
    return losses.CrossBatchMemory(loss or losses.ContrastiveLoss(**more), WIDTH, memory_size=2 * SAMPLES - 4)


def _multiple(**more: Any) -> nn.Module:
    members = [losses.TripletMarginLoss(**more), losses.ContrastiveLoss(**more)]
    return losses.MultipleLosses(members, weights=[1.0, 0.5])


BUILT: dict[str, _Build] = {
    "CrossBatchMemory": _memory,
    "DynamicSoftMarginLoss": _with(losses.DynamicSoftMarginLoss, min_val=-4.0, num_bins=20),
    "ManifoldLoss": _with(losses.ManifoldLoss, l=WIDTH, K=3),
    "MarginLoss": _with(losses.MarginLoss, learn_beta=True, num_classes=CLASSES, nu=0.1),
    "MultipleLosses": _multiple,
    "P2SGradLoss": _with(losses.P2SGradLoss, descriptors_dim=WIDTH, num_classes=CLASSES),
    "RankedListLoss": _with(losses.RankedListLoss, margin=0.5, Tn=1),
    "SelfSupervisedLoss": _self_supervised,
    "SoftTripleLoss": _with(losses.SoftTripleLoss, **_CLASSES, centers_per_class=2),
} | {
    name: _with(getattr(losses, name), **_CLASSES)
    for name in (
        "ArcFaceLoss",
        "CosFaceLoss",
        "LargeMarginSoftmaxLoss",
        "NormalizedSoftmaxLoss",
        "ProxyAnchorLoss",
        "ProxyNCALoss",
        "SphereFaceLoss",
        "SubCenterArcFaceLoss",
    )
}
"""Constructors of the losses that have required arguments."""

BASES = {
    "BaseDistance": "a base class",
    "BaseLossWrapper": "a base class",
    "BaseMetricLossFunction": "a base class",
    "BaseMiner": "a base class",
    "BaseReducer": "a base class",
    "BaseRegularizer": "a base class",
    "BatchedDistance": "for inference: it passes each block of the matrix to a function",
    "EmbeddingRegularizerMixin": "a mixin of the losses",
    "GenericPairLoss": "a base class",
    "WeightRegularizerMixin": "a mixin of the losses",
}
"""Exported classes that are not compared, and why."""

AROUND_ANOTHER = ("CrossBatchMemory", "SelfSupervisedLoss")
WITHOUT_LABELS = ("ManifoldLoss", "SelfSupervisedLoss", "VICRegLoss")
ONE_STEP = ("DynamicSoftMarginLoss",)
"""Its histogram keeps the graph of the step before: a second backward pass raises, on one process too."""
IN_FLOAT32 = ("ManifoldLoss", "SmoothAPLoss")
"""They compute in float32 for every input dtype, so the factor 1/W of a trainer is rounded to 24 bits."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ClassWeightedReducer": {"weights": torch.linspace(0.5, 2.0, SAMPLES)},
    "MultipleReducers": {"reducers": {"pos_loss": reducers.SumReducer()}},
    "ThresholdReducer": {"low": 0.1},
    "AngularMiner": {"angle": 10},
    "HDCMiner": {"filter_percentage": 0.3},
    "UniformHistogramMiner": {"num_bins": 5, "pos_per_bin": 3, "neg_per_bin": 3},
}
"""How to build other parts that need to be told something, or do more on a dozen rows if told."""


CENTERS = {"SoftTripleLoss": 2, "SubCenterArcFaceLoss": 3}
"""How many weights a class has, where not one."""


def exports(module: ModuleType) -> list[str]:
    """Names of the classes that a module of the library exports."""
    return sorted(name for name, x in vars(module).items() if inspect.isclass(x) and not name.startswith("_"))


def parts(module: ModuleType) -> list[str]:
    """Those that can be built, which is all but the base classes."""
    return [name for name in exports(module) if name not in BASES]


# ------------------------------------------------------------------------------------------------------------ one case


@dataclass(frozen=True)
class Case:
    """A loss of the library with its parts, by name.

    Args:
        loss: the class.
        miner: the class of its miner.
        mined: whether the miner is given to DistributedLoss (``"inside"``) or called by itself (``"outside"``).
        references: whether there are reference rows.
        parts: settings of the loss, and the class that fills each.
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

    def made(self) -> tuple[nn.Module, nn.Module | None]:
        """The loss and its miner, with parameters that are the same whenever they are made."""
        torch.manual_seed(7)
        settings = {setting: self._part(setting, name) for setting, name in self.parts}
        loss = BUILT.get(self.loss, getattr(losses, self.loss))(**settings).double()
        return loss, None if self.miner is None else self._part("miner", self.miner)

    def _part(self, setting: str, name: str) -> nn.Module:
        settings = SETTINGS.get(name, {})
        if name == "SparseCentersRegularizer":  # as many rows as it is told
            views = 2 if self.loss == "SelfSupervisedLoss" else 1
            of_weights = CLASSES * CENTERS.get(self.loss, 1)
            rows = views * SAMPLES if setting == "embedding_regularizer" else of_weights
            settings = {"num_classes": 1, "centers_per_class": rows}
        part: nn.Module = getattr(_HOMES[setting], name)(**settings)
        return part

    @property
    def steps(self) -> int:
        """Two for a loss by itself, of which some remember the first, and for those that remember rows."""
        remembers = self == Case(self.loss) or self.loss == "CrossBatchMemory"
        return 2 if remembers and self.loss not in ONE_STEP else 1

    @property
    def tolerance(self) -> float:
        """Largest allowed difference, relative to the larger of 1 and the largest expected element."""
        return torch.finfo(torch.float32).eps if self.loss in IN_FLOAT32 else EXACT

    @property
    def inapplicable(self) -> str | None:
        """Why there is no such thing to compare, in words; None if there is."""
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
            return f"is none of those that {self.loss} says it supports"
        return None

    def rows(self, seed: int) -> dict[str, Tensor]:
        """Features of all samples, and labels if the loss takes any, by the loss's names for them."""
        generator = torch.Generator().manual_seed(seed)
        first, second = torch.randn(2, SAMPLES, 3, dtype=torch.float64, generator=generator)
        if self.loss in ("SelfSupervisedLoss", "VICRegLoss"):
            return {"embeddings": first, "ref_emb": first + 0.3 * second}
        labelled = {} if self.loss == "ManifoldLoss" else {"labels": LABELS}
        if not self.references:
            return {"embeddings": first, **labelled}
        return {"embeddings": first, **labelled, "ref_emb": second, "ref_labels": LABELS.flip(0)}


_HOMES = {
    "loss": losses,
    "miner": miners,
    "reducer": reducers,
    "distance": distances,
    "embedding_regularizer": regularizers,
    "weight_regularizer": regularizers,
}


@dataclass
class Found:
    """What a case computed in two steps: numbers by name, or what it raised."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None


Wrap = Callable[..., Any]


def on_ranks(case: Case, shards: Sequence[int], grad_reduction: str, wrap: Wrap = DistributedLoss) -> Found:
    """Two steps on this rank's part of the batches, gradients reduced as the trainer would."""

    def call(loss: nn.Module, miner: nn.Module | None) -> Callable[..., Any]:
        if miner is None or case.mined == "inside":
            return wrap(loss, miner=miner, grad_reduction=grad_reduction)
        return _mined_outside(wrap(loss, grad_reduction=grad_reduction), DistributedMiner(miner))

    def reduced(of_encoder: Tensor) -> Tensor:
        dist.all_reduce(of_encoder)
        return of_encoder / len(shards) if grad_reduction == "mean" else of_encoder

    start = sum(shards[: dist.get_rank()])
    local = slice(start, start + shards[dist.get_rank()])
    # a rank's own stream, which must not matter
    found = _two_steps(case, call, local, seed=100 + dist.get_rank())
    if found.error is None:
        found.numbers["encoder"] = reduced(found.numbers["encoder"])
        if grad_reduction == "sum":  # each rank holds its share of what the trainer adds up
            for name in [name for name in found.numbers if name.startswith("parameter ")]:
                found.numbers[name] = len(shards) * found.numbers[name]
    return found


def on_one_process(case: Case) -> Found:
    """Two steps of the bare loss on all rows: what is to come out."""

    def call(loss: nn.Module, miner: nn.Module | None) -> Callable[..., Any]:
        return loss if miner is None else _mined_outside(loss, miner)

    return _two_steps(case, call, slice(0, SAMPLES), seed=100)


def _mined_outside(loss: Callable[..., Any], miner: Callable[..., Any]) -> Callable[..., Any]:
    def call(**rows: Tensor) -> Any:
        return loss(**rows, indices_tuple=miner(*rows.values()))

    return call


def _two_steps(case: Case, call: Callable[..., Callable[..., Any]], local: slice, *, seed: int) -> Found:
    numbers: dict[str, Tensor] = {}
    try:
        loss, miner = case.made()
        computed = call(loss, miner)
        encoder = Encoder(WIDTH)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for step in range(case.steps):
            rows = {name: x[local] for name, x in case.rows(step).items()}
            rows = {name: encoder(x) if x.is_floating_point() else x for name, x in rows.items()}
            values = [x for x in tree_leaves(computed(**rows)) if isinstance(x, Tensor)]
            for index, value in enumerate(values):
                numbers[f"value {index} of step {step}"] = value.detach().double()
            learnt = [value.sum() for value in values if value.requires_grad]
            if learnt:
                torch.stack(learnt).sum().backward()
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {error}")
    numbers["encoder"] = _gradient(encoder.weight)
    numbers |= {f"parameter {name}": _gradient(x) for name, x in loss.named_parameters()}
    numbers |= {f"buffer {name}": x.detach().double() for name, x in loss.named_buffers()}
    return Found(numbers)


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad.clone()


def difference(found: Found, expected: Found, tolerance: float) -> str | None:
    """In what they differ, in words; None if they do not."""
    if found.error != expected.error:
        return f"raises {found.error}" if found.error else f"one process raises {expected.error}"
    if found.numbers.keys() != expected.numbers.keys():
        return f"differs in {sorted(found.numbers.keys() ^ expected.numbers.keys())}"
    for name, x in expected.numbers.items():
        y = found.numbers[name]
        if x.shape != y.shape:
            return f"{name} has shape {list(y.shape)} instead of {list(x.shape)}"
        if not torch.equal(x.isnan(), y.isnan()):
            return f"{name} is NaN elsewhere"
        apart = (x - y).abs().nan_to_num().amax().item() if x.numel() else 0.0
        if apart > tolerance * max(1.0, x.abs().nan_to_num().amax().item() if x.numel() else 0.0):
            return f"{name} differs by {apart:.1e}"
    return None


# -------------------------------------------------------------------------------------------------------- all of them


def cases() -> Iterator[Case]:
    """Every loss with every miner, reducer, distance and regularizer, with reference rows, with a miner by itself."""
    for loss in parts(losses):
        yield Case(loss)
        for miner in parts(miners):
            yield Case(loss, miner)
        yield Case(loss, references=True)
        yield Case(loss, "MultiSimilarityMiner", references=True)
        yield Case(loss, "BatchHardMiner", mined="outside")
        for outer in AROUND_ANOTHER:
            yield _inside(outer, loss)
        for setting in ("reducer", "distance", "embedding_regularizer", "weight_regularizer"):
            for name in parts(_HOMES[setting]):
                yield Case(loss, parts=((setting, name),))


Splits = Callable[[Case], Sequence[tuple[int, ...]]]


def all_splits(case: Case) -> Sequence[tuple[int, ...]]:
    """Every split for a loss and its miner; for other parts, of which ranks see nothing by themselves, two uneven ones."""
    if case.parts or case.references or case.mined == "outside":
        return [SPLITS[2][1], SPLITS[3][2]]
    return [shards for splits in SPLITS.values() for shards in splits]


def some_splits(case: Case) -> Sequence[tuple[int, ...]]:
    """Every split for a loss by itself; for all else one of several ranks, in turn."""
    if case == Case(case.loss):
        return all_splits(case)
    several = [*SPLITS[2], *SPLITS[3]]
    return [several[crc32(str(case).encode()) % len(several)]]


Verdict = tuple[str | None, str | None]
"""What the bare loss raises on one process, and what is different on several; None for nothing."""


def judged(of_size: Sequence[tuple[Case, tuple[int, ...]]], wrap: Wrap = DistributedLoss) -> list[Verdict]:
    """On a rank: each of these beside one process."""
    expected: dict[Case, Found] = {}
    verdicts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own, about how it calls torch and NumPy
        for case, shards in of_size:
            if case not in expected:
                expected[case] = on_one_process(case)
            # the sum of a trainer that adds up is tried where shards are uneven
            trainer = "sum" if len(set(shards)) > 1 and min(shards) > 0 else "mean"
            different = difference(on_ranks(case, shards, trainer, wrap), expected[case], case.tolerance)
            verdicts.append((expected[case].error, different))
    return verdicts


@dataclass(frozen=True)
class Row:
    """A case, measured.

    Args:
        case: the case.
        refused: why there is nothing to compare, or what the bare loss raises on one process, as then every rank must.
        verdicts: for each split, what some rank found wrong; None if nothing.
    """

    case: Case
    refused: str | None
    verdicts: dict[tuple[int, ...], str | None]

    @property
    def wrong(self) -> dict[tuple[int, ...], str]:
        """The splits on which it is not what one process computes."""
        return {shards: why for shards, why in self.verdicts.items() if why is not None}


def measure(worlds: Worlds, of: Iterable[Case], splits: Splits = all_splits, wrap: Wrap = DistributedLoss) -> list[Row]:
    """All these cases on their splits: one job for each world size."""
    chosen = list(of)
    keys = [(case, shards) for case in chosen if case.inapplicable is None for shards in splits(case)]
    refused: dict[Case, str | None] = {case: case.inapplicable for case in chosen}
    verdicts: dict[Case, dict[tuple[int, ...], str | None]] = {case: {} for case in chosen}
    for size in SPLITS:
        of_size = [(case, shards) for case, shards in keys if len(shards) == size]
        by_rank = worlds.run(size, judged, of_size, wrap, timeout=60.0 + len(of_size)) if of_size else []
        for (case, shards), *found in zip(of_size, *by_rank, strict=True):
            refused[case] = found[0][0]
            verdicts[case][shards] = next((f"rank {rank}: {why}" for rank, (_, why) in enumerate(found) if why), None)
    return [Row(case, refused[case], verdicts[case]) for case in chosen]


# ----------------------------------------------------------------------------------------------------------- the page


class _Notes:
    """Reasons, numbered in the order in which they come up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        reason = " ".join(reason.split()).replace("|", "/")
        short = reason if len(reason) <= 160 else f"{reason[:160]} …"
        return f"<sup>{self.numbers.setdefault(short, len(self.numbers) + 1)}</sup>"

    def cell(self, row: Row) -> str:
        if row.wrong:
            return "✗" + "".join(self.mark(f"{list(shards)}: {why}") for shards, why in row.wrong.items())
        return "✓" if row.refused is None else f"–{self.mark(row.refused)}"

    def lines(self) -> list[str]:
        return [f"{number}. {reason}" for reason, number in self.numbers.items()]


def _inside(outer: str, loss: str) -> Case:
    return Case(outer, parts=(("loss", loss),))


def page(rows: Sequence[Row]) -> str:
    """The tables, and what stands behind each mark."""
    by_case, notes = {row.case: row for row in rows}, _Notes()
    names = parts(losses)

    def table(title: str, columns: Mapping[str, Callable[[str], Case]]) -> list[str]:
        head = [f"| {title} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        body = [[notes.cell(by_case[case(loss)]) for case in columns.values()] for loss in names]
        return [*head, *(f"| {loss} | {' | '.join(cells)} |" for loss, cells in zip(names, body, strict=True)), ""]

    def of_part(setting: str) -> Mapping[str, Callable[[str], Case]]:
        return {x: partial(Case, parts=((setting, x),)) for x in parts(_HOMES[setting])}

    calls = {
        "`ref_emb`, `ref_labels`": partial(Case, references=True),
        "the same with a miner": partial(Case, miner="MultiSimilarityMiner", references=True),
        "`DistributedMiner`": partial(Case, miner="BatchHardMiner", mined="outside"),
    }
    tables = [
        *table("loss with miner", {"no miner": Case} | {x: partial(Case, miner=x) for x in parts(miners)}),
        *table("loss inside", {f"`{x}`": partial(_inside, x) for x in AROUND_ANOTHER}),
        *table("loss with reducer", of_part("reducer")),
        *table("loss with distance", of_part("distance")),
        *table("loss with embedding regularizer", of_part("embedding_regularizer")),
        *table("loss with weight regularizer", of_part("weight_regularizer")),
        *table("call", calls),
    ]
    measured = [(shards, why) for row in rows for shards, why in row.verdicts.items()]
    by_split = Counter(shards for shards, _ in measured)
    wrong = Counter(shards for shards, why in measured if why)
    splits = ["| W | samples by rank | compared | different |", "|---|---|---|---|"]
    splits += [f"| {len(x)} | {list(x)} | {by_split[x]} | {wrong[x]} |" for x in sorted(by_split, key=lambda x: len(x))]
    left_out = [f"- `{name}`: {why}." for name, why in BASES.items()]
    return "\n".join(
        [
            f"pytorch-metric-learning {version('pytorch-metric-learning')}, torch {torch.__version__.split('+')[0]}.",
            "",
            *splits,
            "",
            "✓ equal to one process; – not supported by the library on one process, for the reason in the note, and the "
            "same error on every rank; ✗ different, with split and reason in the note.",
            "",
            *tables,
            *notes.lines(),
            "",
            "Exported, but not compared:",
            "",
            *left_out,
        ]
    )


BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


def written(text: str, table: str) -> str:
    """The page with what stands between the marks replaced.

    Example:
        >>> written("<!-- matrix: begin -->old<!-- matrix: end -->", "new")
        '<!-- matrix: begin -->\\nnew\\n<!-- matrix: end -->'
    """
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Measure, say what is different, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help=f"the page to write to, between {BEGIN} and {END}")
    path = parser.parse_args().docs
    with Worlds() as worlds:
        rows = measure(worlds, cases())
    for row in rows:
        for shards, why in row.wrong.items():
            print(f"{row.case}, shards {list(shards)}: {why}")
    compared = sum(len(row.verdicts) for row in rows)
    print(f"{len(rows)} cases, {compared} comparisons, {sum(len(row.wrong) for row in rows)} different")
    if path is not None:
        path.write_text(written(path.read_text(encoding="utf-8"), page(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
