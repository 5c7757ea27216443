"""N-pairs: one pair per class, each anchor against the positives of other classes."""

from typing import Annotated

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature


class NPairs(LabelledLoss):
    r"""Compute the multi-class N-pair loss: classify, for each class's first row, its second row among those of all classes.

    With x_c, y_c the first two rows, in rank order, of the C classes that have two,

        loss = mean_c [ log Σ_b exp(x_c·y_b / t)  −  x_c·y_c / t  +  λ (‖x_c‖² + ‖y_c‖²) ]

    Dense: ``cross_entropy(x @ y.T / t, arange(C))``. With ``normalize=True`` equal to pytorch-metric-learning's
    NPairsLoss, which selects the same rows. Its ``embedding_regularizer`` is a mean over all rows; the paper's and this
    one are means over pairs. For views, where every sample is a pair, use ``InfoNCE(temperature=1.0, normalize=False)``.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, in units of dot products; a tensor or a module is learnable. The paper has none.
        l2: λ ≥ 0, the weight of the squared norms.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair, 0 without any), ``"sum"``, or ``"none"`` for the local
            rows.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a negative l2, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> NPairs()(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Sohn 2016, §3.2, https://papers.nips.cc/paper/6200-improved-deep-metric-learning-with-multi-class-n-pair-loss-objective
    """

    temperature: Temperature = 1.0
    l2: Annotated[float, Bounds("l2 is a non-negative weight", low=0)] = 0.0
    normalize: bool = False
    reduction: Reduction = "mean"

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        z, ids = batch.prepared(batch.rows["embeddings"], normalize=self.normalize), batch.int64(batch.rows["labels"])
        shards, all_ids = batch.samples, batch.gathered(ids)
        order = all_ids.argsort(stable=True)
        position = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=z.device))
        start = torch.searchsorted(all_ids[order], all_ids)
        index_in_class = position - start
        has_pair = torch.searchsorted(all_ids[order], all_ids, right=True) - start > 1
        first, second = (index_in_class == 0) & has_pair, index_in_class == 1
        x, y = (selected[shards.local].nonzero().flatten() for selected in (first, second))
        losses = reduce_rows(
            batch, BlockLoss(_pair_losses, temperature=batch.settings.temperature), z[x], ids[x], candidates=z[y],
            candidate_ids=ids[y], shards=shards.selected(first), candidate_shards=shards.selected(second), reduction="none",
        )  # fmt: skip
        squares = batch.settings.l2 * z.square().sum(-1)
        losses = z.new_zeros(len(z)).index_add(0, x, losses) + squares.where((first | second)[shards.local], 0)
        if self.reduction == "none":
            return losses
        total = batch.reduce(losses, reduction="sum")
        return total if self.reduction == "sum" else total / first.sum().clamp(min=1)


def _pair_losses(block: AnchorBlock, temperature: Tensor) -> Rows:
    logits = block.anchors @ block.candidates.T / temperature
    others, positive, valid = yield (
        LogSumExp(logits, ~block.positive),
        Sum(logits.where(block.positive, 0).sum(1)),
        AnyOf(block.positive.any(1)),
    )
    return cross_entropy(positive, others), valid
