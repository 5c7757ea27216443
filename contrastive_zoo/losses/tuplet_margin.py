"""Tuplet margin: all negatives of an anchor against each positive, with an angular margin."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import Average, LabelledLoss, info_nce_per_positive, sum_over_labelled_anchors
from contrastive_zoo.loss_base.checks import number_problem, word_problem
from contrastive_zoo.world import ALONE, World


@checked
def tuplet_margin(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1 / 64,
    margin: float = 5.73,
    average: Average = "pairs",
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute a softmax loss over tuples of a positive and all negatives, on angles.

    With θ_ij the angle between rows i and j of all ranks, P(i) the other rows with i's label, N(i) those with another,

        loss = mean_{i, p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((cos θ_in − cos(θ_ip − β)) / t) )

    Equal to pytorch-metric-learning's TupletMarginLoss with ``scale=1/t``, also where θ_ip = 0, where its gradient
    is infinite and this one zero.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless, the paper's 1/s; a tensor is learnable.
        margin: β in degrees, 0 to 180.
        average: ``"pairs"``, equal weights of pairs (i, p), or ``"anchors"``.
        reduction: ``"mean"`` over all ranks' pairs or anchors (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a margin out of range, an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # log(1 + exp(0 − cos 60°))
        >>> tuplet_margin(z, torch.tensor([0, 0, 1]), temperature=1.0, margin=60.0)
        tensor(0.4741)

    Source: Yu and Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """
    problem = _settings_problem(margin, average)
    settings: Any = {"temperature": temperature, "margin": margin, "average": average, "reduction": reduction}
    return sum_over_labelled_anchors(
        "TupletMargin", _block_losses, embeddings, labels, problem=problem, world=world, **settings
    )


def _block_losses(block: AnchorBlock, temperature: Tensor, margin: float, average: Average) -> Rows:
    cos, beta = block.anchors @ block.candidates.T, math.radians(margin)
    sine2 = 1 - cos.square()
    sine = sine2.clamp(min=torch.finfo(cos.dtype).tiny).sqrt().where(sine2 > torch.finfo(cos.dtype).eps, 0)
    slack = cos * math.cos(beta) + sine * math.sin(beta)  # cos(θ − β)
    return (yield from info_nce_per_positive(cos / temperature, block, average, positive_logits=slack / temperature))


def _settings_problem(margin: float, average: str) -> str | None:
    rule, fix = "margin is an angle of 0 to 180 degrees", "The paper's 0.1 rad is 5.73."
    wrong = number_problem(rule, fix, low=0, high=180, margin=margin)
    return wrong or word_problem("average", average, Average)


class TupletMargin(LabelledLoss, function=tuplet_margin, block_function=_block_losses, check=_settings_problem): ...
