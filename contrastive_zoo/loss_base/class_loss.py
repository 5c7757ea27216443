"""The base of losses with weight vectors for each class: proxies and classifiers, whose weights may be sharded."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.classes import ClassPairs, class_shard, draw_weights
from contrastive_zoo.engine.cost import Classes, Entry, Shared
from contrastive_zoo.engine.softmax_arithmetic import smooths
from contrastive_zoo.loss_base.families import NO_LABELS, LabelledLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Size, Smoothing, field
from contrastive_zoo.loss_base.state import Averages
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

    With ``sample_rate`` r below 1 each step in training mode compares with ⌈r C⌉ of the C classes, as Partial-FC: with
    those of all ranks' samples, even if they are more, and with others at random. The buffer ``step`` counts the steps.
    Every rank draws the same classes, and a resumed training draws those of an uninterrupted one. In
    :func:`contrastive_zoo.one_step` calls have the same random numbers.

    Args:
        num_classes: C.
        embedding_size: d.

    Raises:
        ValueError: at the call, labels that are no classes, or weights of another width.

    Examples:
        >>> from contrastive_zoo.losses.class_softmax import CosFace
        >>> CosFace(1_000, 8, sub_centers=3).weights.shape
        torch.Size([1000, 3, 8])

    Source: of drawn classes, An et al. 2022, https://arxiv.org/abs/2203.15565
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
        rule, fix = f"labels are classes 0 … {classes - 1}", "Number them from 0, or raise num_classes."
        values = [range_rule(labels, 0, classes - 1, rule, fix)]
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
        classes, each = self.num_classes if self.sharded else len(self.weights), self.weights.shape[1:-1].numel()
        learnt = stated.learnt(*(name for name in self._checks if name != "temperature"))
        compared = Classes(["embeddings"], classes, each, matrices=4.2 if each == 1 else 4)  # fewer after the maximum
        return [*map(Shared, learnt), *super().entries(stated), compared]

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


class ShardableClassLoss(ClassSoftmax, Averages):
    """A :class:`ClassSoftmax` whose weights ranks may share out, and which may draw the classes of a step."""

    sub_centers: Size = 1
    shard_over: World | None = None
    sample_rate: Annotated[float, Bounds(above=0, high=1, constant=True)] = 1.0

    step: Tensor = field(init=False)

    has_limits: ClassVar[bool] = False  # whether other classes are compared with a limit of each embedding

    def settings_problem(self) -> str | None:
        if not (self.shard_over is None or isinstance(self.shard_over, World)):
            return f"shard_over is a World, such as World.of(), got {described(self.shard_over)}."
        problem = super().settings_problem()
        if problem is None and "weights" in self._parameters and "step" not in self._buffers and self.sample_rate != 1:
            return f"sample_rate is 1 in a loss that was constructed with 1, got {self.sample_rate}. Construct another loss."
        return problem

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_over is not None:  # a process group can be neither copied nor saved
            self.shard_over = World(self.shard_over.rank, self.shard_over.size)
        if self.sample_rate != 1:
            self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def _drawn(self, settings: SimpleNamespace, classes: int) -> int | None:
        """Return how many classes a call compares with; None is all of them."""
        draws = self.training and "step" in self._buffers
        return math.ceil(round(float(settings.sample_rate) * classes, 6)) if draws else None  # 0.7 · 10 exceeds 7

    def entries(self, stated: CallInputs) -> list[Entry]:
        *others, compared = super().entries(stated)
        assert isinstance(compared, Classes)
        drawn, sums = self._drawn(stated.settings, compared.classes), 1 + smooths(stated.settings.label_smoothing)
        matrices = compared.matrices + 2.2 * self.has_limits  # those of the harder classes
        return [*others, compared._replace(matrices=matrices, drawn=drawn, sums=sums, limits=self.has_limits)]

    def pairs(self, batch: Batch, **how: Any) -> ClassPairs:
        pairs = super().pairs(batch, **how)
        count = self._drawn(batch.settings, pairs.num_classes)
        return pairs if count is None else pairs.drawn(count, self.step)

    def result(self, batch: Batch, losses: Float[Tensor, " n"], *momentum_and_sums: Any) -> Tensor:
        """Return the reduced losses; in training mode the state, if there is one, moves."""
        loss = batch.reduce(losses, reduction=self.reduction)
        if self.moves:
            self.record(momentum_and_sums)
        return loss

    def move(self, calls: Sequence[Any]) -> None:
        if "step" in self._buffers:
            self.step.add_(1)
        if calls[0]:
            super().move(calls)
