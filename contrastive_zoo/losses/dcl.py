"""Decoupled contrastive learning: the denominator leaves out the positive."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature

Denominators = Literal["joint", "per_view"]
_SIGMA = Bounds("sigma must be positive", "Leave it None for no weights.", above=0, finite=False, constant=True)
Sigma = Annotated[float, _SIGMA] | None


class DCL(TwoViewLoss):
    r"""Compute the decoupled contrastive loss of two views, with weighted positives if ``sigma`` is given (DCLW).

    With z the unit rows of both views of all ranks, p(i) the other view of row i, N(i) the rows of other samples and
    w = 1, or, weighted and held constant, w_i = 2 − exp(z_i·z_p / σ) / mean_j exp(z_j·z_p(j) / σ),

        loss = mean_i [ log Σ_{k∈N(i)} exp(z_i·z_k / t)  −  w_i · z_i·z_p / t ]

    Equal to lightly's DCLLoss and DCLWLoss on one process. On several ranks lightly's weights are relative to the local
    batch, these to the global batch. Older releases of lightly add the logarithms of the sums over each view:
    ``denominators="per_view"``.

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        sigma: σ > 0, None for no weights.
        denominators: ``"joint"``, one sum over both views, as in the paper; ``"per_view"``, as in older releases of lightly.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a sigma that is not positive, unknown denominators, or what any :class:`Loss` refuses.

    Examples:
        >>> DCL(temperature=1.0)(torch.eye(2), torch.eye(2))   # log 2 − 1
        tensor(-0.3069)

    Source: Yeh et al. 2021, §3, https://arxiv.org/abs/2110.06848
    """

    temperature: Temperature = 0.1
    sigma: Sigma = None
    denominators: Denominators = "joint"
    normalize: bool = True
    reduction: Reduction = "mean"

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        a, b = (batch.prepared(x, normalize=self.normalize) for x in batch.rows.values())
        weight, sigma = a.new_ones(len(a)), batch.settings.sigma
        if sigma is not None:
            logits = batch.gathered((a * b).sum(-1).detach() / sigma)
            weight = 2 - batch.total * logits.softmax(0)[batch.samples.local]
        view = torch.arange(2, device=a.device).repeat_interleave(len(a))
        loss = BlockLoss(_decoupled, temperature=batch.settings.temperature, denominators=self.denominators)
        companions = [(view, view), (weight.repeat(2), view)]
        z, ids = batch.concatenated([a, b]), batch.indices(times=2)
        return reduce_rows(batch, loss, z, ids, times=2, companions=companions, reduction=self.reduction)


class DCLW(DCL):
    """This class has von Mises–Fisher weights on the positives by default: it is :class:`DCL` with ``sigma=0.5``.

    Examples:
        >>> DCLW()(torch.eye(2), torch.eye(2)).equal(DCL(sigma=0.5)(torch.eye(2), torch.eye(2)))
        True
    """

    sigma: Sigma = 0.5


def _decoupled(block: AnchorBlock, temperature: Tensor, denominators: Denominators) -> Rows:
    (view, views), (weight, _) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    masks = [block.negative]
    if denominators == "per_view":
        same_view = view[:, None] == views
        masks = [block.negative & same_view, block.negative & ~same_view]
    positive, valid, *negative_terms = yield (
        Sum(logits.where(block.positive, 0).sum(1)),
        AnyOf(block.negative.any(1)),
        *(LogSumExp(logits, mask) for mask in masks),
    )
    return torch.stack(negative_terms).sum(0) - weight * positive, valid
