"""What all engines share: panel heights, the dense way, numbers wide enough, a word about second derivatives."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

PANEL_BYTES = 32 * 2**20
"""How large one panel of similarities may be."""

_dense: ContextVar[bool] = ContextVar("dense", default=False)


@contextmanager
def dense() -> Iterator[None]:
    """Within it, losses hold the whole matrix of similarities and are plain autograd: the definition, and slow.

    The panel engines write their gradients by hand, so these cannot be differentiated again. A gradient penalty, a
    Hessian or a meta-learning step runs the loss under this context instead. Value and gradients are the same. Across
    ranks differentiate the function itself, ``nt_xent(…, world=World.of())``, whose gradients are the plain derivatives:
    ``DistributedLoss`` multiplies rows' gradients by what the trainer divides by, and would do so at each order.

    Example:
        >>> import contrastive_zoo as cz
        >>> a, b = torch.eye(2, requires_grad=True), torch.eye(2)
        >>> with cz.dense():
        ...     (g,) = torch.autograd.grad(cz.InfoNCE(temperature=1.0)(a, b), a, create_graph=True)
        >>> g.square().sum().backward()          # differentiated twice
    """
    token = _dense.set(True)
    try:
        yield
    finally:
        _dense.reset(token)


def is_dense() -> bool:
    """Whether :func:`dense` is in force."""
    return _dense.get()


def panels(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of rows, each so low that its similarities to all columns fit into :data:`PANEL_BYTES`.

    Example:
        >>> list(panels(3, PANEL_BYTES, torch.float32))
        [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    height = max(1, PANEL_BYTES // max(1, columns * dtype.itemsize))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


def wide(x: Tensor) -> Tensor:
    """x in at least 32 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Logits and statistics need 32 bits: a matrix product inside must not be cast down by an autocast outside."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


class _Once(torch.autograd.Function):
    """Identity on a hand-written gradient, whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "second derivative of a contrastive_zoo loss: the panel engines write the first one by hand and hold no "
            "graph of it. Compute the loss under `with contrastive_zoo.dense():`, which holds the N × N matrix and can "
            "be differentiated as often as you like."
        )


def once(gradient: Tensor | None, *inputs: Tensor) -> Tensor | None:
    """A gradient that says what to do when somebody differentiates it again."""
    return gradient if gradient is None or not torch.is_grad_enabled() else _Once.apply(gradient, *inputs)
