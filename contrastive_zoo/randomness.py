"""One random stream for all ranks: what one process would draw is what rank 0 would draw."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from contrastive_zoo.world import World


@contextmanager
def one_stream(world: World, device: torch.device | None = None) -> Iterator[None]:
    """Within it every rank draws from rank 0's generators: torch's (CPU and ``device``'s), NumPy's and Python's.

    Afterwards rank 0's generators have moved on by what was drawn, as they would in one process; the others' stand
    where they stood, so that dropout and augmentation stay different from rank to rank.

    Args:
        world: whose ranks.
        device: the accelerator whose generator is drawn from, if any.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> with one_stream(ALONE):
        ...     x = torch.rand(3)
    """
    if world.size == 1:
        yield
        return
    own = _states(device)
    _restore(of_rank_0(own, world), device)
    try:
        yield
    finally:
        if world.rank != 0:
            _restore(own, device)


class Watch:
    """Notices whether a loss draws random numbers or changes its buffers, and takes that back.

    Args:
        loss: whose buffers.
        device: the accelerator whose generator is watched, if any.

    Examples:
        >>> watch = Watch(torch.nn.Identity())
        >>> _ = torch.rand(1)
        >>> watch.has_changed(), watch.undo(), watch.has_changed()
        (True, None, False)
    """

    def __init__(self, loss: torch.nn.Module, device: torch.device | None = None) -> None:
        self.device, self.states = device, _states(device)
        self.buffers = [(x, x.clone()) for x in loss.buffers()]

    def has_changed(self) -> bool:
        """Whether any of it has moved since."""
        states = zip(_states(self.device), self.states, strict=True)
        return any(not torch.equal(now, then) for now, then in [*states, *self.buffers])

    @torch.no_grad()
    def undo(self) -> None:
        """Generators and buffers as they were."""
        _restore(self.states, self.device)
        for now, then in self.buffers:
            now.copy_(then)


def of_rank_0(states: list[torch.Tensor], world: World) -> list[torch.Tensor]:
    """Rank 0's generator states, in one message; each as long everywhere.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> of_rank_0([torch.tensor([3]), torch.tensor([0.5])], ALONE)
        [tensor([3]), tensor([0.5000])]
    """
    packed = torch.cat([state.view(torch.uint8) for state in states]).to(world.device)
    if world.size > 1:
        dist.broadcast(packed, group=world.group, group_src=0)
    parts = packed.cpu().split([state.nbytes for state in states])
    return [part.clone().view(state.dtype) for part, state in zip(parts, states, strict=True)]


def _states(device: torch.device | None) -> list[torch.Tensor]:
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    states = [
        torch.get_rng_state(),
        torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        torch.tensor([position, has_gauss], dtype=torch.int64),
        torch.tensor([gauss], dtype=torch.float64),
        torch.tensor([version, next_gauss is not None, *words], dtype=torch.int64),
        torch.tensor([next_gauss or 0.0], dtype=torch.float64),
    ]
    return [*states, torch.get_device_module(device).get_rng_state(device)] if _accelerated(device) else states


def _restore(states: list[torch.Tensor], device: torch.device | None) -> None:
    cpu, keys, position, gauss, words, next_gauss, *accelerator = states
    torch.set_rng_state(cpu)
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *position.tolist(), gauss.item()))
    version, has_next, *rest = words.tolist()
    random.setstate((version, tuple(rest), next_gauss.item() if has_next else None))
    if accelerator:
        torch.get_device_module(device).set_rng_state(accelerator[0], device)


def _accelerated(device: torch.device | None) -> bool:
    return device is not None and device.type != "cpu"
