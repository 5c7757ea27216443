"""From a loss of pytorch-metric-learning to this library's loss with the same formula, or the reason why there is none."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import losses, miners  # noqa: F401 - the example uses miners
from torch import Tensor, nn

from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.loss_modules import has_user_code
from contrastive_zoo.losses.compositions import WeightedSum
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.losses.nt_xent import NTXent
from contrastive_zoo.wrapper.pml.table import LOSSES, NoExactTranslation, epsilon, mining, reduction, require


def to_native(loss: nn.Module, miner: Callable[..., Any] | None = None) -> Loss:
    """Return this library's loss with the same formula, settings and weights. A few miners are options of such losses.

    Proxies [C, d] and a learnt β are the parameters of ``loss`` itself. Its ``W`` or ``fc`` [d, C k] is copied to the
    parameter ``weights``, [C, d] or [C, k, d] with k centres of a class. Give the optimizer the result's parameters.

    Examples:
        >>> native = to_native(losses.TripletMarginLoss(0.2), miners.BatchHardMiner())
        >>> native.margin, native.mining
        (0.2, 'hard')
        >>> to_native(losses.PNPLoss())
        Traceback (most recent call last):
        ...
        ValueError: PNPLoss has no exact translation: this library has no such formula.
    """
    whole = nn.ModuleList(x for x in (loss, miner) if isinstance(x, nn.Module))
    named = [*whole.named_parameters(remove_duplicate=False)]
    try:
        require(not any(map(has_user_code, whole.modules())), "it has hooks or a forward of its own.")
        require(len(named) == len([*whole.parameters()]), "two parts of it have one parameter.")
        return _translate(loss, miner)
    except NoExactTranslation as reason:
        raise ValueError(f"{type(loss).__name__} has no exact translation: {reason}") from None


def _translate(loss: Any, miner: Any) -> Loss:
    if type(loss) is losses.SelfSupervisedLoss:
        return _self_supervised(loss, miner)
    if type(loss) is losses.MultipleLosses:
        require(miner is None or not loss.miners, "it has miners of its own.")
        members = [_translate(x, own_miner or miner) for x, own_miner, _ in _members(loss)]
        return WeightedSum(members, weights=[x for *_, x in _members(loss)])
    native = LOSSES.get(type(loss), "it is no loss of pytorch-metric-learning itself.")
    if isinstance(native, str):
        raise NoExactTranslation(native)
    for name in ("embedding_regularizer", "weight_regularizer"):
        regularizer = getattr(loss, name, None)
        require(regularizer is None, f"its {name} has no option here. Add {type(regularizer).__name__} to the value.")
    settings = {name: x for read in native.readers for name, x in read(loss).items()}
    settings |= reduction(loss, native.reductions)
    if type(loss) is losses.TripletMarginLoss:
        if loss.smooth_loss and "average" in settings:
            settings["average"] = "all"  # no soft loss is 0
        settings["mining"] = mining(loss, miner, loss.smooth_loss or settings.get("average") == "all")
    elif type(loss) is losses.MultiSimilarityLoss and miner is not None:
        settings |= epsilon(loss, miner)
    else:
        require(miner is None, f"{type(miner).__name__} has no option here.")
    return _with_weights(native.kind, settings, loss)


def _with_weights(native: type[Loss], settings: dict[str, Any], loss: Any) -> Loss:
    if issubclass(native, ClassLoss):
        weights = _class_weights(loss)
        if "sub_centers" in native.fields:
            settings["sub_centers"] = weights.shape[1] if weights.ndim == 3 else 1
        with torch.random.fork_rng(devices=[]):  # the constructor's random weights are replaced
            result: Any = native(len(weights), weights.shape[-1], **settings)
        assert result.weights.shape == weights.shape
        result.weights = _kept(weights)
        return result
    result = native(**settings)
    if type(loss) is losses.MarginLoss:
        result.beta = _kept(loss.beta)
    return result


def _kept(x: Tensor) -> nn.Parameter:
    """Return the parameter itself, so that its optimizer and its checkpoints go on, or a copy of another tensor."""
    if isinstance(x, nn.Parameter):
        return x
    return nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format), requires_grad=x.requires_grad)


def _class_weights(loss: Any) -> Tensor:
    """Return [C, d] or [C, k, d] from weights [d, C k], a class's centres side by side, or proxies [C, d]."""
    weights = next(getattr(loss, name) for name in ("proxies", "fc", "W") if hasattr(loss, name))
    require(isinstance(weights, nn.Parameter), "its weights are computed from other tensors.")
    if hasattr(loss, "proxies"):
        return weights
    centers = getattr(loss, "centers_per_class", getattr(loss, "sub_centers", 1))
    return weights.T if centers == 1 else weights.T.view(loss.num_classes, centers, -1)


def _self_supervised(loss: Any, miner: Any) -> Loss:
    inner = loss.loss
    softmax = losses.NTXentLoss if not loss.symmetric else (losses.NTXentLoss, losses.SupConLoss)
    if isinstance(inner, softmax) and miner is None:
        labelled: Any = _translate(inner, None)
        settings = {name: getattr(labelled, name) for name in ("temperature", "normalize", "reduction")}
        return NTXent(**settings) if loss.symmetric else InfoNCE(**settings)
    require(loss.symmetric, f"{type(inner).__name__} of rows against reference rows has no option here.")
    require(type(inner) in _WITH_VIEWS, f"this library's {type(inner).__name__} takes labelled rows only.")
    return _translate(inner, miner)


def _members(loss: Any) -> list[tuple[Any, Any, float]]:
    """Return each loss of a MultipleLosses, its own miner (None if it has none) and its weight."""
    keys = list(loss.losses) if loss.is_dict else range(len(loss.losses))
    own_miners = dict(loss.miners.items() if loss.is_dict else enumerate(loss.miners)) if loss.miners else {}
    return [(loss.losses[key], own_miners.get(key), loss.weights[key]) for key in keys]


_WITH_VIEWS = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.TripletMarginLoss,
    losses.MultiSimilarityLoss, losses.CircleLoss,
)  # fmt: skip
