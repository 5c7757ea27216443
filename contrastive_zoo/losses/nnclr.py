"""NNCLR: the nearest neighbour in a memory of earlier embeddings as the positive."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.engine.tiling import row_blocks
from contrastive_zoo.engine.tower_pairs import TowerPairs
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.settings import Reduction, Temperature
from contrastive_zoo.losses.memory_loss import MemoryLoss, unfilled


class NNCLR(MemoryLoss):
    r"""Compute InfoNCE between the neighbours of one view's projections and the other view's predictions.

    With z the projections and p the predictions of two views, unit rows of all ranks, Q the unit rows of the memory and
    NN(z) = argmax_{q∈Q} z·q,

        loss = ( InfoNCE(NN(z¹), p²) + InfoNCE(NN(z²), p¹) ) / 2

    with :class:`InfoNCE` at temperature t. Neighbours have no gradient. As long as Q is empty, z takes the place of NN(z).

    The memory holds the projections of the first view of earlier calls; :class:`MemoryLoss` documents it.

    Called as ``loss(projections1, projections2, predictions1, predictions2)``:

    - projections1: z¹, [n, d]; n may differ between ranks.
    - projections2: z², [n, d].
    - predictions1: p¹, [n, d], the predictor's output for z¹.
    - predictions2: p², [n, d].

    Args:
        size: number of embeddings in the memory.
        embedding_size: d.
        temperature: t > 0; a tensor or a module is learnable.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, loss = torch.eye(2), NNCLR(1, embedding_size=2, temperature=1.0)
        >>> loss(eye, eye, eye, eye)   # log(e + 1) − 1
        tensor(0.3133)
        >>> loss(eye, eye, eye, eye)   # all have the neighbour (0, 1), which row 1 is not: + ½
        tensor(0.8133)

    Source: Dwibedi et al. 2021, eqs. 2-4, https://arxiv.org/abs/2104.14548
    """

    temperature: Temperature = 0.1
    reduction: Reduction = "mean"

    has_kernels = True

    def inputs(
        self,
        projections1: Float[Tensor, "n d"],
        projections2: Float[Tensor, "n d"],
        predictions1: Float[Tensor, "n d"],
        predictions2: Float[Tensor, "n d"],
    ) -> Inputs:
        return self.stated_rows(
            "row i of all four is one sample", projections1=projections1, projections2=projections2,
            predictions1=predictions1, predictions2=predictions2,
        )  # fmt: skip

    def compute(self, batch: Batch) -> Tensor:
        z1, z2, p1, p2 = batch.rows.values()
        losses = [self._info_nce(batch, z, p) for z, p in ((z1, p2), (z2, p1))]
        self.remember(z1, batch)
        return (losses[0] + losses[1]) / 2

    def _info_nce(self, batch: Batch, projections: Tensor, predictions: Tensor) -> Tensor:
        """Return InfoNCE of the neighbours of one view's projections and the other view's predictions."""
        nearest = _neighbours(batch.prepared(projections.detach(), normalize=True), *self.earlier())
        towers = {"neighbours": nearest, "predictions": batch.prepared(predictions, normalize=False)}
        pairs = replace(batch, rows=towers, shards=dict.fromkeys(towers, batch.samples))
        return TowerPairs(pairs, batch.settings.temperature, True).cross_entropy(self.reduction)


@torch.no_grad()
def _neighbours(
    z: Float[Tensor, "n d"], memory: Float[Tensor, "m d"], filled: Int[Tensor, ""] | None
) -> Float[Tensor, "n d"]:
    """Return the most similar row of the memory for each row, block by block; the row itself if the memory is empty."""
    if not len(memory):
        return z
    candidates = torch.nn.functional.normalize(memory.to(z), dim=1)
    unused = unfilled(memory, filled)
    nearest = torch.empty(len(z), dtype=torch.int64, device=z.device)
    for rows in row_blocks(len(z), len(memory), z.dtype):
        similarity = matmul(z[rows], candidates.T)
        nearest[rows] = (similarity if unused is None else similarity.masked_fill(unused, -torch.inf)).argmax(1)
    return candidates[nearest] if filled is None else candidates[nearest].where(filled > 0, z)
