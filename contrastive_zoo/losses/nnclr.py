"""NNCLR: the nearest neighbour in a memory of earlier batches takes the place of a view."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Local, Pairs
from contrastive_zoo.engine.pairs import TowerPairs
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.engine.tiling import row_blocks
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Reduction, Size, Temperature, field
from contrastive_zoo.losses.memory_queue import NO_RING_OF_A_MEMORY, MemoryQueue
from contrastive_zoo.ranks import devices


class NNCLR(Loss, engine="softmax", has_kernel=True, no_ring=NO_RING_OF_A_MEMORY):
    r"""Compute InfoNCE between the neighbours of one view's projections and the other view's predictions.

    With z the projections and p the predictions of two views, unit embeddings of all ranks, Q the unit embeddings of
    the memory and NN(z) = argmax_{q∈Q} z·q,

        loss = ( InfoNCE(NN(z¹), p²) + InfoNCE(NN(z²), p¹) ) / 2

    with :class:`InfoNCE` at temperature t. Neighbours have no gradient. As long as Q is empty, z takes the place of NN(z).

    The memory is the module ``queue``, a :class:`MemoryQueue`, and part of the state dict. In training mode the projections
    of the first view of all ranks enter it after each call, in rank order. So every rank has the memory of one process. If
    a step has several calls, use :func:`contrastive_zoo.one_step`.

    Called as ``loss(projections1, projections2, predictions1, predictions2)``, z¹, z² and the predictor's outputs for these,
    p¹, p², [n, d] each.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        size: number of embeddings in the memory.
        embedding_size: the width of embeddings, d.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Raises:
        ValueError: embeddings of another width than the memory's.

    Examples:
        >>> eye, loss = torch.eye(2), NNCLR(1, embedding_size=2, temperature=1.0)
        >>> loss(eye, eye, eye, eye)   # log(e + 1) − 1
        tensor(0.3133)
        >>> loss(eye, eye, eye, eye)   # all have the neighbour (0, 1), which row 1 is not: + ½
        tensor(0.8133)

    Source: Dwibedi et al. 2021, eqs. 2-4, https://arxiv.org/abs/2104.14548
    """

    compares = ("projections1",), ("predictions1",)

    size: Size = field(kw_only=False)
    embedding_size: Size = field(kw_only=False)
    temperature: Temperature = 0.1
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        self.queue = MemoryQueue(self.size, self.embedding_size)

    def inputs(
        self,
        projections1: Float[Tensor, "n d"],
        projections2: Float[Tensor, "n d"],
        predictions1: Float[Tensor, "n d"],
        predictions2: Float[Tensor, "n d"],
    ) -> Inputs:
        rows = {"projections1": projections1, "projections2": projections2}
        rows |= {"predictions1": predictions1, "predictions2": predictions2}
        compared = {"memory": list(self._earlier()[0].shape)}
        return Inputs(rows, self.queue.width_problem(projections1), compared=compared)

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        return self.is_reduced

    def entries(self, stated: CallInputs) -> list[Entry]:
        (scale, learnt), how = self.scale_of(stated), {"columnwise": False, "narrow": False}
        pairs = [Pairs([f"projections{z}"], [f"predictions{p}"], scale, **how) for z, p in ((1, 2), (2, 1))]
        search = Local(["projections1", "projections2"], flop=2 * len(self.queue) * self.embedding_size)
        stored = [Gathered(["projections1"], self.embedding_size * stated.wide)] if self.training else []
        return [*learnt * 2, *pairs, *self.reduced() * 2, search, *stored]

    def compute(self, batch: Batch) -> Tensor:
        z1, z2, p1, p2 = batch.rows.values()
        value = (self._info_nce(batch, z1, p2) + self._info_nce(batch, z2, p1)) / 2
        if self.training:
            unit = batch.prepared(z1.detach(), normalize=True)
            self.queue.write(unit, None, None, batch.samples, batch.world)
        return value

    def _info_nce(self, batch: Batch, projections: Tensor, predictions: Tensor) -> Tensor:
        nearest = _neighbours(batch.prepared(projections.detach(), normalize=True), *self._earlier())
        towers = {"neighbours": nearest, "predictions": batch.prepared(predictions, normalize=False)}
        pairs = replace(batch, rows=towers, shards=dict.fromkeys(towers, batch.samples))
        return TowerPairs(pairs, batch.settings.temperature, True).cross_entropy(self.reduction)

    def _earlier(self) -> tuple[Tensor, Tensor | None]:
        """Return embeddings of earlier calls, and which do not count, None if all do; an accelerator's are all slots."""
        queue = self.queue
        if devices.on_cpu(queue.filled):
            return queue.embeddings[: len(queue)], None
        return queue.embeddings, torch.arange(len(queue.embeddings), device=queue.filled.device) >= queue.filled


@torch.no_grad()
def _neighbours(
    z: Float[Tensor, "n d"], memory: Float[Tensor, "m d"], unused: Bool[Tensor, " m"] | None
) -> Float[Tensor, "n d"]:
    """Return the most similar embedding of the memory for each one, block by block; itself if the memory is empty."""
    if not len(memory):
        return z
    candidates = torch.nn.functional.normalize(memory.to(z), dim=1)
    nearest = torch.empty(len(z), dtype=torch.int64, device=z.device)
    for rows in row_blocks(len(z), len(memory), z.dtype):
        similarity = matmul(z[rows], candidates.T)
        nearest[rows] = (similarity if unused is None else similarity.masked_fill(unused, -torch.inf)).argmax(1)
    return candidates[nearest] if unused is None else candidates[nearest].where(~unused.all(), z)
