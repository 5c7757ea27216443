"""Score distillation: the student's softmax over a query's candidates is that of a teacher's scores."""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import positive_problem, rows_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World


@checked
def score_distillation(
    queries: Float[Tensor, "n d"],
    candidates: Float[Tensor, "n k d"],
    scores: Float[Tensor, "n k"],
    *,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float = 1.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the Kullback-Leibler divergence of the student's distribution over k candidates from the teacher's.

    With q the queries, c their k candidates and y the teacher's scores of these,

        loss_i = t² KL( softmax_k(y_ik / t')  ‖  softmax_k(q_i·c_ik / t) )

    The factor t² keeps the size of the gradient at any temperature. Equal to sentence-transformers' DistillKLDivLoss, which
    takes each candidate as a column of its own: ``torch.stack(columns, 1)``.

    Args:
        queries: [n, d], n may differ between ranks.
        candidates: [n, k, d], the same k ≥ 2 everywhere.
        scores: y, [n, k], without gradient.
        temperature: t > 0, the student's; a tensor is learnable.
        teacher_temperature: t' > 0.
        normalize: normalise embeddings to unit length first; the original does not.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not belong together, a temperature that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, c = torch.tensor([[1.0]]), torch.tensor([[[0.0], [0.0]]])
        >>> score_distillation(q, c, torch.tensor([[50.0, 0.0]]))   # log 2
        tensor(0.6931)

    Source: Hinton et al. 2015, eq. 1 and §2, https://arxiv.org/abs/1503.02531
    """
    problem = _problem(queries, candidates, scores) or _settings_problem(teacher_temperature)
    named = {"queries": queries, "candidates": candidates, "scores": scores}
    settings: dict[str, Any] = {"temperature": temperature, "teacher_temperature": teacher_temperature}
    begin(
        "ScoreDistillation", named, problem=problem, normalize=normalize, reduction=reduction, world=world, **settings
    )
    q, c = (prepare_rows(rows, normalize=normalize, world=world) for rows in (queries, candidates))
    targets = (scores.detach().to(q.dtype) / teacher_temperature).log_softmax(1)
    scale = logit_scale(temperature, world)
    losses = _divergences(q, c, targets, scale) / scale**2
    return reduce_anchors(losses, reduction=reduction, world=world)


def _settings_problem(teacher_temperature: float) -> str | None:
    return positive_problem(teacher_temperature=teacher_temperature)


class ScoreDistillation(Loss, function=score_distillation, check=_settings_problem): ...


@without_autocast
def _divergences(q: Tensor, c: Tensor, targets: Tensor, scale: float | Tensor) -> Tensor:
    logits = scale * (q[:, None] * c).sum(2)
    return F.kl_div(logits.log_softmax(1), targets, reduction="none", log_target=True).sum(1)


def _problem(queries: Tensor, candidates: Tensor, scores: Tensor) -> str | None:
    if found := rows_problem("queries", queries):
        return found
    fits = candidates.ndim == 3 and candidates.shape[::2] == queries.shape and candidates.shape[1] >= 2
    if not fits or candidates.dtype != queries.dtype:
        return f"candidates are k >= 2 rows per query, [n, k, d], got {kind(candidates)} for queries {kind(queries)}."
    if scores.shape != candidates.shape[:2] or not scores.is_floating_point():
        return f"scores are one number per candidate, got {kind(scores)} for candidates {kind(candidates)}."
    return None
