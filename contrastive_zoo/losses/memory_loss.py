"""Losses whose formula contains the embeddings of a memory queue: NNCLR and ReSSL."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Local, Pairs
from contrastive_zoo.engine.pairs import TowerPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.tiling import row_blocks
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Positive, Reduction, Size, Temperature, field
from contrastive_zoo.losses.memory_queue import MemoryQueue
from contrastive_zoo.ranks import devices


class MemoryLoss(Loss):
    """A loss of a batch and of the embeddings of earlier batches, in the module ``queue``, a :class:`MemoryQueue`.

    In training mode unit embeddings of all ranks enter it after each call, in rank order: it is equal on every rank, and
    equal to that of one process. It is part of the state dict. Embeddings of another width raise a ValueError. If a step
    has several calls, use :func:`contrastive_zoo.one_step`.
    """

    size: Size = field(kw_only=False)
    embedding_size: Size = field(kw_only=False)
    temperature: Temperature = 0.1
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        self.queue = MemoryQueue(self.size, self.embedding_size)

    def ring_problem(self) -> str:
        return "every rank holds the memory that it compares with, so a ring would save nothing"

    def stated_rows(self, **rows: Tensor) -> Inputs:
        """Return the inputs of a call whose tensors are as wide as the memory."""
        problem = self.queue.width_problem(next(iter(rows.values())))
        return Inputs(rows, problem, compared={"memory": list(self.earlier()[0].shape)})

    def earlier(self) -> tuple[Tensor, Tensor | None]:
        """Return embeddings of earlier calls, and which do not count, None if all do; an accelerator's are all slots."""
        queue = self.queue
        if devices.on_cpu(queue.filled):
            return queue.embeddings[: len(queue)], None
        return queue.embeddings, torch.arange(len(queue.embeddings), device=queue.filled.device) >= queue.filled

    def remembering(self, stated: CallInputs) -> list[Entry]:
        """Return the gather of what the memory stores, the first tensor or the last of two."""
        names, row = [*stated.inputs.rows], self.embedding_size * stated.wide
        return [Gathered([names[1] if len(names) == 2 else names[0]], row)] if self.training else []

    def remember(self, rows: Tensor, batch: Batch) -> None:
        """Store the embeddings of all ranks with unit length, in training mode."""
        if self.training:
            unit = batch.prepared(rows.detach(), normalize=True)
            self.queue.write(unit, None, None, batch.samples, batch.world)


class NNCLR(MemoryLoss, engine="softmax", has_kernel=True):
    r"""Compute InfoNCE between the neighbours of one view's projections and the other view's predictions.

    With z the projections and p the predictions of two views, unit embeddings of all ranks, Q the unit embeddings of
    the memory and NN(z) = argmax_{q∈Q} z·q,

        loss = ( InfoNCE(NN(z¹), p²) + InfoNCE(NN(z²), p¹) ) / 2

    with :class:`InfoNCE` at temperature t. Neighbours have no gradient. As long as Q is empty, z takes the place of NN(z).
    The memory holds the projections of the first view of earlier calls; :class:`MemoryLoss` documents it.

    Called as ``loss(projections1, projections2, predictions1, predictions2)``, z¹, z² and the predictor's outputs for these,
    p¹, p², [n, d] each.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        size: number of embeddings in the memory.
        embedding_size: the width of embeddings, d.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.

    Examples:
        >>> eye, loss = torch.eye(2), NNCLR(1, embedding_size=2, temperature=1.0)
        >>> loss(eye, eye, eye, eye)   # log(e + 1) − 1
        tensor(0.3133)
        >>> loss(eye, eye, eye, eye)   # all have the neighbour (0, 1), which row 1 is not: + ½
        tensor(0.8133)

    Source: Dwibedi et al. 2021, eqs. 2-4, https://arxiv.org/abs/2104.14548
    """

    def inputs(
        self,
        projections1: Float[Tensor, "n d"],
        projections2: Float[Tensor, "n d"],
        predictions1: Float[Tensor, "n d"],
        predictions2: Float[Tensor, "n d"],
    ) -> Inputs:
        projections = {"projections1": projections1, "projections2": projections2}
        return self.stated_rows(**projections, predictions1=predictions1, predictions2=predictions2)

    def needs(self, inputs: Inputs) -> Needs:
        needs = super().needs(inputs)
        return needs._replace(anchors=("projections1",), candidates=("predictions1",), one_operator=self.is_reduced)

    def entries(self, stated: CallInputs) -> list[Entry]:
        (scale, learnt), how = self.scale_of(stated), {"columnwise": False, "narrow": False}
        pairs = [Pairs([f"projections{z}"], [f"predictions{p}"], scale, **how) for z, p in ((1, 2), (2, 1))]
        search = Local(["projections1", "projections2"], flop=2 * len(self.queue) * self.embedding_size)
        return [*learnt * 2, *pairs, *self.reduced() * 2, search, *self.remembering(stated)]

    def compute(self, batch: Batch) -> Tensor:
        z1, z2, p1, p2 = batch.rows.values()
        value = (self._info_nce(batch, z1, p2) + self._info_nce(batch, z2, p1)) / 2
        self.remember(z1, batch)
        return value

    def _info_nce(self, batch: Batch, projections: Tensor, predictions: Tensor) -> Tensor:
        nearest = _neighbours(batch.prepared(projections.detach(), normalize=True), *self.earlier())
        towers = {"neighbours": nearest, "predictions": batch.prepared(predictions, normalize=False)}
        pairs = replace(batch, rows=towers, shards=dict.fromkeys(towers, batch.samples))
        return TowerPairs(pairs, batch.settings.temperature, True).cross_entropy(self.reduction)


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


class ReSSL(MemoryLoss, engine="statistics"):
    r"""Compute the cross-entropy of the student's distribution over the memory, with the teacher's as target.

    Called as ``loss(student, teacher)``, q and k, [n, d] each; k are a momentum encoder's, of weakly augmented views.
    With q and k the unit embeddings of student and teacher and x_j the unit embeddings of the memory,

        loss_i = − Σ_j softmax_j(k_i·x_j / t') log softmax_j(q_i·x_j / t)

    The teacher has no gradient. As long as the memory is empty, there is no loss. It holds the teacher's embeddings of
    earlier calls; :class:`MemoryLoss` documents it.

    Args:
        size: number of embeddings in the memory.
        embedding_size: the width of embeddings, d.
        temperature: t > 0, the student's.
        teacher_temperature: t' > 0, smaller than t.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.

    Examples:
        >>> eye, loss = torch.eye(2), ReSSL(8, embedding_size=2, temperature=1.0, teacher_temperature=1e-3)
        >>> loss(eye, eye), loss(eye, eye)   # the memory is empty; then log(e + 1) − 1
        (tensor(0.), tensor(0.3133))

    Source: Zheng et al. 2021, eqs. 3-5, https://arxiv.org/abs/2107.09282
    """

    teacher_temperature: Positive = 0.04

    def inputs(self, student: Float[Tensor, "n d"], teacher: Float[Tensor, "n d"]) -> Inputs:
        return self.stated_rows(student=student, teacher=teacher)

    def entries(self, stated: CallInputs) -> list[Entry]:
        size = len(self.queue)  # of targets and logits, their softmaxes and a gradient
        compared = Local(["student"], flop=8 * size * self.embedding_size, bytes=6 * size * stated.wide)
        return [*self.scale_of(stated)[1], compared, *self.reduced(), *self.remembering(stated)]

    def compute(self, batch: Batch) -> Tensor:
        student, teacher = batch.rows.values()
        memory, unused = self.earlier()
        q, k = (batch.prepared(rows, normalize=True) for rows in (student, teacher.detach()))
        candidates = torch.nn.functional.normalize(memory.to(q), dim=1)
        q, k = batch.scale(batch.settings.temperature) * q, k / batch.settings.teacher_temperature
        losses = _cross_entropies(q, k, candidates, unused)
        exists = torch.full_like(losses, len(memory) > 0)
        valid = exists if unused is None else exists * ~unused.all()
        value = batch.reduce(losses, valid, reduction=self.reduction)
        self.remember(teacher, batch)
        return value


@without_autocast
def _cross_entropies(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "n d"],
    candidates: Float[Tensor, "m d"],
    unused: Bool[Tensor, " m"] | None,
) -> Float[Tensor, " n"]:
    targets, logits = matmul(k, candidates.T), matmul(q, candidates.T)
    if unused is not None:  # −inf would make 0 · −inf of them
        targets, logits = (x.masked_fill(unused, torch.finfo(x.dtype).min) for x in (targets, logits))
    return -(targets.softmax(1) * logits.log_softmax(1)).sum(1)
