"""The losses that can be sharded, and why another loss, a reducer or an argument cannot."""

from collections.abc import Callable, Mapping
from typing import Any

from pytorch_metric_learning import losses, reducers
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss import has_user_code
from contrastive_zoo.wrapper.pml.meaning import members, reduction_of
from contrastive_zoo.wrapper.pml.sharded import anchor_losses
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import PAIRWISE_DISTANCES, AnchorBatch, Indices, Info

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
    if reducer.aggregation_func is not reducers.per_anchor_reducer.aggregation_func:
        return "PerAnchorReducer has an aggregation_func of its own, which may depend on several anchors at once."
    if type(reducer.reducer) is reducers.DivisorReducer:
        return "DivisorReducer asks for a divisor, and anchors have none."
    return _reducer_refusal(reducer.reducer, kind)


def call_problem(loss: Any, miner: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why a call cannot be evaluated in shards, in words; None if it can."""
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
