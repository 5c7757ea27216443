# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

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
    """Compute the Kullback-Leibler divergence of the student's distribution over k candidates from the teacher's.

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

class ScoreDistillation(Loss):
    """Compute the Kullback-Leibler divergence of the student's distribution over k candidates from the teacher's.

    With q the queries, c their k candidates and y the teacher's scores of these,

        loss_i = t² KL( softmax_k(y_ik / t')  ‖  softmax_k(q_i·c_ik / t) )

    The factor t² keeps the size of the gradient at any temperature. Equal to sentence-transformers' DistillKLDivLoss, which
    takes each candidate as a column of its own: ``torch.stack(columns, 1)``.

    Called as ``loss(queries, candidates, scores)``:

    - queries: [n, d], n may differ between ranks.
    - candidates: [n, k, d], the same k ≥ 2 everywhere.
    - scores: y, [n, k], without gradient.

    Args:
        temperature: t > 0, the student's; a tensor is learnable.
        teacher_temperature: t' > 0.
        normalize: normalise embeddings to unit length first; the original does not.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: rows that do not belong together, a temperature that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, c = torch.tensor([[1.0]]), torch.tensor([[[0.0], [0.0]]])
        >>> ScoreDistillation()(q, c, torch.tensor([[50.0, 0.0]]))   # log 2
        tensor(0.6931)

    Source: Hinton et al. 2015, eq. 1 and §2, https://arxiv.org/abs/1503.02531
    """

    temperature: float | Tensor | nn.Module
    teacher_temperature: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 1.0,
        teacher_temperature: float = 1.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        candidates: Float[Tensor, "n k d"],
        scores: Float[Tensor, "n k"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
