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
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.pml.meaning import members, reducer_of, reduction_of
from contrastive_zoo.wrapper.pml.sharded import anchor_losses
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import (
    PAIRWISE_DISTANCES,
    AnchorBatch,
    Indices,
    Info,
    local_indices,
    mined,
)

PAIR_LOSSES = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.MultiSimilarityLoss, losses.CircleLoss,
    losses.NTXentLoss, losses.SupConLoss, losses.GeneralizedLiftedStructureLoss, losses.TupletMarginLoss,
    losses.AngularLoss,
)  # fmt: skip
COLUMNS = (
    losses.AngularLoss, losses.CircleLoss, losses.GeneralizedLiftedStructureLoss, losses.LiftedStructureLoss,
    losses.MultiSimilarityLoss, losses.TupletMarginLoss,
)  # fmt: skip
"""Losses that hand a reducer a column ``[n, 1]``, which spreads against a reducer's row of numbers."""
COLUMNS_OF_PAIRS = (losses.AngularLoss, losses.LiftedStructureLoss, losses.TupletMarginLoss)
"""Those among them whose numbers are of pairs: PerAnchorReducer raises unless there is a single pair."""
TRIPLET_LOSSES = (losses.TripletMarginLoss, losses.MarginLoss)
CLASSIFIERS = (
    losses.ArcFaceLoss, losses.CosFaceLoss, losses.LargeMarginSoftmaxLoss, losses.NormalizedSoftmaxLoss,
    losses.ProxyNCALoss, losses.SoftTripleLoss, losses.SphereFaceLoss, losses.SubCenterArcFaceLoss,
)  # fmt: skip
TAKE_NO_INDICES = (losses.InstanceLoss, losses.P2SGradLoss, losses.PNPLoss, losses.RankedListLoss)
TAKE_REFERENCES = (*PAIR_LOSSES, *TRIPLET_LOSSES, losses.NCALoss, losses.IntraPairVarianceLoss)

EVALUATED: dict[type[nn.Module], Callable[[Any, AnchorBatch, Indices | None], dict[str, Info]]] = {
    **dict.fromkeys(PAIR_LOSSES, anchor_losses.of_pairs),
    **dict.fromkeys(TRIPLET_LOSSES, anchor_losses.of_triplets),
    **dict.fromkeys(CLASSIFIERS, anchor_losses.of_classes),
    losses.FastAPLoss: anchor_losses.fast_ap,
    losses.InstanceLoss: anchor_losses.instance,
    losses.IntraPairVarianceLoss: anchor_losses.intra_pair_variance,
    losses.LiftedStructureLoss: anchor_losses.lifted_structure,
    losses.NCALoss: anchor_losses.nca,
    losses.NPairsLoss: anchor_losses.n_pairs,
    losses.P2SGradLoss: anchor_losses.p2s_grad,
    losses.PNPLoss: anchor_losses.pnp,
    losses.RankedListLoss: anchor_losses.ranked_list,
    losses.ThresholdConsistentMarginLoss: anchor_losses.threshold_consistent,
}
"""Losses, and the function that evaluates the local anchors. MultipleLosses and SelfSupervisedLoss of these work, too."""

REFUSED: dict[type[nn.Module], str] = {
    losses.CrossBatchMemory: "its queue holds rows without gradient, whose owners it does not know.",
    losses.DynamicSoftMarginLoss: "its histogram of all pairs is kept from call to call.",
    losses.HistogramLoss: "its histograms are of all pairs.",
    losses.ManifoldLoss: "its random walk goes over all rows.",
    losses.ProxyAnchorLoss: "its anchors are proxies, and a proxy's sums are over all rows.",
    losses.SmoothAPLoss: "it takes blocks of equal classes.",
    losses.VICRegLoss: "its variances and covariances are of all rows.",
}
"""Losses that are not sums over anchors as the library has written them, and the reason."""


def refusal(loss: Any, miner: Callable[..., Indices] | None = None) -> str | None:
    """Return why a loss cannot be evaluated in shards with its miner, in words; None if it can."""
    kind = type(loss)
    if problem := _user_code_problem(loss, miner):
        return problem
    if kind is losses.MultipleLosses:
        if miner is not None and loss.miners:
            return "it has miners of its own."
        result = ((x, _member_refusal(x, own_miner or miner)) for x, own_miner, _ in members(loss))
        return next((f"{type(x).__name__}: {reason}" for x, reason in result if reason), None)
    if kind is losses.SelfSupervisedLoss:
        return refusal(loss.loss, miner)
    if isinstance(loss, nn.parallel.DistributedDataParallel):
        return "its parameters' gradient is complete on every rank already. Pass loss.module."
    if kind not in EVALUATED:
        return REFUSED.get(kind, "it is none of the losses that are known to be sums over anchors.")
    if kind is losses.NPairsLoss and miner is not None:
        return (
            "it takes the first mined pair of each class, and ranks do not know the order in which a miner found them."
        )
    if kind in TRIPLET_LOSSES and miner is None and loss.triplets_per_anchor != "all":
        return f"it draws {loss.triplets_per_anchor} triplets an anchor. Pass triplets_per_anchor='all', or a miner."
    if getattr(loss, "swap", False):
        return "swap compares positives with negatives, which are other ranks' anchors."
    if type(loss.distance) not in PAIRWISE_DISTANCES:
        return f"{type(loss.distance).__name__} is not known to depend on two embeddings alone."
    return _reducer_refusal(loss.reducer, kind)


def _member_refusal(member: Any, miner: Callable[..., Indices] | None) -> str | None:
    if type(member) is losses.SelfSupervisedLoss:
        return "it takes two views, and a member of MultipleLosses takes embeddings and labels."
    return refusal(member, miner)


def _user_code_problem(*modules: Any) -> str | None:
    """Which module of the loss or its miner has code that a rank would call with its own anchors, or not at all."""
    for module in modules:
        for part in module.modules() if isinstance(module, nn.Module) else ():
            if has_user_code(part):
                return f"{type(part).__name__} has hooks or a forward of its own, which would not see the rows of all ranks."
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
    if kind in TRIPLET_LOSSES:
        return "PerAnchorReducer takes no triplets."
    if kind in COLUMNS_OF_PAIRS:
        return "PerAnchorReducer takes a number of each pair, and this loss gives it a column."
    if reducer.aggregation_func is not reducers.per_anchor_reducer.aggregation_func:
        return "PerAnchorReducer has an aggregation_func of its own, which may depend on several anchors at once."
    if type(reducer.reducer) is reducers.DivisorReducer:
        return "DivisorReducer asks for a divisor, and anchors have none."
    return _reducer_refusal(reducer.reducer, kind)


def call_problem(loss: Any, miner: Any, arguments: Mapping[str, Any]) -> str | None:
    problem = refusal(loss, miner) or _arguments_problem(loss, miner, arguments)
    return None if problem is None else f"it cannot be evaluated in shards: {problem} Leave mode='sharded' out."


def _arguments_problem(loss: Any, miner: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a call's arguments, in words; None if nothing is. It is the same on every rank."""
    has_indices = arguments.get("indices_tuple") is not None
    if type(loss) is losses.MultipleLosses and loss.miners and has_indices:
        return "it has miners of its own, and takes no indices_tuple. Leave one of them out."
    for name, shape, dimensions in (("embeddings", "[n, d]", 2), ("ref_emb", "[n, d]", 2), ("labels", "[n]", 1)):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.ndim != dimensions:
            return f"{name} are {shape}, got {x.ndim} dimensions."
    if type(loss) is losses.SelfSupervisedLoss:
        return None
    if type(loss) is losses.MultipleLosses:
        problems = ((x, _arguments_problem(x, own_miner or miner, arguments)) for x, own_miner, _ in members(loss))
        return next((f"{type(x).__name__}: {problem}" for x, problem in problems if problem), None)
    if arguments.get("labels") is None:
        return f"labels are missing: call loss(embeddings, labels){', also with indices_tuple' if has_indices else ''}."
    if arguments.get("ref_emb") is not None and type(loss) not in TAKE_REFERENCES:
        return "it takes no ref_emb."
    if type(loss) in TAKE_NO_INDICES and (miner is not None or has_indices):
        return "it takes no indices_tuple."
    if type(loss) is losses.NPairsLoss and has_indices:
        return "it takes the first pair of each class, and ranks do not know the order of these pairs."
    return None


def sharded(
    loss: Any,
    miner: Callable[..., Indices] | None,
    arguments: Mapping[str, Any],
    shards: Mapping[str, Shards],
    world: World,
) -> Tensor:
    """Return the loss of all ranks' samples; each rank evaluates its own anchors only.

    Equal to ``loss(Z, labels, miner(Z, labels))`` with the samples of all ranks: the value on every rank, ∂L/∂z of the
    local embeddings (other ranks' anchors included), and ∂L/∂φ of the loss's parameters. If no anchor counts, the value
    is 0. An ``indices_tuple`` refers to all samples and is equal on all ranks; ``shards`` are the sizes of each argument.
    """
    if problem := call_problem(loss, miner, arguments):
        raise ValueError(f"{type(loss).__name__}: {problem}")
    if type(loss) is losses.SelfSupervisedLoss:
        arguments, shards = _labelled_views(arguments, shards, symmetric=loss.symmetric)
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
    sub_losses = EVALUATED[type(loss)](loss, batch, indices)
    if loss.embedding_regularizer is not None:
        loss.add_embedding_regularization_to_loss_dict(sub_losses, batch.all_anchors()[0])
    return sub_losses


def _labelled_views(
    arguments: Mapping[str, Any], shards: Mapping[str, Shards], *, symmetric: bool
) -> tuple[dict[str, Any], dict[str, Shards]]:
    """Return two views of the same samples as embeddings whose labels are the samples' numbers."""
    view1, view2, shard = arguments["embeddings"], arguments["ref_emb"], shards["embeddings"]
    labels = torch.arange(shard.start, shard.start + shard.size, device=view1.device)
    result = {"embeddings": view1, "labels": labels, "ref_emb": view2, "ref_labels": labels.clone()}
    if symmetric:
        result, shard = {"embeddings": torch.cat([view1, view2]), "labels": labels.repeat(2)}, shard.times(2)
    return result, dict.fromkeys(result, shard)


def _reduced(reducer: Any, sub_losses: Mapping[str, Info], batch: AnchorBatch, connected: Sequence[Tensor]) -> Tensor:
    """Return what the reducer computes from all ranks' losses; ``connected`` tensors stay in the graph."""
    nothing = torch.stack([x.flatten()[:0].sum(dtype=sum_dtype(x)) for x in connected]).sum()
    terms = [
        _sum_and_count(reducer_of(reducer, name), info, batch)
        if isinstance(info["losses"], Tensor)
        else (nothing, nothing.detach())
        for name, info in sub_losses.items()
    ]
    sums, counts = (torch.stack(x) for x in zip((nothing, nothing.detach()), *terms, strict=True))
    sums = sum_over_ranks(sums, gradient="complete", world=batch.world)
    counts = sum_over_ranks(counts, gradient="complete", world=batch.world)
    return (sums / mean_divisor(counts)).sum().to(batch.anchors.dtype)


def _sum_and_count(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a sub-loss's sum, and of the count that divides it."""
    if info["reduction_type"] == "already_reduced":
        value = info["losses"].sum(dtype=sum_dtype(info["losses"]))
        if "count" in info:
            return value, value.new_tensor(info["count"])
        once = batch.world.rank == 0  # every rank has the same value
        return value * once, value.new_tensor(once)
    values, count = summands(reducer, info, batch)
    dtype = sum_dtype(values)
    count = count.to(dtype) if isinstance(count, Tensor) else values.new_full((), count, dtype=dtype)
    return values.sum(dtype=dtype), count


def summands(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    """Return the values that a reducer adds up, and this rank's part of the count that divides their sum."""
    values, indices, reduction = info["losses"], info["indices"], reduction_of(reducer)
    if reduction == "sum":
        return values, batch.world.rank == 0
    if reduction == "divisor":
        return values, info["divisor"]
    if reduction == "class weights":
        weights, anchors = reducer.weights.to(values), indices if isinstance(indices, Tensor) else indices[0]
        return batch.run_on_all_ranks(reducer, lambda: values * weights[batch.labels[anchors]]), len(values)
    if reduction == "each anchor":
        if info["reduction_type"] != "element":
            is_pair = torch.zeros(len(batch.anchors), len(batch.candidates), dtype=torch.bool, device=values.device)
            is_pair[indices] = True
            of_pairs = torch.zeros_like(is_pair, dtype=values.dtype).index_put(indices, values)
            means = of_pairs.sum(1) / is_pair.sum(1).clamp(min=1)
            info = {"losses": means, "indices": batch.anchor_indices(), "reduction_type": "element"}
        return summands(reducer.reducer, info, batch)
    if reduction != "mean":  # "threshold" or "nonzero"; others are refused
        for bound, is_inside in ((reducer.low, torch.gt), (reducer.high, torch.lt)):
            values = values if bound is None else values[is_inside(values, bound)]
    return values, len(values)
