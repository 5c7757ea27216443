"""State that the second pass restores, so that it computes what the first pass computed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def random_states(devices: Iterable[torch.device]) -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, then each device's."""
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def set_random_states(states: Sequence[Tensor], devices: Iterable[torch.device]) -> None:
    """Restore what :func:`random_states` returned."""
    cpu, *others = states
    torch.set_rng_state(cpu)
    for state, device in zip(others, devices, strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


class AutocastState:
    """The autocast settings at construction, for the CPU and the types of these devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._settings = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *{device.type for device in devices})
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body under these settings, without autocast's cache.

        The cache would pass on weights that were cast without a graph.
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class ChangedBuffers:
    """The buffers that the first pass changes, such as BatchNorm's statistics and a spectral norm's vectors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the values that buffers have before the body, of those that it changes."""
        before: dict[str, Tensor] = {}

        def record(*_: Any) -> None:  # a hook, since DDP copies rank 0's buffers when its forward begins
            if not before:
                before.update((name, x.clone()) for name, x in self._module.named_buffers())

        handle = self._module.register_forward_pre_hook(record)
        try:
            yield
        finally:
            handle.remove()
        after = dict(self._module.named_buffers())
        self._before = {k: x for k, x in before.items() if k in after and not torch.equal(x, after[k])}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body with the recorded values; afterwards buffers have their present values."""
        present = dict(self._module.named_buffers())
        after = {name: present[name].clone() for name in self._before}
        self._copy(self._before, present)
        try:
            yield
        finally:
            self._copy(after, present)

    @staticmethod
    @torch.no_grad()
    def _copy(values: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        for name, x in values.items():
            buffers[name].copy_(x)
