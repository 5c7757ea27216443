"""All tables of losses under test together, and compositions."""

from typing import Any

import torch
from torch import Tensor

import contrastive_zoo as cz
from tests.losses import zoo_labelled, zoo_margins, zoo_pairs, zoo_softmax, zoo_sogclr, zoo_statistics, zoo_weights
from tests.losses.zoo_statistics import dense_flops
from tests.zoo import ZOO, Entry, dense_info_nce, dense_nt_xent, info_nce


def summed(**settings: Any) -> cz.WeightedSum:
    return cz.WeightedSum([cz.NTXent(**settings), cz.InfoNCE(**settings)], weights=[1.0, 0.25])


def dense_summed(*views: Tensor, temperature: Any) -> Tensor:
    return dense_nt_xent(*views, temperature=temperature) + 0.25 * dense_info_nce(*views, temperature=temperature)


def nested(**settings: Any) -> cz.Matryoshka:
    """Prefixes of width 1, the only ones that every batch has."""
    return cz.Matryoshka(cz.InfoNCE(normalize=False, **settings), dims=(1, 1), weights=[0.5, 2.0])


def dense_nested(*views: Tensor, temperature: Any) -> Tensor:
    queries, keys = (view[:, :1] for view in views)
    return 2.5 * info_nce(queries, keys, 1 / temperature)


def splade(**settings: Any) -> cz.WeightedSum:
    return cz.WeightedSum([cz.MNRL(normalize=False, **settings), cz.FLOPS(query_weight=0.5)], weights=[1.0, 0.25])


def dense_splade(q: Tensor, d: Tensor, n: Tensor, temperature: Any) -> Tensor:
    return info_nce(q, torch.cat([d, n]), 1 / temperature) + 0.25 * dense_flops(q, d, n, query_weight=0.5)


FAMILIES = (zoo_softmax, zoo_labelled, zoo_margins, zoo_pairs, zoo_weights, zoo_statistics, zoo_sogclr)
COMPOSITIONS = [
    Entry("WeightedSum", summed, dense_summed),
    Entry("Matryoshka", nested, dense_nested),
    Entry("WeightedSum, SPLADE", splade, dense_splade, views=3),
]
WHOLE_ZOO = [*ZOO, *(entry for family in FAMILIES for entry in family.ENTRIES), *COMPOSITIONS, *zoo_pairs.TOKENS]
EVERY = [*WHOLE_ZOO, *zoo_labelled.ORDERED]
