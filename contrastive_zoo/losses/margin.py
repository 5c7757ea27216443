"""Margin loss: positive distances below a learnable boundary β, negative distances above it, by a margin."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.pairwise import distances, row_sums
from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.numbers import number_problem, of_size
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Number
from contrastive_zoo.ranks.row_checks import range_rule, safe_index


class Margin(RowLoss):
    r"""Compute two hinges around a boundary, which is one parameter or one per class.

    With D_ij the distance of unit rows, P and N an anchor's positives and negatives, and active pairs those with a loss,

        loss = Σ_i [ |N(i)| Σ_{p∈P(i)} max(0, D_ip − β_i + margin) + |P(i)| Σ_{n∈N(i)} max(0, β_i − D_in + margin)
                     + ν |P(i)| |N(i)| β_i ]  /  Σ_i [ |N(i)| · active positives + |P(i)| · active negatives ]

    that is, both pairs of every triplet over the number of active pairs, as in pytorch-metric-learning. The last term
    keeps β small. With one β for all classes it is ν β; if β is not learnable, it is left out. The mean is 0 if no pair is
    active.

    Args:
        margin: distance α between β and either side.
        beta: initial β; then the parameter, [1] or one number per class.
        num_classes: number of classes, each with its own β; labels are then 0 … num_classes − 1.
        learn_beta: whether β is a parameter; pytorch-metric-learning's default is False.
        nu: ν >= 0, the weight of β itself.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`; ``"none"`` returns anchors' sums, without ν β.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a negative ν, num_classes below 1, a margin or β that is not finite; at the call labels
            outside of the classes, or as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> Margin()(z, torch.tensor([0, 0, 1]))   # √2 − 1.2 + 0.2, twice; √2 and 2 are 1.4 or more apart
        tensor(0.4142, grad_fn=<...>)

    Source: Wu et al. 2017, §4, https://arxiv.org/abs/1706.07567
    """

    margin: Number = 0.2
    beta: Annotated[float | Tensor, Bounds(several=True)] = 1.2
    num_classes: Annotated[int, Bounds("num_classes is 1 or more", low=1, whole=True)] | None = None
    learn_beta: bool = True
    nu: Annotated[float, Bounds("nu is 0 or more", low=0)] = 0.0

    def __post_init__(self) -> None:
        arguments = self.beta.detach() if isinstance(self.beta, Tensor) else self.beta
        if problem := number_problem(beta=arguments):
            raise ValueError(f"{type(self).__name__}: {problem}")
        initial, self.num_classes = float(arguments), None if self.num_classes is None else int(self.num_classes)
        size = self.num_classes or 1  # one number as [1]: FSDP shards no parameter of shape []
        betas = of_size("Margin", lambda: torch.full((size,), initial), num_classes=size)
        self.beta = nn.Parameter(betas, requires_grad=self.learn_beta)

    def inputs(self, *args: Tensor, **named: Tensor) -> Inputs:  # type: ignore[override]  # views, too
        stated, classes = super().inputs(*args, **named), self.num_classes
        if classes is None:
            return stated
        labels = stated.rows.get("labels")
        if labels is None or labels.is_floating_point() or labels.is_complex():
            problem = "β of a class needs labels: call loss(embeddings, labels), or leave num_classes out."
            return replace(stated, problem=problem)

        def outside(least: int, most: int) -> str:
            return f"labels are 0 … {classes - 1}, got {least} … {most}."

        return replace(stated, values=[range_rule(labels, 0, classes - 1, outside)])

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        return distances(anchors, candidates)

    def on_block(self, block: AnchorBlock) -> Rows:
        distance = self.similarity(block.anchors, block.candidates)
        assert isinstance(self.beta, Tensor)  # since __post_init__
        beta = self.beta.to(distance.dtype)
        beta = beta if self.num_classes is None else beta[safe_index(block.ids, self.num_classes), None]
        positive_term = (distance - beta + self.margin).relu().where(block.positive, 0)
        negative_term = (beta - distance + self.margin).relu().where(block.negative, 0)
        counts = row_sums(block.positive, block.negative, positive_term > 0, negative_term > 0)
        sums, counts = yield Sum(row_sums(positive_term, negative_term)), Sum(counts)
        positives, negatives, active_positives, active_negatives = counts.unbind(1)
        losses = negatives * sums[:, 0] + positives * sums[:, 1]
        if self.num_classes is not None and self.learn_beta:
            losses = losses + self.nu * beta[:, 0] * positives * negatives
        active = negatives * active_positives + positives * active_negatives
        # an anchor with triplets but no active pair does not count in the divisor, but its ν β is in the sum
        has_triplets = (positives * negatives > 0).to(sums.dtype)
        return losses, active.to(sums.dtype) + torch.finfo(sums.dtype).tiny * has_triplets

    def compute(self, batch: Batch) -> Tensor:
        value = super().compute(batch)
        if self.num_classes is not None or self.reduction == "none" or not self.learn_beta:
            return value
        return value + batch.settings.nu * batch.settings.beta.to(value.dtype)
