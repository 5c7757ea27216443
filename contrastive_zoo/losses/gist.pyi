# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

Strategy = Literal["absolute", "relative"]

def gist(
    anchors: Float[Tensor, "n d"],
    positives: Float[Tensor, "n d"],
    guide_anchors: Float[Tensor, "n e"],
    guide_positives: Float[Tensor, "n e"],
    negatives: Float[Tensor, "m d"] | None = None,
    guide_negatives: Float[Tensor, "m e"] | None = None,
    *,
    temperature: float | Tensor = 0.01,
    margin_strategy: Strategy = "absolute",
    margin: float = 0.0,
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute InfoNCE over the candidates that a guide model does not find closer to the anchor than its positive.

    With a, p, x the unit rows of anchors, positives and negatives of all ranks, g(·,·) the guide's cosine and

        τ_i = g(a_i, p_i) − margin,   or, relative,   g(a_i, p_i) − margin · |g(a_i, p_i)|

    anchor i's logits are a_i·p_j / t; with ``contrast_anchors`` also a_i·a_j / t, j ≠ i; with ``contrast_positives``
    p_i·p_j / t, j ≠ i; and a_i·x / t. Pairs with g(·,·) > τ_i are masked, except a_i·p_i:

        loss = mean_i [ logsumexp of i's logits  −  a_i·p_i / t ]

    Equal to sentence-transformers' GISTEmbedLoss on one process, which masks a_i·a_i and p_i·p_i only if the guide finds
    them closer than τ_i, that is, if τ_i < 1. On several ranks it compares anchors only with anchors of the same rank.

    Args:
        anchors: [n, d], n may differ between ranks.
        positives: [n, d], row i belongs to row i of anchors.
        guide_anchors: [n, e], the guide's embeddings of the same samples; without gradient.
        guide_positives: [n, e].
        negatives: [m, d], candidates of every anchor of every rank; m may differ between ranks.
        guide_negatives: [m, e].
        temperature: t > 0, dimensionless; a tensor is learnable.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        margin: the margin in τ; a larger margin masks more pairs.
        contrast_anchors: whether anchors are candidates of each other.
        contrast_positives: whether positives are candidates of each other.
        reduction: ``"mean"`` over all ranks' anchors (nats per anchor), ``"sum"``, or ``"none"`` for the local anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not pair or lack their guide's, an unknown strategy, a margin that is not finite,
            or what any :class:`Loss` refuses.

    Examples:
        >>> eye, equal = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> gist(eye, eye, eye, eye, temperature=1.0)   # log(e + 3) − 1
        tensor(0.7437)
        >>> gist(eye, eye, equal, equal, temperature=1.0, margin=0.1)   # all other pairs are masked
        tensor(0.)

    Source: Solatorio 2024, §3, https://arxiv.org/abs/2402.16829
    """

class GIST(Loss):
    """Compute InfoNCE over the candidates that a guide model does not find closer to the anchor than its positive.

    With a, p, x the unit rows of anchors, positives and negatives of all ranks, g(·,·) the guide's cosine and

        τ_i = g(a_i, p_i) − margin,   or, relative,   g(a_i, p_i) − margin · |g(a_i, p_i)|

    anchor i's logits are a_i·p_j / t; with ``contrast_anchors`` also a_i·a_j / t, j ≠ i; with ``contrast_positives``
    p_i·p_j / t, j ≠ i; and a_i·x / t. Pairs with g(·,·) > τ_i are masked, except a_i·p_i:

        loss = mean_i [ logsumexp of i's logits  −  a_i·p_i / t ]

    Equal to sentence-transformers' GISTEmbedLoss on one process, which masks a_i·a_i and p_i·p_i only if the guide finds
    them closer than τ_i, that is, if τ_i < 1. On several ranks it compares anchors only with anchors of the same rank.

    Called as ``loss(anchors, positives, guide_anchors, guide_positives, negatives, guide_negatives)``:

    - anchors: [n, d], n may differ between ranks.
    - positives: [n, d], row i belongs to row i of anchors.
    - guide_anchors: [n, e], the guide's embeddings of the same samples; without gradient.
    - guide_positives: [n, e].
    - negatives: [m, d], candidates of every anchor of every rank; m may differ between ranks.
    - guide_negatives: [m, e].

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        margin: the margin in τ; a larger margin masks more pairs.
        contrast_anchors: whether anchors are candidates of each other.
        contrast_positives: whether positives are candidates of each other.
        reduction: ``"mean"`` over all ranks' anchors (nats per anchor), ``"sum"``, or ``"none"`` for the local anchors, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: rows that do not pair or lack their guide's, an unknown strategy, a margin that is not finite,
            or what any :class:`Loss` refuses.

    Examples:
        >>> eye, equal = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> GIST(temperature=1.0)(eye, eye, eye, eye)   # log(e + 3) − 1
        tensor(0.7437)
        >>> GIST(temperature=1.0, margin=0.1)(eye, eye, equal, equal)   # all other pairs are masked
        tensor(0.)

    Source: Solatorio 2024, §3, https://arxiv.org/abs/2402.16829
    """

    temperature: float | Tensor | nn.Module
    margin_strategy: Strategy
    margin: float
    contrast_anchors: bool
    contrast_positives: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.01,
        margin_strategy: Strategy = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        anchors: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        guide_anchors: Float[Tensor, "n e"],
        guide_positives: Float[Tensor, "n e"],
        negatives: Float[Tensor, "m d"] | None = None,
        guide_negatives: Float[Tensor, "m e"] | None = None,
        *,
        world: World | None = None,
    ) -> Tensor: ...
