"""LeJEPA: views near the mean of the global views, and embeddings with a standard normal distribution."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.settings import Share, Size
from contrastive_zoo.losses.sigreg import SIGReg, epps_pulley
from contrastive_zoo.ranks.row_checks import views_problem


class LeJEPA(SIGReg):
    r"""Compute SIGReg of each view plus the distance of views from the mean of the global views.

    With z_v the rows of all ranks in view v of V, of d features, and m_i the mean of sample i over the first g views,

        loss = λ mean_v SIGReg(z_v)  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    where :class:`SIGReg` takes the same directions in each view. In training mode each call draws other directions, as
    there. Embeddings are not normalised. Equal to lightly's LeJEPALoss on all views.

    Called as ``loss(view1, view2, …)``: two or more views of the same samples, [n, d] each, the global ones first; n may
    differ between ranks.

    Args:
        embedding_size: d.
        lambda_: λ, 0 … 1.
        global_views: g.
        num_slices: as in :class:`SIGReg`.
        num_points: as in :class:`SIGReg`.
        limit: as in :class:`SIGReg`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a λ outside 0 … 1, global_views that are not 1 … V, what :class:`SIGReg` or any :class:`Loss` refuses.

    Examples:
        >>> loss = LeJEPA(1, lambda_=0.0)
        >>> loss(torch.ones(2, 1), -torch.ones(2, 1)), loss.step   # 1² from the mean 0
        (tensor(1.), tensor(1))

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    lambda_: Share = 0.05
    global_views: Size = 2

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        problem, count = views_problem(views), len(views)
        if problem is None and self.global_views > count:
            problem = f"the first global_views of the views are global, got {self.global_views} of {count} views."
        problem = problem or self.directions_problem("views", views[0])
        return Inputs({f"view {index}": x for index, x in enumerate(views)}, problem)

    def compute(self, batch: Batch) -> Tensor:
        rows, share = [batch.prepared(x, normalize=False) for x in batch.rows.values()], batch.settings.lambda_
        z = torch.stack(rows, 1)
        distances = (z - z[:, : batch.settings.global_views].mean(1, keepdim=True)).square().mean((1, 2))
        directions = self.directions()
        normality = torch.stack([epps_pulley(batch, x, directions) for x in rows]).mean()
        loss = share * normality + (1 - share) * batch.reduce(distances)
        if self.training:
            self.step.add_(1)
        return loss
