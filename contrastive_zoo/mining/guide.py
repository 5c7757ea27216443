"""False negatives by the scores of a better model."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from contrastive_zoo.row_checks import described

Guide: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of query indices [p] and corpus indices [p] that returns scores [p]."""


def guided(
    guide: Guide, query: Tensor, positives: Tensor, candidates: Tensor, allowed: Tensor, margin: float
) -> Tensor:
    """Return which candidates the guide takes for negatives."""

    def scores(which: Tensor, corpus: Tensor, otherwise: float) -> Tensor:
        pairs = which.nonzero(as_tuple=True)
        found = torch.as_tensor(guide(query[pairs[0]], corpus[pairs])).double().cpu()
        if found.shape != pairs[0].shape or found.isnan().any():
            raise ValueError(f"it returns one number per pair, {len(pairs[0])}, got {described(found)}.")
        return torch.full(which.shape, otherwise, dtype=torch.float64).index_put(pairs, found)

    if not len(query):
        return allowed
    worst = scores(positives >= 0, positives, torch.inf)
    lowest = worst.amin(1, keepdim=True) if positives.shape[1] else torch.full((len(query), 1), torch.inf)
    return scores(allowed, candidates, torch.inf) <= lowest - margin
