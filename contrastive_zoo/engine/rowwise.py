"""Compute any loss that is a sum over anchors, from a function that returns the losses of one block of anchors.

The gradient is taken block by block in the forward pass, and divided by the global count afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock, BatchLayout, BlockLoss, RowwiseSweep
from contrastive_zoo.engine.batch import Batch, Candidates, Reduction, mean_divisor
from contrastive_zoo.engine.cost import Blocks
from contrastive_zoo.engine.ledger import Names, Stored
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.pairwise import first_of_equals
from contrastive_zoo.engine.precision import sum_dtype, without_autocast
from contrastive_zoo.engine.tiling import budget, memory_budget
from contrastive_zoo.ranks.adjoints import all_reduced
from contrastive_zoo.ranks.collectives import all_gather, replicated
from contrastive_zoo.ranks.compiling import Function, differentiable_once
from contrastive_zoo.ranks.randomness import StateWatch, one_stream
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World

__all__ = ["AnchorBlock", "BlockLoss", "reduce_rows"]


def reduce_rows(
    batch: Batch,
    loss: BlockLoss,
    anchors: Float[Tensor, "n e"] | Candidates,
    ids: Int[Tensor, " n"],
    *,
    times: int = 1,
    shards: Shards | None = None,
    candidates: Float[Tensor, "m d"] | Candidates | None = None,
    candidate_ids: Int[Tensor, " m"] | None = None,
    candidate_shards: Shards | None = None,
    own_candidates: Int[Tensor, " n"] | None = None,
    companions: Sequence[tuple[Tensor, Tensor]] = (),
    reduction: Reduction = "mean",
    may_draw: bool = False,
) -> Float[Tensor, "..."]:
    """Return the losses that ``loss.on_block`` computes of every anchor, reduced over the valid anchors of all ranks.

    Equal to ``reduce(*loss.on_block(AnchorBlock(Z, candidates, …)))`` with the anchors of all ranks in one block. Learnable
    settings get their complete gradient on every rank. Candidates None are the anchors; others with the id of an anchor are
    its positives, but for ``own_candidates``, the index of its copy among the candidates of all ranks, −1 for none.
    ``shards`` None are ``times`` anchors for each sample of the batch. Companions are pairs of [n, …] for the local anchors
    and [m, …] for the local candidates, without gradient.

    ``may_draw``: whether the loss may draw random numbers or change a buffer. If it has, every rank computes it from all
    anchors instead, and raises the same ValueError with ``reduction="none"``.
    """
    world, shards = batch.world, batch.samples.times(times) if shards is None else shards
    of_batch = anchors if candidates is None else candidates
    where = candidate_shards or (candidates.shards if isinstance(candidates, Candidates) else shards)
    anchors = anchors.local if isinstance(anchors, Candidates) else anchors
    candidates = candidates.local if isinstance(candidates, Candidates) else candidates
    is_one_tower, splits = candidates is None, batch.plan.work == "own anchors"
    watch = StateWatch(loss.module or nn.Module(), anchors.device) if may_draw and splits else None
    all_ids = batch.gather_detached(ids if candidate_ids is None else candidate_ids, where)
    if is_one_tower and times == 1 and not companions:  # which say what positives are
        batch.note_labels(all_ids)
    pairs = tuple((x, batch.gather_detached(y, where)) for x, y in companions)
    copies = torch.arange(shards.start, shards.start + len(ids), device=ids.device) if is_one_tower else own_candidates
    layout = BatchLayout(ids, all_ids, pairs, where, world, copies)
    if batch.plan.is_plain:
        return _dense(batch, loss, anchors, anchors if candidates is None else candidates, layout, reduction)
    call, shared = _Call(loss, layout, reduction), of_batch.gathered() if isinstance(of_batch, Candidates) else None
    value = _SumOverAnchors.apply(call, watch, shared, anchors, candidates, *loss.learnable.values())
    if watch is None or not watch.found_on_any_rank:
        return value
    watch.undo()
    if isinstance(world, Session):
        world.findings.draws = True

    def gathered(x: Tensor | None, of: Shards) -> Any:
        return None if x is None else all_gather(x, gradient="complete", shards=of, process_group=world)

    alone = replace(batch, world=World(), plan=batch.plan._replace(work="all on every rank"))
    with one_stream(world, anchors.device):  # every rank computes the loss of all anchors, with rank 0's random numbers
        return reduce_rows(
            alone, loss, gathered(anchors, shards), gathered(ids, shards),
            shards=Shards((shards.total,)), candidates=gathered(candidates, where),
            candidate_ids=gathered(candidate_ids, where), candidate_shards=Shards((where.total,)),
            own_candidates=gathered(own_candidates, shards),
            companions=[(gathered(x, shards), gathered(y, where)) for x, y in companions], reduction=reduction,
        )  # fmt: skip


def reduce_towers(
    batch: Batch,
    loss: BlockLoss,
    towers: tuple[Tensor | Candidates, Tensor | Candidates],
    companions: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    symmetric: bool = True,
    reduction: Reduction,
) -> Float[Tensor, "..."]:
    """Return a loss of paired embeddings, of the first tower among the second's; if symmetric, the mean of both ways."""
    (x, y), ids = towers, batch.indices()
    how: Any = {"candidate_ids": ids, "reduction": reduction}
    value = reduce_rows(batch, loss, x, ids, candidates=y, companions=companions, **how)
    if not symmetric:
        return value
    back = reduce_rows(batch, loss, y, ids, candidates=x, companions=[(v, u) for u, v in companions], **how)
    return (value + back) / 2


def blocks_of(loss: BlockLoss, anchors: Names, candidates: Names | Stored = (), **how: Any) -> Blocks:
    """Return what :func:`reduce_rows` of a loss sends, as data."""
    parameters = [x.nbytes for x in loss.learnable.values()]
    of_loss: Any = {"terms": loss.terms, "columns": loss.columns, "matrices": loss.matrices}
    return Blocks(anchors, candidates, parameters=parameters, **of_loss, **how)


@without_autocast
def _dense(
    batch: Batch, loss: BlockLoss, anchors: Tensor, candidates: Tensor, layout: BatchLayout, reduction: Reduction
) -> Tensor:
    """Compute the definition: all local anchors in one block, with plain autograd."""
    gathered = all_gather(candidates, shards=layout.candidate_shards, process_group=layout.world)
    block = layout.block(slice(0, len(anchors)), anchors, gathered, first_of_equals(gathered.detach()))
    shared = {name: replicated(x, process_group=layout.world) for name, x in loss.learnable.items()}
    with loss.in_force(shared):
        losses, valid = loss.on_block(block, shared)
    return batch.reduce(losses, valid, reduction=reduction)


@dataclass(frozen=True)
class _Call:
    loss: BlockLoss
    layout: BatchLayout
    reduction: Reduction
    learns: bool = field(default_factory=torch.is_grad_enabled)  # a leaf has requires_grad under no_grad, too


class _SumOverAnchors(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, call: _Call, watch: StateWatch | None, shared: Tensor | None, anchors: Tensor, *others: Any
    ) -> Tensor:
        """Compute the loss of ``anchors``, candidates and learnable settings, and its gradients where weights are known."""
        loss, layout, (candidates, *learnable) = call.loss, call.layout, others
        columns = anchors if candidates is None else candidates
        gathered = gather_rows(columns, layout.candidate_shards, layout.world) if shared is None else shared
        sweep = RowwiseSweep(loss, layout, anchors, gathered, learnable)
        ctx.call, ctx.one_tower = call, candidates is None
        inputs = [anchors, *([] if candidates is None else [candidates]), *learnable]
        ctx.count_inputs, ctx.has_gradients = len(inputs), False
        # autograd computes gradients of an accelerator in a thread of its own, which has the default
        ctx.budget = budget()
        ctx.save_for_backward(*inputs, gathered)  # saved tensors, unlike attributes, are freed with the graph
        if call.reduction == "none":  # each anchor's weight is known in the backward pass only
            losses = sweep.losses()[0].sum(1)
            if watch is not None:
                changed = torch.tensor(float(watch.has_changed()))
                if all_reduced(changed, "sum", "complete", layout.world) > 0:
                    raise ValueError(_STATEFUL_WITHOUT_REDUCTION)
            return losses
        if call.learns and any(ctx.needs_input_grad) and (loss.terms == 1 or call.reduction == "sum"):
            losses, counts, *gradients = sweep.gradients()
            ctx.has_gradients = True
            ctx.save_for_backward(*inputs, *gradients)
        else:  # each term has its own weight, which is known after the whole sweep
            losses, counts = sweep.losses()
        sums = [x.sum(0, dtype=sum_dtype(x)) for x in (losses, counts)]
        if watch is not None:
            sums.append(torch.full_like(sums[0], watch.has_changed()))
        totals = all_reduced(torch.stack(sums), "sum", "complete", layout.world)
        total, count, *changes = totals.unbind()
        if watch is not None:  # all ranks see the same sum
            watch.found_on_any_rank = any(bool(x.any()) for x in changes)
            compared = layout.world.findings.anchors if isinstance(layout.world, Session) else None
            if compared is not None and ctx.one_tower and not watch.found_on_any_rank:
                compared |= {"anchor": losses[-1].sum()} if len(losses) else {}
                compared["other anchor"] = sweep.loss_of_next_rank()
        ctx.count = mean_divisor(count) if call.reduction == "mean" else torch.ones_like(count)
        return (total / ctx.count).sum().to(anchors.dtype)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint recomputes them at the first access and refuses a second
        call, inputs, rest = ctx.call, saved[: ctx.count_inputs], saved[ctx.count_inputs :]
        if not ctx.has_gradients:
            sweep = RowwiseSweep(call.loss, call.layout, inputs[0], rest[0], inputs[1 if ctx.one_tower else 2 :])
            weights = grad_output[:, None] if call.reduction == "none" else grad_output / ctx.count
            with torch.no_grad(), memory_budget(ctx.budget):
                gradients = sweep.gradients(weights=weights.expand(len(inputs[0]), call.loss.terms))[2:]
        else:
            weight = (grad_output / ctx.count[0]).to(grad_output.dtype)
            gradients = [weight * gradient for gradient in rest]
        danchors, dcandidates, *dlearnable = gradients
        by_rows = [danchors + dcandidates, None] if ctx.one_tower else [danchors, dcandidates]
        by_input = (differentiable_once(gradient, *inputs) for gradient in [*by_rows, *dlearnable])
        return None, None, None, *by_input


_STATEFUL_WITHOUT_REDUCTION = (
    "reduction='none': the loss draws random numbers or changes a buffer as it is computed, so every rank must compute it "
    "from the embeddings of all ranks, and no rank has the losses of its own anchors alone. Use reduction='mean' or 'sum'."
)


Average = Literal["anchors", "pairs"]  # what a mean is taken over


def info_nce_per_positive(
    logits: Tensor, block: AnchorBlock, average: Average, positive_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return log(1 + Σ_n exp(logits_n − logits_p)): the mean over positives p and if there are any, or sum and number."""
    negatives = masked_log_sum_exp(logits, block.negative)
    positives = logits if positive_logits is None else positive_logits
    of_pairs = -F.logsigmoid(positives - negatives[:, None]).where(block.positive, 0)
    losses, pairs = of_pairs.sum(1), block.positive.sum(1)
    return (losses, pairs) if average == "pairs" else (losses / pairs.clamp(min=1), pairs > 0)


class PairBlock(NamedTuple):
    """A block whose anchors are pairs, and whose candidates are pairs and single embeddings, both of a pair in turn."""

    first: Tensor
    second: Tensor
    candidate_first: Tensor  # the first ones of the candidates that are pairs; of others the single one
    documents: Tensor  # the second ones of the candidates that are pairs, and single ones
    is_pair: Tensor

    def similarity(self, direction: str) -> Float[Tensor, "c N"]:
        """Return the dot products of one embedding of the anchors' pairs with one of the candidates', "query_to_doc"."""
        anchors = self.first if direction.startswith("query") else self.second
        return anchors @ (self.documents if direction.endswith("doc") else self.candidate_first).T


def reduce_pairs(
    batch: Batch,
    loss: BlockLoss,
    rows: Sequence[Tensor],
    guides: Sequence[Sequence[Tensor]] = (),
    *,
    ids: Sequence[tuple[Tensor, Tensor | None]] = (),
    owners: Tensor | None = None,
    groups: Tensor | None = None,
    reduction: Reduction,
) -> Float[Tensor, "..."]:
    """Reduce a loss of blocks whose anchors are pairs, and whose candidates are all ranks' pairs and single embeddings.

    Rows are the first and the second embeddings of pairs, and single ones, the batch's ``negatives``; guides are the same,
    without gradient. ``ids`` are of pairs, and of single embeddings, None for none. The block's companions say which
    candidates are single, then guides, then ids with a column of flags. ``owners`` are the pairs of this rank that single
    embeddings are also positives of, or −1 for none; None is −1. ``groups`` are of pairs, and of the single embeddings that
    they own: a pair's candidates are those of its group, and the embeddings without an owner.
    """
    first, second, singles = rows
    pairs, columns, single = concat_pairs(first, second, singles)
    index, samples = batch.indices(), batch.samples
    of_singles = index.new_full((len(singles),), -1)
    if owners is not None:
        of_singles = torch.where(owners < 0, of_singles, owners + samples.start)
    of_ids: list[tuple[Tensor, Tensor]] = []
    if groups is not None:
        flags = torch.where(of_singles < 0, NO_ID, SAME_GROUP)
        of_owners = of_singles if owners is None else torch.cat([groups, groups.new_zeros(1)])[owners.long()]
        of_ids = [(groups, torch.cat([_with_flag(groups, SAME_GROUP), _with_flag(of_owners, flags)]))]
    of_guides = [concat_pairs(*guide)[:2] for guide in guides]
    for x, y in ids:
        of_negatives = _with_flag(of_singles, NO_ID) if y is None else _with_flag(y, OTHER_ID)
        of_ids.append((x, torch.cat([_with_flag(x, OTHER_ID), of_negatives])))
    return reduce_rows(
        batch, loss, pairs, index, candidates=columns, candidate_ids=torch.cat([index, of_singles]),
        candidate_shards=samples.plus(batch.shards["negatives"]) if "negatives" in batch.shards else samples,
        companions=[(index, single), *of_guides, *of_ids], reduction=reduction,
    )  # fmt: skip


NO_ID, OTHER_ID, SAME_GROUP = range(3)
"""What a candidate's id says: nothing; it is none of a pair with this id; it is one of pairs with this id only."""


def comparable(block: AnchorBlock, ids_from: int) -> Bool[Tensor, "c N"]:
    """Return which candidates the ids of :func:`reduce_pairs` let an anchor meet: the companions from this one on."""
    result = torch.ones_like(block.positive)
    for ids, of_candidates in block.companions[ids_from:]:
        candidate_ids, flag = of_candidates.unbind(1)
        result &= ((ids[:, None] == candidate_ids) == (flag == SAME_GROUP)) | (flag == NO_ID)
    return result


def _with_flag(ids: Tensor, flag: int | Tensor) -> Tensor:
    return torch.stack([ids.long(), torch.zeros_like(ids, dtype=torch.int64) + flag], 1)


def concat_pairs(
    first: Float[Tensor, "n d"], second: Float[Tensor, "n d"], singles: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "n e"], Float[Tensor, "k e"], Bool[Tensor, " k"]]:
    """Return pairs as anchors, pairs and singles as candidates of the same width, and which candidates are singles."""
    pairs = torch.cat([first, second], 1)
    single = torch.arange(len(pairs) + len(singles), device=pairs.device) >= len(pairs)
    return pairs, torch.cat([pairs, torch.cat([singles, torch.zeros_like(singles)], 1)]), single


def split_pairs(anchors: Tensor, candidates: Tensor, single: Tensor) -> PairBlock:
    """Return the parts that :func:`concat_pairs` concatenated, of one block; candidates keep their places."""
    (first, second), (candidate_first, candidate_second) = anchors.chunk(2, 1), candidates.chunk(2, 1)
    documents = candidate_first.where(single[:, None], candidate_second)
    return PairBlock(first, second, candidate_first, documents, ~single)
