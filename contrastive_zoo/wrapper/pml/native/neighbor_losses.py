"""Translations of losses that weigh each anchor's positives against its other candidates, and of VICReg."""

from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.row_statistics import AnyOf, Rows
from contrastive_zoo.losses.multi_positive import NPairs
from contrastive_zoo.losses.pair_margins import RankedList
from contrastive_zoo.losses.ranking import FastAP
from contrastive_zoo.losses.redundancy import VICReg
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon
from contrastive_zoo.wrapper.pml.native.settings import (
    MEAN_OR_SUM,
    euclidean_settings,
    number_settings,
    reduction_settings,
    require_positive,
    similarity_settings,
)
from contrastive_zoo.wrapper.pml.native.variants import named_as_its_base

EPSILON = 1e-5
"""What pytorch-metric-learning's RankedListLoss adds to each weight of its means."""


def nt_xent(loss: Any) -> SINCERE:
    """Translate NTXentLoss: with labels it leaves an anchor's other positives out of the denominator, as SINCERE does."""
    temperature = number_settings(loss, "temperature")
    reduction = reduction_settings(loss, **MEAN_OR_SUM)
    return SINCERE(**temperature, average="pairs", **similarity_settings(loss), **reduction)


def fast_ap(loss: Any) -> FastAP:
    """Translate FastAPLoss."""
    euclidean_settings(loss, power=2)
    return FastAP(num_bins=loss.num_bins, **reduction_settings(loss, **MEAN_OR_SUM))


def n_pairs(loss: Any) -> NPairs:
    """Translate NPairsLoss."""
    return NPairs(**similarity_settings(loss), **reduction_settings(loss, **MEAN_OR_SUM))


# --------------------------------------------------------------------------------------------------------------- SupCon


def supervised_contrastive(loss: Any) -> SupCon:
    """Translate SupConLoss."""
    temperature = number_settings(loss, "temperature")
    reduction = reduction_settings(loss, nonzero={}, sum={"reduction": "sum"})
    return _SupConOfSeveralClasses(**temperature, **similarity_settings(loss), **reduction)


@named_as_its_base
class _SupConOfSeveralClasses(SupCon):
    """:class:`SupCon`, or 0 without gradient if all samples are of one class: there is no negative pair."""

    def compute(self, batch: Batch) -> Tensor:
        value, labels = super().compute(batch), batch.rows.get("labels", batch.indices())
        edges = [labels.max(), ~labels.min()] if len(labels) else [labels.new_tensor(torch.iinfo(labels.dtype).min)] * 2
        highest, inverted_lowest = batch.maximum(torch.stack(edges)).unbind()
        return value * (highest != ~inverted_lowest)


# ------------------------------------------------------------------------------------------------------------------ NCA


def neighborhood_components(loss: Any) -> NCA:
    """Translate NCALoss."""
    scale = require_positive(float(loss.softmax_scale), "softmax_scale")
    reduction = reduction_settings(loss, **MEAN_OR_SUM)
    return _NCAOfPositives(temperature=1 / scale, **euclidean_settings(loss, power=2), **reduction)


@named_as_its_base
class _NCAOfPositives(NCA):
    """:class:`NCA`, or NaN, the mean of nothing, if all of several samples have no positive."""

    def compute(self, batch: Batch) -> Tensor:
        value = super().compute(batch)
        if self.reduction != "mean" or batch.total == 1:
            return value
        all_ids = batch.gathered(batch.int64(batch.rows["labels"]))
        return value if len(all_ids.unique()) < len(all_ids) else value + torch.nan


# ---------------------------------------------------------------------------------------------------------- ranked list


def ranked_list(loss: Any) -> RankedList:
    """Translate RankedListLoss."""
    settings = number_settings(loss, "margin", "alpha", "imbalance", t_p="Tp", t_n="Tn")
    reduction = reduction_settings(loss, **MEAN_OR_SUM)
    return _RankedListOfDistinct(**settings, epsilon=EPSILON, **euclidean_settings(loss), **reduction)


@named_as_its_base
class _RankedListOfDistinct(RankedList):
    """:class:`RankedList` that leaves out pairs of equal embeddings, at distance 0."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        distinct = similarity > 0
        (valid,) = yield (AnyOf(positive.any(1) | negative.any(1)),)
        losses, _ = yield from super().rows(similarity, positive & distinct, negative & distinct)
        return losses, valid


# --------------------------------------------------------------------------------------------------------------- VICReg


def vicreg(loss: Any) -> VICReg:
    """Translate VICRegLoss."""
    reduction_settings(loss, mean={})
    renamed = {"invariance": "invariance_lambda", "variance": "variance_mu", "covariance": "covariance_v"}
    return _VICRegOfTwo(**number_settings(loss, "eps", **renamed))


@named_as_its_base
class _VICRegOfTwo(VICReg):
    """:class:`VICReg`, or NaN for a single sample, which has no variance."""

    def degrees(self, count: int) -> int:
        return count - 1
