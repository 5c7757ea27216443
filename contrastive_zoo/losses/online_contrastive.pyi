# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def online_contrastive(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    *,
    margin: float = 0.5,
    reduction: Reduction = "sum",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the contrastive loss of the positive pairs and negative pairs that overlap in distance.

    With D_i = 1 − q_i·k_i of unit rows, and positives y_i = 1 and negatives y_i = 0 of all ranks,

        loss = Σ_{i: y_i = 1, D_i > min_{y_j = 0} D_j} D_i²  +  Σ_{i: y_i = 0, D_i < max_{y_j = 1} D_j} max(0, margin − D_i)²

    If there are only positives or only negatives, their mean distance takes the place of the extreme of the other kind.
    Equal to sentence-transformers' OnlineContrastiveLoss.

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [n, d], row i forms a pair with row i of queries.
        labels: y, [n], 1 for a positive pair and 0 for a negative one.
        margin: cosine distance beyond which negatives have no loss.
        reduction: ``"sum"``, as the original, ``"mean"`` over the hard pairs of all ranks, or ``"none"`` for the local
            pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels other than 0 and 1, a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.6, 0.8]])
        >>> online_contrastive(q, k, torch.tensor([1, 0]))   # distances 0.4 and 0.2 overlap: 0.4² + 0.3²
        tensor(0.2500)

    Source: sentence-transformers, https://sbert.net/docs/package_reference/sentence_transformer/losses.html, after
    Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """

class OnlineContrastive(Loss):
    """Compute the contrastive loss of the positive pairs and negative pairs that overlap in distance.

    With D_i = 1 − q_i·k_i of unit rows, and positives y_i = 1 and negatives y_i = 0 of all ranks,

        loss = Σ_{i: y_i = 1, D_i > min_{y_j = 0} D_j} D_i²  +  Σ_{i: y_i = 0, D_i < max_{y_j = 1} D_j} max(0, margin − D_i)²

    If there are only positives or only negatives, their mean distance takes the place of the extreme of the other kind.
    Equal to sentence-transformers' OnlineContrastiveLoss.

    Called as ``loss(queries, keys, labels)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d], row i forms a pair with row i of queries.
    - labels: y, [n], 1 for a positive pair and 0 for a negative one.

    Args:
        margin: cosine distance beyond which negatives have no loss.
        reduction: ``"sum"``, as the original, ``"mean"`` over the hard pairs of all ranks, or ``"none"`` for the local
            pairs, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels other than 0 and 1, a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.6, 0.8]])
        >>> OnlineContrastive()(q, k, torch.tensor([1, 0]))   # distances 0.4 and 0.2 overlap: 0.4² + 0.3²
        tensor(0.2500)

    Source: sentence-transformers, https://sbert.net/docs/package_reference/sentence_transformer/losses.html, after
    Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """

    margin: float
    reduction: Reduction
    check_finite: bool

    def __init__(self, *, margin: float = 0.5, reduction: Reduction = "sum", check_finite: bool = True) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "n d"],
        labels: Int[Tensor, " n"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
