"""How to construct the losses and the other parts of pytorch-metric-learning."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from torch import nn

SAMPLES, CLASSES, WIDTH = 12, 3, 4

LABELS = torch.arange(CLASSES).repeat_interleave(SAMPLES // CLASSES)
"""The same number of samples in each class, sorted by class, as SmoothAPLoss requires."""

_CLASSES = {"num_classes": CLASSES, "embedding_size": WIDTH}
_Build = Callable[..., nn.Module]


def _configured(cls: Any, **settings: Any) -> _Build:
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
    "DynamicSoftMarginLoss": _configured(losses.DynamicSoftMarginLoss, min_val=-4.0, num_bins=20),
    "ManifoldLoss": _configured(losses.ManifoldLoss, l=WIDTH, K=3),
    "MarginLoss": _configured(losses.MarginLoss, learn_beta=True, num_classes=CLASSES, nu=0.1),
    "MultipleLosses": _multiple,
    "P2SGradLoss": _configured(losses.P2SGradLoss, descriptors_dim=WIDTH, num_classes=CLASSES),
    "RankedListLoss": _configured(losses.RankedListLoss, margin=0.5, Tn=1),
    "SelfSupervisedLoss": _self_supervised,
    "SoftTripleLoss": _configured(losses.SoftTripleLoss, **_CLASSES, centers_per_class=2),
} | {
    name: _configured(getattr(losses, name), **_CLASSES)
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
"""Losses whose histogram holds the graph of the previous step: a second backward pass raises, on one process too."""
IN_FLOAT32 = ("ManifoldLoss", "SmoothAPLoss")
"""Losses that compute in float32 for every input dtype, so the factor 1/W of a trainer is rounded to 24 bits."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ClassWeightedReducer": {"weights": torch.linspace(0.5, 2.0, SAMPLES)},
    "MultipleReducers": {"reducers": {"pos_loss": reducers.SumReducer()}},
    "ThresholdReducer": {"low": 0.1},
    "AngularMiner": {"angle": 10},
    "HDCMiner": {"filter_percentage": 0.3},
    "UniformHistogramMiner": {"num_bins": 5, "pos_per_bin": 3, "neg_per_bin": 3},
}
"""Settings of other parts, where required or where 12 samples need them to have an effect."""


CENTERS = {"SoftTripleLoss": 2, "SubCenterArcFaceLoss": 3}
"""Number of weights per class, if it is not one."""

MODULES = {
    "loss": losses,
    "miner": miners,
    "reducer": reducers,
    "distance": distances,
    "embedding_regularizer": regularizers,
    "weight_regularizer": regularizers,
}


def exports(module: ModuleType) -> list[str]:
    """Return the names of the classes that a module of the library exports."""
    return sorted(name for name, x in vars(module).items() if inspect.isclass(x) and not name.startswith("_"))


def parts(module: ModuleType) -> list[str]:
    """Return the names of the exported classes without the base classes."""
    return [name for name in exports(module) if name not in BASES]
