"""Negative cosine: predictions of one view point at the other view's targets; the loss of BYOL and SimSiam."""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.loss_base.graph_operator import in_graph
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@in_graph
def negative_cosine(
    predictions: Float[Tensor, "n d"],
    targets: Float[Tensor, "n d"],
    *,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute minus the cosine of each prediction and its target; targets have no gradient.

        loss_i = − p_i·z_i / (‖p_i‖ ‖z_i‖)

    SimSiam's loss is ½ loss(p1, z2) + ½ loss(p2, z1). BYOL's is 2 + 2 loss for each direction, with a momentum encoder's
    targets. There are no negatives, so the loss of a batch is a mean over its samples, which is right also for shards
    of different size. lightly's NegativeCosineSimilarity has gradients with respect to targets that are not detached.

    Args:
        predictions: p, [n, d], n may differ between ranks.
        targets: z, [n, d] of the same samples in another view.
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: predictions and targets of different shape, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> negative_cosine(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(-0.6000)

    Source: Chen & He 2021, eq. 1, https://arxiv.org/abs/2011.10566; Grill et al. 2020, eq. 2,
    https://arxiv.org/abs/2006.07733
    """
    (p, z), _ = begin_views("NegativeCosine", (predictions, targets.detach()), reduction=reduction, world=world)
    return reduce_anchors(-(p * z).sum(1), reduction=reduction, world=world)


class NegativeCosine(Loss, function=negative_cosine): ...
