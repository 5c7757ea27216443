"""Share between losses whose formula contains the embeddings of a memory queue."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo import devices
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.loss_base.preparation import prepare_rows
from contrastive_zoo.memory.queue import MemoryQueue
from contrastive_zoo.row_checks import tensor_problem
from contrastive_zoo.world import World


class MemoryLoss(ConstructingLoss):
    """A loss whose function has a setting ``memory``, the rows of the module ``queue``, a :class:`MemoryQueue`.

    In training mode unit embeddings of all ranks enter it after each call, in rank order: it is equal on every rank, and
    equal to that of one process. It is part of the state dict.

    Args:
        size: number of embeddings in the memory.
        embedding_size: d.

    Raises:
        ValueError: a size or embedding_size below 1.

    Examples:
        >>> from contrastive_zoo.memory.ressl import ReSSL
        >>> loss = ReSSL(3, embedding_size=2)
        >>> _ = loss(torch.eye(2), torch.eye(2))
        >>> loss.queue.rows
        tensor([[1., 0.],
                [0., 1.]])
    """

    made = ("memory", "filled")
    ring_refusal = "every rank holds the memory that it compares with, so a ring would save nothing"

    def __init__(self, size: int, embedding_size: int, **settings: Any) -> None:
        super().__init__(memory=None, filled=None, **settings)
        if problem := number_problem(low=1, whole=True, size=size, embedding_size=embedding_size):
            raise ValueError(f"{type(self).__name__}: {problem}")
        self.queue = MemoryQueue(size, embedding_size)
        self.size, self.embedding_size = int(size), int(embedding_size)

    def settings(self) -> Mapping[str, Any]:
        """Return the current settings, with the rows of the memory.

        The host knows their number on a CPU only. On an accelerator they are all slots, and the number of filled ones.
        """
        queue = self.queue
        if devices.on_cpu(queue.filled):
            return {**super().settings(), "memory": queue.rows}
        return {**super().settings(), "memory": queue.embeddings, "filled": queue.filled}

    def remember(self, rows: Tensor, world: World) -> None:
        """Store the rows of all ranks with unit length, in training mode."""
        if self.training:
            unit = prepare_rows(rows.detach(), normalize=True, world=world)
            self.queue.write(unit, None, None, world.shards(rows), world)


def unfilled(memory: Tensor, filled: Tensor | None) -> Tensor | None:
    """Return which rows of a memory do not count, [m]; None if all do.

    Examples:
        >>> unfilled(torch.ones(3, 1), torch.tensor(2))
        tensor([False, False,  True])
    """
    return None if filled is None else torch.arange(len(memory), device=filled.device) >= filled


def memory_problem(memory: Tensor, rows: Tensor, filled: Tensor | None = None) -> str | None:
    """Return why rows cannot be compared with those of a memory, in words; None if they can.

    Examples:
        >>> memory_problem(torch.empty(0, 3), torch.ones(4, 2))
        'the memory is as wide as embeddings, [m, 2], got float32 [0, 3]. Pass embedding_size=2.'
    """
    wrong = tensor_problem("memory", memory) or (None if filled is None else tensor_problem("filled", filled))
    if wrong is not None:
        return wrong
    if filled is not None and (filled.ndim or filled.dtype not in _INTEGERS or filled.device != memory.device):
        got = f"got {kind(filled)} on {filled.device} for a memory on {memory.device}"
        return f"filled is one integer on the device of the memory, the number of its slots in use, {got}."
    if memory.ndim == 2 and memory.is_floating_point() and memory.shape[1:] == rows.shape[1:]:
        return None
    width = rows.shape[-1]
    return f"the memory is as wide as embeddings, [m, {width}], got {kind(memory)}. Pass embedding_size={width}."


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
