"""CLIP: classify the text of each image and the image of each text, with a learnable logit scale."""

from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.tower_pairs import TowerPairs
from contrastive_zoo.loss_base.families import ImageTextLoss
from contrastive_zoo.loss_base.settings import Reduction, Temperature, field
from contrastive_zoo.loss_base.temperature import LearnableTemperature, LogitScale


class Clip(ImageTextLoss, LogitScale):
    r"""Compute the mean cross-entropy of text i for image i and of image i for text i: symmetric :class:`InfoNCE`.

    With x, y the unit rows of all ranks and S = x yᵀ / t,

        loss = ½ · cross_entropy(S, arange(N)) + ½ · cross_entropy(Sᵀ, arange(N))

    Equal to open_clip's ``ClipLoss()(images, texts, logit_scale=1 / t)`` on one process. A ``logit_bias`` added to S
    does not change a softmax; :class:`SigLIP` has one. The temperature is learnable by default; ``loss.logit_scale`` is
    its parameter, log(1/t) as open_clip's ``model.logit_scale``, clamped to at most log(100).

    Called as ``loss(images, texts)``:

    - images: [n, d], n may differ between ranks.
    - texts: [n, d], row i belongs to row i of images.

    Args:
        temperature: t > 0, dimensionless; ``LearnableTemperature(0.07)`` by default. A number is constant.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: as :class:`InfoNCE`.

    Examples:
        >>> import torch
        >>> Clip(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Radford et al. 2021, fig. 3, https://arxiv.org/abs/2103.00020
    """

    temperature: Temperature = field(factory=LearnableTemperature)
    normalize: bool = True
    reduction: Reduction = "mean"

    has_kernels = supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        return pairs.cross_entropy(self.reduction, symmetric=True)
