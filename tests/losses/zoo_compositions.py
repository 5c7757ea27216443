"""Compositions for the conformance table."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.losses.matryoshka import Matryoshka
from contrastive_zoo.losses.weighted_sum import WeightedSum
from tests.zoo import Entry


def nt_xent(view1: Tensor, view2: Tensor, temperature: Any) -> Tensor:
    """Pair by pair."""
    z, losses = F.normalize(torch.cat([view1, view2]), dim=1), []
    for i in range(len(z)):
        others = torch.cat([z[:i], z[i + 1 :]]) @ z[i] / temperature
        losses.append(others.logsumexp(0) - z[(i + len(view1)) % len(z)] @ z[i] / temperature)
    return torch.stack(losses).mean()


def info_nce(queries: Tensor, keys: Tensor, temperature: Any) -> Tensor:
    logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(queries)))


def summed(**settings: Any) -> WeightedSum:
    return WeightedSum([cz.NTXent(**settings), cz.InfoNCE(**settings)], weights=[1.0, 0.25])


def dense_summed(*views: Tensor, temperature: Any) -> Tensor:
    return nt_xent(*views, temperature=temperature) + 0.25 * info_nce(*views, temperature=temperature)


def nested(**settings: Any) -> Matryoshka:
    """Prefixes of width 1, the only ones that every batch has."""
    return Matryoshka(cz.InfoNCE(normalize=False, **settings), dims=(1, 1), weights=[0.5, 2.0])


def dense_nested(*views: Tensor, temperature: Any) -> Tensor:
    queries, keys = (view[:, :1] for view in views)
    return 2.5 * F.cross_entropy(queries @ keys.T / temperature, torch.arange(len(queries)))


ENTRIES = [
    Entry("WeightedSum", summed, dense_summed),
    Entry("Matryoshka", nested, dense_nested),
]
