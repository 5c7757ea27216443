"""Softmax over the views of a batch: NT-Xent, and its forms whose negatives or positives have weights."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry, Gathered
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.pairs import ViewPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.loss_base.families import TwoViewLoss, ViewLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs
from contrastive_zoo.loss_base.settings import Bounds, NonNegative, Reduction, Temperature


class NTXent(ViewLoss, engine="softmax", has_kernel=True):
    r"""Compute the normalised-temperature cross-entropy over two or more views.

    Called as ``loss(view1, view2, …)``, two or more of [n, d].
    With z the unit embeddings of all views of all ranks and P(i) the other views of i's sample,

        loss = mean_i [ log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t ]

    For two views this is ``cross_entropy((z @ z.T / t).fill_diagonal_(-inf), partner)``, without the 2N × 2N matrix.
    SimCLR trains with t = 0.1 on ImageNet and 0.5 on CIFAR-10; lightly's default is 0.5.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> NTXent(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(e + 2) − 1
        tensor(0.5514)

    Source: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709
    """

    temperature: Temperature = 0.1
    normalize: bool = True
    reduction: Reduction = "mean"

    def needs(self, inputs: Inputs) -> Needs:
        count, needs = len(inputs.rows), super().needs(inputs)
        return needs if count == 2 else needs._replace(no_kernel=f"compares two views, got {count}")

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        return len(rows) == 2 and self.normalize and self.is_reduced

    def compute(self, batch: Batch) -> Tensor:
        return ViewPairs(batch, batch.settings.temperature, self.normalize).cross_entropy(self.reduction)


_SIGMA = Bounds(fix="Leave it None for no weights.", above=0, finite=False, constant=True)


class DCL(TwoViewLoss, engine="rows"):
    r"""Compute the decoupled contrastive loss of two views, with weighted positives if ``sigma`` is given (DCLW).

    Called as ``loss(view1, view2)``, [n, d] each.
    With z the unit embeddings of both views of all ranks, p(i) the other view of embedding i, N(i) the embeddings of
    other samples and w = 1, or, weighted and held constant, w_i = 2 − exp(z_i·z_p / σ) / mean_j exp(z_j·z_p(j) / σ),

        loss = mean_i [ log Σ_{k∈N(i)} exp(z_i·z_k / t)  −  w_i · z_i·z_p / t ]

    Equal to lightly's DCLLoss and DCLWLoss on one process; on several ranks lightly's weights are of the local batch.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        sigma: σ > 0, 0.5 in DCLW; None for no weights.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> DCL(temperature=1.0)(torch.eye(2), torch.eye(2))   # log 2 − 1
        tensor(-0.3069)

    Source: Yeh et al. 2021, §3, https://arxiv.org/abs/2110.06848
    """

    temperature: Temperature = 0.1
    sigma: Annotated[float, _SIGMA] | None = None
    normalize: bool = True
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        names, learnt = [*stated.inputs.rows], stated.learnt("temperature")
        of_weights = [] if self.sigma is None else [Gathered(names[:1], stated.wide)]
        return [*of_weights, Blocks(names, companions=[8], parameters=learnt, reduction=self.reduction, matrices=3.5)]

    def compute(self, batch: Batch) -> Tensor:
        z, ids = batch.candidates(*batch.rows, normalize=self.normalize), batch.indices(times=2)
        a, b = z.local.tensor_split(2)
        weight, sigma = a.new_ones(len(a)), batch.settings.sigma
        if sigma is not None:
            logits = batch.gather_detached((a * b).sum(-1).detach() / sigma)
            weight = 2 - batch.total * logits.softmax(0)[batch.samples.local]
        loss, companions = BlockLoss(_decoupled, temperature=batch.settings.temperature), [(weight.repeat(2), ids)]
        return reduce_rows(batch, loss, z, ids, times=2, companions=companions, reduction=self.reduction)


def _decoupled(block: AnchorBlock, temperature: Tensor) -> tuple[Tensor, Tensor]:
    ((weight, _),) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    positive = logits.where(block.positive, 0).sum(1)
    return masked_log_sum_exp(logits, block.negative) - weight * positive, block.negative.any(1)


_SHARE = Bounds("tau_plus is a probability in [0, 1)", "With C even classes it is 1/C.", low=0, below=1, constant=True)


class HCL(TwoViewLoss, engine="rows", matrices=5.5):
    r"""Compute the contrastive loss of two views with an estimate of the true negatives that weights hard ones more.

    Called as ``loss(view1, view2)``, [n, d] each.
    With x_ik = z_i·z_k / t the logits of unit embeddings, p the other view of embedding i, its M = 2N − 2 negatives N(i),

        H_i = Σ_{k∈N(i)} w_ik exp(x_ik),       w_ik = M exp(β x_ik) / Σ_{l∈N(i)} exp(β x_il)
        G_i = max( (H_i − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    β = 0 is the debiased loss; with τ⁺ = 0, too, NT-Xent. Equal to the authors' code on one process; computed in logarithms.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        beta: β ≥ 0; a larger β weights hard negatives more.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> HCL(temperature=1.0, tau_plus=0.0)(torch.eye(2), torch.eye(2))   # log(1 + 2/e)
        tensor(0.5514)

    Source: Robinson et al. 2021, §3, https://arxiv.org/abs/2010.04592; β = 0: Chuang et al. 2020,
    https://arxiv.org/abs/2007.00224
    """

    temperature: Temperature = 0.5
    tau_plus: Annotated[float, _SHARE] = 0.1
    beta: NonNegative = 1.0
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        z, log_negatives = batch.candidates(*batch.rows, normalize=True), math.log(max(1, 2 * batch.total - 2))
        loss = BlockLoss.of(_estimated_negatives_loss, batch.settings, log_negatives=log_negatives)
        return reduce_rows(batch, loss, z, batch.indices(times=2), times=2, reduction=self.reduction)


def _estimated_negatives_loss(
    block: AnchorBlock, temperature: Tensor, tau_plus: float, beta: float, log_negatives: float
) -> tuple[Tensor, Tensor]:
    x = block.anchors @ block.candidates.T / temperature
    positive = x.where(block.positive, 0).sum(1)
    hard = masked_log_sum_exp((1 + beta) * x, block.negative, empty=0.0)
    hard = hard - masked_log_sum_exp(beta * x, block.negative, empty=0.0) + log_negatives
    lower_bound, estimate = x.new_zeros(()) + log_negatives - 1 / temperature, hard
    if tau_plus > 0:
        share = math.log(tau_plus) + log_negatives + positive - hard
        is_positive = share < -torch.finfo(x.dtype).eps  # elsewhere the estimate is 0 or negative
        estimate = (hard + torch.log1p(-share.where(is_positive, -1.0).exp())).where(is_positive, -torch.inf)
    estimate = torch.maximum(estimate - math.log1p(-tau_plus), lower_bound.expand_as(estimate))
    return -F.logsigmoid(positive - estimate), block.negative.any(1)
