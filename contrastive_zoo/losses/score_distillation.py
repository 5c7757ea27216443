"""Score distillation: the student's softmax over a query's candidates is that of a teacher's scores."""

import torch  # noqa: F401 - the examples use it
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Positive, Reduction, Temperature
from contrastive_zoo.ranks.row_checks import described, rows_problem


class ScoreDistillation(Loss):
    r"""Compute the Kullback-Leibler divergence of the student's distribution over k candidates from the teacher's.

    With q the queries, c their k candidates and y the teacher's scores of these,

        loss_i = t² KL( softmax_k(y_ik / t')  ‖  softmax_k(q_i·c_ik / t) )

    The factor t² keeps the size of the gradient at any temperature. Equal to sentence-transformers' DistillKLDivLoss, which
    takes each candidate as a column of its own: ``torch.stack(columns, 1)``.

    Called as ``loss(queries, candidates, scores)``:

    - queries: [n, d], n may differ between ranks.
    - candidates: [n, k, d], the same k ≥ 2 everywhere.
    - scores: y, [n, k], without gradient.

    Args:
        temperature: t > 0, the student's; a tensor or a module is learnable.
        teacher_temperature: t' > 0.
        normalize: normalise embeddings to unit length first; the original does not.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: rows that do not belong together, a temperature that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> q, c = torch.tensor([[1.0]]), torch.tensor([[[0.0], [0.0]]])
        >>> ScoreDistillation()(q, c, torch.tensor([[50.0, 0.0]]))   # log 2
        tensor(0.6931)

    Source: Hinton et al. 2015, eq. 1 and §2, https://arxiv.org/abs/1503.02531
    """

    temperature: Temperature = 1.0
    teacher_temperature: Positive = 1.0
    normalize: bool = False
    reduction: Reduction = "mean"

    def inputs(
        self, queries: Float[Tensor, "n d"], candidates: Float[Tensor, "n k d"], scores: Float[Tensor, "n k"]
    ) -> Inputs:
        rows = {"queries": queries, "candidates": candidates, "scores": scores}
        return Inputs(rows, _problem(queries, candidates, scores))

    def compute(self, batch: Batch) -> Tensor:
        *rows, scores = batch.rows.values()
        q, c = (batch.prepared(x, normalize=self.normalize) for x in rows)
        targets = (scores.detach().to(q.dtype) / batch.settings.teacher_temperature).log_softmax(1)
        scale = batch.scale(batch.settings.temperature)
        losses = _divergences(q, c, targets, scale) / scale**2
        return batch.reduce(losses, reduction=self.reduction)


@without_autocast
def _divergences(q: Tensor, c: Tensor, targets: Tensor, scale: float | Tensor) -> Tensor:
    logits = scale * (q[:, None] * c).sum(2)
    return F.kl_div(logits.log_softmax(1), targets, reduction="none", log_target=True).sum(1)


def _problem(queries: Tensor, candidates: Tensor, scores: Tensor) -> str | None:
    if result := rows_problem("queries", queries):
        return result
    fits = candidates.ndim == 3 and candidates.shape[::2] == queries.shape and candidates.shape[1] >= 2
    if not fits or candidates.dtype != queries.dtype:
        return (
            f"candidates are k >= 2 rows per query, [n, k, d], got "
            f"{described(candidates)} for queries {described(queries)}."
        )
    if scores.shape != candidates.shape[:2] or not scores.is_floating_point():
        return f"scores are one number per candidate, got {described(scores)} for candidates {described(candidates)}."
    return None
