"""The losses that can be sharded, or why they cannot be; the value and the gradients of a sharded loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pytorch_metric_learning import losses, reducers
from torch import Tensor, nn

from contrastive_zoo.engine.batch import mean_divisor
from contrastive_zoo.engine.precision import sum_dtype
from contrastive_zoo.engine.rowwise import AsForward
from contrastive_zoo.loss_base.loss import has_user_code
from contrastive_zoo.ranks.collectives import replicated, sum_over_ranks
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.pml.native.settings import members, reducer_of, reduction_of
from contrastive_zoo.wrapper.pml.sharded import anchor_losses
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import (
    PAIRWISE_DISTANCES,
    AnchorBatch,
    Indices,
    Info,
    local_indices,
    mined,
)
from contrastive_zoo.wrapper.pml.table import LOSSES

COLUMNS = (
    losses.AngularLoss, losses.CircleLoss, losses.GeneralizedLiftedStructureLoss, losses.LiftedStructureLoss,
    losses.MultiSimilarityLoss, losses.TupletMarginLoss,
)  # fmt: skip
"""Losses that hand a reducer a column ``[n, 1]``, which spreads against a reducer's row of numbers."""
COLUMNS_OF_PAIRS = (losses.AngularLoss, losses.LiftedStructureLoss, losses.TupletMarginLoss)
"""Those among them whose numbers are of pairs: PerAnchorReducer raises unless there is a single pair."""
TAKE_NO_INDICES = (losses.InstanceLoss, losses.P2SGradLoss, losses.PNPLoss, losses.RankedListLoss)
TAKE_REFERENCES = (
    anchor_losses.of_pairs, anchor_losses.of_triplets, anchor_losses.nca, anchor_losses.intra_pair_variance,
)  # fmt: skip


def refusal(
    loss: Any, miner: Callable[..., Indices] | None = None, arguments: Mapping[str, Any] | None = None
) -> str | None:
    """Return why a loss cannot be evaluated in shards with its miner, or a call with these arguments, in words."""
    kind, has_indices = type(loss), arguments is not None and arguments.get("indices_tuple") is not None
    parts = (part for module in (loss, miner) if isinstance(module, nn.Module) for part in module.modules())
    if part := next(filter(has_user_code, parts), None):
        return f"{type(part).__name__} has hooks or a forward of its own, which would not see the rows of all ranks."
    if kind is losses.MultipleLosses:
        if loss.miners and (miner is not None or has_indices):
            return "it has miners of its own, and takes neither another one nor indices_tuple. Leave one of them out."
        for member, own_miner, _ in members(loss):
            views = "it takes two views, and a member of MultipleLosses takes embeddings and labels."
            is_of_views = type(member) is losses.SelfSupervisedLoss
            if problem := views if is_of_views else refusal(member, own_miner or miner, arguments):
                return f"{type(member).__name__}: {problem}"
        return None
    if kind is losses.SelfSupervisedLoss:
        if arguments is not None:
            references = {} if loss.symmetric else {"ref_emb": arguments["ref_emb"]}
            arguments = {"embeddings": arguments["embeddings"], "labels": torch.zeros(0), **references}
        return refusal(loss.loss, miner, arguments)
    if isinstance(loss, nn.parallel.DistributedDataParallel):
        return "its parameters' gradient is complete on every rank already. Pass loss.module."
    if kind not in LOSSES:
        return "it is none of the losses that are known to be sums over anchors."
    if isinstance(evaluate := LOSSES[kind].evaluate, str):
        return evaluate
    if kind is losses.NPairsLoss and (miner is not None or has_indices):
        return "it takes the first pair of each class, and ranks do not know the order in which a miner found them."
    if evaluate is anchor_losses.of_triplets and miner is None and loss.triplets_per_anchor != "all":
        return f"it draws {loss.triplets_per_anchor} triplets an anchor. Pass triplets_per_anchor='all', or a miner."
    if getattr(loss, "swap", False):
        return "swap compares positives with negatives, which are other ranks' anchors."
    if type(loss.distance) not in PAIRWISE_DISTANCES:
        return f"{type(loss.distance).__name__} is not known to depend on two embeddings alone."
    if kind in TAKE_NO_INDICES and (miner is not None or has_indices):
        return "it takes no indices_tuple."
    problem = _reducer_refusal(loss.reducer, kind)
    return _arguments_problem(evaluate, arguments) if problem is None and arguments is not None else problem


def _arguments_problem(evaluate: Any, arguments: Mapping[str, Any]) -> str | None:
    for name, shape, dimensions in (("embeddings", "[n, d]", 2), ("ref_emb", "[n, d]", 2), ("labels", "[n]", 1)):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.ndim != dimensions:
            return f"{name} are {shape}, got {x.ndim} dimensions."
    if arguments.get("labels") is None:
        return "labels are missing: call loss(embeddings, labels), also with indices_tuple."
    if arguments.get("ref_emb") is not None and evaluate not in TAKE_REFERENCES:
        return "it takes no ref_emb."
    return None


def _reducer_refusal(reducer: Any, kind: type[nn.Module]) -> str | None:
    if type(reducer) is reducers.MultipleReducers:
        parts = [*reducer.reducers.values(), reducer.default_reducer]
        return next((reason for x in parts if (reason := _reducer_refusal(x, kind))), None)
    if type(reducer) is reducers.DoNothingReducer:
        return "DoNothingReducer returns every pair's loss, and a rank has those of its own anchors only."
    reduction = reduction_of(reducer)
    if reduction is None:
        return f"{type(reducer).__name__} is not known to be a sum over a count."
    if reduction == "divisor" and kind is not losses.MarginLoss:
        return "DivisorReducer asks for a divisor, and this loss gives none."
    if reduction == "class weights" and kind in COLUMNS:
        return (
            "ClassWeightedReducer multiplies its column of losses with a row of weights: each anchor's loss with all."
        )
    if reduction != "each anchor":
        return None
    if LOSSES[kind].evaluate is anchor_losses.of_triplets or kind in COLUMNS_OF_PAIRS:
        return "PerAnchorReducer takes a number of each pair, and this loss has none, or a column."
    if reducer.aggregation_func is not reducers.per_anchor_reducer.aggregation_func:
        return "PerAnchorReducer has an aggregation_func of its own, which may depend on several anchors at once."
    if type(reducer.reducer) is reducers.DivisorReducer:
        return "DivisorReducer asks for a divisor, and anchors have none."
    return _reducer_refusal(reducer.reducer, kind)


def call_problem(loss: Any, miner: Any, arguments: Mapping[str, Any]) -> str | None:
    problem = refusal(loss, miner, arguments)
    return None if problem is None else f"it cannot be evaluated in shards: {problem} Leave mode='sharded' out."


def sharded(
    loss: Any,
    miner: Callable[..., Indices] | None,
    arguments: Mapping[str, Any],
    shards: Mapping[str, Shards],
    world: World,
) -> Tensor:
    """Return ``loss(Z, labels, miner(Z, labels))`` of all ranks' samples; each rank evaluates its own anchors only.

    If no anchor counts, the value is 0. An ``indices_tuple`` refers to all samples; ``shards`` are those of each argument.
    """
    if type(loss) is losses.SelfSupervisedLoss:
        views, shard = (arguments["embeddings"], arguments["ref_emb"]), shards["embeddings"]
        arguments = _labelled_views(*views, symmetric=loss.symmetric, start=shard.start)
        shards = dict.fromkeys(arguments, shard.times(2) if loss.symmetric else shard)
        return sharded(loss.loss, miner, arguments, shards, world)
    batch = AnchorBatch.of(arguments, shards, world)
    indices = local_indices(arguments.get("indices_tuple"), batch) if miner is None else mined(miner, batch)
    return _of_all_ranks(loss, batch, indices)


def _of_all_ranks(loss: Any, batch: AnchorBatch, indices: Indices | None) -> Tensor:
    """Return the loss of all ranks' samples with the pairs or triplets that were chosen for the local anchors."""
    if type(loss) is losses.MultipleLosses:
        values = [
            weight * _of_all_ranks(x, batch, indices if own_miner is None else mined(own_miner, batch))
            for x, own_miner, weight in members(loss)
        ]
        return torch.stack(values).sum()
    if hasattr(loss, "cast_types"):  # before functional_call replaces the weights: it replaces their data
        loss.cast_types(batch.anchors.dtype, batch.anchors.device)
    elif type(loss) is losses.P2SGradLoss:
        # norms, then the cast, as in the library: the other order rounds differently
        loss.weight.data = loss.weight.data.renorm(2, 1, 1e-5).mul(1e5).to(batch.anchors)
    loss.reset_stats()
    shared = {f"loss.{name}": replicated(x, process_group=batch.world) for name, x in loss.named_parameters()}
    sub_losses: dict[str, Info] = torch.func.functional_call(AsForward(loss, _evaluated), shared, (batch, indices))
    return _reduced(loss.reducer, sub_losses, batch, connected=[batch.anchors, batch.candidates, *shared.values()])


def _evaluated(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    evaluate = LOSSES[type(loss)].evaluate
    assert not isinstance(evaluate, str), evaluate
    sub_losses = evaluate(loss, batch, indices)
    if loss.embedding_regularizer is not None:
        loss.add_embedding_regularization_to_loss_dict(sub_losses, batch.all_anchors()[0])
    return sub_losses


def _labelled_views(view1: Tensor, view2: Tensor, *, symmetric: bool, start: int) -> dict[str, Tensor]:
    """Return two views of the same samples as embeddings whose labels are the samples' numbers."""
    labels = torch.arange(start, start + len(view1), device=view1.device)
    if symmetric:
        return {"embeddings": torch.cat([view1, view2]), "labels": labels.repeat(2)}
    return {"embeddings": view1, "labels": labels, "ref_emb": view2, "ref_labels": labels.clone()}


def _reduced(reducer: Any, sub_losses: Mapping[str, Info], batch: AnchorBatch, connected: Sequence[Tensor]) -> Tensor:
    """Return what the reducer computes from all ranks' losses; ``connected`` tensors stay in the graph."""
    nothing = torch.stack([x.flatten()[:0].sum(dtype=sum_dtype(x)) for x in connected]).sum()
    terms = [(nothing, nothing.detach())]
    for name, info in sub_losses.items():
        of_rank = terms[0]  # as many terms on every rank
        if isinstance(info["losses"], Tensor):
            values, count = summands(reducer_of(reducer, name), info, batch)
            dtype = sum_dtype(values)
            total = count.to(dtype) if isinstance(count, Tensor) else values.new_full((), count, dtype=dtype)
            of_rank = values.sum(dtype=dtype), total
        terms.append(of_rank)
    sums, counts = (torch.stack(x) for x in zip(*terms, strict=True))
    sums = sum_over_ranks(sums, gradient="complete", world=batch.world)
    counts = sum_over_ranks(counts, gradient="complete", world=batch.world)
    return (sums / mean_divisor(counts)).sum().to(batch.anchors.dtype)


def summands(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    """Return the values that a reducer adds up, and this rank's part of the count that divides their sum."""
    values, indices, reduction, once = info["losses"], info["indices"], reduction_of(reducer), batch.world.rank == 0
    if info["reduction_type"] == "already_reduced":  # without a count every rank has the same value
        return (values, info["count"]) if "count" in info else (values * once, once)
    if reduction == "sum":
        return values, once
    if reduction == "divisor":
        return values, info["divisor"]
    if reduction == "class weights":
        weights, anchors = reducer.weights.to(values), indices if isinstance(indices, Tensor) else indices[0]
        weighted = failing_together(
            type(reducer).__name__, lambda: values * weights[batch.labels[anchors]], batch.world
        )
        return weighted, len(values)
    if reduction == "each anchor":
        if info["reduction_type"] != "element":
            is_pair = torch.zeros(len(batch.anchors), len(batch.candidates), dtype=torch.bool, device=values.device)
            is_pair[indices] = True
            of_pairs = torch.zeros_like(is_pair, dtype=values.dtype).index_put(indices, values)
            means = of_pairs.sum(1) / is_pair.sum(1).clamp(min=1)
            info = {
                "losses": means,
                "indices": torch.arange(len(means), device=means.device),
                "reduction_type": "element",
            }
        return summands(reducer.reducer, info, batch)
    if reduction != "mean":  # "threshold" or "nonzero"; others are refused
        for bound, is_inside in ((reducer.low, torch.gt), (reducer.high, torch.lt)):
            values = values if bound is None else values[is_inside(values, bound)]
    return values, len(values)
