"""Choose between the torch engines and the Triton kernels, which compute some losses of one process on a GPU."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from contrastive_zoo.engine.dense_mode import is_dense, is_small_batch
from contrastive_zoo.world import World

Implementation = Literal["auto", "torch", "triton"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of embeddings that kernels support."""

LARGEST_WIDTH = 4096
"""Largest embedding size of kernels."""

_implementation: ContextVar[Implementation] = ContextVar("implementation", default="auto")


@contextmanager
def implementation(name: Implementation | str) -> Iterator[None]:
    """Choose what computes NTXent, InfoNCE, Clip and SigLIP: Triton kernels or torch operations.

    Kernels compute ``reduction="mean"`` of float32, bfloat16 or float16 embeddings with at most 4,096 features, on one
    process, on an NVIDIA GPU of compute capability 8.0 or later. They compare two views or two towers; InfoNCE has negatives
    of all queries only, and none if it is symmetric. Several ranks compute with torch.

    Args:
        name: ``"auto"``, the default, uses a kernel wherever there is one and the batch has more than 512 rows;
            ``"torch"`` uses none; ``"triton"`` refuses to compute these losses otherwise. With ``TRITON_INTERPRET=1`` it
            also takes embeddings on the CPU, slowly, for tests.

    Raises:
        ValueError: another name. At the call of a loss, on every rank, if ``"triton"`` cannot compute it.

    Examples:
        >>> import contrastive_zoo as cz
        >>> with implementation("torch"):
        ...     cz.nt_xent(torch.eye(2), torch.eye(2), temperature=1.0)
        tensor(0.5514)
    """
    if name not in get_args(Implementation):
        raise ValueError(f"implementation: 'auto', 'torch' or 'triton', got {name!r}.")
    token = _implementation.set(cast("Implementation", name))
    try:
        yield
    finally:
        _implementation.reset(token)


def choose_kernel(
    rows: Sequence[Any], *, reduction: str, world: World, unsupported: str | None = None
) -> tuple[bool, str | None]:
    """Return whether a kernel computes a loss, and what is wrong with that choice, for the handshake.

    Args:
        rows: the arguments of the loss; if they are invalid, the loss refuses them.
        reduction: the reduction of the loss.
        world: the ranks that share the batch.
        unsupported: why the kernel cannot compute this call.

    Examples:
        >>> with implementation("triton"):
        ...     choose_kernel([torch.eye(2)] * 2, reduction="sum", world=World())
        (False, "implementation 'triton' computes reduction='mean' only. Use implementation('auto').")
    """
    name = _implementation.get()
    tensors = [x for x in rows if isinstance(x, Tensor)]
    if name == "torch" or len(tensors) < 2 or (name == "auto" and not tensors[0].is_cuda):
        return False, None
    a, b = tensors[:2]
    if any(x.ndim != 2 for x in tensors) or (name == "auto" and is_small_batch(len(a) * len(b) // 4)):
        return False, None
    problem = unsupported or _problem(a, reduction, world)
    if problem is None and find_spec("triton") is None:
        problem = "needs Triton: pip install contrastive_zoo[triton]"
        if name == "auto":
            _warn_once()
    if problem is None:
        from contrastive_zoo.kernels import device_problem  # imported here: most programs use no kernels

        problem = device_problem(a.device)
    if problem is None:
        return True, None
    return False, f"implementation 'triton' {problem}. Use implementation('auto')." if name == "triton" else None


def _problem(rows: Tensor, reduction: str, world: World) -> str | None:
    if is_dense():
        return "computes nothing under dense()"
    if world.size > 1:
        return f"computes the losses of one process, got {world.size}"
    if reduction != "mean":
        return "computes reduction='mean' only"
    if rows.dtype not in DTYPES:
        return f"takes float32, bfloat16 or float16, got {rows.dtype}"
    if not 1 <= rows.shape[1] <= LARGEST_WIDTH:
        return f"takes embeddings of 1 to {LARGEST_WIDTH} features, got {rows.shape[1]}"
    return None


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "Triton is not installed, so torch operations compute this loss, more slowly than the kernels. "
            "Install contrastive_zoo[triton], or choose implementation('torch').",
            stacklevel=5,
        )


_warned = False
