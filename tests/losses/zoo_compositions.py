"""Compositions for the conformance table."""

from typing import Any

from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.losses.compositions import Matryoshka, WeightedSum
from tests.zoo import Entry, dense_info_nce, dense_nt_xent, info_nce


def summed(**settings: Any) -> WeightedSum:
    return WeightedSum([cz.NTXent(**settings), cz.InfoNCE(**settings)], weights=[1.0, 0.25])


def dense_summed(*views: Tensor, temperature: Any) -> Tensor:
    return dense_nt_xent(*views, temperature=temperature) + 0.25 * dense_info_nce(*views, temperature=temperature)


def nested(**settings: Any) -> Matryoshka:
    """Prefixes of width 1, the only ones that every batch has."""
    return Matryoshka(cz.InfoNCE(normalize=False, **settings), dims=(1, 1), weights=[0.5, 2.0])


def dense_nested(*views: Tensor, temperature: Any) -> Tensor:
    queries, keys = (view[:, :1] for view in views)
    return 2.5 * info_nce(queries, keys, 1 / temperature)


ENTRIES = [
    Entry("WeightedSum", summed, dense_summed),
    Entry("Matryoshka", nested, dense_nested),
]
