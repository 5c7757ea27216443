"""Sigmoid over all pairs of images and texts: a binary classification of each."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.pairs import TowerPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.loss_base.families import ImageTextLoss
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.loss_base.settings import Learnable, Temperature, field
from contrastive_zoo.loss_base.temperature import LearnableTemperature, LogitScale

_unbounded_temperature = partial(LearnableTemperature, 0.1, max_scale=math.inf)


def _negative_bias() -> nn.Parameter:
    """Return SigLIP's learnable bias, −10, which matches the many negatives: as [1], since FSDP shards no []."""
    return nn.Parameter(torch.tensor([-10.0]))


class SigLIP(ImageTextLoss, LogitScale, engine="sigmoid", has_kernel=True):
    r"""Compute the binary cross-entropy of all pairs, summed over texts and averaged over images.

    Called as ``loss(images, texts)``, [n, d] each.
    With x, y the unit embeddings of all ranks, z_ij = 1 for i = j and −1 otherwise,

        loss = −1/N · Σ_i Σ_j log σ( z_ij · (x_i·y_j / t + b) )

    Dense: ``-logsigmoid((2 * eye(N) - 1) * (x @ y.T / t + b)).sum() / N``. Equal to open_clip's ``SigLipLoss`` on one
    process, whose parameters are ``loss.logit_scale``, log(1/t) without a bound, and ``loss.logit_bias``.

    Args:
        temperature: t; ``LearnableTemperature(0.1, max_scale=math.inf)`` by default.
        logit_bias: b; a parameter that begins at −10 by default. A number is constant.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> SigLIP(temperature=1.0, logit_bias=0.0)(torch.eye(2), torch.eye(2))   # log(1 + e⁻¹) + log 2
        tensor(1.0064)

    Source: Zhai et al. 2023, §3.2 and algorithm 1, https://arxiv.org/abs/2303.15343
    """

    temperature: Temperature = field(factory=_unbounded_temperature)
    logit_bias: Learnable = field(factory=_negative_bias)

    def needs(self, inputs: Inputs) -> Needs:
        no_kernel = "computes SigLIP with reduction='mean' or 'sum'" if self.reduction == "none" else None
        return super().needs(inputs)._replace(no_kernel=no_kernel)

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        return pairs.binary_cross_entropy(self.reduction, batch.settings.logit_bias)
