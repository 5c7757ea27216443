"""NNCLR: the nearest neighbour in a memory of earlier embeddings as the positive."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.compiling import traced_as, uncompiled
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.tiling import row_blocks
from contrastive_zoo.loss_base.checks import towers_problem
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.losses.info_nce import info_nce
from contrastive_zoo.memory.memory_loss import MemoryLoss, memory_problem, unfilled
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.world import ALONE, World


@uncompiled
def nnclr(
    projections1: Float[Tensor, "n d"],
    projections2: Float[Tensor, "n d"],
    predictions1: Float[Tensor, "n d"],
    predictions2: Float[Tensor, "n d"],
    *,
    memory: Float[Tensor, "m d"],
    filled: Int[Tensor, ""] | None = None,
    temperature: float | Tensor = 0.1,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute InfoNCE between the neighbours of one view's projections and the other view's predictions.

    With z the projections and p the predictions of two views, unit rows of all ranks, Q the unit rows of the memory and
    NN(z) = argmax_{q∈Q} z·q,

        loss = ( InfoNCE(NN(z¹), p²) + InfoNCE(NN(z²), p¹) ) / 2

    with :func:`info_nce` at temperature t. Neighbours have no gradient. As long as Q is empty, z takes the place of NN(z).

    Args:
        projections1: z¹, [n, d]; n may differ between ranks.
        projections2: z², [n, d].
        predictions1: p¹, [n, d], the predictor's output for z¹.
        predictions2: p², [n, d].
        memory: Q, [m, d], equal on every rank; the ``queue`` of :class:`NNCLR`.
        filled: how many rows of ``memory`` are in Q, the first ones, on its device; None is all.
        temperature: t > 0; a tensor is learnable.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> nnclr(eye, eye, eye, eye, memory=torch.empty(0, 2), temperature=1.0)   # log(e + 1) − 1
        tensor(0.3133)
        >>> nnclr(eye, eye, eye, eye, memory=eye[:1], temperature=1.0)   # row 2 has the neighbour of row 1: + ½
        tensor(0.8133)

    Source: Dwibedi et al. 2021, eqs. 2-4, https://arxiv.org/abs/2104.14548
    """
    named = {
        "projections1": projections1,
        "projections2": projections2,
        "predictions1": predictions1,
        "predictions2": predictions2,
    }
    problem = towers_problem("row i of all four is one sample", "Pass as many of each.", **named)
    problem = problem or memory_problem(memory, projections1, filled)
    if problem is not None:
        refuse("NNCLR", problem, world=world)
    settings: Any = {"temperature": temperature, "reduction": reduction}
    session = Session.of(world)
    own = partial(begin, "NNCLR", named, memory=list(memory.shape), world=session, **settings)

    def compared(positives: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        predictions = (prepare_rows(p, normalize=False, world=session) for p in (predictions2, predictions1))
        return [partial(info_nce, q, p, world=session, **settings) for q, p in zip(positives, predictions, strict=True)]

    projections = [prepare_rows(z.detach(), normalize=True, world=session) for z in (projections1, projections2)]
    session.declare("NNCLR", [own, *compared(projections)])  # neighbours have the shape and dtype of projections
    own()
    losses = [loss() for loss in compared([_neighbours(z, memory, filled) for z in projections])]
    return (losses[0] + losses[1]) / 2


class NNCLR(MemoryLoss, function=nnclr):
    """The memory holds the projections of the first view of earlier calls; :class:`MemoryLoss` documents it.

    Examples:
        >>> eye, loss = torch.eye(2), NNCLR(1, embedding_size=2, temperature=1.0)
        >>> loss(eye, eye, eye, eye), loss(eye, eye, eye, eye)   # then all have the neighbour (0, 1)
        (tensor(0.3133), tensor(0.8133))
    """

    @traced_as(GraphModule.traced_forward)
    def forward(  # type: ignore[override]  # rows by name
        self,
        projections1: Tensor,
        projections2: Tensor,
        predictions1: Tensor,
        predictions2: Tensor,
        *,
        world: World | None = None,
    ) -> Tensor:
        """Return the loss, and add the first view's projections to the memory.

        Args:
            projections1: as in the function.
            projections2: as in the function.
            predictions1: as in the function.
            predictions2: as in the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
        """
        world = self.local() if world is None else world
        loss = super().forward(projections1, projections2, predictions1, predictions2, world=world)
        self.remember(projections1, world)
        return loss


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
