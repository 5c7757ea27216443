"""Contrastive losses with hard-negative weights (HCL), and with uniform weights (debiased)."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature

Beta = Annotated[float, Bounds("beta must be non-negative and finite", "0 weighs all negatives evenly.", low=0)]
_SHARE = Bounds("tau_plus is a probability in [0, 1)", "With C even classes it is 1/C.", low=0, below=1, constant=True)
TauPlus = Annotated[float, _SHARE]


class HCL(TwoViewLoss):
    r"""Compute the contrastive loss of two views with an estimate of the true negatives that weights hard ones more.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        H_i = Σ_{k∈N(i)} w_ik exp(x_ik),       w_ik = M exp(β x_ik) / Σ_{l∈N(i)} exp(β x_il)
        G_i = max( (H_i − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    β = 0 is the debiased loss; with τ⁺ = 0, too, NT-Xent. Equal to the authors' code on one process; computed in logarithms.

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks; rows are normalised, which the bound exp(−1/t) needs.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        beta: β ≥ 0; a larger β weights hard negatives more.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: tau_plus or beta out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> HCL(temperature=1.0, tau_plus=0.0)(torch.eye(2), torch.eye(2))   # log(1 + 2/e)
        tensor(0.5514)

    Source: Robinson et al. 2021, §3, https://arxiv.org/abs/2010.04592
    """

    temperature: Temperature = 0.5
    tau_plus: TauPlus = 0.1
    beta: Beta = 1.0
    reduction: Reduction = "mean"

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        return _contrastive(batch, batch.settings.beta, self.reduction)


class Debiased(TwoViewLoss):
    r"""Compute the contrastive loss of two views, corrected for negatives of the anchor's class: :class:`HCL` with β = 0.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        G_i = max( (Σ_{k∈N(i)} exp(x_ik) − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks; rows are normalised.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: as :class:`HCL`.

    Examples:
        >>> Debiased(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(1 + (2 − 0.2e) / 0.9e)
        tensor(0.4671)

    Source: Chuang et al. 2020, https://arxiv.org/abs/2007.00224
    """

    temperature: Temperature = 0.5
    tau_plus: TauPlus = 0.1
    reduction: Reduction = "mean"

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        return _contrastive(batch, 0.0, self.reduction)


def _contrastive(batch: Batch, beta: float, reduction: Reduction) -> Tensor:
    z = batch.concatenated([batch.prepared(x, normalize=True) for x in batch.rows.values()])
    loss = BlockLoss(
        _estimated_negatives_loss, temperature=batch.settings.temperature, tau_plus=batch.settings.tau_plus, beta=beta,
        log_negatives=math.log(max(1, 2 * batch.total - 2)),
    )  # fmt: skip
    return reduce_rows(batch, loss, z, batch.indices(times=2), times=2, reduction=reduction)


def _estimated_negatives_loss(
    block: AnchorBlock, temperature: Tensor, tau_plus: float, beta: float, log_negatives: float
) -> Rows:
    x = block.anchors @ block.candidates.T / temperature
    positive, hard, total, valid = yield (
        Sum(x.where(block.positive, 0).sum(1)),
        LogSumExp((1 + beta) * x, block.negative, empty=0.0),
        LogSumExp(beta * x, block.negative, empty=0.0),
        AnyOf(block.negative.any(1)),
    )
    hard = hard - total + log_negatives
    lower_bound = x.new_zeros(()) + log_negatives - 1 / temperature
    estimate = hard
    if tau_plus > 0:
        share = math.log(tau_plus) + log_negatives + positive - hard
        is_positive = share < -torch.finfo(x.dtype).eps  # elsewhere the estimate is 0 or negative
        share = share.where(is_positive, -1.0)
        estimate = (hard + torch.log1p(-share.exp())).where(is_positive, -torch.inf)
    estimate = torch.maximum(estimate - math.log1p(-tau_plus), lower_bound.expand_as(estimate))
    return -F.logsigmoid(positive - estimate), valid
