"""Share between losses with class weights: the weights as a parameter, whole or sharded, and the softmax over classes."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.collectives import gather_rows, scale_gradient
from contrastive_zoo.devices import state_problem
from contrastive_zoo.engine.classes import (
    CenterPooling,
    class_shard,
    draw_weights,
    nearest_center,
    target_and_negatives,
)
from contrastive_zoo.engine.precision import at_least_float32
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.checks import labelled_problem, number_problem
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS, Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin, labels_as_int64, prepare_rows
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.session import Session
from contrastive_zoo.sizes import of_size
from contrastive_zoo.value_checks import range_problem, safe_index, values_are_read
from contrastive_zoo.world import Shards, World


class ConstructingLoss(Loss):
    """A loss whose constructor creates some of the function's settings, such as weights from their sizes.

    Examples:
        >>> from contrastive_zoo.losses.cos_face import CosFace
        >>> CosFace(3, 2)
        CosFace(num_classes=3, embedding_size=2, sub_centers=1, margin=0.35, scale=64.0, reduction='mean')
    """

    def extra_repr(self) -> str:
        hidden = {*self._modules, *(("check_finite",) if self.check_finite else ())}
        names = [x for x in self.__signature__.parameters if x not in hidden]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name))


class ClassLoss(ConstructingLoss):
    """A loss with weight vectors for each class, the parameter ``weights``; the base of proxy losses and classifiers.

    Weights are drawn from a standard normal distribution; only their direction matters. Construct the loss with the
    same seed on every rank. Every rank then gets the complete gradient of all weights, before the trainer reduces it.

    With ``shard_over`` each rank holds the weights of its share of the classes only, the slice ``class_shard``. Their
    gradient is complete on the rank that holds them, and no other rank has any. Therefore **no trainer may average,
    broadcast or shard them**: keep the loss out of DDP, FSDP and DeepSpeed, and pass its parameters to this rank's
    optimizer, together with the model's. Each rank saves its own part. The gradient is 1 × ∂L/∂weights under either
    ``grad_reduction`` of ``DistributedLoss``.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        sub_centers: weight vectors per class; None is 1, or 10 for SoftTriple.
        shard_over: the ranks that classes are split over, ``World.of()`` or ``World.of(group)``, the same that share the
            batch; None keeps all weights on every rank.
        check_finite: whether NaN and infinite embeddings are refused.
        settings: keyword-only arguments of the function.

    Raises:
        ValueError: fewer than one class, width or centre, or more than memory holds.
        TypeError: a setting that the function does not have.

    Examples:
        >>> from contrastive_zoo.losses.cos_face import CosFace
        >>> CosFace(1_000, 8, sub_centers=3).weights.shape
        torch.Size([1000, 3, 8])
    """

    made = ("weights", "sharded")
    ring_refusal = SENDS_NO_ROWS
    default_centers: ClassVar[int] = 1

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        sub_centers: int | None = None,
        shard_over: World | None = None,
        check_finite: bool = True,
        **settings: Any,
    ) -> None:
        sub_centers = self.default_centers if sub_centers is None else sub_centers
        sizes = {"num_classes": num_classes, "embedding_size": embedding_size, "sub_centers": sub_centers}
        for name, value in sizes.items():
            if problem := number_problem(f"{name} is at least 1", whole=True, low=1, **{name: value}):
                raise ValueError(f"{type(self).__name__}: {problem}")
        num_classes, embedding_size, sub_centers = int(num_classes), int(embedding_size), int(sub_centers)
        for name, given in (("sub_centers", sub_centers != 1), ("shard_over", shard_over is not None)):
            if given and name in self.refused:
                raise TypeError(f"{type(self).__name__} has no {name}: leave it out.")
        if shard_over is not None:
            settings["sharded"] = True
        local = class_shard(num_classes, shard_over)
        draw = partial(draw_weights, num_classes, sub_centers, embedding_size, local=local)
        weights = of_size(type(self).__name__, draw, **sizes)
        super().__init__(
            check_finite=check_finite, weights=nn.Parameter(weights[:, 0] if sub_centers == 1 else weights), **settings
        )
        self.num_classes, self.embedding_size, self.sub_centers = num_classes, embedding_size, sub_centers


def softmax_over_classes(
    caller: str,
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    *,
    target_function: Callable[[Float[Tensor, " n"]], Float[Tensor, " n"]] = lambda cosine: cosine,
    penalty: Callable[[], Float[Tensor, ""]] | None = None,
    temperature: float | Tensor = 1.0,
    scale_factor: float = 1.0,
    scale: float | None = None,
    pooling: CenterPooling = nearest_center,
    sharded: bool = False,
    problem: str | None = None,
    reduction: Reduction,
    world: World,
    **settings: Any,
) -> Float[Tensor, "..."]:
    """Check inputs, and reduce ``log(1 + Σ_{j≠y_i} exp(s z_i·w_j) / exp(s f(z_i·w_{y_i})))`` with unit rows z and w.

    Args:
        caller: name of the loss.
        embeddings: the local rows.
        labels: their classes y.
        weights: weights of all classes, or of the local classes with ``sharded``.
        target_function: f, applied to the cosine of the target class.
        penalty: a function that returns a term for each row; it is called after the checks.
        temperature: t > 0; a tensor is learnable.
        scale_factor: s t.
        scale: s; None is ``scale_factor / temperature``.
        pooling: from the centres of a class to its similarity.
        sharded: whether ``weights`` are this rank's share.
        problem: a problem that the caller found.
        reduction: reduction of the rows' losses.
        world: the ranks that hold rows, and classes.
        settings: passed to :func:`contrastive_zoo.loss_base.preparation.begin`.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> eye = torch.eye(2)
        >>> softmax_over_classes("Loss", eye, torch.arange(2), eye, reduction="mean", world=ALONE)   # log(e + 1) − 1
        tensor(0.3133)
    """
    z, targets, unit_weights, shards, class_shards = begin_with_classes(
        caller,
        embeddings,
        labels,
        weights,
        sharded=sharded,
        problem=problem,
        temperature=temperature,
        scale=scale,
        reduction=reduction,
        world=world,
        **settings,
    )
    factor = scale_factor * logit_scale(temperature, world) if scale is None else real(scale)
    target, negatives = target_and_negatives(
        z, targets, unit_weights, scale=factor, pooling=pooling, shards=shards, class_shards=class_shards, world=world
    )
    losses = -F.logsigmoid(factor * target_function(target) - negatives)
    if penalty is not None:
        losses = losses + penalty().to(losses.dtype)
    return reduce_anchors(losses, reduction=reduction, world=world)


def begin_with_classes(
    caller: str,
    embeddings: Tensor,
    labels: Tensor | None,
    weights: Tensor,
    *,
    sharded: bool = False,
    normalize: bool = True,
    normalize_weights: bool = True,
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Shards, Shards | None]:
    """Check labelled embeddings and class weights, as :func:`contrastive_zoo.loss_base.preparation.begin`, and prepare them.

    Returns:
        Rows [n, d], labels, weights [C, k, d], shard sizes of the rows, and shard sizes of sharded classes; rows and
        weights have unit length unless the caller keeps their norms.

    Raises:
        ValueError: what ``begin`` raises, weights of another width, or labels that are no classes.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> begin_with_classes("Loss", torch.eye(2), torch.tensor([0, 7]), torch.eye(2), world=ALONE)
        Traceback (most recent call last):
        ...
        ValueError: Loss: labels are classes 0 … 1, got 7. Number them from 0, or raise num_classes.
    """
    problem = labelled_problem(embeddings, labels) or _weights_problem(embeddings, weights) or problem
    if problem is None and not sharded:
        problem = _classes_problem(labels, len(weights), world)
    named: dict[str, Tensor | None] = {"embeddings": embeddings, "labels": labels}
    if sharded:
        named["class weights"] = weights
    else:
        settings["classes"] = list(weights.shape)
    all_shards = begin(caller, named, problem=problem, world=world, **settings)
    shards, class_shards = all_shards[0], all_shards[-1] if sharded else None
    assert labels is not None  # begin raises otherwise
    if class_shards is not None:
        checked = gather_rows(labels, shards, world) if values_are_read(labels, world) else labels
        if problem := _classes_problem(checked, class_shards.total, world):  # every rank sees the same labels
            raise ValueError(f"{caller}: {problem}")
        if isinstance(world, Session):
            weights = scale_gradient(weights, world.options.sharded_factor)
    targets = safe_index(labels_as_int64(labels, world), len(weights) if class_shards is None else class_shards.total)
    z = prepare_rows(embeddings, normalize=normalize, world=world)
    weights = at_least_float32(weights)
    centers = (F.normalize(weights, dim=-1) if normalize_weights else weights).to(z.dtype)
    return z, targets, centers if centers.ndim == 3 else centers[:, None], shards, class_shards


def _weights_problem(embeddings: Tensor, weights: Tensor) -> str | None:
    if weights.ndim not in (2, 3) or not weights.is_floating_point() or weights.shape[-1] != embeddings.shape[-1]:
        return (
            f"weights are [classes, d] or [classes, centres, d] and as wide as embeddings, got {kind(weights)} for "
            f"embeddings {kind(embeddings)}. Construct the loss with embedding_size={embeddings.shape[-1]}."
        )
    return state_problem("weights", weights, embeddings)


def _classes_problem(labels: Tensor | None, classes: int, world: World) -> str | None:
    def problem(least: int, most: int) -> str:
        wrong = least if least < 0 else most
        return f"labels are classes 0 … {classes - 1}, got {wrong}. Number them from 0, or raise num_classes."

    return None if labels is None else range_problem(labels, 0, classes - 1, problem, world=world)
