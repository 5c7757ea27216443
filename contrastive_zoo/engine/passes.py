"""What losses make of a panel of similarities, in as few passes over it as it takes; autograd takes three times as many.

Each function is its plain formula under :func:`dense`, and the same number and gradient by hand otherwise. Comparisons
are written as 0 and 1 into floats (``out=``): to and from booleans a processor compares and selects one by one.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.precision import without_autocast


def shared_by_panels(columns: Tensor) -> Tensor:
    """Columns as a leaf that many panels are compared with: its squares are taken once, and few rows' gradient is sparse.

    Example:
        >>> columns = shared_by_panels(torch.eye(3))
        >>> near = smallest(dot_products(torch.tensor([[3.0, 2.0, 1.0]]), columns), torch.ones(1, 3, dtype=torch.bool))
        >>> torch.autograd.grad(near, columns)[0].is_sparse
        True
    """
    leaf = columns.detach().requires_grad_()
    leaf.squares = leaf.detach().square().sum(1)  # type: ignore[attr-defined]  # kept where every panel finds them
    return leaf


def _mark(matrix: Tensor, columns: Tensor) -> Tensor:
    """A matrix of panel and columns; if these are shared by panels, it says who takes a sparse gradient.

    On a GPU nobody does: a dense product is quicker there than to ask which pairs there are.
    """
    if hasattr(columns, "squares") and matrix.device.type == "cpu":
        matrix.takes_pairs = matrix.grad_fn  # type: ignore[attr-defined]  # no more if it is changed in place
    return matrix


def dot_products(anchors: Float[Tensor, "c d"], columns: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
    """``anchors @ columns.T``; the backward pass skips the zeros where a mined loss's gradient is almost only zeros.

    Example:
        >>> dot_products(torch.eye(2), torch.ones(1, 2))
        tensor([[1.],
                [1.]])
    """
    return anchors @ columns.T if is_dense() else _mark(_DotProducts.apply(anchors, columns), columns)


class _DotProducts(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, anchors: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(anchors, columns)
        ctx.shared = hasattr(columns, "squares")
        return anchors @ columns.T

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        anchors, columns = ctx.saved_tensors
        if (pairs := _pairs(gradient, anchors.shape[1])) is not None:
            i, j, w = pairs
            return _sums(i, w * columns[j], anchors), _sums(j, w * anchors[i], columns, sparse=ctx.shared)
        return gradient @ columns, gradient.t() @ anchors


def _pairs(gradient: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows, columns and gradients [k, 1] of pairs if it is that of few; None if of many."""
    if not gradient.is_sparse:
        if not _few(gradient, width):
            return None
        gradient = gradient.to_sparse()
    i, j = gradient._indices()
    return i, j, gradient._values()[:, None]


def _sums(index: Tensor, rows: Tensor, like: Tensor, *, sparse: bool = False) -> Tensor:
    """What goes to each row of ``like``, of which only those of ``index`` get something."""
    if sparse:
        return torch.sparse_coo_tensor(index[None], rows, like.shape, check_invariants=False)
    return torch.zeros_like(like).index_add_(0, index, rows)


def _few(weights: Tensor, width: int) -> bool:
    """Whether w has so few entries that their rows are smaller than w itself; a sample is asked before all are."""
    return weights.device.type == "cpu" and all(
        int(x.count_nonzero()) * width <= x.numel() for x in (weights[::16], weights)
    )


def euclidean(
    anchors: Float[Tensor, "c d"], columns: Float[Tensor, "N d"], *, squared: bool = False
) -> Float[Tensor, "c N"]:
    """‖a − b‖ of every anchor and column, or its square; the gradient at 0 is 0.

    Rows closer together than a matrix product's rounding can tell are the same point: exactly 0, and without gradient.

    Example:
        >>> euclidean(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]]))
        tensor([[5., 0.]])
    """
    if not is_dense():
        return _mark(_Euclidean.apply(anchors, columns, squared), columns)
    both = anchors.square().sum(1)[:, None] + columns.square().sum(1)
    found = torch.addmm(both, anchors, columns.T, alpha=-2)
    there = found > _ROUNDING * torch.finfo(found.dtype).eps * both.detach()
    return found.where(there, 0) if squared else found.where(there, 1).sqrt().where(there, 0)


_ROUNDING = 8


class _Euclidean(Function):
    """da_i = Σ_j w_ij (a_i − b_j), db_j = Σ_i w_ij (b_j − a_i);  w = dD / D, or 2 dD of the square, 0 where D is."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, anchors: Tensor, columns: Tensor, squared: bool) -> Tensor:
        ctx.shared = hasattr(columns, "squares")
        squares: Tensor = columns.squares if ctx.shared else columns.square().sum(1)  # type: ignore[attr-defined]  # see shared_by_panels
        both = anchors.square().sum(1)[:, None] + squares
        found = torch.addmm(both, anchors, columns.T, alpha=-2)
        found *= torch.gt(found, both.mul_(_ROUNDING * torch.finfo(found.dtype).eps), out=both)
        if not squared:
            found.sqrt_()
        ctx.save_for_backward(anchors, columns, found)
        ctx.squared = squared
        return found

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        anchors, columns, found = ctx.saved_tensors

        def weigh(g: Tensor, d: Tensor) -> Tensor:
            w = torch.gt(d, 0, out=torch.empty_like(d)).mul_(g)
            return w.mul_(2) if ctx.squared else w.div_(d.clamp(min=torch.finfo(d.dtype).tiny))

        if (pairs := _pairs(gradient, anchors.shape[1])) is not None:
            i, j, g = pairs
            apart = weigh(g, found[i, j, None]) * (anchors[i] - columns[j])
            return _sums(i, apart, anchors), _sums(j, -apart, columns, sparse=ctx.shared), None
        w = weigh(gradient, found)
        of_anchors, of_columns = w @ columns.new_ones(len(columns), 1), w.t() @ anchors.new_ones(len(anchors), 1)
        of_anchors, of_columns = of_anchors * anchors, of_columns * columns
        return of_anchors.addmm_(w, columns, alpha=-1), of_columns.addmm_(w.t(), anchors, alpha=-1), None


def _others_beyond(x: Tensor, where: Tensor, beyond: float) -> Tensor:
    """x of the marked columns; the others are about ``beyond``, which no x that is finite comes near."""
    if x.device.type != "cpu":
        return x.where(where, beyond)
    others = torch.empty_like(x).copy_((~where).view(torch.uint8))
    return torch.add(x, others, alpha=beyond, out=others)


def _beyond(x: Tensor) -> float:
    return torch.finfo(x.dtype).max / 4


def log_sum_exp(x: Float[Tensor, "c N"], where: Bool[Tensor, "c N"]) -> Float[Tensor, " c"]:
    """log Σ exp x over the marked columns of each row; −inf, without gradient, where none is marked. All x are finite.

    Example:
        >>> log_sum_exp(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
        tensor([0.6931,   -inf])
    """
    if not is_dense():
        return _LogSumExp.apply(x, where)
    some = where.any(1)
    return x.masked_fill(~where & some[:, None], -torch.inf).logsumexp(1).where(some, -torch.inf)


class _LogSumExp(Function):
    """dx = softmax(x) dy, made already in the forward pass: the largest softmax is exp(largest x − y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Tensor) -> Tensor:
        marked = _others_beyond(x, where, -_beyond(x))
        largest = marked.amax(1)
        none = largest < -_beyond(x) / 2
        marked[none] = 0
        softmax = marked.softmax(1)
        ctx.save_for_backward(softmax, none)
        return (largest - softmax.amax(1).log_()).masked_fill_(none, -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, none = ctx.saved_tensors
        return softmax * gradient.masked_fill(none, 0)[:, None], None


def largest(x: Float[Tensor, "c N"], where: Bool[Tensor, "c N"], *, first: bool = False) -> Float[Tensor, " c"]:
    """The largest of the marked columns of each row; −inf, without gradient, where none is marked. All x are finite.

    Equally large ones share the gradient, so that it does not depend on their order; with ``first`` the first of them
    gets all of it, as from ``x.max(1)``.

    Example:
        >>> largest(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, False]]))
        tensor([1., -inf])
    """
    return _extreme(x, where, -1, first)


def smallest(x: Float[Tensor, "c N"], where: Bool[Tensor, "c N"], *, first: bool = False) -> Float[Tensor, " c"]:
    """The smallest of them; +inf where none is marked.

    Example:
        >>> smallest(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, True], [False, False]]))
        tensor([1., inf])
    """
    return _extreme(x, where, 1, first)


def _extreme(x: Tensor, where: Tensor, sign: int, first: bool) -> Tensor:
    if not is_dense():
        return _Extreme.apply(x, where, sign, first, x.grad_fn is getattr(x, "takes_pairs", False))
    some, nothing = where.any(1), sign * torch.inf
    marked = x.where(where | ~some[:, None], nothing)
    if first:
        return (marked.max(1) if sign < 0 else marked.min(1)).values.where(some, nothing)
    return (marked.amax(1) if sign < 0 else marked.amin(1)).where(some, nothing)


class _Extreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Tensor, sign: int, first: bool, pairs: bool) -> Tensor:
        marked = _others_beyond(x, where, sign * _beyond(x))
        found = marked.amax(1) if sign < 0 else marked.amin(1)
        none = sign * found > _beyond(x) / 2
        hit = torch.eq(marked, found[:, None], out=marked)
        equals = hit.sum(1)
        if first and int(equals.amax()) > 1:
            hit = torch.zeros_like(hit).scatter_(1, hit.argmax(1, keepdim=True), 1)
            equals = hit.sum(1)
        ctx.save_for_backward(none, equals, *(_places(hit, equals, none) if pairs else [hit]))
        ctx.shape = x.shape
        return found.masked_fill_(none, sign * torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        none, equals, *places = ctx.saved_tensors
        share = (gradient / equals).masked_fill(none, 0)
        if len(places) == 1:
            return places[0] * share[:, None], None, None, None, None
        i, j = places
        w = torch.sparse_coo_tensor(torch.stack([i, j]), share[i], ctx.shape, check_invariants=False)
        return w, None, None, None, None


def _places(hit: Tensor, equals: Tensor, none: Tensor) -> list[Tensor]:
    """Rows and columns of the ones in a matrix of 0 and 1, but for rows that have none to show."""
    if int(equals.amax()) == 1 and hit.shape[1] < 1 / torch.finfo(hit.dtype).eps:  # most often; a product tells which
        i = (~none).nonzero()[:, 0]
        return [i, (hit @ torch.arange(hit.shape[1], dtype=hit.dtype, device=hit.device))[i].long()]
    return list(hit.masked_fill_(none[:, None], 0).nonzero().unbind(1))


def any_in_row(mask: Bool[Tensor, "c N"]) -> Bool[Tensor, " c"]:
    """``mask.any(1)`` of at least one column.

    Example:
        >>> any_in_row(torch.eye(2, dtype=torch.bool))
        tensor([True, True])
    """
    return mask.view(torch.uint8).amax(1).bool()


def marked_columns(mask: Bool[Tensor, "c N"]) -> tuple[Int[Tensor, "c k"], Bool[Tensor, "c k"]]:
    """The marked columns of each row in order, k in the row with most, and which of them are there at all.

    Example:
        >>> marked_columns(torch.tensor([[True, False, True], [False, True, False]]))
        (tensor([[0, 2],
                [1, 0]]), tensor([[ True,  True],
                [ True, False]]))
    """
    rows, columns = mask.nonzero().unbind(1)
    counts = rows.bincount(minlength=len(mask))
    there = torch.arange(int(counts.max()) if len(rows) else 0, device=mask.device) < counts[:, None]
    return columns.new_zeros(there.shape).masked_scatter_(there, columns), there
