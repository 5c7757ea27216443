# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def info_nce(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    negatives: Float[Tensor, "m d"] | Float[Tensor, "n m d"] | None = None,
    *,
    temperature: float | Tensor = 0.07,
    symmetric: bool = False,
    in_batch_negatives: bool = True,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the cross-entropy of key i for query i; row i of queries belongs to row i of keys.

    With q, k the unit rows of all ranks and X(i) the extra negatives that query i sees,

        loss = mean_i [ log ( Σ_j exp(q_i·k_j / t) + Σ_{x∈X(i)} exp(q_i·x / t) )  −  q_i·k_i / t ]

    Without extra negatives this is ``cross_entropy(q @ k.T / t, arange(N))``; with ``symmetric``, it is
    the mean of that and of ``cross_entropy(k @ q.T / t, arange(N))``, the CLIP loss. The N × N matrix is never held.
    Without ``in_batch_negatives`` the first sum has one term, q_i·k_i: MoCo's loss, over the own key and the queue.
    MoCo v3 multiplies the loss by 2t: ``WeightedSum([InfoNCE(temperature=t)], weights=[2 * t])``, with keys detached.

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [n, d].
        negatives: [m, d] are candidates of every query of every rank (m may differ between ranks); [n, m, d] are candidates
            of one query each. In the symmetric direction only queries are candidates.
        temperature: t > 0, dimensionless; a tensor is learnable.
        symmetric: whether to average with the direction from keys to queries.
        in_batch_negatives: whether other queries' keys are negatives. If not, pass ``negatives``, and not symmetric.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: negatives of another width or number, no negatives without in-batch negatives, or what any
            :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> info_nce(eye, eye, temperature=1.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748; symmetric: Radford et al. 2021, fig. 3,
    https://arxiv.org/abs/2103.00020; without negatives in the batch: He et al. 2020, eq. 1,
    https://arxiv.org/abs/1911.05722
    """

class InfoNCE(Loss):
    """Compute the cross-entropy of key i for query i; row i of queries belongs to row i of keys.

    With q, k the unit rows of all ranks and X(i) the extra negatives that query i sees,

        loss = mean_i [ log ( Σ_j exp(q_i·k_j / t) + Σ_{x∈X(i)} exp(q_i·x / t) )  −  q_i·k_i / t ]

    Without extra negatives this is ``cross_entropy(q @ k.T / t, arange(N))``; with ``symmetric``, it is
    the mean of that and of ``cross_entropy(k @ q.T / t, arange(N))``, the CLIP loss. The N × N matrix is never held.
    Without ``in_batch_negatives`` the first sum has one term, q_i·k_i: MoCo's loss, over the own key and the queue.
    MoCo v3 multiplies the loss by 2t: ``WeightedSum([InfoNCE(temperature=t)], weights=[2 * t])``, with keys detached.

    Called as ``loss(queries, keys, negatives)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d].
    - negatives: [m, d] are candidates of every query of every rank (m may differ between ranks); [n, m, d] are candidates
      of one query each. In the symmetric direction only queries are candidates.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        symmetric: whether to average with the direction from keys to queries.
        in_batch_negatives: whether other queries' keys are negatives. If not, pass ``negatives``, and not symmetric.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: negatives of another width or number, no negatives without in-batch negatives, or what any
            :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> InfoNCE(temperature=1.0)(eye, eye)   # log(e + 1) − 1
        tensor(0.3133)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748; symmetric: Radford et al. 2021, fig. 3,
    https://arxiv.org/abs/2103.00020; without negatives in the batch: He et al. 2020, eq. 1,
    https://arxiv.org/abs/1911.05722
    """

    temperature: float | Tensor | nn.Module
    symmetric: bool
    in_batch_negatives: bool
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.07,
        symmetric: bool = False,
        in_batch_negatives: bool = True,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "n d"],
        negatives: Float[Tensor, "m d"] | Float[Tensor, "n m d"] | None = None,
        *,
        world: World | None = None,
    ) -> Tensor: ...
