"""Images and texts besides CLIP's softmax: without the positive in the sum, and with consistent similarities."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry
from contrastive_zoo.engine.pairs import TowerPairs
from contrastive_zoo.engine.statistics import second_moments
from contrastive_zoo.loss_base.families import ImageTextLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import NonNegative, Temperature


class InfoLOOB(ImageTextLoss, engine="softmax", has_kernel=True):
    r"""Compute the leave-one-out bound: :class:`Clip` whose softmax leaves the positive out of its sum.

    Called as ``loss(images, texts)``, [n, d] each.
    With x, y the unit embeddings of all ranks and S = x yᵀ / t,

        loss = mean_i [ ½ log Σ_{j≠i} exp(S_ij)  +  ½ log Σ_{j≠i} exp(S_ji)  −  S_ii ]

    It keeps its gradient where a positive already has the largest similarity, and is 0 for a single pair. CLOOB adds up
    both directions, multiplies by t, and takes embeddings that a Hopfield network has retrieved. :class:`DCL` is the same
    for two views.

    Args:
        temperature: t > 0; 1/30 is CLOOB's. A tensor or module is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> InfoLOOB(temperature=1.0)(torch.eye(2), torch.eye(2))   # 0 − 1
        tensor(-1.)

    Source: Fürst et al. 2022, eq. 5, https://arxiv.org/abs/2110.11316
    """

    temperature: Temperature = 1 / 30

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        return False

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        over_texts, over_images, positive = pairs.sums(symmetric=True)
        assert over_images is not None
        losses = ((over_texts + over_images) / 2 - positive).to(pairs.rows[0].dtype)
        return batch.reduce(losses, losses.new_full(losses.shape, batch.total > 1), reduction=self.reduction)


class CyclicConsistency(Loss, engine="statistics"):
    r"""Compute CyCLIP's two penalties: similarities of images and texts should be symmetric, and equal within both.

    Called as ``loss(images, texts)``, [n, d] each.
    With x, y the unit embeddings of all ranks,

        loss = λ/N Σ_ij (x_i·y_j − x_j·y_i)²  +  μ/N Σ_ij (x_i·x_j − y_i·y_j)²

    It takes sums of products of features, and no N × N matrix. CyCLIP is ``WeightedSum([Clip(), CyclicConsistency()])``.

    Args:
        cross_modal: λ ≥ 0.
        in_modal: μ ≥ 0.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> x = torch.eye(2)
        >>> CyclicConsistency(cross_modal=1.0, in_modal=0.0)(x, x.flip(0) * torch.tensor([1.0, -1.0]))   # (2² + 2²) / 2
        tensor(4.)

    Source: Goel et al. 2022, eqs. 2-3, https://arxiv.org/abs/2205.14459
    """

    cross_modal: NonNegative = 0.25
    in_modal: NonNegative = 0.25

    def inputs(self, images: Float[Tensor, "n d"], texts: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"images": images, "texts": texts})

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [stated.held(3), *[entry for _ in range(3) for entry in stated.products()]]

    def compute(self, batch: Batch) -> Tensor:
        x, y = (batch.prepared(of, normalize=True) for of in batch.rows.values())
        xx, yy, xy = (second_moments(batch, *pair) for pair in ((x, x), (y, y), (x, y)))
        cross_modal = 2 * ((xx * yy).sum() - (xy * xy.T).sum())
        in_modal = xx.square().sum() + yy.square().sum() - 2 * xy.square().sum()
        return (batch.settings.cross_modal * cross_modal + batch.settings.in_modal * in_modal) / batch.total
