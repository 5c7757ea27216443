"""NT-Xent: classify each view's partner among all other views of the global batch."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy_of_several
from contrastive_zoo.engine.implementation import choose_kernels, is_one_call
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.small_batch import small_batch_info_nce, uses_small_batch_path
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import views_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_once, concat_views, prepare_rows, round_to_input_dtype
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World


@checked
def nt_xent(
    *views: Float[Tensor, "n d"],
    temperature: float | Tensor = 0.1,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the normalised-temperature cross-entropy over two or more views.

    With z the unit rows of all views of all ranks and P(i) the other views of row i's sample,

        loss = mean_i [ log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t ]

    For two views this is ``cross_entropy((z @ z.T / t).fill_diagonal_(-inf), partner)``, without the 2N × 2N matrix.
    SimCLR trains with t = 0.1 on ImageNet and 0.5 on CIFAR-10; lightly's default is 0.5.

    Args:
        views: two or more of [n, d], rows of one sample at the same index; n may differ between ranks.
        temperature: t > 0, dimensionless; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors (nats), ``"sum"``, or ``"none"`` for the local anchors, view
            after view, [views · n].
        world: the ranks that share the batch.

    Raises:
        ValueError: fewer than two views, or what any :class:`Loss` refuses.

    Examples:
        >>> nt_xent(torch.eye(2), torch.eye(2), temperature=1.0)   # log(e + 2) − 1
        tensor(0.5514)

    Source: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709
    """
    temperature = real(temperature)
    settings: Any = {"temperature": temperature, "normalize": normalize, "reduction": reduction, "world": world}
    unsupported = None if len(views) == 2 else f"compares two views, got {len(views)}"
    kernels, count = choose_kernels(views, unsupported=unsupported), len(views)
    problem = views_problem(views) or kernels.problem
    named = {f"view {index}": view for index, view in enumerate(views)}
    of_views, (shards, *_), world, own = begin_once(
        "NTXent", named, problem=problem, implementation=str(kernels), **settings
    )
    first, on_kernel = of_views[0], kernels.compute(2 * shards.total, 2 * shards.total)
    small = not on_kernel and count == 2 and normalize
    if small and uses_small_batch_path(first, reduction, world, views=True):
        return small_batch_info_nce(
            first, of_views[1], temperature=temperature, comparison="views", reduction=reduction, own=own
        )

    scale = logit_scale(temperature, world)
    rows = [round_to_input_dtype(prepare_rows(x, normalize=normalize, world=world), x, world) for x in of_views]
    if on_kernel and is_one_call(reduction, world):
        from contrastive_zoo.kernels import softmax  # imported here: Triton is optional

        a, b = (x.to(first.dtype) for x in rows)
        return softmax.nt_xent(a, b, scale)
    offsets = [len(rows[0]) * step for step in range(1, count)]
    others, similarities = self_log_sum_exp(
        concat_views(rows, world), scale=scale, unit_norm=normalize, dtype=first.dtype, partner_offsets=offsets,
        shards=shards.times(count), world=world, on_kernel=on_kernel,
    )  # fmt: skip
    losses = cross_entropy_of_several(_of_partners(similarities, count), others)
    return reduce_anchors(losses.to(rows[0].dtype), reduction=reduction, world=world)


def _of_partners(similarities: list[Tensor], views: int) -> Tensor:
    """Return the logits of each row with the other views of its sample, [views − 1, views · n].

    ``similarities[step - 1]`` are those of views 0, 1, … with the views ``step`` later, one after the other.
    """
    by_step = [s.unflatten(0, (views - step, -1)) for step, s in enumerate(similarities, 1)]
    # each pair counts for both of its views
    of_view = [[by_step[abs(v - u) - 1][min(u, v)] for u in range(views) if u != v] for v in range(views)]
    return torch.stack([torch.stack(x) for x in of_view], 1).flatten(1)


class NTXent(Loss, function=nt_xent, begins_once=True):
    supports_ring = True
