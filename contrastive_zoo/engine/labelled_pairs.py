"""Softmax over labelled embeddings: each against all others, with the others of its class as positives."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from contrastive_zoo.engine.anchor_block import class_numbers, only_positives
from contrastive_zoo.engine.batch import Batch, Reduction
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.engine.sigmoid import sum_over_sigmoid_pairs
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.engine.tower_pairs import sigmoid_block_loss

ContrastMode = Literal["all", "one"]


@dataclass(frozen=True)
class LabelledPairs:
    """Similarities z_i·z_k / t of all embeddings; the positives of an anchor are the others with its label.

    Args:
        batch: the first of its tensors are embeddings, [n, d], or [n, v, d] for v views of each sample.
        labels: [n]; None makes each sample a class of its own.
        temperature: t.
        normalize: whether embeddings are normalised to unit length first.

    Examples:
        >>> from contrastive_zoo.ranks.world import Shards
        >>> batch = Batch({"embeddings": torch.eye(2)[[0, 0, 1]]}, {"embeddings": Shards((3,))})
        >>> losses, positives = LabelledPairs(batch, torch.tensor([0, 0, 1]), 1.0, True).cross_entropies()
        >>> losses[:2], positives.tolist()   # log(e + 1) − 1
        (tensor([0.3133, 0.3133]), [1, 1, 0])
    """

    batch: Batch
    labels: Integer[Tensor, " n"] | Bool[Tensor, " n"] | None
    temperature: float | Tensor
    normalize: bool

    @cached_property
    def views(self) -> int:
        """The number of views of a sample."""
        return self.batch.first.shape[1] if self.batch.first.ndim == 3 else 1

    @cached_property
    def samples(self) -> Int[Tensor, " a"]:
        """The index of the sample of each local anchor."""
        return self.batch.indices().repeat_interleave(self.views)

    @cached_property
    def ids(self) -> Int[Tensor, " a"]:
        """The label of each local anchor."""
        return self.samples if self.labels is None else self.batch.int64(self.labels).repeat_interleave(self.views)

    @cached_property
    def embeddings(self) -> Float[Tensor, "a d"]:
        """The local anchors, sample by sample."""
        prepared = self.batch.prepared(self.batch.first, normalize=self.normalize)
        return prepared.flatten(0, 1) if prepared.ndim == 3 else prepared

    def cross_entropies(self) -> tuple[Float[Tensor, " a"], Int[Tensor, " a"]]:
        """Return ``logsumexp(all others) - mean(positives)`` of the local anchors, and their numbers of positives.

        Positives need no mask: the sum of their logits is one dot product with the sum of the class.
        """
        batch, shards = self.batch, self.batch.samples.times(self.views)
        z, scale = batch.rounded(self.embeddings, batch.first), batch.scale(self.temperature)
        class_index, counts = class_numbers(batch.gathered(self.ids, shards))
        local = class_index[shards.local]
        sums = batch.sum(z.new_zeros(len(counts), z.shape[1]).index_add(0, local, z), gradient="partial")
        positives = counts[local] - 1
        mean = scale * (z * (sums.index_select(0, local) - z)).sum(-1) / positives.clamp(min=1)
        # the only positive of an anchor is left out of the sum, so that a solved batch keeps its digits
        only = only_positives(class_index, counts)
        on_kernel = batch.kernels.compute(batch.name, shards.total, shards.total)
        others, _ = self_log_sum_exp(
            z, scale=scale, unit_norm=self.normalize, dtype=batch.first.dtype, shards=shards, world=batch.world,
            excluded=None if only is None else only[shards.local], on_kernel=on_kernel,
        )  # fmt: skip
        losses = others - mean
        if only is not None:
            losses = cross_entropy(mean, others).where(positives == 1, losses)
        return losses.to(z.dtype), positives

    def reduce_rows(
        self,
        loss: BlockLoss,
        reduction: Reduction,
        *,
        mask: Tensor | None = None,
        anchors: ContrastMode = "all",
        unsupported: str | None = None,
    ) -> Float[Tensor, "..."]:
        """Reduce a loss of blocks, whose positives may be given by a mask, and whose anchors may be the first views only.

        Args:
            loss: of a block; the mask's rows and the candidates' samples are its companions.
            reduction: of its anchors.
            mask: [n, N], whether a sample is a positive of a local one.
            anchors: all views, or the first one.
            unsupported: why Triton kernels cannot compute it, for who has chosen them.
        """
        self.batch.kernels.compute(self.batch.name, 0, 0, unsupported=unsupported)
        z, views, samples = self.embeddings, self.views, self.batch.samples
        companions = [] if mask is None else [(mask.bool().repeat_interleave(views, 0), self.samples)]
        if anchors == "all":
            return reduce_rows(self.batch, loss, z, self.ids, times=views, companions=companions, reduction=reduction)
        first = slice(None, None, views)
        own = torch.arange(samples.start * views, samples.start * views + len(z), device=z.device)[first]
        return reduce_rows(
            self.batch, loss, z[first], self.ids[first], candidates=z, candidate_ids=self.ids,
            candidate_shards=samples.times(views), own_candidates=own,
            companions=[(of_anchors[first], x) for of_anchors, x in companions], reduction=reduction,
        )  # fmt: skip

    def binary_cross_entropy(self, reduction: Reduction, bias: float | Tensor) -> Float[Tensor, "..."]:
        """Reduce ``-logsigmoid(±(z_i·z_j / t + bias)).sum(1)`` over all anchors: + for equal labels, − for others."""
        batch, z = self.batch, self.embeddings
        if is_dense():
            return reduce_rows(batch, sigmoid_block_loss(self.temperature, bias), z, self.ids, reduction=reduction)
        return sum_over_sigmoid_pairs(
            batch.rounded(z, batch.first), None, self.ids, scale=1 / self.temperature, bias=bias, dtype=batch.first.dtype,
            shards=batch.samples, reduction=reduction, world=batch.world,
        )  # fmt: skip
