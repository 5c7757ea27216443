"""Recipes that compute the loss of the wrong samples: local ones, or gathered ones in a wrong order or with wrong labels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.testing.gallery.recipe import (
    DenseInfoNCE,
    dense_sup_con,
    gather_detached,
    rank_and_size,
    recipe,
    scale_gradient,
    shard_sizes,
    symmetric_cross_entropy,
)


@recipe("local negatives", mistake="local negatives")
def _() -> Any:
    """no gather: each rank computes the loss of its local samples"""
    return DenseInfoNCE()


@recipe("views split wrongly", mistake="views split wrongly")
def _() -> Any:
    """`[view1; view2]` gathered in one tensor and split in half: P N P N read as P P N N"""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        both = all_gather(F.normalize(torch.cat([view1, view2]), dim=1))
        return symmetric_cross_entropy(3.0 * both[: len(both) // 2] @ both[len(both) // 2 :].T)

    return loss


@recipe("[W, n, d] folded wrongly", mistake="views split wrongly")
def _() -> Any:
    """Lightning's `all_gather` returns [W, n, d]; the samples of one view are interleaved, those of the other are not"""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        a, b = (all_gather(F.normalize(view, dim=1)) for view in (view1, view2))
        local_index = [index for n in shard_sizes(view2) for index in range(n)]
        interleaved = torch.tensor(sorted(range(len(b)), key=lambda row: local_index[row]), dtype=torch.int64)
        return symmetric_cross_entropy(3.0 * a @ b[interleaved].T)

    return loss


@recipe("own rank first", mistake="own rank first", call="labels")
def _() -> Any:
    """`[local, others]`: results that depend on the order of samples differ between ranks"""

    def local_first(x: Tensor) -> Tensor:
        gathered = gather_detached(x)
        local = gathered.pop(rank_and_size()[0])
        return torch.cat([local if not x.requires_grad else x, *gathered])

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        z, y = local_first(embeddings), local_first(labels)
        z = scale_gradient(rank_and_size()[1], z)
        weight = 1 / torch.arange(1, len(z) + 1)  # stands for a miner, a queue or a tie, which depend on the order
        return dense_sup_con(z, y) + weight @ z.square().sum(1)

    return loss


@recipe("labels not gathered", mistake="labels not gathered", call="labels")
def _() -> Any:
    """embeddings gathered, labels not: the embeddings of all ranks get this rank's labels"""

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        z = all_gather(embeddings)
        repeated = labels.repeat(len(z) // max(len(labels), 1) + 1)[: len(z)] if len(labels) else torch.zeros(len(z))
        return dense_sup_con(z, repeated)

    return loss


@recipe("labels by position", mistake="labels by position")
def _() -> Any:
    """ids from `arange(n)` on every rank: the first samples of all ranks become positives"""

    def loss(view1: Tensor, view2: Tensor) -> Tensor:
        ids = torch.arange(len(view1)).repeat(2)
        return dense_sup_con(all_gather(torch.cat([view1, view2])), all_gather(ids))

    return loss
