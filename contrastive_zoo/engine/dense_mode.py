"""When a loss is plain autograd: because a user asked for it, or because it is small."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FEW = 2**16
"""So few similarities, or numbers in rows, that one process is done sooner by plain autograd than by an engine."""

_dense: ContextVar[bool] = ContextVar("dense", default=False)


@contextmanager
def dense() -> Iterator[None]:
    """Within it, losses hold the whole matrix of similarities and are plain autograd: the definition, and slow.

    The panel engines write their gradients by hand, so these cannot be differentiated again. A gradient penalty, a
    Hessian or a meta-learning step runs the loss under this context instead. Value and gradients are the same. Across
    ranks differentiate the function itself, ``nt_xent(…, world=World.of())``, whose gradients are the plain derivatives:
    ``DistributedLoss`` multiplies rows' gradients by what the trainer divides by, and would do so at each order. (Small
    batches on one process are plain autograd anyway.)

    Example:
        >>> import torch
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


def few(numbers: int) -> bool:
    """Whether so many are at most :data:`FEW`."""
    return numbers <= FEW
