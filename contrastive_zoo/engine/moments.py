"""Compute means and second moments over the embeddings of all ranks, with gradients: d × d numbers, never N × N.

Two passes run: embeddings are first centred by the global mean, so that nothing cancels, and then multiplied. Ranks
exchange sums over rows only, so shards may be uneven or empty.
"""

import torch  # noqa: F401 - the examples use it
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul, without_autocast


@without_autocast
def centered(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return the local rows minus the mean of all ranks' rows.

    Examples:
        >>> from contrastive_zoo.world import Shards
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> centered(Batch({"embeddings": x}, {"embeddings": Shards((2,))}), x)
        tensor([[-1.],
                [ 1.]])
    """
    # each rank uses the mean for its local rows only, so gradients are summed over ranks
    return x - batch.sum(x.sum(0), gradient="partial") / max(1, batch.total)


@without_autocast
def second_moments(batch: Batch, x: Float[Tensor, "n d"], y: Float[Tensor, "n e"]) -> Float[Tensor, "d e"]:
    """Return ``X.T @ Y``, summed over the rows of all ranks, not divided; every rank must derive the same value from it.

    Examples:
        >>> second_moments(Batch({}, {}), torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]))
        tensor([[11.]])
    """
    return batch.sum(matmul(x.T, y), gradient="complete")


@without_autocast
def squared_sums(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Return the diagonal of ``second_moments(batch, x, x)``.

    Examples:
        >>> squared_sums(Batch({}, {}), torch.tensor([[1.0], [2.0]]))
        tensor([5.])
    """
    return batch.sum(x.square().sum(0), gradient="complete")


@without_autocast
def divided_by_norms(batch: Batch, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return rows whose features are divided by their norms over all ranks' rows; a feature of zeros stays zero.

    Examples:
        >>> divided_by_norms(Batch({}, {}), torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor([[0.6000, 0.0000],
                [0.8000, 0.0000]])
    """
    # each rank divides its local rows only, so gradients are summed over ranks
    squares = batch.sum(x.square().sum(0), gradient="partial")
    return x / squares.clamp(min=LEAST_SQUARE).sqrt()


LEAST_SQUARE = 1e-24
"""The square of the smallest norm by which ``torch.nn.functional.normalize`` divides."""


def off_diagonal(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Return the matrix with zeros on its diagonal.

    Examples:
        >>> off_diagonal(torch.ones(2, 2))
        tensor([[0., 1.],
                [1., 0.]])
    """
    return matrix - matrix.diagonal().diag()
