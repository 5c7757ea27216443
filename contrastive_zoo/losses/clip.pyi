# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.temperature import LearnableScaleLoss
from contrastive_zoo.world import ALONE, World

def clip(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.07,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the mean cross-entropy of text i for image i and of image i for text i: symmetric :func:`info_nce`.

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

class Clip(LearnableScaleLoss):
    """Compute the mean cross-entropy of text i for image i and of image i for text i: symmetric :func:`info_nce`.

    With x, y the unit rows of all ranks and S = x yᵀ / t,

        loss = ½ · cross_entropy(S, arange(N)) + ½ · cross_entropy(Sᵀ, arange(N))

    Equal to open_clip's ``ClipLoss()(images, texts, logit_scale=1 / t)`` on one process. A ``logit_bias`` added to S
    does not change a softmax; :class:`SigLIP` has one.

    The temperature is learnable; the setting is its initial value.

    ``loss.logit_scale`` is the parameter, log(1/t) as open_clip's ``model.logit_scale``, clamped to at most log(100).
    For a constant temperature use ``InfoNCE(symmetric=True)``.

    Called as ``loss(images, texts)``:

    - images: [n, d], n may differ between ranks.
    - texts: [n, d], row i belongs to row i of images.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: as :func:`info_nce`.

    Examples:
        >>> import torch
        >>> Clip(temperature=1.0)(torch.eye(2), torch.eye(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Radford et al. 2021, fig. 3, https://arxiv.org/abs/2103.00020
    """

    temperature: float | Tensor | nn.Module
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.07,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, images: Float[Tensor, "n d"], texts: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
