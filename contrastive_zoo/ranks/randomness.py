"""Random numbers of a loss that every rank computes alike: all ranks draw those of rank 0."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from contrastive_zoo.ranks.transport import broadcast_in_place
from contrastive_zoo.ranks.world import World


@contextmanager
def one_stream(world: World, device: torch.device | None = None) -> Iterator[None]:
    """Context manager: all ranks draw rank 0's numbers; the others' generators are restored, as dropout must differ."""
    if world.size == 1:
        yield
        return
    states = random_states(device)
    packed = torch.cat([state.view(torch.uint8) for state in states]).to(world.device)
    broadcast_in_place(packed, 0, world)  # as long on every rank
    parts = packed.cpu().split([state.nbytes for state in states])
    restore_random([part.clone().view(state.dtype) for part, state in zip(parts, states, strict=True)], device)
    try:
        yield
    finally:
        if world.rank != 0:
            restore_random(states, device)


@contextmanager
def generators_kept(device: torch.device | None) -> Iterator[None]:
    states = random_states(device)
    try:
        yield
    finally:
        restore_random(states, device)


def draw_from_generators(objects: Iterable[object], device: torch.device | None) -> None:
    """Draw a number from the generators that programs share, and from those among some objects."""
    torch.rand((), device=device)
    np.random.random()
    random.random()
    for x in objects:
        if isinstance(x, torch.Generator):
            torch.rand((), generator=x, device=x.device)
        elif isinstance(x, random.Random | np.random.Generator | np.random.RandomState):
            x.random()


class StateWatch:
    """Detects whether a loss draws random numbers, changes its buffers or counts in its attributes, and undoes that."""

    def __init__(self, loss: torch.nn.Module, device: torch.device | None = None) -> None:
        self.found_on_any_rank = False  # whether ranks have told each other of a change
        self.device, self.states = device, random_states(device)
        places = [(of._buffers, name) for of in loss.modules() for name in of._buffers]
        self.buffers = [(held, name, x, x.clone()) for held, name in places if (x := held[name]) is not None]
        plain = (int, float, bool, str)
        self.attributes = [(vars(x), {k: y for k, y in vars(x).items() if type(y) in plain}) for x in loss.modules()]

    def has_changed(self) -> bool:
        """Return whether a generator, a buffer or a plain attribute has changed since construction."""
        states = zip(random_states(self.device), self.states, strict=True)
        if any(not torch.equal(present, before) for present, before in states):
            return True
        if any(held.get(name) is not x or not torch.equal(x, before) for held, name, x, before in self.buffers):
            return True
        return any(held.get(name) != x for held, before in self.attributes for name, x in before.items())

    @torch.no_grad()
    def undo(self) -> None:
        restore_random(self.states, self.device)
        for held, plain in self.attributes:
            held.update(plain)
        for of, name, buffer, before in self.buffers:
            of[name] = buffer.copy_(before)


def random_states(device: torch.device | None = None) -> list[torch.Tensor]:
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    numbers = [np.asarray(keys, dtype=np.int64), np.array([position, has_gauss]), np.array([gauss])]
    numbers += [np.array([version, next_gauss is not None, *words]), np.array([next_gauss or 0.0])]
    states = [torch.get_rng_state(), *map(torch.from_numpy, numbers)]
    if device is None or device.type == "cpu":
        return states
    return [*states, torch.get_device_module(device).get_rng_state(device)]


def restore_random(states: list[torch.Tensor], device: torch.device | None = None) -> None:
    cpu, keys, position, gauss, words, next_gauss, *accelerator = states
    torch.set_rng_state(cpu)
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *position.tolist(), gauss.item()))
    version, has_next, *rest = words.tolist()
    random.setstate((version, tuple(rest), next_gauss.item() if has_next else None))
    if accelerator:
        torch.get_device_module(device).set_rng_state(accelerator[0], device)
