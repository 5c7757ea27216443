"""MarginMSE: the student's differences of similarities are those of a teacher."""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import towers_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.world import ALONE, World


@checked
def margin_mse(
    queries: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    negatives: Float[Tensor, "n k d"],
    margins: Float[Tensor, "n k"],
    *,
    normalize: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the squared error of the difference between the similarities of a positive and of each negative.

    With q, p, n the queries, their positives and their k negatives, and m the teacher's margins,

        loss_i = mean_k ( q_i·p_i − q_i·n_ik − m_ik )²

    Of a teacher's scores [n, 1 + k], positive first, the margins are ``scores[:, :1] - scores[:, 1:]``. Equal to
    sentence-transformers' MarginMSELoss, which takes each negative as a column of its own: ``torch.stack(columns, 1)``.

    Args:
        queries: [n, d], n may differ between ranks.
        positives: [n, d], row i belongs to row i of queries.
        negatives: [n, k, d], the same k everywhere.
        margins: [n, k], without gradient.
        normalize: normalise embeddings to unit length first; the original does not.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not belong together, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, p, n = torch.eye(2), torch.eye(2), torch.zeros(2, 1, 2)
        >>> margin_mse(q, p, n, torch.tensor([[1.0], [3.0]]))   # (1 − 1)² and (1 − 3)²
        tensor(2.)

    Source: Hofstätter et al. 2020, https://arxiv.org/abs/2010.02666
    """
    named = {"queries": queries, "positives": positives, "negatives": negatives, "margins": margins}
    problem = _problem(queries, positives, negatives, margins)
    begin("MarginMSE", named, problem=problem, normalize=normalize, reduction=reduction, world=world)
    q, p, n = (prepare_rows(rows, normalize=normalize, world=world) for rows in (queries, positives, negatives))
    return reduce_anchors(_squared_errors(q, p, n, margins.detach()), reduction=reduction, world=world)


class MarginMSE(Loss, function=margin_mse): ...


@without_autocast
def _squared_errors(q: Tensor, p: Tensor, n: Tensor, margins: Tensor) -> Tensor:
    differences = (q[:, None] * (p[:, None] - n)).sum(2)
    return (differences - margins.to(q.dtype)).square().mean(1)


def _problem(queries: Tensor, positives: Tensor, negatives: Tensor, margins: Tensor) -> str | None:
    found = towers_problem("row i is one query's", queries=queries, positives=positives)
    fits = negatives.ndim == 3 and negatives.shape[::2] == queries.shape and negatives.shape[1] >= 1
    if found is None and not (fits and negatives.dtype == queries.dtype):
        return f"negatives are k >= 1 rows per query, [n, k, d], got {kind(negatives)} for queries {kind(queries)}."
    if found is None and not (margins.shape == negatives.shape[:2] and margins.is_floating_point()):
        return f"margins are one number per negative, got {kind(margins)} for negatives {kind(negatives)}."
    return found
