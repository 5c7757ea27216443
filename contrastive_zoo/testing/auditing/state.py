"""The state of a training in this process, which a rerun changes, and which is put back bit for bit."""

import gc
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

STATEFUL = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes whose objects a step changes; all of the process are put back."""

DEPTH = 4
"""Levels of containers in an attribute that are copied: an optimizer's state has three."""


def is_plain(x: Tensor) -> bool:
    """Return whether operators of a tensor are torch's: a class with a dispatch of its own may hold no numbers."""
    return not any("__torch_dispatch__" in vars(cls) for cls in type(x).__mro__ if cls not in Tensor.__mro__)


class TrainingState:
    """A copy of what a step changes: modules, optimizers, schedulers and GradScalers of the process, random numbers.

    Of an object, the attributes are copied, with their lists, dictionaries and tensors, and the gradients of these. Copies
    of tensors are on the CPU. Tensors that are not plain, as those of a tracer, are left out.
    """

    def __init__(self, further: Sequence[Any] = ()) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, Tensor | None] = {}
        gc.collect()  # what nothing refers to is not part of the training
        objects = [x for x in gc.get_objects() if issubclass(type(x), STATEFUL)]
        for x in (*objects, *further):
            self._add(vars(x), DEPTH)
        self._of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def _add(self, x: Any, depth: int) -> None:
        if isinstance(x, Tensor):
            self._add_tensor(x)
        elif depth and isinstance(x, dict | list | deque | set | tuple):
            if not isinstance(x, tuple):
                self._containers.append((x, dict(x) if isinstance(x, dict) else list(x)))
            for y in x.values() if isinstance(x, dict) else x:
                self._add(y, depth - 1)

    def _add_tensor(self, x: Tensor) -> None:
        if not is_plain(x) or x in self._tensors or x.grad_fn is not None:
            return
        self._tensors[x] = x.detach().to("cpu", copy=True)
        if x.requires_grad:
            self._gradients[x] = x.grad
            if x.grad is not None:
                self._tensors[x.grad] = x.grad.detach().to("cpu", copy=True)

    @torch.no_grad()
    def put_back(self) -> None:
        for container, items in self._containers:
            if isinstance(container, dict):
                for key in container.keys() - items.keys():
                    del container[key]
                container.update(items)
            elif isinstance(container, list):
                container[:] = items
            else:
                container.clear()
                container.extend(items) if isinstance(container, deque) else container.update(items)
        for x, gradient in self._gradients.items():
            x.grad = gradient
        for x, value in self._tensors.items():
            x.copy_(value)
        if self._of_devices:
            torch.cuda.set_rng_state_all(self._of_devices)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])
