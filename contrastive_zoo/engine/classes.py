"""Compare embeddings with class weights: log-sum-exps over classes and over embeddings, block by block.

With sharded weights every rank compares the embeddings of *all* ranks with its own classes, and two numbers per embedding
are reduced: the target's similarity and the log-sum-exp of the other classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.precision import at_least_float32, matmul
from contrastive_zoo.engine.softmax_arithmetic import smooths
from contrastive_zoo.engine.tiling import block_rows, by_blocks
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.random_keys import device_keys
from contrastive_zoo.ranks.row_checks import safe_index
from contrastive_zoo.ranks.world import Shards, World

_CLASSES_PER_DRAW = 4096


@dataclass(frozen=True)
class ClassPairs:
    """Similarities z_i·w_j of embeddings to the weight vectors of all classes; ``labels`` of the batch are their classes.

    The batch has a split of ``class weights`` where each rank holds only some.
    """

    batch: Batch
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"]
    normalize: bool = True
    normalize_weights: bool = True
    label_smoothing: float | Tensor = 0.0  # the share of a target that is spread evenly over all classes

    def cross_entropies(
        self,
        scale: float | Tensor,
        target_function: Callable[[Float[Tensor, " n"]], Float[Tensor, " n"]] = lambda similarity: similarity,
        softness: float | Tensor | None = None,
        harder: tuple[Float[Tensor, " n"], Float[Tensor, ""]] | None = None,
    ) -> Float[Tensor, " n"]:
        """Return cross-entropies of the logits scale · z_i·w_j, with ``target_function`` of the similarity to y_i.

        Of several centres of a class the most similar counts, or with a softness γ their mean by ``softmax(s / γ)``.
        ``harder`` are limits and t, without gradient: of another class, s (t + s) replaces an s above the embedding's limit.
        """
        smoothed = smooths(self.label_smoothing)

        def on_block(rows: Tensor, targets: Tensor, *more: Tensor) -> Tensor:
            *limits, centers, scale, gamma = more
            s = _similarities(rows, centers)
            if s.shape[2] > 1:
                s = s.amax(2, keepdim=True) if softness is None else ((s / gamma).softmax(2) * s).sum(2, keepdim=True)
            s = s[..., 0]
            column = targets.clamp(0, max(0, s.shape[1] - 1))[:, None]
            hit = torch.zeros_like(s, dtype=torch.bool)
            if s.shape[1]:  # a rank may hold no class, or others than the target
                hit.scatter_(1, column, column == targets[:, None])

            def of_target(s: Tensor) -> Tensor:
                return s.gather(1, column)[:, 0].where(column[:, 0] == targets, 0) if s.shape[1] else s.sum(1)

            similarities = [of_target(s)]
            if harder is not None:
                s = s.where(s <= limits[0][:, None], s * (harder[1] + s))
            if smoothed:
                similarities.append(s.sum(1) - of_target(s))
            negatives = masked_log_sum_exp(scale * s, ~hit, empty=torch.finfo(s.dtype).min)
            return torch.stack([negatives, *similarities], 1)

        batch, rows, is_whole = self.batch, [*self._compared], self.class_shards is None
        if harder is not None:
            rows.append(harder[0] if is_whole else batch.gather_detached(harder[0]))
        centers = batch.shared(self.centers) if is_whole else self.centers
        results = self._over_blocks(on_block, rows, centers, [scale, 0.0 if softness is None else softness])
        negatives, sums = results[:, 0], results[:, 1:]
        if not is_whole:
            sums = batch.sum(sums, gradient="partial")[batch.samples.local]
            negatives = batch.log_sum_exp(negatives, gradient="partial")[batch.samples.local]
        positive = scale * target_function(sums[:, 0])
        losses = -F.logsigmoid(positive - negatives)
        if smoothed:
            mean = (positive + scale * sums[:, 1]) / self.num_classes
            losses = losses + self.label_smoothing * (positive - mean)
        return losses

    @cached_property
    def _compared(self) -> tuple[Float[Tensor, "m d"], Int[Tensor, " m"]]:
        """The embeddings that this rank compares with its weights, and the places of their classes among these."""
        batch, classes = self.batch, self.class_shards
        if classes is None:
            return self.embeddings, self.targets
        gathered = all_gather(self.embeddings, shards=batch.samples, process_group=batch.world)
        return gathered, batch.gather_detached(self.targets) - classes.start

    def target_similarities(self) -> Float[Tensor, " n"]:
        """Return the similarities of the local embeddings to their classes, without gradient."""
        (rows, targets), centers = self._compared, self.centers.detach()
        held = (targets >= 0) & (targets < len(centers))
        of_targets = centers[targets.where(held, 0)] if len(centers) else rows.detach()[:, None]
        s = (of_targets * rows.detach()[:, None]).sum(2).amax(1).where(held, 0)  # autocast would round a vecdot
        return s if self.class_shards is None else self.batch.sum(s, gradient="complete")[self.batch.samples.local]

    def log1p_sum_exp_by_class(
        self, shift: float | Tensor, scale: float | Tensor
    ) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Int[Tensor, " C"]]:
        """Return per class two log-sum-exps over the embeddings of all ranks, and the number of its own.

        With s the similarities to the class's weights: ``log(1 + Σ exp(−scale · (s − shift)))`` over the embeddings of
        the class, and ``log(1 + Σ exp(scale · (s + shift)))`` over those of other classes.
        """

        def on_block(
            centers: Tensor, classes: Tensor, rows: Tensor, targets: Tensor, shift: Tensor, scale: Tensor
        ) -> Tensor:
            s = _similarities(centers[:, 0], rows[:, None])[..., 0]
            hit, lowest = classes[:, None] == targets, torch.finfo(s.dtype).min
            positive = masked_log_sum_exp(-scale * (s - shift), hit, empty=lowest)
            return torch.stack([positive, masked_log_sum_exp(scale * (s + shift), ~hit, empty=lowest)], 1)

        batch, labels, z = self.batch, self.targets, self.embeddings
        classes = torch.arange(len(self.centers), device=z.device)
        local = self._over_blocks(on_block, [batch.shared(self.centers), classes], z, [shift, scale], labels)
        positive, negative = (-F.logsigmoid(-batch.log_sum_exp(x, gradient="complete")) for x in local.unbind(1))
        # torch.bincount would wait for an accelerator
        counts = labels.new_zeros(len(self.centers)).index_add_(0, labels, torch.ones_like(labels))
        return positive, negative, batch.sum(counts, gradient="complete")

    def _over_blocks(
        self,
        on_block: Callable[..., Tensor],
        rows: Sequence[Tensor],
        columns: Tensor,
        numbers: Sequence[float | Tensor],
        *of_columns: Tensor,
    ) -> Float[Tensor, "m k"]:
        """Return ``on_block`` of all rows, compared with all columns."""
        z = self.embeddings
        others = [columns, *of_columns, *(x.to(z) if isinstance(x, Tensor) else z.new_full((), x) for x in numbers)]
        centers = rows[0].shape[1:-1].numel() * columns.shape[1:-1].numel()  # of a class
        height = block_rows(4 * len(columns) * centers, z.dtype)  # a block makes several matrices
        return by_blocks(on_block, height, rows, others, plain=self.batch.plan.is_plain)

    def drawn(self, count: int, step: Int[Tensor, ""]) -> "ClassPairs":
        """Return those to so many classes: these of all ranks' embeddings, even if they are more, and others at random.

        Every rank draws the same: the classes with the smallest of the random numbers that belong to a step. Of sharded
        weights it takes those that it holds.
        """
        batch, shards, total, local = self.batch, self.batch.shards, self.num_classes, self.targets
        of_all = safe_index(batch.gather_detached(batch.rows["labels"]).long(), total)
        if count < min(batch.total, total):  # otherwise there are no more labels, and nothing is read
            count = max(count, len(of_all.unique()))
        keys = device_keys(step, total).index_fill_(0, of_all, torch.iinfo(torch.int64).min)
        drawn = keys.topk(count, largest=False, sorted=False).indices.sort().values
        rows = {**batch.rows, "labels": torch.searchsorted(drawn, local)}
        if self.class_shards is not None:
            is_drawn = torch.zeros_like(keys, dtype=torch.bool).index_fill_(0, drawn, True)
            split = self.class_shards.selected(is_drawn)
            shards, drawn = {**shards, "class weights": split}, drawn[split.local] - self.class_shards.start
        batch = replace(batch, rows=rows, shards=shards)
        return replace(self, batch=batch, weights=self.weights.index_select(0, drawn))

    @cached_property
    def embeddings(self) -> Float[Tensor, "n d"]:
        """The local embeddings, prepared for matmuls."""
        return self.batch.prepared(self.batch.first, normalize=self.normalize)

    @cached_property
    def targets(self) -> Int[Tensor, " n"]:
        return safe_index(self.batch.rows["labels"].long(), self.num_classes)

    @property
    def num_classes(self) -> int:
        return len(self.weights) if self.class_shards is None else self.class_shards.total

    @cached_property
    def centers(self) -> Float[Tensor, "C k d"]:
        """The weights, in the dtype of the prepared embeddings."""
        weights = at_least_float32(self.weights if self.class_shards is None else self.batch.sharded(self.weights))
        centers = (F.normalize(weights, dim=-1) if self.normalize_weights else weights).to(self.embeddings.dtype)
        return centers if centers.ndim == 3 else centers[:, None]

    @property
    def class_shards(self) -> Shards | None:
        """The split of the classes over the ranks; None if every rank holds all."""
        return self.batch.shards.get("class weights")


def class_shard(num_classes: int, world: World | None) -> slice:
    """Return the classes that this rank holds: all of them, or an even share in rank order."""
    if world is None:
        return slice(0, num_classes)
    sizes = tuple(len(range(rank, num_classes, world.size)) for rank in range(world.size))
    return Shards(sizes, world.rank).local


def draw_weights(num_classes: int, *shape: int, local: slice) -> Float[Tensor, "..."]:
    """Return standard normal weights [local classes, *shape]: every rank draws those of all classes and keeps its own."""
    weights = torch.empty(local.stop - local.start, *shape)
    for start in range(0, num_classes, _CLASSES_PER_DRAW):
        drawn = torch.randn(min(_CLASSES_PER_DRAW, num_classes - start), *shape)
        first, last = max(start, local.start), min(start + len(drawn), local.stop)
        if first < last:
            weights[first - local.start : last - local.start] = drawn[first - start : last - start]
    return weights


def _similarities(rows: Tensor, centres: Tensor) -> Tensor:
    return matmul(rows, centres.flatten(0, 1).T).view(len(rows), *centres.shape[:2])
