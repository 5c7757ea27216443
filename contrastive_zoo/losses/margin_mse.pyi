# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

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
    """Compute the squared error of the difference between the similarities of a positive and of each negative.

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

class MarginMSE(Loss):
    """Compute the squared error of the difference between the similarities of a positive and of each negative.

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
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: rows that do not belong together, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, p, n = torch.eye(2), torch.eye(2), torch.zeros(2, 1, 2)
        >>> MarginMSE()(q, p, n, torch.tensor([[1.0], [3.0]]))   # (1 − 1)² and (1 − 3)²
        tensor(2.)

    Source: Hofstätter et al. 2020, https://arxiv.org/abs/2010.02666
    """

    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self, *, normalize: bool = False, reduction: Reduction = "mean", check_finite: bool = True
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        negatives: Float[Tensor, "n k d"],
        margins: Float[Tensor, "n k"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
