"""The base of losses with weight vectors for each class: proxies and classifiers, whose weights may be sharded."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.classes import ClassPairs, class_shard, draw_weights
from contrastive_zoo.engine.cost import Classes, Entry, Shared
from contrastive_zoo.loss_base.families import NO_LABELS, LabelledLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs
from contrastive_zoo.loss_base.settings import Reduction, Size, Smoothing, field
from contrastive_zoo.ranks.devices import state_problem
from contrastive_zoo.ranks.row_checks import described, range_rule
from contrastive_zoo.ranks.world import World


class ClassLoss(LabelledLoss, engine="classes"):
    """A loss with weight vectors for each class, the parameter ``weights``; the base of proxy losses and classifiers.

    Weights are drawn standard normal; only their direction matters. Construct the loss with the same seed on every rank.
    Every rank then gets the complete gradient of all weights, before the trainer reduces it.

    With ``shard_over`` each rank holds the weights of an even share of the classes, in rank order. Their gradient is
    complete there, 1 × ∂L/∂weights under either ``grad_reduction``, and no other rank has any. Therefore **no trainer may
    average, broadcast or shard them**: keep the loss out of DDP, FSDP and DeepSpeed, and pass its parameters to this
    rank's optimizer, together with the model's. Each rank saves its own part.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] classes 0 … C − 1.
    Losses with ``sub_centers`` have so many weight vectors for a class, of which the nearest counts; in losses with
    ``shard_over`` the ranks of ``World.of()`` or ``World.of(group)`` share the classes, and None keeps all weights on each.

    Args:
        num_classes: C.
        embedding_size: d.

    Raises:
        ValueError: at the call, labels that are no classes, or weights of another width.

    Examples:
        >>> from contrastive_zoo.losses.class_softmax import CosFace
        >>> CosFace(1_000, 8, sub_centers=3).weights.shape
        torch.Size([1000, 3, 8])
    """

    num_classes: Size = field(kw_only=False)
    embedding_size: Size = field(kw_only=False)
    weights: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        local = class_shard(self.num_classes, self.__dict__.get("shard_over"))
        centers = self.__dict__.get("sub_centers", 1)
        weights = draw_weights(self.num_classes, centers, self.embedding_size, local=local)
        self.weights = nn.Parameter(weights[:, 0] if weights.shape[1] == 1 else weights)

    @property
    def sharded(self) -> bool:
        """Whether this rank holds the weights of its share of the classes only."""
        return self.__dict__.get("shard_over") is not None

    def split_reason(self) -> str | None:
        return "each rank holds the weights of its own classes" if self.sharded else super().split_reason()

    def inputs(self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None) -> Inputs:
        """Return the inputs of a call, and what ranks must know of the weights."""
        weights = self.weights
        problem = NO_LABELS if labels is None else self._weights_problem(embeddings)
        if problem is not None or labels is None:
            return Inputs({}, problem)
        rows = {"embeddings": embeddings, "labels": labels}
        classes = self.num_classes if self.sharded else len(weights)

        def labels_problem(least: int, most: int) -> str:
            label = least if least < 0 else most
            return f"labels are classes 0 … {classes - 1}, got {label}. Number them from 0, or raise num_classes."

        values = [range_rule(labels, 0, classes - 1, labels_problem)]
        if self.sharded:
            return Inputs({**rows, "class weights": weights}, values=values)
        return Inputs(rows, values=values, compared={"classes": list(weights.shape)})

    def _weights_problem(self, embeddings: Tensor) -> str | None:
        weights, centers = self.weights, "sub_centers" in self.fields
        right = weights.ndim == 2 or (centers and weights.ndim == 3)
        if not right or not weights.is_floating_point() or weights.shape[-1] != embeddings.shape[-1]:
            return (
                f"weights are {'[classes, d] or [classes, centres, d]' if centers else '[classes, d]'} and as wide as "
                f"embeddings, got {described(weights)} for embeddings {described(embeddings)}. Construct the loss with "
                f"embedding_size={embeddings.shape[-1]}."
            )
        return state_problem("weights", weights, embeddings)

    def entries(self, stated: CallInputs) -> list[Entry]:
        numbers, centers = self.weights.numel(), self.weights.shape[:-1].numel()
        return [*super().entries(stated), Shared(numbers * stated.wide), Classes(["embeddings"], centers)]

    def pairs(self, batch: Batch, **how: Any) -> ClassPairs:
        """Return similarities to the weights.

        Raises:
            ValueError: the ranks of the batch do not hold the weights of all classes.
        """
        shards = batch.shards.get("class weights")
        if shards is not None and shards.total != self.num_classes:  # equal on every rank
            held = f"the ranks that share the batch hold the weights of {shards.total} classes of {self.num_classes}"
            raise ValueError(f"{batch.name}: {held}. Pass these ranks as shard_over, and call DistributedLoss(loss).")
        label_smoothing = getattr(batch.settings, "label_smoothing", 0.0)
        return ClassPairs(batch, self.weights, label_smoothing=label_smoothing, **how)


class ClassSoftmax(ClassLoss):
    """A :class:`ClassLoss` that is a cross-entropy over classes, whose targets may be smoothed."""

    label_smoothing: Smoothing = 0.0
    reduction: Reduction = "mean"


class ShardableClassLoss(ClassSoftmax):
    """A :class:`ClassSoftmax` with several weight vectors per class, if asked, and weights that ranks may share out."""

    sub_centers: Size = 1
    shard_over: World | None = None

    def settings_problem(self) -> str | None:
        if self.shard_over is None or isinstance(self.shard_over, World):
            return super().settings_problem()
        return f"shard_over is a World, such as World.of(), got {described(self.shard_over)}."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_over is not None:  # a process group can be neither copied nor saved
            self.shard_over = World(self.shard_over.rank, self.shard_over.size)
