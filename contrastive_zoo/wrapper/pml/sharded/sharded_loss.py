"""The value and the gradients of a sharded loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor

from contrastive_zoo.engine.batch import mean_divisor
from contrastive_zoo.engine.precision import sum_dtype
from contrastive_zoo.engine.rowwise import AsForward
from contrastive_zoo.ranks.collectives import replicated, sum_over_ranks
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.pml.meaning import members, reducer_of, reduction_of
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices, Info, local_indices, mined
from contrastive_zoo.wrapper.pml.sharded.refusals import EVALUATED, call_problem


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

    Raises:
        ValueError: on every rank alike, what :func:`call_problem` says.
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


# ------------------------------------------------------------------------------------------------------------- reducers


def _reduced(reducer: Any, sub_losses: Mapping[str, Info], batch: AnchorBatch, connected: Sequence[Tensor]) -> Tensor:
    """Return what the reducer computes from all ranks' losses: a sum over a count for each sub-loss.

    ``connected`` tensors stay in the graph, so that every rank takes part in the backward pass.
    """
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
