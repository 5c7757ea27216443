"""CLIP: classify the text of each image and the image of each text, with a learnable logit scale."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.argument_types import checked, unchecked
from contrastive_zoo.loss_base.temperature import LearnableScaleLoss
from contrastive_zoo.losses.info_nce import info_nce
from contrastive_zoo.world import ALONE, World


@checked
def clip(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.07,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the mean cross-entropy of text i for image i and of image i for text i: symmetric :func:`info_nce`.

    With x, y the unit rows of all ranks and S = x yᵀ / t,

        loss = ½ · cross_entropy(S, arange(N)) + ½ · cross_entropy(Sᵀ, arange(N))

    Equal to open_clip's ``ClipLoss()(images, texts, logit_scale=1 / t)`` on one process. A ``logit_bias`` added to S
    does not change a softmax; :class:`SigLIP` has one.

    Args:
        images: [n, d], n may differ between ranks.
        texts: [n, d], row i belongs to row i of images.
        temperature: t > 0, dimensionless; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: as :func:`info_nce`.

    Examples:
        >>> import torch
        >>> clip(torch.eye(2), torch.eye(2), temperature=1.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Radford et al. 2021, fig. 3, https://arxiv.org/abs/2103.00020
    """
    settings: Any = {"temperature": temperature, "normalize": normalize, "reduction": reduction}
    return _info_nce(images, texts, symmetric=True, world=world, **settings)


_info_nce = unchecked(info_nce)
"""Without the check of its arguments' types, which :func:`clip` has made."""


class Clip(LearnableScaleLoss, function=clip, begins_once=True):
    """The temperature is learnable; the setting is its initial value.

    ``loss.logit_scale`` is the parameter, log(1/t) as open_clip's ``model.logit_scale``, clamped to at most log(100).
    For a constant temperature use ``InfoNCE(symmetric=True)``.

    Examples:
        >>> import torch
        >>> Clip(temperature=1.0)(torch.eye(2), torch.eye(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)
    """

    supports_ring = True
