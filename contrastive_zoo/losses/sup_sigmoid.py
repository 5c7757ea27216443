"""Supervised sigmoid: a binary classification of every pair of rows as the same class or not."""

from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.labelled_pairs import LabelledPairs
from contrastive_zoo.engine.tower_pairs import sigmoid_block_loss
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_base.settings import Learnable, Reduction, Temperature, field
from contrastive_zoo.loss_base.temperature import LogitScale
from contrastive_zoo.losses.siglip import negative_bias, unbounded_temperature


class SupSigmoid(AnchorLoss, LogitScale):
    r"""Compute SigLIP's binary cross-entropy over all pairs of labelled rows.

    With z the unit rows of all ranks, y_ij = 1 for equal labels and −1 otherwise,

        loss = −1/N · Σ_i Σ_{j≠i} log σ( y_ij · (z_i·z_j / t + b) )

    Temperature and bias are learnable by default, as those of :class:`SigLIP`.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless; ``LearnableTemperature(0.1, max_scale=math.inf)`` by default. A number is
            constant.
        logit_bias: b; a parameter that begins at −10 by default. A number is constant.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # (2 log(1 + e⁻¹) + 4 log 2) / 3
        >>> SupSigmoid(temperature=1.0, logit_bias=0.0)(z, torch.tensor([0, 0, 1]))
        tensor(1.1330)

    Source: Zhai et al. 2023, §3.2, with z_ij from labels, https://arxiv.org/abs/2303.15343
    """

    temperature: Temperature = field(factory=unbounded_temperature)
    logit_bias: Learnable = field(factory=negative_bias)
    normalize: bool = True
    reduction: Reduction = "mean"

    supports_ring = True

    def block_loss(self, batch: Batch) -> BlockLoss:
        return sigmoid_block_loss(batch.settings.temperature, batch.settings.logit_bias)

    def compute(self, batch: Batch) -> Tensor:
        pairs = LabelledPairs(batch, batch.rows["labels"], batch.settings.temperature, self.normalize)
        return pairs.binary_cross_entropy(self.reduction, batch.settings.logit_bias)
