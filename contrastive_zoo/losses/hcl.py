"""Contrastive losses with hard-negative weights (HCL), and with uniform weights (debiased)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views, concat_views, sample_indices
from contrastive_zoo.world import ALONE, World


@checked
def hcl(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.5,
    tau_plus: float = 0.1,
    beta: float = 1.0,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the contrastive loss of two views with an estimate of the true negatives that weights hard ones more.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        H_i = Σ_{k∈N(i)} w_ik exp(x_ik),       w_ik = M exp(β x_ik) / Σ_{l∈N(i)} exp(β x_il)
        G_i = max( (H_i − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    β = 0 is the debiased loss; with τ⁺ = 0, too, NT-Xent. Equal to the authors' code on one process; computed in logarithms.

    Args:
        view1: [n, d], n may differ between ranks; rows are normalised, which the bound exp(−1/t) needs.
        view2: [n, d], row i belongs to row i of view1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        beta: β ≥ 0; a larger β weights hard negatives more.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        world: the ranks that share the batch.

    Raises:
        ValueError: tau_plus or beta out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> hcl(torch.eye(2), torch.eye(2), temperature=1.0, tau_plus=0.0)   # log(1 + 2/e)
        tensor(0.5514)

    Source: Robinson et al. 2021, §3, https://arxiv.org/abs/2010.04592
    """
    return _contrastive("HCL", view1, view2, temperature, tau_plus, beta, reduction, world)


@checked
def debiased(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.5,
    tau_plus: float = 0.1,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the contrastive loss of two views, corrected for negatives of the anchor's class: :func:`hcl` with β = 0.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        G_i = max( (Σ_{k∈N(i)} exp(x_ik) − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    Args:
        view1: [n, d], n may differ between ranks; rows are normalised.
        view2: [n, d], row i belongs to row i of view1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        world: the ranks that share the batch.

    Raises:
        ValueError: as :func:`hcl`.

    Examples:
        >>> debiased(torch.eye(2), torch.eye(2), temperature=1.0)   # log(1 + (2 − 0.2e) / 0.9e)
        tensor(0.4671)

    Source: Chuang et al. 2020, https://arxiv.org/abs/2007.00224
    """
    return _contrastive("Debiased", view1, view2, temperature, tau_plus, 0.0, reduction, world)


def _debiased_problem(tau_plus: float) -> str | None:
    rule, fix = "tau_plus is a probability in [0, 1)", "With C even classes it is 1/C."
    return number_problem(rule, fix, low=0, below=1, tau_plus=tau_plus)


def _settings_problem(tau_plus: float, beta: float) -> str | None:
    rule, fix = "beta must be non-negative and finite", "0 weighs all negatives evenly."
    return number_problem(rule, fix, low=0, beta=beta) or _debiased_problem(tau_plus)


class HCL(Loss, function=hcl, check=_settings_problem):
    supports_ring = True


class Debiased(Loss, function=debiased, check=_debiased_problem):
    supports_ring = True


def _contrastive(
    caller: str,
    view1: Tensor,
    view2: Tensor,
    temperature: float | Tensor,
    tau_plus: float,
    beta: float,
    reduction: Reduction,
    world: World,
) -> Tensor:
    problem = _settings_problem(tau_plus, beta)
    settings: dict[str, Any] = {"temperature": temperature, "tau_plus": tau_plus, "beta": beta}
    views, shards = begin_views(caller, (view1, view2), problem=problem, reduction=reduction, world=world, **settings)
    z, samples = concat_views(views, world), sample_indices(shards, view1, views=2)
    loss = BlockLoss(_estimated_negatives_loss, log_negatives=math.log(max(1, 2 * shards.total - 2)), **settings)
    return sum_over_anchors(loss, z, samples, shards=shards.times(2), reduction=reduction, world=world)


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
