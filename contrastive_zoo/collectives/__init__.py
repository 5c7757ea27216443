"""The collectives of torch.distributed as differentiable functions, each with its adjoint beside it.

The gradient. The ranks together compute one number L. A tensor that lives on several ranks is several variables, one per
rank, and each rank's gradient is the derivative of L with respect to its own variable. A collective is a linear map, and
its adjoint is the transposed matrix: if the forward pass copies, the backward pass sums; if it sums, it copies.

| forward                  | backward (``gradient="partial"``) | backward (``gradient="complete"``) |
|--------------------------|-----------------------------------|------------------------------------|
| all_reduce(sum)          | all_reduce(sum)                   | the gradient itself                |
| all_reduce(mean)         | all_reduce(sum) / W               | the gradient itself / W            |
| all_reduce(max)          | all_reduce(sum), to the winners   | the gradient itself, to the winners|
| all_gather               | reduce_scatter(sum)               | this rank's slice                  |
| reduce(sum) to dst       | broadcast from dst                |                                    |
| broadcast from src       | reduce(sum) to src                |                                    |
| scatter from src         | gather to src                     |                                    |
| gather to dst            | scatter from dst                  |                                    |
| reduce_scatter(sum)      | all_gather                        |                                    |
| replicated (no message)  | all_reduce(sum)                   |                                    |

``gradient="complete"`` is for results from which every rank computes the same L: each rank then holds the complete
derivative, and a sum of W equal copies would be W times too large.

Every rank must run the backward pass through its result, in the same order, as it must run the forward pass. A message of
either pass raises a ``CommunicationError`` if another rank failed, died or is late.
"""

from contrastive_zoo.collectives.adjoints import Gradient, gather_together, scale_gradient
from contrastive_zoo.collectives.functions import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    mean_over_ranks,
    reduce,
    reduce_scatter,
    replicated,
    scatter,
    sum_over_ranks,
)
from contrastive_zoo.collectives.transport import (
    Reduction,
    broadcast_in_place,
    derived,
    exchange_rows,
    extreme_over_ranks,
    gather_rows,
    narrowest,
    packed,
    reduce_scatter_rows,
    scatters_sums,
    start_gather,
)

__all__ = [
    "Gradient",
    "Reduction",
    "all_gather",
    "all_reduce",
    "broadcast",
    "broadcast_in_place",
    "derived",
    "exchange_rows",
    "extreme_over_ranks",
    "gather",
    "gather_rows",
    "gather_together",
    "mean_over_ranks",
    "narrowest",
    "packed",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_rows",
    "replicated",
    "scale_gradient",
    "scatter",
    "scatters_sums",
    "start_gather",
    "sum_over_ranks",
]
