"""SupCon: InfoNCE whose positives are all other rows of the anchor's class."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from contrastive_zoo.collectives import gather_rows, sum_over_ranks
from contrastive_zoo.engine.class_pairs import class_numbers, only_positives
from contrastive_zoo.engine.cross_entropy import cross_entropy
from contrastive_zoo.engine.implementation import choose_kernels
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.row_statistics import LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss, LabelledLoss
from contrastive_zoo.loss_base.checks import labelled_problem, positive_problem, rows_problem, word_problem
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import (
    begin,
    labels_as_int64,
    prepare_rows,
    round_to_input_dtype,
    sample_indices,
)
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.world import ALONE, Shards, World

Variant = Literal["out", "in"]
ContrastMode = Literal["all", "one"]


@checked
def sup_con(
    embeddings: Float[Tensor, "n d"] | Float[Tensor, "n v d"],
    labels: Int[Tensor, " n"] | None = None,
    mask: Shaped[Tensor, "n N"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    variant: Variant = "out",
    contrast_mode: ContrastMode = "all",
    base_temperature: float | None = None,
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

    The authors' code has temperature 0.07 and multiplies the loss by t / 0.07: ``temperature=0.07,
    base_temperature=0.07``. It counts anchors without a positive in the mean, this loss does not.

    Args:
        embeddings: [n, d], n may differ between ranks; or [n, v, d], v views of each sample, the same v everywhere.
        labels: [n] integers; None with views makes each sample a class of its own.
        mask: [n, N], in place of labels: whether each of the N samples of all ranks, in rank order, is a positive of each
            local sample. A row is never its own positive.
        temperature: t > 0, dimensionless; a tensor is learnable.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        contrast_mode: ``"all"`` views are anchors, or the first (``"one"``); candidates are always all views.
        base_temperature: t₀; multiplies the loss by t / t₀, without gradient. None leaves this factor out.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n], or [n · v] sample by sample.
        world: the ranks that share the batch.

    Raises:
        ValueError: an unknown variant or contrast mode, labels together with a mask, a mask that does not have a column for
            each sample of all ranks, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> sup_con(z, torch.tensor([0, 0, 1]), temperature=1.0)   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)
        >>> sup_con(torch.eye(2)[:, None].repeat(1, 2, 1), temperature=1.0)   # two samples, two views: log(e + 2) − 1
        tensor(0.5514)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362
    """
    settings: Any = {"temperature": temperature, "variant": variant, "base_temperature": base_temperature}
    views = embeddings.shape[1] if embeddings.ndim == 3 else 1
    named = {"embeddings": embeddings, "labels": labels, "mask": mask}
    by_rows = variant == "in" or mask is not None or contrast_mode == "one"
    kernels = choose_kernels([embeddings], unsupported=_UNSUPPORTED_BY_KERNELS if by_rows else None)
    problem = _problem(embeddings, labels, mask) or _settings_problem(variant, contrast_mode, base_temperature)
    shards, *_ = begin(
        "SupCon", named, problem=problem or kernels.problem, reduction=reduction, normalize=normalize,
        contrast_mode=contrast_mode, implementation=str(kernels), world=world, **settings,
    )  # fmt: skip
    if mask is not None and mask.shape[1] != shards.total:  # equal on every rank
        rule = f"the mask has a column for each of the {shards.total} samples of all ranks"
        raise ValueError(f"SupCon: {rule}, got {kind(mask)}.")
    z = prepare_rows(embeddings, normalize=normalize, world=world)
    samples = sample_indices(shards, z)
    ids = samples if labels is None else labels_as_int64(labels, world)
    if embeddings.ndim == 3:
        z, ids, samples = z.flatten(0, 1), ids.repeat_interleave(views), samples.repeat_interleave(views)
    shards = shards.times(views)
    if by_rows:
        companions = [] if mask is None else [(mask.bool().repeat_interleave(views, 0), samples)]
        of_first_views = views if contrast_mode == "one" else 1
        loss = BlockLoss(_block_losses, **settings)
        return _by_rows(loss, z, ids, companions, of_first_views, shards, reduction, world)

    z = round_to_input_dtype(z, embeddings, world)
    # the sum of an anchor's positive logits is one dot product with the sum of its class
    all_ids = gather_rows(ids, shards, world)
    class_index, counts = class_numbers(all_ids)
    local_index = class_index[shards.local]
    class_sums = sum_over_ranks(
        z.new_zeros(len(counts), z.shape[1]).index_add(0, local_index, z), gradient="partial", world=world
    )
    positives = counts[local_index] - 1
    scale = logit_scale(temperature, world)
    positive = scale * (z * (class_sums.index_select(0, local_index) - z)).sum(-1) / positives.clamp(min=1)
    # the only positive of an anchor is left out of the sum, so that a solved batch keeps its digits
    only = only_positives(class_index, counts)
    candidates, _ = self_log_sum_exp(
        z, scale=scale, unit_norm=normalize, dtype=embeddings.dtype, shards=shards, world=world,
        excluded=None if only is None else only[shards.local], on_kernel=kernels.compute(shards.total, shards.total),
    )  # fmt: skip
    losses = candidates - positive
    if only is not None:
        losses = cross_entropy(positive, candidates).where(positives == 1, losses)
    losses = _rescaled(losses.to(z.dtype), temperature, base_temperature)
    return reduce_anchors(losses, positives > 0, reduction=reduction, world=world)


_UNSUPPORTED_BY_KERNELS = "computes SupCon with variant='out' and contrast_mode='all', without a mask"


def _by_rows(
    loss: BlockLoss,
    z: Tensor,
    ids: Tensor,
    companions: list[tuple[Tensor, Tensor]],
    step: int,
    shards: Shards,
    reduction: Reduction,
    world: World,
) -> Tensor:
    """Return the loss of every ``step``-th row from all of its similarities, for positives that are no classes too."""
    if step == 1:
        return sum_over_anchors(loss, z, ids, companions=companions, shards=shards, reduction=reduction, world=world)
    first = slice(None, None, step)
    own = torch.arange(shards.start, shards.start + len(z), device=z.device)[first]
    sizes = Shards(tuple(size // step for size in shards.sizes), shards.rank)
    return sum_over_anchors(
        loss, z[first], ids[first], candidates=z, candidate_ids=ids, candidate_shards=shards, own_candidates=own,
        companions=[(of_anchors[first], x) for of_anchors, x in companions], shards=sizes, reduction=reduction,
        world=world,
    )  # fmt: skip


def _block_losses(
    block: AnchorBlock,
    temperature: Tensor,
    variant: Variant,
    base_temperature: float | None = None,
) -> Rows:
    logits = block.anchors @ block.candidates.T / temperature
    positive, candidates = block.positive, block.positive | block.negative
    for mask, samples in block.companions:
        positive = mask.index_select(1, samples) & candidates
    over_negatives, over_positives, sums, count = yield (
        LogSumExp(logits, candidates & ~positive),
        LogSumExp(logits, positive, empty=0.0),
        Sum(logits.where(positive, 0).sum(1)),
        Sum(positive.sum(1, dtype=logits.dtype)),
    )
    divisor = count.clamp(min=1)
    if variant == "in":
        losses = cross_entropy(over_positives, over_negatives) + divisor.log()
    else:
        mean = sums / divisor
        # the only positive of an anchor is left out of the sum, so that a solved batch keeps its digits
        alone = cross_entropy(mean, over_negatives)
        losses = alone.where(count == 1, torch.logaddexp(over_positives, over_negatives) - mean)
    return _rescaled(losses, temperature, base_temperature), count > 0


def _rescaled(losses: Tensor, temperature: float | Tensor, base_temperature: float | None) -> Tensor:
    if base_temperature is None:
        return losses
    t = real(temperature)
    t = t.detach().to(losses.dtype) if isinstance(t, Tensor) else t
    return losses * (t / real(base_temperature))


def _settings_problem(variant: str, contrast_mode: str, base_temperature: float | None) -> str | None:
    wrong = word_problem("variant", variant, Variant) or word_problem("contrast_mode", contrast_mode, ContrastMode)
    given = {} if base_temperature is None else {"base_temperature": base_temperature}
    return wrong or positive_problem(**given)


def _problem(embeddings: Tensor, labels: Tensor | None, mask: Tensor | None) -> str | None:
    if embeddings.ndim == 3 and embeddings.shape[1] >= 1 and embeddings.is_floating_point():
        found = None if labels is None else labels_problem("labels", labels, len(embeddings))
    else:
        labelled = mask is None or labels is not None
        found = labelled_problem(embeddings, labels) if labelled else rows_problem("embeddings", embeddings)
    if found is None and mask is not None and labels is not None:
        return "positives are given by labels or by a mask, got both. Leave one out."
    if found is None and mask is not None and (mask.ndim != 2 or len(mask) != len(embeddings)):
        return f"the mask has a row for each local sample, got {kind(mask)} for embeddings {kind(embeddings)}."
    return found


class SupCon(LabelledLoss, function=sup_con, block_function=_block_losses, check=_settings_problem): ...
