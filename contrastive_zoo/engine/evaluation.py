"""What all engines share: panel heights, the dense way, a budget, unit rows, a word about second derivatives."""

import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.precision import without_autocast

PANEL_BYTES = 32 * 2**20
"""How large one panel of similarities may be."""

TILE_BYTES = 4 * 2**20
"""How large a tile of similarities may be, to stay in a processor's cache; a GPU's are 32 times as large."""

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


def few(numbers: int) -> bool:
    """Whether so many are at most :data:`FEW`."""
    return numbers <= FEW


_budget: ContextVar[int] = ContextVar("budget", default=128 * 2**20)


@contextmanager
def memory_budget(size: int) -> Iterator[None]:
    """Within it, losses hold at most ``size`` bytes of similarities at a time.

    Similarities are kept for the backward pass as far as they fit, those of all losses that wait for theirs taken
    together, which saves one product of three (of four with two towers); the others are made again, tile by tile. Losses
    that are sums over anchors make their panels as low as the budget asks for. The default is 128 MiB.

    On a processor with glibc, malloc is told to keep freed memory for the next step, twice the budget and a panel, unless
    its environment variables (``MALLOC_TRIM_THRESHOLD_``, …) say what it shall do.

    Args:
        size: bytes; 0 never keeps any.

    Raises:
        ValueError: a negative size.

    Example:
        >>> import contrastive_zoo as cz
        >>> with memory_budget(2**30):
        ...     cz.InfoNCE(temperature=1.0)(torch.eye(2), torch.eye(2))
        tensor(0.3133)
    """
    if size < 0:
        raise ValueError(f"memory_budget: size is a number of bytes, 0 or more, got {size}.")
    token = _budget.set(size)
    try:
        yield
    finally:
        _budget.reset(token)


def budget() -> int:
    """Bytes of similarities that may be held at a time."""
    return _budget.get()


class Kept:
    """Similarities that one loss keeps until its backward pass, within what others leave of the budget.

    Example:
        >>> with memory_budget(100):
        ...     one, other = Kept(), Kept()
        ...     one.takes(80), other.takes(80), other.takes(20)
        (True, False, True)
    """

    _all: ClassVar[weakref.WeakSet["Kept"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.size = 0
        Kept._all.add(self)

    def takes(self, size: int) -> bool:
        """Whether so many more bytes fit; then they are taken."""
        fits = sum(kept.size for kept in Kept._all) + size <= budget()
        self.size += size if fits else 0
        return fits

    def release(self) -> None:
        """Leave them to others."""
        self.size = 0


def is_dense() -> bool:
    """Whether :func:`dense` is in force."""
    return _dense.get()


def tiles(rows: int, columns: int, like: Tensor, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Pieces of a matrix that fit a cache, strip by strip; with ``upper`` those on and above the diagonal alone.

    Tiles on the diagonal are then square.

    Example:
        >>> list(tiles(2, 3, torch.empty(0)))
        [(slice(0, 2, None), slice(0, 3, None))]
    """
    height, width = tile_shape(like)
    for top in range(0, rows, height):
        strip, left = slice(top, min(rows, top + height)), 0
        if upper:
            yield strip, strip
            left = strip.stop
        for start in range(left, columns, width):
            yield strip, slice(start, min(columns, start + width))


def tile_shape(like: Tensor) -> tuple[int, int]:
    """Height and width of a tile: powers of two, two or four times as wide as high."""
    room = tile_bytes(like) // like.dtype.itemsize
    height = 2 ** max(0, int(math.log2(max(1, room // 2)) / 2))
    return height, max(1, room // height)


def tile_bytes(like: Tensor) -> int:
    """How large a tile may be on this device.

    Example:
        >>> tile_bytes(torch.empty(0)) == TILE_BYTES
        True
    """
    return TILE_BYTES if like.device.type == "cpu" else 32 * TILE_BYTES


def panels(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of rows, each so low that its similarities to all columns fit into :data:`PANEL_BYTES`.

    Example:
        >>> list(panels(3, PANEL_BYTES, torch.float32))
        [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    height = max(1, PANEL_BYTES // max(1, columns * dtype.itemsize))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


def unit(x: Tensor) -> Tensor:
    """Rows over their lengths, ``torch.nn.functional.normalize(x, dim=-1)``; a zero row stays zero.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return torch.nn.functional.normalize(x, dim=-1) if is_dense() or few(x.numel()) else _Unit.apply(x)


class _Unit(Function):
    """y = x / |x|;  dx = (dy − y ⟨y, dy⟩) / |x|, a few rows at a time, which stay in the cache from step to step."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, length = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        for some_x, some_y, some_length in _some(x, y, length):
            torch.linalg.vector_norm(some_x, dim=-1, keepdim=True, out=some_length)
            torch.div(some_x, some_length.clamp(min=shortest), out=some_y)
        ctx.save_for_backward(x, y, length)
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> Tensor | None:
        x, y, length = ctx.saved_tensors
        dx = torch.empty_like(x)
        with torch.no_grad():
            for some_dx, some_dy, some_y, some_length in _some(dx, dy, y, length):
                along = torch.linalg.vecdot(some_y, some_dy).unsqueeze(-1).where(some_length > shortest, 0)
                torch.addcmul(some_dy, some_y, along, value=-1, out=some_dx).div_(some_length.clamp(min=shortest))
        return once(dx, x)


def _some(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of several tensors together, as many of the first as a quarter of a tile holds."""
    first = rows[0]
    height = max(1, tile_bytes(first) // 4 // max(1, first[:1].nbytes)) if len(first) else 1
    return zip(*(x.split(height) for x in rows), strict=True)


shortest = 1e-12
"""What a row shorter than that is divided by."""


def saved_tensors_are_hooked() -> bool:
    """Whether an activation checkpoint, or another hook, takes what is saved for the backward pass.

    Examples:
        >>> saved_tensors_are_hooked()
        False
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def inner_graph() -> Iterator[None]:
    """Within it a graph is recorded and differentiated at once: hooks on saved tensors from outside do not see it.

    An activation checkpoint around a loss would otherwise compute the whole loss again for every block's gradient.

    Examples:
        >>> with torch.no_grad(), inner_graph():
        ...     torch.is_grad_enabled()
        True
    """
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if saved_tensors_are_hooked():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


class _Once(Function):
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
