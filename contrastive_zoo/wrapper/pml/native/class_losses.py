"""Translations of losses with one or several weight vectors per class: classifiers and proxies."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.losses.class_softmax import ArcFace, CosFace, NormalizedSoftmax, ProxyNCA, SoftTriple
from contrastive_zoo.losses.proxy_anchor import ProxyAnchor
from contrastive_zoo.wrapper.pml.native.settings import (
    MEAN_OR_SUM,
    NoExactTranslation,
    euclidean_settings,
    number_settings,
    reduction_settings,
    require_cosine,
    require_positive,
)

C = TypeVar("C", bound=ClassLoss)


def arc_face(loss: Any) -> ArcFace:
    """Translate ArcFaceLoss and SubCenterArcFaceLoss."""
    require_cosine(loss)
    weights = _by_class(loss.W, loss.num_classes, getattr(loss, "sub_centers", 1))
    settings = number_settings(loss, "margin", "scale")
    return _with_weights(ArcFace, weights, **settings, **reduction_settings(loss, **MEAN_OR_SUM))


def cos_face(loss: Any) -> CosFace:
    """Translate CosFaceLoss."""
    require_cosine(loss)
    settings = number_settings(loss, "margin", "scale")
    return _with_weights(CosFace, loss.W.T, **settings, **reduction_settings(loss, **MEAN_OR_SUM))


def normalized_softmax(loss: Any) -> NormalizedSoftmax:
    """Translate NormalizedSoftmaxLoss."""
    require_cosine(loss)
    temperature = number_settings(loss, "temperature")
    return _with_weights(NormalizedSoftmax, loss.W.T, **temperature, **reduction_settings(loss, **MEAN_OR_SUM))


def proxy_nca(loss: Any) -> ProxyNCA:
    """Translate ProxyNCALoss.

    Raises:
        NoExactTranslation: its embeddings are not normalised, or a setting has no equivalent.
    """
    if not euclidean_settings(loss, power=2)["normalize"]:
        raise NoExactTranslation("its embeddings are not normalised.")
    temperature = 1 / require_positive(float(loss.softmax_scale), "softmax_scale")
    return _with_weights(ProxyNCA, loss.proxies, temperature=temperature, **reduction_settings(loss, **MEAN_OR_SUM))


def proxy_anchor(loss: Any) -> ProxyAnchor:
    """Translate ProxyAnchorLoss."""
    require_cosine(loss)
    reduction_settings(loss, divisor={})
    return _with_weights(ProxyAnchor, loss.proxies, **number_settings(loss, "margin", "alpha"))


def soft_triple(loss: Any) -> SoftTriple:
    """Translate SoftTripleLoss."""
    require_cosine(loss)
    settings = number_settings(loss, "la", "margin") | {"gamma": 1 / loss.gamma, "tau": 0.0}
    weights = _by_class(loss.fc, loss.num_classes, loss.centers_per_class)
    return _with_weights(SoftTriple, weights, **settings, **reduction_settings(loss, **MEAN_OR_SUM))


def _with_weights(native: type[C], weights: Tensor, **settings: Any) -> C:
    """Return a loss with a copy of these weights, [C, d] or [C, k, d]."""
    if "sub_centers" in native.fields:
        settings["sub_centers"] = weights[0, ..., 0].numel()
    with torch.random.fork_rng(devices=[]):  # the constructor's random weights are replaced
        loss = native(len(weights), weights.shape[-1], **settings)
    assert loss.weights.shape == weights.shape
    loss.weights = nn.Parameter(weights.detach().clone(), requires_grad=weights.requires_grad)
    return loss


def _by_class(columns: Tensor, classes: int, centers: int = 1) -> Tensor:
    """Return weights [d, C k], a class's centres side by side, as [C, d] or [C, k, d]."""
    rows = columns.T.contiguous()
    return rows if centers == 1 else rows.view(classes, centers, -1)
