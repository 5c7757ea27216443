# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

Duplicates = Literal["positive", "ignore", "negative"]

def multi_positive(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "m d"],
    ids: Int[Tensor, " n"] | Int[Tensor, "n k"],
    key_ids: Int[Tensor, " m"] | None = None,
    weights: Float[Tensor, "n k"] | None = None,
    *,
    temperature: float | Tensor = 0.07,
    duplicates: Duplicates = "positive",
    symmetric: bool = False,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute InfoNCE with all keys of the query's ids as targets.

    With q, k the unit rows of all ranks, s_ij = q_i·k_j / t and targets p_i, a distribution over keys,

        loss_i = log Σ_{j∈C(i)} exp(s_ij)  −  Σ_j p_ij s_ij

    which is ``cross_entropy(s, p)`` for C(i) all keys. The targets of a query with several
    ids follow its weights: p_ij ∝ Σ_l w_il [key j has id ids_il]. A query without a key does not count.

    Where row i of queries belongs to row i of keys, others of its id, such as a caption that occurs twice, are

        "positive"  p_i is even over the keys with its id
        "ignore"    p_i is key i, and others of its id are left out of C(i)
        "negative"  p_i is key i, and others of its id are candidates like any: InfoNCE

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [m, d], m may differ between ranks.
        ids: [n] integers, or [n, k] for several targets; an id without a key, such as −1, is padding.
        key_ids: [m] integers; None where row i of keys belongs to row i of queries, and has its id.
        weights: [n, k], non-negative; None weights all ids equally.
        temperature: t > 0, dimensionless; a tensor is learnable.
        duplicates: see above; other than ``"positive"`` for paired rows with one id each.
        symmetric: whether to average with the direction from keys to queries, for paired rows with one id each.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries with a target (nats per query), ``"sum"``, or ``"none"`` for the
            local queries, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: invalid ids or weights, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> multi_positive(eye, eye, torch.tensor([5, 5]), temperature=1.0)   # log(e + 1) − ½
        tensor(0.8133)
        >>> multi_positive(eye, eye, torch.tensor([5, 5]), temperature=1.0, duplicates="ignore")   # log e − 1
        tensor(0.)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748, with the targets of Yang et al. 2022
    (UniCL), https://arxiv.org/abs/2204.03610
    """

class MultiPositive(Loss):
    """Compute InfoNCE with all keys of the query's ids as targets.

    With q, k the unit rows of all ranks, s_ij = q_i·k_j / t and targets p_i, a distribution over keys,

        loss_i = log Σ_{j∈C(i)} exp(s_ij)  −  Σ_j p_ij s_ij

    which is ``cross_entropy(s, p)`` for C(i) all keys. The targets of a query with several
    ids follow its weights: p_ij ∝ Σ_l w_il [key j has id ids_il]. A query without a key does not count.

    Where row i of queries belongs to row i of keys, others of its id, such as a caption that occurs twice, are

        "positive"  p_i is even over the keys with its id
        "ignore"    p_i is key i, and others of its id are left out of C(i)
        "negative"  p_i is key i, and others of its id are candidates like any: InfoNCE

    Called as ``loss(queries, keys, ids, key_ids, weights)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [m, d], m may differ between ranks.
    - ids: [n] integers, or [n, k] for several targets; an id without a key, such as −1, is padding.
    - key_ids: [m] integers; None where row i of keys belongs to row i of queries, and has its id.
    - weights: [n, k], non-negative; None weights all ids equally.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        duplicates: see above; other than ``"positive"`` for paired rows with one id each.
        symmetric: whether to average with the direction from keys to queries, for paired rows with one id each.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries with a target (nats per query), ``"sum"``, or ``"none"`` for the
            local queries, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: invalid ids or weights, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> MultiPositive(temperature=1.0)(eye, eye, torch.tensor([5, 5]))   # log(e + 1) − ½
        tensor(0.8133)
        >>> MultiPositive(temperature=1.0, duplicates="ignore")(eye, eye, torch.tensor([5, 5]))   # log e − 1
        tensor(0.)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748, with the targets of Yang et al. 2022
    (UniCL), https://arxiv.org/abs/2204.03610
    """

    temperature: float | Tensor | nn.Module
    duplicates: Duplicates
    symmetric: bool
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.07,
        duplicates: Duplicates = "positive",
        symmetric: bool = False,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "m d"],
        ids: Int[Tensor, " n"] | Int[Tensor, "n k"],
        key_ids: Int[Tensor, " m"] | None = None,
        weights: Float[Tensor, "n k"] | None = None,
        *,
        world: World | None = None,
    ) -> Tensor: ...
