"""Decide when a loss runs as plain autograd: because the user asks for it, or because the batch is small."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

SMALL_BATCH_ELEMENTS = 2**16
"""Up to so many similarities, or elements of embeddings, plain autograd on one process is faster than an engine."""

ON_ACCELERATORS = 64
"""So many times as many similarities are a small batch on an accelerator: those of 2,048 rows of either side, 16 MB.

A step there takes as long as its launches. On an H100 the Triton kernels take 0.9 to 2.1 ms a step up to 2,048 rows and the
compiled dense formula 0.6 to 1.3 ms; from about 8,192 rows on the kernels are quicker (benchmarks/gpu.md).
"""

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


def is_small_batch(elements: int, *, on_accelerator: bool = False) -> bool:
    """Return whether a matrix of so many elements is at most at the threshold :data:`SMALL_BATCH_ELEMENTS`."""
    return elements <= SMALL_BATCH_ELEMENTS * (ON_ACCELERATORS if on_accelerator else 1)
