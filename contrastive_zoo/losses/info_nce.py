"""InfoNCE: classify each query's own key among all keys of the global batch; CLIP's loss is its symmetric form."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy, log_sum_exp
from contrastive_zoo.engine.implementation import choose_kernels, is_one_call
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.small_batch import small_batch_info_nce, uses_small_batch_path
from contrastive_zoo.engine.small_batch_terms import Comparison
from contrastive_zoo.engine.softmax import cross_log_sum_exp
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import rows_problem, towers_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_once, prepare_rows, round_to_input_dtype
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, Shards, World


@checked
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
    r"""Compute the cross-entropy of key i for query i; row i of queries belongs to row i of keys.

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
    temperature, problem = real(temperature), _problem(queries, keys, negatives)
    if not in_batch_negatives and negatives is None:
        problem = _OWN_KEY_ONLY
    problem = _settings_problem(symmetric, in_batch_negatives) or problem
    kernels = choose_kernels(
        [queries, keys], unsupported=_unsupported_by_kernels(negatives, symmetric, in_batch_negatives)
    )
    problem = problem or kernels.problem
    (queries, keys, negatives), (shards, *_, last), world, own = begin_once(
        "InfoNCE", {"queries": queries, "keys": keys, "negatives": negatives}, problem=problem, temperature=temperature,
        symmetric=symmetric, in_batch_negatives=in_batch_negatives, normalize=normalize, reduction=reduction, world=world,
        implementation=str(kernels),
    )  # fmt: skip
    on_kernel = kernels.compute(shards.total, shards.total + (0 if negatives is None else last.total))
    comparison: Comparison = "rows and columns" if symmetric else "rows"
    small = not on_kernel and negatives is None and normalize
    if small and uses_small_batch_path(queries, reduction, world):
        return small_batch_info_nce(
            queries, keys, temperature=temperature, comparison=comparison, reduction=reduction, own=own
        )

    scale = logit_scale(temperature, world)
    q, k, *others = (
        round_to_input_dtype(prepare_rows(rows, normalize=normalize, world=world), rows, world)
        for rows in (queries, keys, negatives)
        if rows is not None
    )
    if on_kernel and is_one_call(reduction, world):
        k = torch.cat([k, *others]) if others else k
        return _on_kernel(q, k, scale, symmetric=symmetric, dtype=queries.dtype)
    losses = _of_queries(
        q, k, others[0] if others else None, shards, last, scale=scale, symmetric=symmetric,
        in_batch_negatives=in_batch_negatives, unit_norm=normalize, dtype=queries.dtype, on_kernel=on_kernel, world=world,
    )  # fmt: skip
    return reduce_anchors(losses.to(q.dtype), reduction=reduction, world=world)


def _of_queries(
    q: Tensor,
    k: Tensor,
    extra: Tensor | None,
    shards: Shards,
    extra_shards: Shards,
    *,
    scale: float | Tensor,
    symmetric: bool,
    in_batch_negatives: bool,
    unit_norm: bool,
    dtype: torch.dtype,
    on_kernel: bool,
    world: World,
) -> Tensor:
    """Return the losses of the local queries from prepared rows; ``extra`` are further negatives."""
    over_columns = partial(
        cross_log_sum_exp, q, scale=scale, row_shards=shards, unit_norm=unit_norm, dtype=dtype, on_kernel=on_kernel,
        world=world,
    )  # fmt: skip
    if in_batch_negatives:
        other_keys, other_queries, (positive,) = over_columns(
            k, column_shards=shards, columnwise=symmetric, partner_offsets=[0]
        )
        others = [other_keys]
    else:
        positive = scale * (q * k).sum(-1)
        others, other_queries = [torch.full_like(positive, -torch.inf)], None
    if extra is not None and extra.ndim == 3:
        others.append(torch.logsumexp(scale * (q[:, None] * extra).sum(-1), 1))
    elif extra is not None and extra_shards.total > 0:
        others.append(over_columns(extra, column_shards=extra_shards, columnwise=False)[0])
    losses = cross_entropy(positive, log_sum_exp(torch.stack(others), 0))
    return losses if other_queries is None else (losses + cross_entropy(positive, other_queries)) / 2


def _on_kernel(q: Tensor, k: Tensor, scale: float | Tensor, *, symmetric: bool, dtype: torch.dtype) -> Tensor:
    from contrastive_zoo.kernels import softmax  # imported here: Triton is optional

    return (softmax.clip if symmetric else softmax.info_nce)(q.to(dtype), k.to(dtype), scale)


def _unsupported_by_kernels(negatives: Tensor | None, symmetric: bool, in_batch_negatives: bool) -> str | None:
    if not in_batch_negatives:
        return "computes InfoNCE with in_batch_negatives=True only"
    if negatives is not None and (symmetric or negatives.ndim != 2):
        return "computes InfoNCE with negatives of all queries, [m, d], if it is not symmetric"
    return None


_OWN_KEY_ONLY = (
    "in_batch_negatives=False leaves a query its own key and the negatives: pass negatives, and not symmetric."
)


def _settings_problem(symmetric: bool, in_batch_negatives: bool) -> str | None:
    return _OWN_KEY_ONLY if symmetric and not in_batch_negatives else None


class InfoNCE(Loss, function=info_nce, check=_settings_problem, begins_once=True):
    supports_ring = True


def _problem(queries: Tensor, keys: Tensor, negatives: Tensor | None) -> str | None:
    if negatives is not None:
        if problem := rows_problem("queries", queries):
            return problem
        fits = negatives.ndim == 2 or (negatives.ndim == 3 and len(negatives) == len(queries))
        if not fits or negatives.shape[-1] != queries.shape[-1] or negatives.dtype != queries.dtype:
            got = f"got {kind(negatives)} for queries {kind(queries)}"
            return f"negatives are shared [m, d] or per query [n, m, d], {got}."
    rule, fix = "row i of queries belongs to row i of keys", "Pass keys without a partner as negatives."
    return towers_problem(rule, fix, queries=queries, keys=keys)
