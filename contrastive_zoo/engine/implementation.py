"""Choose what computes losses: torch operations, Triton kernels on a GPU, or block functions that are compiled."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from contrastive_zoo.engine.dense_mode import is_dense, is_small_batch
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.world import World

Implementation = Literal["auto", "torch", "triton", "compiled"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of embeddings that kernels support."""

LARGEST_WIDTH = 4096
"""Largest embedding size of kernels."""

_implementation: ContextVar[Implementation] = ContextVar("implementation", default="auto")


@contextmanager
def implementation(name: Implementation | str) -> Iterator[None]:
    """Choose what computes losses: Triton kernels, torch operations, or compiled ones.

    Kernels compute NTXent, InfoNCE, Clip, SigLIP, SupCon and MNRL, on any number of ranks: float32, bfloat16 or float16
    embeddings with at most 4,096 features, on NVIDIA GPUs of compute capability 8.0 or later. NTXent compares two views;
    InfoNCE has negatives of all queries only, and none if it is symmetric; SigLIP's ``reduction`` is not ``"none"``; SupCon
    has ``variant="out"``, ``contrast_mode="all"`` and no mask; MNRL no ``hardness_mode`` and no direction ``doc_to_doc``.

    ``"compiled"`` passes losses that are sums over anchors, such as Circle, Triplet or your own :class:`RowLoss`, block by
    block through ``torch.compile``. The first step of a loss then takes seconds to a minute; batches of other sizes need no
    further compilation. Values and gradients agree up to rounding, and messages between ranks are the same. A rank that
    cannot compile a loss warns once and computes it as without. A ring and :func:`dense` compile nothing.

    Args:
        name: ``"auto"``, the default, uses a kernel wherever there is one and the batch has more than 2,048 × 2,048
            similarities; ``"torch"`` uses none; ``"triton"`` refuses to compute these losses otherwise. With
            ``TRITON_INTERPRET=1`` it also takes embeddings on the CPU, slowly, for tests. ``"compiled"`` is ``"auto"`` for
            these losses.

    Raises:
        ValueError: another name. At the call of a loss, on every rank, if ``"triton"`` cannot compute it, or if kernels
            compute it on some ranks only.

    Examples:
        >>> import contrastive_zoo as cz
        >>> with implementation("torch"):
        ...     cz.nt_xent(torch.eye(2), torch.eye(2), temperature=1.0)
        tensor(0.5514)
    """
    if name not in get_args(Implementation):
        raise ValueError(f"implementation: 'auto', 'torch', 'triton' or 'compiled', got {name!r}.")
    token = _implementation.set(cast("Implementation", name))
    try:
        yield
    finally:
        _implementation.reset(token)


def compiles_blocks() -> bool:
    """Return whether row losses compile their block functions.

    Examples:
        >>> with implementation("compiled"):
        ...     compiles_blocks()
        True
    """
    return _implementation.get() == "compiled"


class Kernels(NamedTuple):
    """Whether kernels compute a call.

    Args:
        apply: whether they can.
        always: whether they also compute small batches.
        problem: what is wrong with the user's choice, for the handshake.
    """

    apply: bool = False
    always: bool = False
    problem: str | None = None

    def __str__(self) -> str:
        """What ranks compare: which implementation it is determines their messages."""
        return "torch" if not self.apply else "triton" if self.always else "triton for large batches"

    def compute(self, rows: int, columns: int) -> bool:
        """Return whether they compute so many rows of all ranks against so many columns.

        Examples:
            >>> Kernels(apply=True).compute(10**4, 10**4), Kernels().compute(10**4, 10**4)
            (True, False)
        """
        return self.apply and (self.always or not is_small_batch(rows * columns, on_accelerator=True))


def choose_kernels(rows: Sequence[Any], *, unsupported: str | None = None) -> Kernels:
    """Return whether kernels compute a loss.

    Args:
        rows: the arguments of the loss; if they are invalid, the loss refuses them.
        unsupported: why kernels cannot compute this call.

    Examples:
        >>> with implementation("triton"):
        ...     choose_kernels([torch.eye(2)] * 2, unsupported="computes no sums").problem
        "implementation 'triton' computes no sums. Use implementation('auto')."
    """
    name = _implementation.get()
    tensors = [x for x in rows if isinstance(x, Tensor)]
    if name == "torch" or not tensors or (name != "triton" and not tensors[0].is_cuda):
        return Kernels()
    if any(x.ndim < 2 for x in tensors):
        return Kernels()
    problem = unsupported or _problem(tensors[0])
    if problem is None and find_spec("triton") is None:
        problem = "needs Triton: pip install contrastive_zoo[triton]"
        if name != "triton":
            _warn_once()
    if problem is None:
        from contrastive_zoo.kernels import device_problem  # imported here: most programs use no kernels

        problem = device_problem(tensors[0].device)
    if problem is None:
        return Kernels(apply=True, always=name == "triton")
    return Kernels(
        problem=f"implementation 'triton' {problem}. Use implementation('auto')." if name == "triton" else None
    )


def is_one_call(reduction: Reduction, world: World) -> bool:
    """Return whether a function of :mod:`contrastive_zoo.kernels` is the loss; elsewhere kernels compute an engine's blocks.

    Examples:
        >>> is_one_call("mean", World()), is_one_call("sum", World())
        (True, False)
    """
    return world.size == 1 and reduction == "mean"


def _problem(rows: Tensor) -> str | None:
    if is_dense():
        return "computes nothing under dense()"
    if rows.dtype not in DTYPES:
        return f"takes float32, bfloat16 or float16, got {rows.dtype}"
    if not 1 <= rows.shape[-1] <= LARGEST_WIDTH:
        return f"takes embeddings of 1 to {LARGEST_WIDTH} features, got {rows.shape[-1]}"
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
