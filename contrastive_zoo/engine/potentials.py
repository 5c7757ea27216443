"""Sum the Gaussian potentials of all pairs of unit rows, which are exponentials of similarities."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.softmax import self_log_sum_exp


def log_potentials(batch: Batch, views: Sequence[Float[Tensor, "n d"]], scale: float | Tensor) -> Float[Tensor, " v"]:
    """Return of each view ``log Σ_{i≠j} exp(scale · z_i·z_j)`` over the pairs of all ranks' rows.

    Args:
        batch: says how rows are split over ranks; there are two rows or more.
        views: the local unit rows of each view.
        scale: the factor of similarities.

    Examples:
        >>> from contrastive_zoo.world import Shards
        >>> batch = Batch({"view 0": torch.eye(2)}, {"view 0": Shards((2,))})
        >>> log_potentials(batch, [torch.eye(2)], 1.0)   # log(e⁰ + e⁰)
        tensor([0.6931])
    """
    shards, world = batch.samples, batch.world
    sums = [self_log_sum_exp(z, scale=scale, unit_norm=True, shards=shards, world=world)[0].logsumexp(0) for z in views]
    return batch.log_sum_exp(torch.stack(sums), gradient="complete")
