"""PNP: penalise the negatives that are ranked before a positive."""

from typing import Literal

import torch
from torch import Tensor

from contrastive_zoo.engine.hinges import sum_over_positives
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Positive, Temperature

PNPVariant = Literal["O", "Iu", "Ib", "Ds", "Dq"]


class PNP(RowLoss):
    r"""Compute a function of the soft number of negatives before each positive, the mean over an anchor's positives.

        R_ip = Σ_{n∈N(i)} σ((s_in − s_ip) / τ)
        loss_i = mean_{p∈P(i)} f(R_ip)

        f(R) = R  (O),  (1 + R) log(1 + R)  (Iu),  (bR − log(1 + bR)) / b²  (Ib),  log(1 + R)  (Ds),  1 − (1 + R)^−α  (Dq)

    averaged over the anchors with a positive. One matrix of an anchor block by N is held at a time, never N³ numbers.

    Args:
        variant: f. The first three grow faster than R or as fast, the last two slower.
        temperature: τ > 0, in units of similarity; a tensor or a module is learnable.
        alpha: α > 0, used by ``"Dq"``.
        b: b > 0, used by ``"Ib"``.
        with_self: whether the anchor is one of its own positives, as in pytorch-metric-learning.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an unknown variant, a τ, α or b that is not positive; at the call as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
        >>> PNP()(z, torch.tensor([0, 0, 1]))   # row 0 ranks row 2 first: 1; row 1 sees a tie: ½
        tensor(0.7500)

    Source: Li et al. 2021, https://arxiv.org/abs/2102.04640
    """

    variant: PNPVariant = "O"
    temperature: Temperature = 0.01
    alpha: Positive = 1.0
    b: Positive = 2.0
    with_self: bool = False

    def lists_positives(self) -> bool:
        return True

    def rows(
        self, similarity: Tensor, positive: Tensor, negative: Tensor, most_positives: int | None = None
    ) -> tuple[Tensor, Tensor]:
        relevant = ~negative if self.with_self else positive
        most = None if most_positives is None else most_positives + self.with_self
        logits = similarity / self.temperature  # type: ignore[operator]  # here it is a number or a tensor

        def penalty(p: Tensor) -> Tensor:
            before = (logits - logits.gather(1, p)).sigmoid()
            return self._penalty(before.where(negative, 0).sum(1))

        return sum_over_positives(penalty, relevant, most) / relevant.sum(1).clamp(min=1), positive.any(1)

    def _penalty(self, negatives_before: Tensor) -> Tensor:
        r = negatives_before
        if self.variant == "Ib":
            return (self.b * r - torch.log1p(self.b * r)) / self.b**2
        if self.variant == "Dq":
            return 1 - (1 + r) ** -self.alpha
        return {"O": lambda: r, "Iu": lambda: (1 + r) * torch.log1p(r), "Ds": lambda: torch.log1p(r)}[self.variant]()
