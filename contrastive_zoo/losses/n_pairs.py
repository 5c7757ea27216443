"""N-pairs: one pair per class, each anchor against the positives of other classes."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import gather_rows
from contrastive_zoo.engine.cross_entropy import cross_entropy
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.world import ALONE, Shards, World


@checked
def n_pairs(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    l2: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the multi-class N-pair loss: classify, for each class's first row, its second row among those of all classes.

    With x_c, y_c the first two rows, in rank order, of the C classes that have two,

        loss = mean_c [ log Σ_b exp(x_c·y_b / t)  −  x_c·y_c / t  +  λ (‖x_c‖² + ‖y_c‖²) ]

    Dense: ``cross_entropy(x @ y.T / t, arange(C))``. With ``normalize=True`` equal to pytorch-metric-learning's
    NPairsLoss, which selects the same rows. Its ``embedding_regularizer`` is a mean over all rows; the paper's and this
    one are means over pairs. For views, where every sample is a pair, use ``InfoNCE(temperature=1.0, normalize=False)``.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, in units of dot products; a tensor is learnable. The paper has none.
        l2: λ ≥ 0, the weight of the squared norms.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair, 0 without any), ``"sum"``, or ``"none"`` for the local
            rows.
        world: the ranks that share the batch.

    Raises:
        ValueError: a negative l2, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> n_pairs(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Sohn 2016, §3.2, https://papers.nips.cc/paper/6200-improved-deep-metric-learning-with-multi-class-n-pair-loss-objective
    """
    z, ids, shards = begin_labelled(
        "NPairs", embeddings, labels, problem=_settings_problem(l2), temperature=temperature, l2=l2, normalize=normalize,
        reduction=reduction, world=world,
    )  # fmt: skip
    all_ids = gather_rows(ids, shards, world)
    order = all_ids.argsort(stable=True)
    position = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=z.device))
    start = torch.searchsorted(all_ids[order], all_ids)
    index_in_class = position - start
    has_pair = torch.searchsorted(all_ids[order], all_ids, right=True) - start > 1
    first, second = (index_in_class == 0) & has_pair, index_in_class == 1
    x, y = (selected[shards.local].nonzero().flatten() for selected in (first, second))
    loss = BlockLoss(_pair_losses, temperature=temperature)
    losses = sum_over_anchors(
        loss, z[x], ids[x], candidates=z[y], candidate_ids=ids[y], shards=_shards_of_selected(shards, first),
        candidate_shards=_shards_of_selected(shards, second), reduction="none", world=world,
    )  # fmt: skip
    squares = l2 * z.square().sum(-1)
    losses = z.new_zeros(len(z)).index_add(0, x, losses) + squares.where((first | second)[shards.local], 0)
    if reduction == "none":
        return losses
    total = reduce_anchors(losses, reduction="sum", world=world)
    return total if reduction == "sum" else total / first.sum().clamp(min=1)


def _settings_problem(l2: float) -> str | None:
    return number_problem("l2 is a non-negative weight", low=0, l2=l2)


class NPairs(Loss, function=n_pairs, check=_settings_problem):
    supports_ring = True


def _pair_losses(block: AnchorBlock, temperature: Tensor) -> Rows:
    logits = block.anchors @ block.candidates.T / temperature
    others, positive, valid = yield (
        LogSumExp(logits, ~block.positive),
        Sum(logits.where(block.positive, 0).sum(1)),
        AnyOf(block.positive.any(1)),
    )
    return cross_entropy(positive, others), valid


def _shards_of_selected(shards: Shards, selected: Tensor) -> Shards:
    """Return the shard sizes of the selected rows."""
    return Shards(tuple(int(part.sum()) for part in selected.split(list(shards.sizes))), shards.rank)
