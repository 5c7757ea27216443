"""SupCon: InfoNCE whose positives are all other rows of the anchor's class."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import gather_rows, sum_over_ranks
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.class_pairs import only_positives
from contrastive_zoo.engine.cross_entropy import cross_entropy
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.loss_base.block_loss import BlockLoss, LabelledLoss
from contrastive_zoo.loss_base.checks import word_problem
from contrastive_zoo.loss_base.preparation import begin_labelled, round_to_input_dtype
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World

Variant = Literal["out", "in"]


@uncompiled
def sup_con(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    variant: Variant = "out",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the supervised contrastive loss, with positives outside the logarithm (or inside).

    With z the unit rows of all ranks and P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t

    averaged over the anchors that have a positive. Dense: ``-(log_softmax((z @ z.T / t).fill_diagonal_(-inf), 1) *
    positive).sum(1) / positive.sum(1)``. Positives need no mask: the sum of
    their logits is one dot product with the sum of the class.

    The variant ``"in"``, which performs worse in the paper, averages probabilities, not their logarithms. Its last term is
    log mean_{p∈P(i)} exp(z_i·z_p / t).

    Args:
        embeddings: [n, d], n may differ between ranks. Several views of a sample are several rows.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnable.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an unknown variant, or what any :class:`Loss` refuses.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> sup_con(z, torch.tensor([0, 0, 1]), temperature=1.0)   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362
    """
    settings: Any = {"temperature": temperature, "variant": variant}
    z, ids, shards = begin_labelled(
        "SupCon", embeddings, labels, problem=_settings_problem(variant), reduction=reduction,
        normalize=normalize, world=world, **settings,
    )  # fmt: skip
    if variant == "in":
        loss = BlockLoss(_block_losses, **settings)
        return sum_over_anchors(loss, z, ids, shards=shards, reduction=reduction, world=world)

    z = round_to_input_dtype(z, embeddings, world)
    # the sum of an anchor's positive logits is one dot product with the sum of its class
    all_ids = gather_rows(ids, shards, world)
    classes, class_index, counts = torch.unique(all_ids, return_inverse=True, return_counts=True)
    local_index = class_index[shards.local]
    class_sums = sum_over_ranks(
        z.new_zeros(len(classes), z.shape[1]).index_add(0, local_index, z), gradient="partial", world=world
    )
    positives = counts[local_index] - 1
    scale = logit_scale(temperature, world)
    positive = scale * (z * (class_sums.index_select(0, local_index) - z)).sum(-1) / positives.clamp(min=1)
    # the only positive of an anchor is left out of the sum, so that a solved batch keeps its digits
    only = only_positives(class_index, counts)
    candidates, _ = self_log_sum_exp(
        z, scale=scale, unit_norm=normalize, dtype=embeddings.dtype, shards=shards, world=world,
        excluded=None if only is None else only[shards.local],
    )  # fmt: skip
    losses = candidates - positive
    if only is not None:
        losses = cross_entropy(positive, candidates).where(positives == 1, losses)
    return reduce_anchors(losses, positives > 0, reduction=reduction, world=world)


def _block_losses(block: AnchorBlock, temperature: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    logits = block.anchors @ block.candidates.T / temperature
    count = block.positive.sum(1, dtype=logits.dtype)
    if variant == "in":
        positives = masked_log_sum_exp(logits, block.positive, empty=0.0)
        losses = cross_entropy(positives, masked_log_sum_exp(logits, block.negative)) + count.clamp(min=1).log()
        return losses, count > 0
    positive = logits.where(block.positive, 0).sum(1) / count.clamp(min=1)
    # the only positive of an anchor is left out of the sum, so that a solved batch keeps its digits
    candidates = masked_log_sum_exp(logits, block.negative | (block.positive & (count != 1)[:, None]))
    return cross_entropy(positive, candidates).where(count == 1, candidates - positive), count > 0


def _settings_problem(variant: str) -> str | None:
    return word_problem("variant", variant, Variant)


class SupCon(LabelledLoss, function=sup_con, block_function=_block_losses, check=_settings_problem):
    def can_ring(self) -> bool:
        return self.variant == "out"
