"""Margin loss: positive distances below a learnable boundary β, negative distances above it, by a margin."""

from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from contrastive_zoo.compiling import traced_as
from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.checks import flag_problem, number_problem
from contrastive_zoo.loss_base.distances import MetricLoss, distances, row_sums
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.row_loss import RowSettings
from contrastive_zoo.row_checks import tensor_problem
from contrastive_zoo.session import refuse
from contrastive_zoo.sizes import of_size
from contrastive_zoo.value_checks import range_problem, safe_index
from contrastive_zoo.world import World

_SIZE = "num_classes is 1 or more"


class Margin(MetricLoss):
    r"""Compute two hinges around a boundary, which is one parameter or one per class.

    With D_ij the distance of unit rows, P and N an anchor's positives and negatives, and active pairs those with a loss,

        loss = Σ_i [ |N(i)| Σ_{p∈P(i)} max(0, D_ip − β_i + margin) + |P(i)| Σ_{n∈N(i)} max(0, β_i − D_in + margin)
                     + ν |P(i)| |N(i)| β_i ]  /  Σ_i [ |N(i)| · active positives + |P(i)| · active negatives ]

    that is, both pairs of every triplet over the number of active pairs, as in pytorch-metric-learning. The last term
    keeps β small. With one β for all classes it is ν β; if β is not learnable, it is left out. The mean is 0 if no pair is
    active.

    Args:
        margin: distance α between β and either side.
        beta: initial β.
        num_classes: number of classes, each with its own β; labels are then 0 … num_classes − 1.
        learn_beta: whether β is a parameter; pytorch-metric-learning's default is False.
        nu: ν >= 0, the weight of β itself.
        row_settings: normalize, reduction, check_finite of :class:`RowLoss`; ``"none"`` returns
            anchors' sums, without ν β.

    Raises:
        ValueError: a negative ν, num_classes below 1, a margin or β that is not finite; at the call labels
            outside of the classes, or as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> Margin()(z, torch.tensor([0, 0, 1]))   # √2 − 1.2 + 0.2, twice; √2 and 2 are 1.4 or more apart
        tensor(0.4142, grad_fn=<...>)

    Source: Wu et al. 2017, §4, https://arxiv.org/abs/1706.07567
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        beta: float = 1.2,
        num_classes: int | None = None,
        learn_beta: bool = True,
        nu: float = 0.0,
        **row_settings: Unpack[RowSettings],
    ) -> None:
        super().__init__(**row_settings)
        self.margin, self.nu, self.learn_beta = margin, nu, learn_beta
        problem = None if num_classes is None else number_problem(_SIZE, low=1, whole=True, num_classes=num_classes)
        problem = problem or flag_problem(learn_beta=learn_beta) or number_problem(beta=beta)
        if problem := problem or (tensor_problem("beta", beta) if isinstance(beta, Tensor) else None):
            raise ValueError(f"{type(self).__name__}: {problem}")
        initial = float(beta.detach() if isinstance(beta, Tensor) else beta)
        self.num_classes = None if num_classes is None else int(num_classes)
        # one number as [1]: FSDP shards no parameter of shape []
        betas = of_size(
            "Margin", partial(torch.full, (self.num_classes or 1,), initial), num_classes=self.num_classes or 1
        )
        self.beta = nn.Parameter(betas, requires_grad=learn_beta)
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        return (
            super().settings_problem()
            or number_problem("nu is 0 or more", low=0, nu=self.nu)
            or number_problem(margin=self.margin)
            or number_problem(several=True, beta=self.beta)
        )

    def similarity(self, anchors: Tensor, columns: Tensor) -> Tensor:
        return distances(anchors, columns)

    def on_block(self, block: AnchorBlock) -> Rows:
        distance = self.similarity(block.anchors, block.candidates)
        beta = self.beta.to(distance.dtype)
        beta = beta[:, None] if self.num_classes is None else beta[safe_index(block.ids, self.num_classes), None]
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

    @traced_as(GraphModule.traced_forward)
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Tensor:
        """Return the reduced loss.

        Args:
            rows: as in :class:`RowLoss`.
            world: the ranks that share the batch.
            named_rows: as in :class:`RowLoss`.
        """
        world = self.local() if world is None else world
        labels = named_rows.get("labels", rows[-1] if len(rows) == 2 else None)
        if self.num_classes is not None:
            problem = _classes_problem(labels, self.num_classes, world)
            if problem is not None:
                refuse(type(self).__name__, problem, world=world)
        value = super().forward(*rows, world=world, **named_rows)
        if self.num_classes is not None or self.reduction == "none" or not self.learn_beta:
            return value
        return value + self.nu * real(self.beta).to(value.dtype)


def _classes_problem(labels: Tensor | None, num_classes: int, world: World) -> str | None:
    def problem(least: int, most: int) -> str:
        return f"labels are 0 … {num_classes - 1}, got {least} … {most}."

    if labels is None or tensor_problem("labels", labels) or labels.is_floating_point() or labels.is_complex():
        return "β of a class needs labels: call loss(embeddings, labels), or leave num_classes out."
    return range_problem(labels, 0, num_classes - 1, problem, world=world)
