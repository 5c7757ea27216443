"""Compute losses, and their derivatives by logits, from the whole matrix of a small batch: softmaxes, or sigmoids of pairs.

Each function returns losses, whose mean is the loss of the batch, and a function that computes the derivative of their sum
by logits. That function is called at most once: it overwrites what the losses were computed from.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy

Comparison = Literal["rows", "rows and columns", "views"]
"""The softmaxes of the loss: of each row over the columns; also of each column over the rows; or of all rows of two
views over each other."""

Terms = tuple[Tensor, Callable[[], Tensor]]

LARGEST_SCALE = 40.0
"""The exponentials of unit rows' logits, up to exp(1/t), and their sums are finite in float32 up to here."""


def softmaxes_by_one_exponential(logits: Tensor, comparison: Comparison, *, overwrite: bool) -> Terms:
    """Return cross-entropies of logits of at most 40: one exponential serves rows and columns, and both passes.

    Examples:
        >>> losses, weights = softmaxes_by_one_exponential(torch.zeros(2, 2), "rows", overwrite=False)
        >>> losses, weights()
        (tensor([[0.6931, 0.6931]]), tensor([[-0.5000,  0.5000],
                [ 0.5000, -0.5000]]))
    """
    n, views = len(logits), comparison == "views"
    e = logits.exp_() if overwrite else logits.exp()
    positive = e.diagonal(n // 2 if views else 0).clone()
    own = e.as_strided((2, 2, n // 2), (n // 2 * n, n // 2, n + 1)) if views else e.diagonal()
    own.zero_()  # the sums leave the positive out, so that it cancels nowhere
    others = torch.stack([e.sum(1), e.sum(0)]) if comparison == "rows and columns" else e.sum(1).view(-1, len(positive))

    def weights() -> Tensor:
        inverse = (others + positive).reciprocal_()
        of_positives = (inverse * others).sum(0)  # minus the sum of the others' weights
        if views:
            flat = inverse.view(-1)
            w = torch.add(flat[:, None], flat).mul_(e)
        else:
            of_rows = inverse[0].unsqueeze(1)
            w = e.mul_(of_rows if comparison == "rows" else of_rows + inverse[1])
        _of_pairs(w, views=views).sub_(of_positives)
        return w

    return (others / positive).log1p_(), weights


def softmaxes(logits: Tensor, comparison: Comparison) -> Terms:
    """Return cross-entropies of logits of any size, in few operations. Of two views' logits the diagonal is overwritten.

    Examples:
        >>> softmaxes(torch.tensor([[400.0, 0.0], [400.0, 0.0]]), "rows")[0]
        tensor([  0., 400.])
    """
    views, both = comparison == "views", comparison == "rows and columns"
    if views:  # a finite number, whose product with the weight 0 is 0
        logits.fill_diagonal_(torch.finfo(logits.dtype).min)
    shares = torch.log_softmax(torch.stack([logits, logits.T]) if both else logits, -1)
    w = shares.exp()
    of_pairs = _of_pairs(w, views=views)
    of_pairs.zero_()  # the sums leave the positive out, so that it cancels nowhere
    others = w.sum(-1).view_as(of_pairs)

    def weights() -> Tensor:
        of_pairs.sub_(others)
        if views:
            return w + w.T
        return w[0].add_(w[1].T) if both else w

    return cross_entropy(_of_pairs(shares, views=views), others.log()), weights


def sigmoids(logits: Tensor) -> Terms:
    """Return binary cross-entropies, summed over the pairs of a row, of which that on the diagonal is positive.

    Examples:
        >>> losses, weights = sigmoids(torch.zeros(2, 2))
        >>> losses, weights()
        (tensor([1.3863, 1.3863]), tensor([[-0.5000,  0.5000],
                [ 0.5000, -0.5000]]))
    """
    positive = logits.diagonal()
    positive.neg_()

    def weights() -> Tensor:
        logits.sigmoid_()
        positive.neg_()
        return logits

    return F.softplus(logits, threshold=40).sum(1), weights


def _of_pairs(x: Tensor, *, views: bool) -> Tensor:
    """Return a view of the positives: the diagonal of each matrix, or of the blocks of one view with the other."""
    n, width = len(x) // 2, len(x)
    return x.as_strided((2, n), (n * width - n, width + 1), n) if views else x.diagonal(dim1=-2, dim2=-1)
