"""Decide when a loss runs as plain autograd: because the user asks for it, or because the batch is small."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

SMALL_BATCH_ELEMENTS = 2**16
"""Up to so many similarities, or elements of embeddings, plain autograd on one process is faster than an engine."""

_dense: ContextVar[bool] = ContextVar("dense", default=False)


@contextmanager
def dense() -> Iterator[None]:
    """Compute losses from the whole similarity matrix with plain autograd: the definition, slow and differentiable twice.

    The engines write their gradients by hand, so these cannot be differentiated again. A gradient penalty, a Hessian
    or a meta-learning step runs the loss under this context instead. Value and gradients are the same. Across ranks,
    differentiate the function itself, ``nt_xent(…, world=World.of())``, whose gradients are the plain derivatives:
    ``DistributedLoss`` multiplies the gradients of embeddings by the number that the trainer divides by, and would do
    so at each order. (Small batches on one process run as plain autograd anyway.)

    Examples:
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
    """Return whether :func:`dense` is in force."""
    return _dense.get()


def has_plain_formulas() -> bool:
    """Return whether functions of matrices are their plain formulas, with gradients by autograd: under :func:`dense`.

    Also in code that is being compiled: the compiler derives gradients, and fuses passes that autograd would make.
    """
    return torch.compiler.is_compiling() or is_dense()


def is_small_batch(elements: int) -> bool:
    """Return whether a matrix of so many elements is below the threshold :data:`SMALL_BATCH_ELEMENTS`."""
    return elements <= SMALL_BATCH_ELEMENTS
