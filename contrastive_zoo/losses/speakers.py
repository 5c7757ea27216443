"""Speakers, or other classes of which a batch holds several samples each: embeddings are compared with class centroids."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine.anchor_block import class_numbers
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry, Gathered, Summed
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.precision import unit_rows
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.settings import Reduction, Temperature
from contrastive_zoo.losses.multi_positive import between_classes


class _CentroidLoss(LabelledLoss, engine="rows"):
    temperature: Temperature = 0.1
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        """Return what it costs at most, if each embedding is an anchor and a class: that depends on the labels."""
        names, learnt = ["embeddings"], stated.learnt("temperature")
        of_classes = Summed(stated.width * stated.wide, partial=True, by_class=True)
        blocks = Blocks(names, names, parameters=learnt, reduction="none", width=stated.width)
        return [Gathered(["labels"], 8), of_classes, blocks, *self.reduced()]


class _Classes(NamedTuple):
    sums: Float[
        Tensor, "n d"
    ]  # for each local embedding, the sum of all ranks' embeddings of its class, but for its last one if so asked
    sizes: Int[Tensor, "n 1"]  # for each local embedding, the size of its class
    counts: Int[Tensor, " N"]  # for each embedding of all ranks, the size of its class
    is_last: Bool[Tensor, " N"]  # whether an embedding is the last one of its class

    @classmethod
    def of(cls, batch: Batch, z: Float[Tensor, "n d"], *, with_last: bool = True) -> "_Classes":
        classes, counts = class_numbers(batch.gather_detached(batch.rows["labels"].long()))
        local, index = batch.samples.local, torch.arange(len(classes), device=z.device)
        last = torch.zeros_like(counts).scatter_reduce(0, classes, index, "amax")
        is_last = last[classes] == index
        added = z if with_last else z.where(~is_last[local, None], 0)
        by_class = z.new_zeros(len(counts), z.shape[1]).index_add(0, classes[local], added)
        sums = batch.sum(by_class, gradient="partial")[classes[local]]
        counts = counts[classes]
        return cls(sums, counts[local, None], counts, is_last)


class GE2E(_CentroidLoss):
    r"""Compute the generalised end-to-end loss: each embedding is classified among the centroids of all classes.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers: speakers, of which a batch holds several utterances.
    With z the unit embeddings of all ranks, c_k the mean of class k, m_i the mean of the others of z_i's class y_i,

        loss = mean_i [ log( exp(x_i) + Σ_{k≠y_i} exp(cos(z_i, c_k) / t) )  −  x_i ],      x_i = cos(z_i, m_i) / t

    over the embeddings whose class has others. This is the paper's softmax variant, with a mean in place of its sum. The
    paper's w is 1/t, and its b cancels.

    Args:
        temperature: t > 0; 0.1 is the paper's first w of 10. A tensor or module is learnable.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> GE2E(temperature=1.0)(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wan et al. 2018, eqs. 5-9, https://arxiv.org/abs/1710.10467
    """

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*self.scale_of(stated)[1], *super().entries(stated)]

    def compute(self, batch: Batch) -> Tensor:
        z, shards = batch.prepared(batch.rows["embeddings"], normalize=True), batch.samples
        ids = batch.rows["labels"].long()
        classes = _Classes.of(batch, z)
        of_class, counts = classes.is_last[shards.local].nonzero().flatten(), classes.counts[shards.local]
        centroids = unit_rows((classes.sums / classes.sizes)[of_class])
        mates = unit_rows((classes.sums - z) / (classes.sizes - 1).clamp(min=1))
        others = reduce_rows(
            batch, BlockLoss(_of_other_classes, temperature=batch.settings.temperature), z, ids,
            candidates=centroids, candidate_ids=ids[of_class], candidate_shards=shards.selected(classes.is_last),
            reduction="none",
        )  # fmt: skip
        positive = batch.scale(batch.settings.temperature) * (z * mates).sum(1)
        losses = cross_entropy(positive, others.masked_fill(counts == batch.total, -torch.inf))
        return batch.reduce(losses.to(z.dtype), counts > 1, reduction=self.reduction)


def _of_other_classes(block: AnchorBlock, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = block.anchors @ block.candidates.T / temperature
    return masked_log_sum_exp(logits, block.negative), block.negative.any(1)


class AngularPrototypical(_CentroidLoss):
    r"""Compute the angular prototypical loss: each class's last embedding is classified among the means of the others.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers: speakers, of which a batch holds several utterances.
    With q_k the last unit embedding, in rank order, of the K classes that have two or more, and c_k the mean of the
    class's other unit embeddings,

        loss = mean_k [ log Σ_l exp(cos(q_k, c_l) / t)  −  cos(q_k, c_k) / t ]

    which is ``cross_entropy(normalize(q) @ normalize(c).T / t, arange(K))``. The paper's w is 1/t, and its b cancels.

    Args:
        temperature: t > 0; 0.1 is the paper's first w of 10. A tensor or module is learnable.
        reduction: ``"mean"`` over all ranks' classes, ``"sum"``, or ``"none"`` for the local embeddings, 0 for most.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> AngularPrototypical(temperature=1.0)(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Chung et al. 2020, §2.3, https://arxiv.org/abs/2003.11982
    """

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.rows["embeddings"], normalize=True)
        classes = _Classes.of(batch, z, with_last=False)
        queries = classes.is_last & (classes.counts > 1)
        return between_classes(
            batch, z, unit_rows(classes.sums / (classes.sizes - 1).clamp(min=1)), (queries, queries),
            temperature=batch.settings.temperature, reduction=self.reduction,
        )  # fmt: skip
