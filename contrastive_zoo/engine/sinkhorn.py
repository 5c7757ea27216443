"""Assign the embeddings of all ranks softly to prototypes, so that every prototype gets an equal share."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import without_autocast


@torch.no_grad()
@without_autocast
def balanced_assignment(
    batch: Batch, scores: Float[Tensor, "n K"], *, epsilon: float | Tensor, iterations: int
) -> Float[Tensor, "n K"]:
    """Run Sinkhorn's iterations on ``exp(scores / epsilon)`` of all ranks; return the local rows, which each sum to 1.

    The result has no gradient. The iterations run on logarithms, so that a small epsilon does not overflow. One
    iteration gives each prototype an equal share of all N rows, by a reduction of K numbers, and then normalises rows.

    Examples:
        >>> both = torch.tensor([[1.0, 0.0], [1.0, 0.0]])   # two rows whose best prototype is the same
        >>> balanced_assignment(Batch({}, {}), both, epsilon=0.1, iterations=3)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    log_q = scores / epsilon
    for _ in range(iterations):
        share = batch.log_sum_exp(torch.logsumexp(log_q, 0), gradient="complete")
        log_q = (log_q - share).log_softmax(1)
    return log_q.softmax(1)
