"""MarginMSE: the student's differences of similarities are those of a teacher."""

import torch  # noqa: F401 - the examples use it
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Reduction
from contrastive_zoo.ranks.row_checks import described, towers_problem


class MarginMSE(Loss):
    r"""Compute the squared error of the difference between the similarities of a positive and of each negative.

    With q, p, n the queries, their positives and their k negatives, and m the teacher's margins,

        loss_i = mean_k ( q_i·p_i − q_i·n_ik − m_ik )²

    Of a teacher's scores [n, 1 + k], positive first, the margins are ``scores[:, :1] - scores[:, 1:]``. Equal to
    sentence-transformers' MarginMSELoss, which takes each negative as a column of its own: ``torch.stack(columns, 1)``.

    Called as ``loss(queries, positives, negatives, margins)``:

    - queries: [n, d], n may differ between ranks.
    - positives: [n, d], row i belongs to row i of queries.
    - negatives: [n, k, d], the same k everywhere.
    - margins: [n, k], without gradient.

    Args:
        normalize: normalise embeddings to unit length first; the original does not.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: rows that do not belong together, or what any :class:`Loss` refuses.

    Examples:
        >>> q, p, n = torch.eye(2), torch.eye(2), torch.zeros(2, 1, 2)
        >>> MarginMSE()(q, p, n, torch.tensor([[1.0], [3.0]]))   # (1 − 1)² and (1 − 3)²
        tensor(2.)

    Source: Hofstätter et al. 2020, https://arxiv.org/abs/2010.02666
    """

    normalize: bool = False
    reduction: Reduction = "mean"

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        negatives: Float[Tensor, "n k d"],
        margins: Float[Tensor, "n k"],
    ) -> Inputs:
        rows = {"queries": queries, "positives": positives, "negatives": negatives, "margins": margins}
        return Inputs(rows, _problem(queries, positives, negatives, margins))

    def compute(self, batch: Batch) -> Tensor:
        *rows, margins = batch.rows.values()
        q, p, n = (batch.prepared(x, normalize=self.normalize) for x in rows)
        return batch.reduce(_squared_errors(q, p, n, margins.detach()), reduction=self.reduction)


@without_autocast
def _squared_errors(q: Tensor, p: Tensor, n: Tensor, margins: Tensor) -> Tensor:
    differences = (q[:, None] * (p[:, None] - n)).sum(2)
    return (differences - margins.to(q.dtype)).square().mean(1)


def _problem(queries: Tensor, positives: Tensor, negatives: Tensor, margins: Tensor) -> str | None:
    result = towers_problem("row i is one query's", queries=queries, positives=positives)
    fits = negatives.ndim == 3 and negatives.shape[::2] == queries.shape and negatives.shape[1] >= 1
    if result is None and not (fits and negatives.dtype == queries.dtype):
        return (
            f"negatives are k >= 1 rows per query, [n, k, d], got "
            f"{described(negatives)} for queries {described(queries)}."
        )
    if result is None and not (margins.shape == negatives.shape[:2] and margins.is_floating_point()):
        return f"margins are one number per negative, got {described(margins)} for negatives {described(negatives)}."
    return result
