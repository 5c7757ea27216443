"""Every loss of pytorch-metric-learning with every distance, reducer, regulariser and miner, in shards and whole."""

import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from pytorch_metric_learning import distances as D
from pytorch_metric_learning import losses as L
from pytorch_metric_learning import miners as M
from pytorch_metric_learning import reducers as R
from pytorch_metric_learning import regularizers as G
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.pml.sharded.sharded_loss import EVALUATED
from tests.helpers import distance, split
from tools.pml_matrix.constructors import BUILT, WIDTH

CLASSES = 6


def _build(name: str, **parts: Any) -> Any:
    of_classes = {"num_classes": CLASSES} if name in BUILT and name not in _WITHOUT_CLASSES else {}
    return BUILT.get(name, getattr(L, name))(**of_classes, **parts)


_WITHOUT_CLASSES = ("MultipleLosses", "RankedListLoss")
LOSSES = {x.__name__.removesuffix("Loss"): partial(_build, x.__name__) for x in (*EVALUATED, L.MultipleLosses)}
PARTS: dict[str, dict[str, Callable[[], Any]]] = {
    "distance": {
        "cosine": D.CosineSimilarity,
        "dot": D.DotProductSimilarity,
        "L2": D.LpDistance,
        "L1 squared": lambda: D.LpDistance(p=1, power=2, normalize_embeddings=False),
        "SNR": D.SNRDistance,
    },
    "reducer": {
        "mean": R.MeanReducer,
        "sum": R.SumReducer,
        "above 0": R.AvgNonZeroReducer,
        "threshold": lambda: R.ThresholdReducer(low=0.1, high=0.9),
        "class weights": lambda: R.ClassWeightedReducer(torch.arange(1.0, 1 + CLASSES)),
        "divisor": R.DivisorReducer,
        "each anchor": R.PerAnchorReducer,
        "each anchor above 0": lambda: R.PerAnchorReducer(R.AvgNonZeroReducer()),
        "several": lambda: R.MultipleReducers({"pos_loss": R.MeanReducer()}, R.SumReducer()),
    },
    "embedding_regularizer": {"norm": G.LpRegularizer, "centre": G.CenterInvariantRegularizer},
}
MINERS: dict[str, Callable[[], Any]] = {
    "angular": M.AngularMiner,
    "easy": M.BatchEasyHardMiner,
    "hardest": M.BatchHardMiner,
    "weighted": M.DistanceWeightedMiner,
    "triplets": M.EmbeddingsAlreadyPackagedAsTriplets,
    "HDC": M.HDCMiner,
    "multi-similarity": M.MultiSimilarityMiner,
    "pair margins": M.PairMarginMiner,
    "semihard": lambda: M.TripletMarginMiner(0.3, "semihard"),
    "histogram": lambda: M.UniformHistogramMiner(num_bins=4, pos_per_bin=2, neg_per_bin=2),
}


class Case(NamedTuple):
    """A loss and a miner, made anew on every rank."""

    loss: Callable[[], Any]
    miner: Callable[[], Any] | None = None


class Combination(NamedTuple):
    """Names of a loss, and of its parts; None for the part that it has by default, or for no miner."""

    loss: str
    distance: str | None = None
    reducer: str | None = None
    regularizer: str | None = None
    miner: str | None = None

    def case(self) -> Case:
        parts = zip(PARTS, (self.distance, self.reducer, self.regularizer), strict=True)
        settings = {part: PARTS[part][name] for part, name in parts if name is not None}
        return Case(
            lambda: LOSSES[self.loss](**{part: make() for part, make in settings.items()}),
            None if self.miner is None else MINERS[self.miner],
        )


def combinations() -> Iterator[Combination]:
    """All of them, whether or not the library accepts them."""
    parts = ((None, *names) for names in PARTS.values())
    return itertools.starmap(Combination, itertools.product(LOSSES, *parts, (None, *MINERS)))


class Rows(NamedTuple):
    """Embeddings and labels, with or without reference embeddings and labels."""

    z: Tensor
    labels: Tensor
    references: Tensor | None = None
    reference_labels: Tensor | None = None


Shards = tuple[int, ...]


def whole(case: Case, rows: Rows) -> list[Tensor]:
    """Return what pytorch-metric-learning computes on one process: the value and the gradients."""
    torch.manual_seed(0)
    loss, miner = case.loss().double(), case.miner and case.miner()
    leaves = [x.clone().requires_grad_() for x in rows[::2] if x is not None]
    others = [] if rows.references is None else [leaves[1], rows.reference_labels]
    torch.manual_seed(3)
    indices = miner(leaves[0], rows.labels, *others) if miner else None
    value = loss(leaves[0], rows.labels, indices, *others)
    return [value.detach(), *_gradients(value, [*leaves, *loss.parameters()])]


def in_shards(
    case: Case, rows: Rows, shards: Shards, *, put: Callable[[Any], Any] = lambda x: x, steps: int = 1
) -> list[Tensor]:
    """Return the same on every rank, of the last step: the embeddings' gradients are those of all ranks."""
    torch.manual_seed(0)
    loss, miner = put(case.loss().double()), case.miner and case.miner()
    rank = dist.get_rank()
    sizes = [shards, shards, *[(*shards[:-1], shards[-1] + 1)] * 2]  # there is one reference more
    local = [put(split(x, of)[rank].clone()) for x, of in zip(rows, sizes, strict=True) if x is not None]
    leaves = [x.requires_grad_() for x in local[::2]]
    wrapper = cz.DistributedLoss(loss, miner=miner, mode="sharded", check_distinct=False)
    for _ in range(steps):
        torch.manual_seed(3 if rank == 0 else 77)  # dropout and augmentation differ between ranks
        value = wrapper(*local) if rows.references is None else wrapper(*local[:2], None, *local[2:])
        gradients = _gradients(value, [*leaves, *loss.parameters()])
    for nth, (x, of) in enumerate(zip(rows[::2], sizes[::2], strict=True)):
        if x is not None:
            total = put(torch.zeros_like(x))
            split(total, of)[rank].copy_(gradients[nth] / len(shards))
            dist.all_reduce(total)
            gradients[nth] = total
    return [value.detach(), *gradients]


def _gradients(value: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    return [*torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)]


def largest_difference(x: list[Tensor], y: list[Tensor]) -> float:
    differences = [distance(a, b) for a, b in zip(x, y, strict=True)]
    return max(float("inf") if x != x else x for x in differences)


Verdict = tuple[str, str]
"""One of these, and what was found where it is wrong.

"the same" value and gradients as on one process, "not the same", "refused", "raises", or "not accepted" by the library
itself, which raises or returns NaN. "on a threshold": the library counts a loss above 0 that is a rounding error.
"""
WRONG = ("not the same", "raises")
Chosen = tuple[Combination, Shards, int]
"""A combination, shard sizes, and the seed of the rows."""
SHARDS: dict[int, list[Shards]] = {2: [(7, 5), (0, 11), (3, 1)], 3: [(4, 0, 8), (6, 2, 3)]}


def drawn(world_size: int, count: int | None = None, seed: int = 0) -> list[Chosen]:
    """Return so many combinations, or all, each with uneven shards, one of which may be empty, and a seed."""
    draw, grid = random.Random(seed), [*combinations()]
    indices = draw.sample(range(len(grid)), len(grid) if count is None else count)
    return [(grid[index], draw.choice(SHARDS[world_size]), index) for index in indices]


def compared(chosen: Sequence[Chosen], world_size: int, worlds: Worlds) -> tuple[Counter[str], list[Any]]:
    """Return how many combinations have each verdict, and those that are wrong."""
    counts: Counter[str] = Counter()
    wrong: list[Any] = []
    for start in range(0, len(chosen), 200):
        part = chosen[start : start + 200]
        result = worlds.run(world_size, verdicts, part, timeout=120.0)[0]
        counts.update(verdict for verdict, _ in result)
        wrong += [(*x, *verdict) for x, verdict in zip(part, result, strict=True) if verdict[0] in WRONG]
    return counts, wrong


def verdicts(chosen: Iterable[Chosen]) -> list[Verdict]:
    """On every rank: each combination with these shards and this seed, in shards and on one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_verdict(*x) for x in chosen]


def _verdict(combination: Combination, shards: Shards, seed: int) -> Verdict:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (sum(shards),), generator=generator)
    rows = Rows(torch.randn(sum(shards), WIDTH, generator=generator, dtype=torch.float64), labels)
    case = combination.case()
    try:
        expected = whole(case, rows)
    except Exception:  # many combinations mean nothing, and fail in many ways
        return "not accepted", ""
    if any(x.isnan().any() for x in expected):  # as NCA without any positive
        return "not accepted", ""
    try:
        found = in_shards(case, rows, shards)
    except (RuntimeError, ValueError) as error:
        return ("refused", "") if "in shards" in str(error) else ("raises", str(error))
    worst = largest_difference(found, expected)
    if worst <= 1e-9:
        return "the same", ""
    return ("on a threshold", "") if _has_rounding_error(case, rows) else ("not the same", f"by {worst:.2g}")


def _has_rounding_error(case: Case, rows: Rows) -> bool:
    """Return whether a reducer gets a loss that is next to its bound, as FastAP's 1 − 1 is next to 0."""
    distances: list[float] = []
    reduce = R.ThresholdReducer.element_reduction_helper

    def recorded(self: Any, losses: Tensor, embeddings: Tensor) -> Tensor:
        for bound in (self.low, self.high):
            distances.extend([] if bound is None else (losses - bound).abs().flatten().tolist())
        return reduce(self, losses, embeddings)

    with patch.object(R.ThresholdReducer, "element_reduction_helper", recorded):
        whole(case, rows)
    return any(0 < x < 1e-12 for x in distances)


def main() -> None:
    """Print the verdicts on all combinations: ``python -m tests.adapters.sharded_grid [WORLD_SIZE]``."""
    world_size = int([*sys.argv, "2"][1])
    with Worlds() as worlds:
        counts, wrong = compared(drawn(world_size), world_size, worlds)
    print(f"{counts.total():,} combinations: {', '.join(f'{count:,} {name}' for name, count in counts.most_common())}")
    print(*wrong, sep="\n")


if __name__ == "__main__":
    main()
