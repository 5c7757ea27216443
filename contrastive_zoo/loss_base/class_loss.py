"""What losses with class weights share: weights as a parameter, whole or dealt out, and rows compared with them."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.collectives import gather_rows, scale_gradient
from contrastive_zoo.engine.classes import Pool, class_shard, drawn_weights, nearest_center, target_and_others
from contrastive_zoo.engine.precision import wide
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.checks import labelled_problem, number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin, prepared, whole_labels
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.session import Session
from contrastive_zoo.world import Shards, World


class Maker(Loss):
    """A loss whose constructor makes some of its function's settings itself, such as weights from their sizes.

    Example:
        >>> from contrastive_zoo.losses.cos_face import CosFace
        >>> CosFace(3, 2)
        CosFace(num_classes=3, embedding_size=2, sub_centers=1, margin=0.35, scale=64.0, reduction='mean')
    """

    def extra_repr(self) -> str:
        hidden = {*self._modules, *(("check_finite",) if self.check_finite else ())}
        names = [x for x in self.__signature__.parameters if x not in hidden]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name))


class ClassLoss(Maker):
    """A loss with weight vectors for each class, its parameter ``weights``; the base of proxies and classifiers.

    Weights are drawn standard normal; only their direction matters. Construct the loss with the same seed on every
    rank. Every rank then gets the complete gradient of all weights, before the trainer reduces anything.

    With ``shard_over`` each rank keeps the weights of its share of the classes only, rows ``class_shard`` of
    the whole. Their gradient is complete on the rank that holds them, and no other rank has any, so **no trainer may
    average, broadcast or shard them**: keep the loss out of DDP, FSDP and DeepSpeed, and give its parameters to this
    rank's optimizer beside the model's. Each rank saves its own part. The gradient is 1 × ∂L/∂weights under either
    ``grad_reduction`` of ``DistributedLoss``.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        sub_centers: weight vectors a class; None is one, ten for SoftTriple.
        shard_over: the processes over which classes are dealt, ``World.of()`` or ``World.of(group)``, the same that
            share the batch; None is whole weights on every rank.
        check_finite: whether rows with NaN or infinite values are refused.
        settings: as the function takes them.

    Raises:
        ValueError: fewer than one class, width or centre. TypeError: a setting that the function does not have.

    Example:
        >>> from contrastive_zoo.losses.cos_face import CosFace
        >>> CosFace(1_000, 8, sub_centers=3).weights.shape
        torch.Size([1000, 3, 8])
    """

    made = ("weights", "sharded")
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
        for name, given in (("sub_centers", sub_centers != 1), ("shard_over", shard_over is not None)):
            if given and name in self.refused:
                raise TypeError(f"{type(self).__name__} has no {name}: leave it out.")
        if shard_over is not None:
            settings["sharded"] = True
        weights = drawn_weights(num_classes, sub_centers, embedding_size, keep=class_shard(num_classes, shard_over))
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
    of_target: Callable[[Float[Tensor, " n"]], Float[Tensor, " n"]] = lambda cosine: cosine,
    penalty: Callable[[], Float[Tensor, ""]] | None = None,
    temperature: float | Tensor = 1.0,
    times: float = 1.0,
    scale: float | None = None,
    pool: Pool = nearest_center,
    sharded: bool = False,
    problem: str | None = None,
    reduction: Reduction,
    world: World,
    **settings: Any,
) -> Float[Tensor, "..."]:
    """Check, meet, and reduce ``log(1 + Σ_{j≠y_i} exp(s z_i·w_j) / exp(s f(z_i·w_{y_i})))``, with unit rows z and weights w.

    Args:
        caller: name of the loss.
        embeddings: my rows.
        labels: their classes y.
        weights: of all classes, or with ``sharded`` of mine.
        of_target: f, what the cosine to the own class counts as.
        penalty: a term for each row alike, asked for when the input has been found good.
        temperature: t > 0; may be learnt.
        times: s t, what is divided by the temperature.
        scale: s; None is ``times / temperature``.
        pool: from the centres of a class to its similarity.
        sharded: whether ``weights`` are this rank's share.
        problem: what is wrong besides.
        reduction: of the rows' losses.
        world: who holds rows, and classes.
        settings: for :func:`contrastive_zoo.loss_base.preparation.begin`.

    Example:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> eye = torch.eye(2)
        >>> softmax_over_classes("Loss", eye, torch.arange(2), eye, reduction="mean", world=ALONE)   # log(e + 1) − 1
        tensor(0.3133)
    """
    z, own, unit, shards, class_shards = begin_with_classes(
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
    factor = times * logit_scale(temperature, world) if scale is None else real(scale)
    target, others = target_and_others(
        z, own, unit, scale=factor, pool=pool, shards=shards, class_shards=class_shards, world=world
    )
    losses = -F.logsigmoid(factor * of_target(target) - others)
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
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Shards, Shards | None]:
    """:func:`contrastive_zoo.loss_base.preparation.begin` for labelled rows and classes.

    Returns:
        Unit rows [n, d], labels, unit weights [C, k, d], where rows lie, and where classes lie if they are dealt out.

    Raises:
        ValueError: also for weights of another width, or labels that are no classes.

    Example:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> begin_with_classes("Loss", torch.eye(2), torch.tensor([0, 7]), torch.eye(2), world=ALONE)
        Traceback (most recent call last):
        ...
        ValueError: Loss: labels are classes 0 … 1, got 7. Number them from 0, or raise num_classes.
    """
    problem = labelled_problem(embeddings, labels) or _weights_problem(embeddings, weights) or problem
    if problem is None and not sharded:
        problem = _classes_problem(labels, len(weights))
    named: dict[str, Tensor | None] = {"embeddings": embeddings, "labels": labels}
    if sharded:
        named["class weights"] = weights
    else:
        settings["classes"] = list(weights.shape)
    found = begin(caller, named, problem=problem, world=world, **settings)
    shards, class_shards = found[0], found[-1] if sharded else None
    assert labels is not None  # begin has refused it
    if class_shards is not None:
        problem = _classes_problem(gather_rows(labels, shards, world), class_shards.total)
        if problem:  # every rank sees the same labels
            raise ValueError(f"{caller}: {problem}")
        if isinstance(world, Session):
            weights = scale_gradient(weights, world.options.sharded_factor)
    labels = whole_labels(labels, world)
    z = prepared(embeddings, normalize=True, world=world)
    unit = F.normalize(wide(weights), dim=-1).to(z.dtype)
    return z, labels, unit if unit.ndim == 3 else unit[:, None], shards, class_shards


def _weights_problem(embeddings: Tensor, weights: Tensor) -> str | None:
    if weights.ndim not in (2, 3) or not weights.is_floating_point() or weights.shape[-1] != embeddings.shape[-1]:
        return (
            f"weights are [classes, d] or [classes, centres, d] and as wide as embeddings, got {kind(weights)} for "
            f"embeddings {kind(embeddings)}. Construct the loss with embedding_size={embeddings.shape[-1]}."
        )
    return None


def _classes_problem(labels: Tensor | None, classes: int) -> str | None:
    if labels is not None and len(wrong := labels[(labels < 0) | (labels >= classes)]):
        return f"labels are classes 0 … {classes - 1}, got {int(wrong[0])}. Number them from 0, or raise num_classes."
    return None
