"""My rows against class weights: log-sum-exps over classes and over rows, in panels, with the weights whole or dealt out.

Whole: every rank holds all C classes and compares its own rows with them; the weights' gradient is summed over ranks.

Dealt out: rank r holds C_r of the classes. Every rank compares *all* rows with its own classes, and two numbers a row
are reduced: the target's similarity and the log-sum-exp of the others. So the weights, their gradient and the panels
are C_r high, and only rows travel. A rank's gradient of its own weights is complete by itself: nobody else has any.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import all_gather, extreme_over_ranks, gather_rows, replicated, sum_over_ranks
from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.derivatives import inner_graph, once
from contrastive_zoo.engine.precision import product, without_autocast
from contrastive_zoo.engine.tiling import panels
from contrastive_zoo.world import Shards, World

Pool = Callable[[Float[Tensor, "c C k"]], Float[Tensor, "c C"]]
"""Similarities to the k centres of each class, to one similarity a class."""

_CLASSES_DRAWN_AT_ONCE = 4096


def nearest_center(similarity: Float[Tensor, "c C k"]) -> Float[Tensor, "c C"]:
    """A row is as similar to a class as to the most similar of its centres.

    Example:
        >>> nearest_center(torch.tensor([[[0.1, 0.7], [0.3, 0.2]]]))
        tensor([[0.7000, 0.3000]])
    """
    return similarity.amax(2)


@without_autocast
def target_and_others(
    z: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    weights: Float[Tensor, "C k d"],
    *,
    scale: float | Tensor,
    pool: Pool = nearest_center,
    shards: Shards,
    class_shards: Shards | None = None,
    world: World,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """``s[i, labels[i]]`` and ``log Σ_{j ≠ labels[i]} exp(scale · s[i, j])`` for my rows, s their class similarities.

    A softmax loss with any margin on its target is ``log(1 + exp(others − scale · f(target)))``.

    Args:
        z: my rows.
        labels: classes of my rows.
        weights: k centres of each class.
        scale: each rank's gradient is that of its own part; pass a ``replicated`` one.
        pool: from centres to classes.
        shards: where everybody's rows are.
        class_shards: where the classes are, if ``weights`` are this rank's own; None if they are all and everybody's.
        world: who holds rows, and classes.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> eye, where = torch.eye(3), Shards((3,))
        >>> target_and_others(eye, torch.arange(3), eye[:, None], scale=1.0, shards=where, world=ALONE)   # 1, log 2
        (tensor([1., 1., 1.]), tensor([0.6931, 0.6931, 0.6931]))
    """

    def of_panel(rows: Tensor, own: Tensor, centres: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        s = pool(_similarities(rows, centres))
        hit = own[:, None] == torch.arange(s.shape[1], device=s.device)
        others = torch.logsumexp((scale * s).masked_fill(hit, torch.finfo(s.dtype).min), 1)
        return s.where(hit, 0).sum(1), others

    factor = torch.as_tensor(scale, dtype=z.dtype, device=z.device)
    if class_shards is None:
        return _swept(_ByRow, of_panel, z, labels, replicated(weights, process_group=world), factor)
    everybody = all_gather(z, shards=shards, process_group=world)
    own = gather_rows(labels, shards, world) - class_shards.start
    target, others = _swept(_ByRow, of_panel, everybody, own, weights, factor)
    target = sum_over_ranks(target, gradient="partial", world=world)
    others = log_sum_exp_over_ranks(others, gradient="partial", world=world)
    return target[shards.mine], others[shards.mine]


@without_autocast
def log1p_sum_exp_by_class(
    z: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    weights: Float[Tensor, "C 1 d"],
    *,
    shift: float,
    scale: float,
    world: World,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Int[Tensor, " C"]]:
    """Of each class ``log(1 + Σ exp(−scale · (s − shift)))`` over the rows of it, ``log(1 + Σ exp(scale · (s + shift)))``
    over the rows of others, and the number of its rows; s their similarity to its weights, rows those of all ranks.

    Every rank holds the same results, and the weights' gradient is complete on each.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> eye = torch.eye(2)
        >>> log1p_sum_exp_by_class(eye, torch.arange(2), eye[:, None], shift=0.0, scale=1.0, world=ALONE)
        (tensor([0.3133, 0.3133]), tensor([0.6931, 0.6931]), tensor([1, 1]))
    """

    def of_panel(rows: Tensor, own: Tensor, proxies: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        s = _similarities(rows, proxies)[..., 0]
        hit = own[:, None] == torch.arange(s.shape[1], device=s.device)
        least = torch.finfo(s.dtype).min
        near = torch.logsumexp((-scale * (s - shift)).masked_fill(~hit, least), 0)
        return near, torch.logsumexp((scale * (s + shift)).masked_fill(hit, least), 0)

    factor = torch.as_tensor(scale, dtype=z.dtype, device=z.device)
    mine = _swept(_ByClass, of_panel, z, labels, replicated(weights, process_group=world), factor)
    near, far = (-F.logsigmoid(-log_sum_exp_over_ranks(x, gradient="complete", world=world)) for x in mine)
    members = torch.bincount(labels, minlength=len(weights))
    return near, far, sum_over_ranks(members, gradient="complete", world=world)


def log_sum_exp_over_ranks(
    x: Float[Tensor, "..."], *, gradient: Literal["partial", "complete"], world: World
) -> Float[Tensor, "..."]:
    """Elementwise ``logsumexp`` of all ranks' x, which may be −inf on some of them but not on all.

    Args:
        x: the same shape on every rank.
        gradient: as :func:`contrastive_zoo.collectives.all_reduce` takes it.
        world: whose.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> log_sum_exp_over_ranks(torch.tensor([2.0, 3.0]), gradient="complete", world=ALONE)
        tensor([2., 3.])
    """
    top = extreme_over_ranks(x.detach(), "max", world)
    return top + sum_over_ranks((x - top).exp(), gradient=gradient, world=world).log()


def class_shard(num_classes: int, world: World | None) -> slice:
    """The classes that this rank holds: all of them, or an even share in rank order.

    Example:
        >>> class_shard(5, World(rank=0, size=2)), class_shard(5, World(rank=1, size=2)), class_shard(5, None)
        (slice(0, 3, None), slice(3, 5, None), slice(0, 5, None))
    """
    if world is None:
        return slice(0, num_classes)
    share, more = divmod(num_classes, world.size)
    start = world.rank * share + min(world.rank, more)
    return slice(start, start + share + (world.rank < more))


def drawn_weights(num_classes: int, *shape: int, keep: slice) -> Float[Tensor, "..."]:
    """Standard normal weights [classes kept, *shape], the same for a class however classes are dealt out.

    Every rank draws all classes, a few thousand at a time, and keeps its own: equal seeds give the weights of one
    process, and never two classes the same ones.

    Example:
        >>> drawn_weights(5, 2, keep=slice(3, 5)).shape
        torch.Size([2, 2])
    """
    kept = torch.empty(keep.stop - keep.start, *shape)
    for start in range(0, num_classes, _CLASSES_DRAWN_AT_ONCE):
        drawn = torch.randn(min(_CLASSES_DRAWN_AT_ONCE, num_classes - start), *shape)
        first, last = max(start, keep.start), min(start + len(drawn), keep.stop)
        if first < last:
            kept[first - keep.start : last - keep.start] = drawn[first - start : last - start]
    return kept


def _similarities(rows: Tensor, centres: Tensor) -> Tensor:
    """[c, C, k]."""
    return product(rows, centres.flatten(0, 1).T).view(len(rows), *centres.shape[:2])


OfPanel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Two results of a panel of rows, their labels, all weights and the scale."""


def _swept(
    sweep: type[torch.autograd.Function], of_panel: OfPanel, z: Tensor, labels: Tensor, weights: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``of_panel`` on all rows; where these do not fit into one panel, each panel is computed again backward."""
    if is_dense() or len(list(_panels(z, weights))) < 2:
        return of_panel(z, labels, weights, scale)
    return sweep.apply(of_panel, labels, z, weights, scale)


def _panels(z: Tensor, weights: Tensor) -> Iterator[slice]:
    return panels(len(z), 4 * weights.shape[0] * weights.shape[1], z.dtype)  # a panel makes several matrices


class _ByRow(Function):
    """Results are one number a row each."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, of_panel: OfPanel, labels: Tensor, z: Tensor, weights: Tensor, scale: Tensor) -> Any:
        ctx.of_panel = of_panel
        ctx.save_for_backward(labels, z, weights, scale)
        first, second = z.new_empty(2, len(z))
        for rows in _panels(z, weights):
            first[rows], second[rows] = of_panel(z[rows], labels[rows], weights, scale)
        return first, second

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return _pull(ctx, ctx.saved_tensors, lambda rows, _: [x[rows] for x in g])


class _ByClass(Function):
    """Results are one log-sum-exp over rows a class each, which add up from panel to panel."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, of_panel: OfPanel, labels: Tensor, z: Tensor, weights: Tensor, scale: Tensor) -> Any:
        ctx.of_panel = of_panel
        totals = z.new_full((2, len(weights)), -torch.inf)
        for rows in _panels(z, weights):
            totals = torch.logaddexp(totals, torch.stack(of_panel(z[rows], labels[rows], weights, scale)))
        ctx.save_for_backward(labels, z, weights, scale, totals)
        return totals[0].clone(), totals[1].clone()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        *inputs, totals = ctx.saved_tensors
        return _pull(
            ctx, inputs, lambda _, found: [h * (x - y).exp() for h, x, y in zip(g, found, totals, strict=True)]
        )


@without_autocast
def _pull(ctx: Any, inputs: Sequence[Tensor], share: Callable[[slice, Sequence[Tensor]], list[Tensor]]) -> Any:
    """The inputs' gradient, panel by panel; ``share`` is what a panel's results get of the gradient of all."""
    labels, z, weights, scale = (x.detach() for x in inputs)
    dz, dweights, dscale = (torch.zeros_like(x) for x in (z, weights, scale))
    for rows in _panels(z, weights):
        with inner_graph():
            leaves = [x.detach().requires_grad_() for x in (z[rows], weights, scale)]
            found = ctx.of_panel(leaves[0], labels[rows], *leaves[1:])
        dz[rows], by_weights, by_scale = torch.autograd.grad(found, leaves, share(rows, [x.detach() for x in found]))
        dweights += by_weights
        dscale += by_scale
    return None, None, *(once(gradient, *inputs[1:]) for gradient in (dz, dweights, dscale))
