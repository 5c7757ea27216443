# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def mega_batch_margin(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    *,
    positive_margin: float = 0.8,
    negative_margin: float = 0.3,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute hinges on each query's own key and on the most similar other key of all ranks.

    With s_ij = q_i·k_j of unit rows,

        loss_i = max(0, m⁺ − s_ii)  +  max(0, max_{j≠i} s_ij − m⁻)

    A single pair has no second term. Equal maxima share the gradient.

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [n, d], row i belongs to row i of queries.
        positive_margin: m⁺, the similarity from which on a pair has no loss.
        negative_margin: m⁻, the similarity up to which a negative has no loss.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        >>> mega_batch_margin(q, k)   # 0.8 − 0.6 and 0.8 − 0.3, twice
        tensor(0.7000)

    Source: Wieting & Gimpel 2018, https://arxiv.org/abs/1711.05732
    """

class MegaBatchMargin(Loss):
    """Compute hinges on each query's own key and on the most similar other key of all ranks.

    With s_ij = q_i·k_j of unit rows,

        loss_i = max(0, m⁺ − s_ii)  +  max(0, max_{j≠i} s_ij − m⁻)

    A single pair has no second term. Equal maxima share the gradient.

    Called as ``loss(queries, keys)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d], row i belongs to row i of queries.

    Args:
        positive_margin: m⁺, the similarity from which on a pair has no loss.
        negative_margin: m⁻, the similarity up to which a negative has no loss.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        >>> MegaBatchMargin()(q, k)   # 0.8 − 0.6 and 0.8 − 0.3, twice
        tensor(0.7000)

    Source: Wieting & Gimpel 2018, https://arxiv.org/abs/1711.05732
    """

    positive_margin: float
    negative_margin: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        positive_margin: float = 0.8,
        negative_margin: float = 0.3,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
