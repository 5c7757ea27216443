"""Every loss of pytorch-metric-learning with every distance, reducer, regulariser and miner, in shards and whole."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pytorch_metric_learning import distances as D
from pytorch_metric_learning import losses as L
from pytorch_metric_learning import miners as M
from pytorch_metric_learning import reducers as R
from pytorch_metric_learning import regularizers as G
from torch import Tensor, nn

import contrastive_zoo as cz
from tests.helpers import distance

CLASSES, WIDTH = 4, 3
_WITH_CLASSES = {"num_classes": CLASSES, "embedding_size": WIDTH}

LOSSES: dict[str, Callable[..., Any]] = {
    "Angular": L.AngularLoss,
    "Circle": L.CircleLoss,
    "Contrastive": L.ContrastiveLoss,
    "FastAP": L.FastAPLoss,
    "GeneralizedLifted": L.GeneralizedLiftedStructureLoss,
    "Instance": L.InstanceLoss,
    "IntraPairVariance": L.IntraPairVarianceLoss,
    "Lifted": L.LiftedStructureLoss,
    "Margin": L.MarginLoss,
    "Margin, learnt": lambda **parts: L.MarginLoss(learn_beta=True, nu=0.1, num_classes=CLASSES, **parts),
    "MultiSimilarity": L.MultiSimilarityLoss,
    "NCA": L.NCALoss,
    "NPairs": L.NPairsLoss,
    "NTXent": L.NTXentLoss,
    "PNP": L.PNPLoss,
    "RankedList": lambda **parts: L.RankedListLoss(margin=0.4, Tn=-2, Tp=-1, **parts),
    "SignalToNoise": L.SignalToNoiseRatioContrastiveLoss,
    "SupCon": L.SupConLoss,
    "ThresholdConsistent": L.ThresholdConsistentMarginLoss,
    "Triplet": L.TripletMarginLoss,
    "Tuplet": L.TupletMarginLoss,
    "ArcFace": lambda **parts: L.ArcFaceLoss(**_WITH_CLASSES, **parts),
    "CosFace": lambda **parts: L.CosFaceLoss(**_WITH_CLASSES, **parts),
    "LargeMarginSoftmax": lambda **parts: L.LargeMarginSoftmaxLoss(**_WITH_CLASSES, **parts),
    "NormalizedSoftmax": lambda **parts: L.NormalizedSoftmaxLoss(**_WITH_CLASSES, **parts),
    "P2SGrad": lambda **parts: L.P2SGradLoss(WIDTH, CLASSES, **parts),
    "ProxyNCA": lambda **parts: L.ProxyNCALoss(**_WITH_CLASSES, **parts),
    "SoftTriple": lambda **parts: L.SoftTripleLoss(**_WITH_CLASSES, **parts),
    "SphereFace": lambda **parts: L.SphereFaceLoss(**_WITH_CLASSES, **parts),
    "SubCenterArcFace": lambda **parts: L.SubCenterArcFaceLoss(**_WITH_CLASSES, **parts),
    "Multiple": lambda **parts: L.MultipleLosses(
        [L.ContrastiveLoss(**parts), L.MultiSimilarityLoss()], weights=[1, 0.5]
    ),
}
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


class Combination(NamedTuple):
    """Names of a loss, and of its parts; None for the part that it has by default, or for no miner."""

    loss: str
    distance: str | None
    reducer: str | None
    regularizer: str | None
    miner: str | None

    def make(self) -> tuple[nn.Module, Any]:
        """The loss and the miner, the same on every rank."""
        torch.manual_seed(0)
        parts = zip(PARTS, (self.distance, self.reducer, self.regularizer), strict=True)
        loss = LOSSES[self.loss](**{part: PARTS[part][name]() for part, name in parts if name is not None})
        return loss.double(), None if self.miner is None else MINERS[self.miner]()


def combinations() -> Iterator[Combination]:
    """All of them, whether or not the library accepts them."""
    parts = ((None, *names) for names in PARTS.values())
    return itertools.starmap(Combination, itertools.product(LOSSES, *parts, (None, *MINERS)))


Verdict = tuple[str, float]
""""the same" or "not the same" with the largest difference, "refused", or "not accepted" by the library itself."""


def verdicts(chosen: Iterable[tuple[Combination, tuple[int, ...], int]]) -> list[Verdict]:
    """On every rank: each combination with these shards and this seed, in shards and on one process."""
    return [_verdict(*x) for x in chosen]


def _verdict(combination: Combination, shards: tuple[int, ...], seed: int) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(CLASSES, (sum(shards),), generator=generator)
        z = torch.randn(sum(shards), WIDTH, generator=generator, dtype=torch.float64)
        try:
            expected = _on_one_process(combination, z, labels)
        except Exception:  # many combinations mean nothing, and fail in many ways
            return "not accepted", 0.0
        try:
            found = _in_shards(combination, z, labels, shards)
        except ValueError as error:
            if "in shards" in str(error):
                return "refused", 0.0
            raise AssertionError(f"{combination}, {shards}, seed {seed}") from error
        differences = [distance(x, y) for x, y in zip(found, expected, strict=True)]
        worst = max(float("inf") if x != x else x for x in differences)
        return "the same" if worst <= 1e-9 else "not the same", worst


def _on_one_process(combination: Combination, z: Tensor, labels: Tensor) -> list[Tensor]:
    loss, miner = combination.make()
    z = z.clone().requires_grad_()
    torch.manual_seed(3)
    value = loss(z, labels, miner(z, labels)) if miner else loss(z, labels)
    return [value.detach(), *_gradients(value, [z, *loss.parameters()])]


def _in_shards(combination: Combination, z: Tensor, labels: Tensor, shards: tuple[int, ...]) -> list[Tensor]:
    loss, miner = combination.make()
    rank = dist.get_rank()
    mine, own = z.split(shards)[rank].clone().requires_grad_(), labels.split(shards)[rank]
    wrapper = cz.DistributedLoss(loss, miner=miner, mode="sharded", check_distinct=False)
    torch.manual_seed(3 if rank == 0 else 77)
    value = wrapper(mine, own)
    of_rows, *others = _gradients(value, [mine, *loss.parameters()])
    whole = torch.zeros_like(z)
    whole.split(shards)[rank].copy_(of_rows / len(shards))
    dist.all_reduce(whole)
    return [value.detach(), whole, *others]


def _gradients(value: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    return [*torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)]
