"""The value and the gradients of a sharded loss."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor

from contrastive_zoo.engine.rowwise import AsForward
from contrastive_zoo.ranks.collectives import replicated
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.pml.meaning import members
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices, Info
from contrastive_zoo.wrapper.pml.sharded.mining import local_indices, mined
from contrastive_zoo.wrapper.pml.sharded.reducers import reduced
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
    is 0.

    Args:
        loss: one for which :func:`refusals.refusal` returns None.
        miner: called on the local anchors and all candidates if it treats each anchor separately (TripletMarginMiner,
            BatchHardMiner, MultiSimilarityMiner, PairMarginMiner, AngularMiner); otherwise on all samples, on every rank.
        arguments: the local ``embeddings`` and ``labels``, optionally ``ref_emb`` and ``ref_labels``, as agreed by the
            handshake; an ``indices_tuple`` refers to all samples and is equal on all ranks.
        shards: the shard sizes of each argument.
        world: the ranks of the process group.

    Raises:
        ValueError: on every rank alike: what :func:`refusals.refusal` says, missing labels, reference embeddings or
            indices for a loss that takes none.
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
            weight * _of_all_ranks(x, batch, indices if own is None else mined(own, batch))
            for x, own, weight in members(loss)
        ]
        return torch.stack(values).sum()
    if hasattr(loss, "cast_types"):  # before functional_call replaces the weights: it replaces their data
        loss.cast_types(batch.anchors.dtype, batch.anchors.device)
    elif (
        type(loss) is losses.P2SGradLoss
    ):  # norms, then the cast, as in the library: the other order rounds differently
        loss.weight.data = loss.weight.data.renorm(2, 1, 1e-5).mul(1e5).to(batch.anchors)
    loss.reset_stats()
    shared = {f"loss.{name}": replicated(x, process_group=batch.world) for name, x in loss.named_parameters()}
    sub_losses: dict[str, Info] = torch.func.functional_call(AsForward(loss, _evaluated), shared, (batch, indices))
    return reduced(loss.reducer, sub_losses, batch, connected=[batch.anchors, batch.candidates, *shared.values()])


def _evaluated(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Return the sub-losses of the local anchors."""
    sub_losses = EVALUATED[type(loss)](loss, batch, indices)
    if loss.embedding_regularizer is not None:
        loss.add_embedding_regularization_to_loss_dict(sub_losses, batch.all_anchors()[0])
    return sub_losses


def _labelled_views(
    arguments: Mapping[str, Any], shards: Mapping[str, Shards], *, symmetric: bool
) -> tuple[dict[str, Any], dict[str, Shards]]:
    """Return two views of the same samples as embeddings whose labels are the samples' numbers."""
    view1, view2, shard = arguments["embeddings"], arguments["ref_emb"], shards["embeddings"]
    if symmetric:
        labels = torch.arange(shard.start, shard.start + shard.size, device=view1.device).repeat(2)
        return {"embeddings": torch.cat([view1, view2]), "labels": labels}, dict.fromkeys(
            ("embeddings", "labels"), shard.times(2)
        )
    labels = torch.arange(shard.start, shard.start + shard.size, device=view1.device)
    result = {"embeddings": view1, "labels": labels, "ref_emb": view2, "ref_labels": labels.clone()}
    return result, dict.fromkeys(result, shard)
