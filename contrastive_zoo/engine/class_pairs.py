"""Leave the positive of an anchor that has only one out of its log-sum-exp, where positives are rows of the same class.

With one positive p the loss log Σ exp(s_j) − s_p and the weight 1 − softmax(s)_p of the positive cancel in a solved batch,
and without p in the sum they do not: see :mod:`contrastive_zoo.engine.cross_entropy`. With k positives the weights
1/k − softmax(s)_p do not cancel together, because the logits of positives differ.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def only_positives(classes: Int[Tensor, " n"], counts: Int[Tensor, " c"]) -> Int[Tensor, " n"] | None:
    """Return for each row the index of the other row of its class, or its own index where others are none or several.

    Args:
        classes: the class of each row, 0 … c − 1.
        counts: the number of rows of each class.

    Returns:
        The indices, or None if no class has two rows.

    Examples:
        >>> only_positives(torch.tensor([1, 0, 2, 1, 2, 2]), torch.tensor([1, 2, 3]))
        tensor([3, 1, 2, 0, 4, 5])
    """
    has_two = counts == 2
    if not has_two.any():
        return None
    index = torch.arange(len(classes), device=classes.device)
    index_sums = counts.new_zeros(len(counts)).index_add_(0, classes, index)
    return (index_sums[classes] - index).where(has_two[classes], index)


def clear_excluded(tile: Float[Tensor, "h w"], excluded: Int[Tensor, " h"]) -> None:
    """Write −inf over one logit of each row: that of the column ``excluded``, if it is one of the tile's.

    Examples:
        >>> tile = torch.zeros(3, 2)
        >>> clear_excluded(tile, torch.tensor([1, 7, -3]))
        >>> tile
        tensor([[0., -inf],
                [0., 0.],
                [0., 0.]])
    """
    rows = ((excluded >= 0) & (excluded < tile.shape[1])).nonzero().squeeze(1)
    tile[rows, excluded[rows]] = -torch.inf
