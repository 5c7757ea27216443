"""Choose what computes losses: plain autograd, engines of torch operations, or Triton kernels."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from contrastive_zoo.ranks.devices import float32_matmuls

_dense: ContextVar[bool] = ContextVar("dense", default=False)


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Compute losses from the whole similarity matrix with plain autograd: the definition, slow and differentiable twice.

    The engines write their gradients by hand, so these cannot be differentiated again. A gradient penalty, a Hessian
    or a meta-learning step runs the loss under this context instead. Value and gradients are the same. Across ranks,
    differentiate the bare loss, ``NTXent()(…, world=World.of())``, whose gradients are the plain derivatives:
    ``DistributedLoss`` multiplies the gradients of embeddings by the number that the trainer divides by, and would do
    so at each order.

    Examples:
        >>> import torch
        >>> import contrastive_zoo as cz
        >>> a, b = torch.eye(2, requires_grad=True), torch.eye(2)
        >>> with cz.engine.plain_formulas():
        ...     (g,) = torch.autograd.grad(cz.InfoNCE(temperature=1.0)(a, b), a, create_graph=True)
        >>> g.square().sum().backward()          # differentiated twice
    """
    token = _dense.set(True)
    try:
        yield
    finally:
        _dense.reset(token)


is_dense: Callable[[], bool] = _dense.get
"""Returns whether :func:`plain_formulas` is in force."""


Implementation = Literal["auto", "torch", "triton"]

LARGEST_MATRIX = 3732
"""Embeddings of a side up to which operations on the whole matrix are quicker than kernels on an H100: the point where the
times cross that ``python benchmarks/gpu.py --crossover`` measures."""

# what kernels support
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_WIDTH = 4096

_implementation: ContextVar[Implementation] = ContextVar("implementation", default="auto")
implementation: Callable[[], Implementation] = _implementation.get


@contextmanager
def use_implementation(name: Implementation | str) -> Iterator[None]:
    """Choose what computes losses: Triton kernels or torch operations.

    Kernels compute NTXent, InfoNCE, Clip, SigLIP, SupCon and MNRL, on any number of ranks: float32, bfloat16 or float16
    embeddings with at most 4,096 features, on NVIDIA GPUs of compute capability 8.0 or later. NTXent compares two views;
    InfoNCE has negatives of all queries only, and none if it is symmetric; SigLIP's ``reduction`` is not ``"none"``; SupCon
    has ``variant="out"`` and no mask; MNRL no ``hardness_mode``, ids, ``false_negative_margin`` or
    direction ``doc_to_doc``.

    Args:
        name: ``"auto"``, the default, uses a kernel wherever there is one that is quicker, by measured times: above about
            3,700 × 3,700 similarities. ``"torch"`` uses none; ``"triton"`` refuses to compute these losses otherwise. With
            ``TRITON_INTERPRET=1`` it also takes embeddings on the CPU, slowly, for tests.

    Raises:
        ValueError: another name. At the call of a loss, on every rank, if ``"triton"`` cannot compute it, or if not all
            ranks choose it.

    Examples:
        >>> import contrastive_zoo as cz
        >>> with use_implementation("torch"):
        ...     cz.NTXent(temperature=1.0)(torch.eye(2), torch.eye(2))
        tensor(0.5514)
    """
    if name not in get_args(Implementation):
        raise ValueError(f"implementation: 'auto', 'torch' or 'triton', got {name!r}.")
    token = _implementation.set(cast("Implementation", name))
    try:
        yield
    finally:
        _implementation.reset(token)


class Kernels(NamedTuple):
    """Whether kernels compute the losses that they can compute, as far as this rank and its embeddings go.

    ``always``: the user chose ``"triton"``; ``problem``: why they cannot ``apply``; ``warning``: what would be quicker.
    """

    apply: bool = False
    always: bool = False
    problem: str | None = None
    warning: str | None = None

    def __str__(self) -> str:
        """What ranks compare: where kernels start, and the choice of ``"triton"``, refused where kernels do not apply."""
        if not self.always:
            return CHOOSES_KERNELS
        return "triton" if self.apply else f"triton, which {self.problem}"

    def on_ranks(self, capable: Sequence[bool]) -> "Kernels":
        """Return what all ranks do, given what each one states: kernels compute what they compute on every rank."""
        if all(capable) or not any(capable):
            return self
        lacking = ", ".join(str(rank) for rank, applies in enumerate(capable) if not applies)
        return _without_kernels(self.problem or f"does not run on rank {lacking}")


def choose_kernels(rows: Iterable[Tensor]) -> Kernels:
    """Return whether kernels can compute losses of these embeddings on this rank; the first of them decides."""
    name, first = _implementation.get(), next((x for x in rows if x.ndim > 1), None)
    if name == "torch" or first is None or (name != "triton" and not first.is_cuda):
        return NO_KERNELS
    from contrastive_zoo.engine import kernels  # imported here: most programs use no kernels

    chosen = name == "triton"
    if (problem := problem_of(first) or kernels.device_problem(first.device)) is not None:
        return Kernels(always=chosen, problem=problem)
    if (problem := kernels.installation_problem(first.device)) is not None:
        return Kernels(always=True, problem=problem) if chosen else _without_kernels(problem)
    lacks_tensor_cores = first.dtype == torch.float32 and float32_matmuls() == "ieee"
    under_autocast = lacks_tensor_cores and torch.is_autocast_enabled(first.device.type)
    return Kernels(True, chosen, warning=_IN_FLOAT32 if under_autocast else None)


def _without_kernels(problem: str) -> Kernels:
    """Return the torch operations, which all ranks take in place of kernels that do not run on one of them."""
    return Kernels(
        problem=problem,
        warning=f"Torch operations compute this loss on all ranks, more slowly than Triton, which {problem}. "
        "use_implementation('torch') chooses them without this warning.",
    )


_IN_FLOAT32 = (
    "Embeddings are float32 under autocast, as those that normalize or layer_norm returns, and a loss multiplies them as "
    "they are: in float32, without tensor cores. For 16 bits pass embeddings.bfloat16(); for TF32 call "
    "torch.set_float32_matmul_precision('high')."
)

NO_KERNELS = Kernels()
CHOOSES_KERNELS = f"torch, or triton above {LARGEST_MATRIX} embeddings"


def problem_of(rows: Tensor) -> str | None:
    """Return why kernels cannot compare these embeddings on any device, in words, or None."""
    if is_dense():
        return "computes nothing under plain_formulas()"
    if rows.dtype not in DTYPES:
        return f"takes float32, bfloat16 or float16, got {rows.dtype}"
    if not 1 <= rows.shape[-1] <= LARGEST_WIDTH:
        return f"takes embeddings of 1 to {LARGEST_WIDTH} features, got {rows.shape[-1]}"
    return None
