"""Leave the positive of an anchor that has only one out of its log-sum-exp, where positives are rows of the same class.

With one positive p the loss log Σ exp(s_j) − s_p and the weight 1 − softmax(s)_p of the positive cancel in a solved batch,
and without p in the sum they do not: see :mod:`contrastive_zoo.engine.cross_entropy`. With k positives the weights
1/k − softmax(s)_p do not cancel together, because the logits of positives differ.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo import devices


def class_numbers(ids: Int[Tensor, " n"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " c"]]:
    """Return the class of each row, 0, 1, …, and the number of rows of each class.

    On an accelerator there are as many counts as rows, 0 for classes that do not exist: to know the number of classes, the
    host would have to wait for the device. All ranks have as many, because the handshake compares their devices.

    Examples:
        >>> class_numbers(torch.tensor([7, 3, 7]))
        (tensor([1, 0, 1]), tensor([1, 2]))
    """
    if devices.on_cpu(ids):
        _, classes, counts = ids.unique(return_inverse=True, return_counts=True)
        return classes, counts
    ordered, order = ids.sort()
    begins = torch.zeros_like(ids)
    begins[1:] = ordered[1:] != ordered[:-1]
    classes = torch.empty_like(ids).scatter_(0, order, begins.cumsum(0))
    return classes, torch.zeros_like(ids).index_add_(0, classes, torch.ones_like(ids))


def class_numbers_as_floats(ids: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the class of each row as a float that represents it exactly: a CPU vectorises comparisons of floats.

    Examples:
        >>> class_numbers_as_floats(torch.tensor([2**60, 2**60 + 1]))
        tensor([0., 1.])
    """
    return class_numbers(ids)[0].to(torch.float32 if len(ids) < 2**24 else torch.float64)


def only_positives(classes: Int[Tensor, " n"], counts: Int[Tensor, " c"]) -> Int[Tensor, " n"] | None:
    """Return for each row the index of the other row of its class, or its own index where others are none or several.

    Args:
        classes: the class of each row, 0 … c − 1.
        counts: the number of rows of each class.

    Returns:
        The indices, or None if no class has two rows and that is known without waiting for an accelerator.

    Examples:
        >>> only_positives(torch.tensor([1, 0, 2, 1, 2, 2]), torch.tensor([1, 2, 3]))
        tensor([3, 1, 2, 0, 4, 5])
    """
    has_two = counts == 2
    if devices.on_cpu(counts) and not has_two.any():
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
    if tile.shape[1] == 0:
        return
    column = excluded.clamp(0, tile.shape[1] - 1)
    logits = tile.gather(1, column[:, None])
    tile.scatter_(1, column[:, None], logits.masked_fill_((column == excluded)[:, None], -torch.inf))
