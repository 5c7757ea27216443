"""Negative cosine: predictions of one view point at the other view's targets; the loss of BYOL and SimSiam."""

import torch  # noqa: F401 - the examples use it
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Reduction
from contrastive_zoo.ranks.row_checks import views_problem


class NegativeCosine(Loss):
    r"""Compute minus the cosine of each prediction and its target; targets have no gradient.

        loss_i = − p_i·z_i / (‖p_i‖ ‖z_i‖)

    SimSiam's loss is ½ loss(p1, z2) + ½ loss(p2, z1). BYOL's is 2 + 2 loss for each direction, with a momentum encoder's
    targets. There are no negatives, so the loss of a batch is a mean over its samples, which is right also for shards
    of different size. lightly's NegativeCosineSimilarity has gradients with respect to targets that are not detached.

    Called as ``loss(predictions, targets)``:

    - predictions: p, [n, d], n may differ between ranks.
    - targets: z, [n, d] of the same samples in another view.

    Args:
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: predictions and targets of different shape, or what any :class:`Loss` refuses.

    Examples:
        >>> NegativeCosine()(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(-0.6000)

    Source: Chen & He 2021, eq. 1, https://arxiv.org/abs/2011.10566; Grill et al. 2020, eq. 2,
    https://arxiv.org/abs/2006.07733
    """

    reduction: Reduction = "mean"

    def inputs(self, predictions: Float[Tensor, "n d"], targets: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": predictions, "view 1": targets}, views_problem((predictions, targets)))

    def compute(self, batch: Batch) -> Tensor:
        predictions, targets = batch.rows.values()
        p, z = (batch.prepared(x, normalize=True) for x in (predictions, targets.detach()))
        return batch.reduce(-(p * z).sum(1), reduction=self.reduction)
