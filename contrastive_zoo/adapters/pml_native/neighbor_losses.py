"""Translations of losses that weigh each anchor's positives against its other candidates, and of VICReg."""

from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.adapters.pml_native.settings import (
    MEAN_OR_SUM,
    Settings,
    euclidean_settings,
    number_settings,
    reduction_settings,
    require_positive,
    similarity_settings,
)
from contrastive_zoo.adapters.pml_native.variants import named_as_its_base
from contrastive_zoo.collectives import extreme_over_ranks, gather_rows
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import AnyOf, Rows
from contrastive_zoo.engine.rowwise import sum_over_anchors
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.losses.fast_ap import FastAP
from contrastive_zoo.losses.n_pairs import NPairs
from contrastive_zoo.losses.nca import NCA
from contrastive_zoo.losses.ranked_list import RankedList
from contrastive_zoo.losses.sincere import SINCERE
from contrastive_zoo.losses.sup_con import SupCon, sup_con
from contrastive_zoo.losses.vicreg import VICReg, vicreg_over
from contrastive_zoo.world import ALONE, World

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


def _sup_con_of_several_classes(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 0.1,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Tensor:
    """Return :func:`sup_con`, or 0 without gradient if all samples are of one class: there is no negative pair."""
    value = sup_con(embeddings, labels, temperature=temperature, normalize=normalize, reduction=reduction, world=world)
    assert labels is not None  # sup_con refuses it
    edges = [labels.max(), ~labels.min()] if len(labels) else [labels.new_tensor(torch.iinfo(labels.dtype).min)] * 2
    highest, inverted_lowest = extreme_over_ranks(torch.stack(edges), "max", world).unbind()
    return value * (highest != ~inverted_lowest)


@named_as_its_base
class _SupConOfSeveralClasses(SupCon, function=_sup_con_of_several_classes, block_function=SupCon.block_function):
    """The module of :func:`_sup_con_of_several_classes`."""


# ------------------------------------------------------------------------------------------------------------------ NCA


def neighborhood_components(loss: Any) -> NCA:
    """Translate NCALoss."""
    scale = require_positive(float(loss.softmax_scale), "softmax_scale")
    reduction = reduction_settings(loss, **MEAN_OR_SUM)
    return _NCAOfPositives(temperature=1 / scale, **euclidean_settings(loss, power=2), **reduction)


def _nca_of_positives(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Tensor:
    """Return :func:`contrastive_zoo.nca`, or NaN, the mean of nothing, if all of several samples have no positive."""
    z, ids, shards = begin_labelled(
        "NCA", embeddings, labels, temperature=temperature, normalize=normalize, reduction=reduction, world=world
    )
    loss = BlockLoss(NCA.block_function, temperature=temperature)
    value = sum_over_anchors(loss, z, ids, shards=shards, reduction=reduction, world=world)
    if reduction != "mean" or shards.total == 1:
        return value
    all_ids = gather_rows(ids, shards, world)
    return value if len(all_ids.unique()) < len(all_ids) else value + torch.nan


@named_as_its_base
class _NCAOfPositives(NCA, function=_nca_of_positives, block_function=NCA.block_function):
    """The module of :func:`_nca_of_positives`."""


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


def _vicreg_of_two(
    view1: Tensor,
    view2: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    eps: float = 1e-4,
    world: World = ALONE,
) -> Tensor:
    """Return :func:`contrastive_zoo.vicreg`, or NaN for a single sample, which has no variance."""
    weights: Settings = {"invariance": invariance, "variance": variance, "covariance": covariance, "eps": eps}
    return vicreg_over(view1, view2, degrees=lambda count: count - 1, gamma=1.0, **weights, world=world)


@named_as_its_base
class _VICRegOfTwo(VICReg, function=_vicreg_of_two):
    """The module of :func:`_vicreg_of_two`."""
