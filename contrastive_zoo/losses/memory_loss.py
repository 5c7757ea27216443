"""Share between losses whose formula contains the embeddings of a memory queue."""

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Size, field
from contrastive_zoo.losses.memory_queue import MemoryQueue
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.row_checks import described, towers_problem


class MemoryLoss(Loss):
    """A loss of a batch and of the embeddings of earlier batches, in the module ``queue``, a :class:`MemoryQueue`.

    In training mode unit embeddings of all ranks enter it after each call, in rank order: it is equal on every rank, and
    equal to that of one process. It is part of the state dict.

    Args:
        size: number of embeddings in the memory.
        embedding_size: d.

    Raises:
        ValueError: a size or embedding_size below 1.

    Examples:
        >>> from contrastive_zoo.losses.ressl import ReSSL
        >>> loss = ReSSL(3, embedding_size=2)
        >>> _ = loss(torch.eye(2), torch.eye(2))
        >>> loss.queue.rows
        tensor([[1., 0.],
                [0., 1.]])
    """

    size: Size = field(kw_only=False)
    embedding_size: Size = field(kw_only=False)

    ring_refusal = "every rank holds the memory that it compares with, so a ring would save nothing"

    def __post_init__(self) -> None:
        self.size, self.embedding_size = int(self.size), int(self.embedding_size)
        self.queue = MemoryQueue(self.size, self.embedding_size)

    def stated_rows(self, rule: str, **rows: Tensor) -> Inputs:
        """Return the inputs of a call whose tensors have one shape, that of rows of the memory."""
        problem, (first, *_) = towers_problem(rule, "Pass as many of each.", **rows), rows.values()
        if problem is None and first.shape[1] != self.queue.embeddings.shape[1]:
            width, memory = first.shape[1], described(self.queue.embeddings)
            problem = f"the memory is as wide as embeddings, [m, {width}], got {memory}. Pass embedding_size={width}."
        return Inputs(rows, problem, compared={"memory": list(self.earlier()[0].shape)})

    def earlier(self) -> tuple[Tensor, Tensor | None]:
        """Return embeddings of earlier calls, which a later one overwrites, and how many of them count; None is all.

        The host knows their number on a CPU only. On an accelerator they are all slots, and the number of filled ones.
        """
        queue = self.queue
        if devices.on_cpu(queue.filled):
            return queue.embeddings[: len(queue)], None
        return queue.embeddings, queue.filled

    def remember(self, rows: Tensor, batch: Batch) -> None:
        """Store the rows of all ranks with unit length, in training mode."""
        if self.training:
            unit = batch.prepared(rows.detach(), normalize=True)
            self.queue.write(unit, None, None, batch.samples, batch.world)


def unfilled(memory: Tensor, filled: Tensor | None) -> Tensor | None:
    """Return which rows of a memory do not count, [m]; None if all do.

    Examples:
        >>> unfilled(torch.ones(3, 1), torch.tensor(2))
        tensor([False, False,  True])
    """
    return None if filled is None else torch.arange(len(memory), device=filled.device) >= filled
