"""Compute means and second moments over the embeddings of all ranks, with gradients: d × d numbers, never N × N.

Two passes run: embeddings are first centred by the global mean, so that nothing cancels, and then multiplied. Ranks
exchange sums over rows only, so shards may be uneven or empty.
"""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.world import Shards, World


@without_autocast
def centered(x: Float[Tensor, "n d"], *, shards: Shards, world: World) -> Float[Tensor, "n d"]:
    """Return the local rows minus the mean of all ranks' rows.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> centered(torch.tensor([[1.0], [3.0]]), shards=Shards((2,)), world=ALONE)
        tensor([[-1.],
                [ 1.]])
    """
    # each rank uses the mean for its local rows only, so gradients are summed over ranks
    return x - sum_over_ranks(x.sum(0), gradient="partial", world=world) / max(1, shards.total)


@without_autocast
def second_moments(x: Float[Tensor, "n d"], y: Float[Tensor, "n e"], *, world: World) -> Float[Tensor, "d e"]:
    """Return ``X.T @ Y``, summed over the rows of all ranks, not divided; every rank must derive the same value from it.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> second_moments(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), world=ALONE)
        tensor([[11.]])
    """
    return sum_over_ranks(matmul(x.T, y), gradient="complete", world=world)


@without_autocast
def squared_sums(x: Float[Tensor, "n d"], *, world: World) -> Float[Tensor, " d"]:
    """Return the diagonal of ``second_moments(x, x)``.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> squared_sums(torch.tensor([[1.0], [2.0]]), world=ALONE)
        tensor([5.])
    """
    return sum_over_ranks(x.square().sum(0), gradient="complete", world=world)


def off_diagonal(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Return the matrix with zeros on its diagonal.

    Examples:
        >>> import torch
        >>> off_diagonal(torch.ones(2, 2))
        tensor([[0., 1.],
                [1., 0.]])
    """
    return matrix - matrix.diagonal().diag()
