"""Means and second moments of the rows of all ranks, with their gradient: d × d numbers, never N × N.

Two passes: rows are centred by the global mean first, so that nothing cancels, and then multiplied. Only sums over rows
travel, hence shards may be uneven or empty.
"""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.precision import product, without_autocast
from contrastive_zoo.world import Shards, World


@without_autocast
def centered(x: Float[Tensor, "n d"], *, shards: Shards, world: World) -> Float[Tensor, "n d"]:
    """My rows less the mean of all ranks' rows.

    Example:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> centered(torch.tensor([[1.0], [3.0]]), shards=Shards((2,)), world=ALONE)
        tensor([[-1.],
                [ 1.]])
    """
    # each rank goes on with the mean for its own rows only: gradients are summed
    return x - sum_over_ranks(x.sum(0), gradient="partial", world=world) / max(1, shards.total)


@without_autocast
def second_moments(x: Float[Tensor, "n d"], y: Float[Tensor, "n e"], *, world: World) -> Float[Tensor, "d e"]:
    """``X.T @ Y``, summed over the rows of all ranks and not divided; every rank must compute the same from it.

    Example:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> second_moments(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), world=ALONE)
        tensor([[11.]])
    """
    return sum_over_ranks(product(x.T, y), gradient="complete", world=world)


@without_autocast
def squared_sums(x: Float[Tensor, "n d"], *, world: World) -> Float[Tensor, " d"]:
    """The diagonal of ``second_moments(x, x)``.

    Example:
        >>> import torch
        >>> from contrastive_zoo.world import ALONE
        >>> squared_sums(torch.tensor([[1.0], [2.0]]), world=ALONE)
        tensor([5.])
    """
    return sum_over_ranks(x.square().sum(0), gradient="complete", world=world)


def off_diagonal(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The matrix with zeros on its diagonal.

    Example:
        >>> import torch
        >>> off_diagonal(torch.ones(2, 2))
        tensor([[0., 1.],
                [1., 0.]])
    """
    return matrix - matrix.diagonal().diag()
