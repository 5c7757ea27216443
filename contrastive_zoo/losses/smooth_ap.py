"""SmoothAP: average precision of an anchor's ranking, with sigmoids in place of comparisons."""

import torch
from torch import Tensor

from contrastive_zoo.engine.hinges import sum_over_positives
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Temperature


class SmoothAP(RowLoss):
    r"""Compute one minus average precision, with a soft count of the rows before each positive.

    With σ_k(p) = sigmoid((s_ik − s_ip) / t), the soft comparison of row k and positive p in anchor i's ranking,

        loss_i = 1 − mean_{p∈P(i)} (1 + Σ_{k∈P(i), k≠p} σ_k(p)) / (1 + Σ_{k∈P(i)∪N(i), k≠p} σ_k(p))

    averaged over the anchors with a positive. One positive per anchor is processed at a time: memory is linear in N,
    and an anchor takes P N comparisons.

    Args:
        temperature: t > 0, in units of similarity; the smaller, the closer to true average precision; a tensor
            or a module is learnable.
        with_self: whether an anchor is its own positive, as in the authors' code and in pytorch-metric-learning, which needs
            classes of equal size, in blocks.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a temperature that is not positive; at the call as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
        >>> SmoothAP()(z, torch.tensor([0, 0, 1]))   # row 0 ranks row 2 first: 1 − 1/2; row 1 sees a tie: 1 − 1/1.5
        tensor(0.4167)

    Source: Brown et al. 2020, https://arxiv.org/abs/2007.12163
    """

    temperature: Temperature = 0.01
    with_self: bool = False

    ring_refusal = "a rank is a sum over all candidates for each positive, so it needs whole rows"

    def lists_positives(self) -> bool:
        return True

    def rows(
        self, similarity: Tensor, positive: Tensor, negative: Tensor, most_positives: int | None = None
    ) -> tuple[Tensor, Tensor]:
        relevant = ~negative if self.with_self else positive
        most = None if most_positives is None else most_positives + self.with_self
        logits = similarity / self.temperature  # type: ignore[operator]  # here it is a number or a tensor
        ranked = logits.masked_fill(~(relevant | negative), -torch.inf)

        def precision(p: Tensor) -> Tensor:
            before = (ranked - logits.gather(1, p)).sigmoid()
            # both sums contain sigmoid(0) = ½ of the positive itself
            return (before.where(relevant, 0).sum(1) + 0.5) / (before.sum(1) + 0.5)

        mean = sum_over_positives(precision, relevant, most) / relevant.sum(1).clamp(min=1)
        return 1 - mean, positive.any(1)
