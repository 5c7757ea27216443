"""A gather in ⌈log₂ W⌉ rounds, for small messages of many ranks; Bruck et al. 1997, §3, https://doi.org/10.1109/71.642949"""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class Doubling(threading.Thread):
    """Writes the tensors of all ranks into ``gathered``, [W, …]; waited for as a work is, in parts, so it is a thread."""

    error: RuntimeError | None = None

    def __init__(self, x: Tensor, gathered: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        super().__init__(daemon=True, name="contrastive_zoo gather")
        self.gathered, self.group, self.tag = gathered, group, tag
        # of the caller's thread; only in that mode its tensors may be written
        self.inference = torch.is_inference_mode_enabled()
        gathered[group.rank()] = x
        self.start()

    def run(self) -> None:
        try:
            with torch.inference_mode(self.inference):
                self._gather()
        except RuntimeError as error:
            self.error = error

    def _gather(self) -> None:
        rank, size, held = self.group.rank(), self.group.size(), 1
        while held < size:  # the tensors of this rank and of those that follow it
            block = rank + torch.arange(min(held, size - held))
            sent = self.gathered[block % size]
            received = torch.empty_like(sent)
            pairs = (dist.isend, sent, (rank - held) % size), (dist.irecv, received, (rank + held) % size)
            messages = [dist.P2POp(op, x, None, self.group, self.tag, peer) for op, x, peer in pairs]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            self.gathered[(block + held) % size] = received
            held *= 2

    def wait(self, timeout: timedelta | None = None) -> None:
        self.join(None if timeout is None else timeout.total_seconds())
        if self.error is not None or self.is_alive():
            raise self.error or RuntimeError("the gather is under way")

    def is_completed(self) -> bool:
        return not self.is_alive()
