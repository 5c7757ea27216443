"""Sparse embeddings: activations that are few, and spread evenly over features."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Summed
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Number


class FLOPS(Loss, engine="statistics"):
    r"""Compute the sum of squared mean activations, which makes sparse embeddings cheap to compare.

    With W the embeddings of all ranks, which are not normalised, of queries or of documents and negatives together,

        a_j(W) = mean_i |W_ij|
        loss   = λ_q Σ_j a_j(queries)²  +  λ_d Σ_j a_j(documents)²

    Called as ``loss(queries)``, ``loss(queries, documents)`` or ``loss(queries, documents, negatives)``, [n, d] each, and
    negatives [m, d] or [n, k, d], as :class:`MNRL` and :class:`InfoNCE` are. SPLADE's loss is their sum,
    ``WeightedSum([MNRL(temperature=1.0, normalize=False), FLOPS(query_weight=5e-5, document_weight=3e-5)])``.

    Args:
        query_weight: λ_q, of the first argument; 0 if queries are not learnt.
        document_weight: λ_d, of the others.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> FLOPS()(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))   # 1² + 2²
        tensor(5.)

    Source: Paria et al. 2020, eq. 4, https://arxiv.org/abs/2004.05665; SPLADE: Formal et al. 2021, eq. 4,
    https://arxiv.org/abs/2107.05720
    """

    query_weight: Number = 1.0
    document_weight: Number = 1.0

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        documents: Float[Tensor, "n d"] | None = None,
        negatives: Float[Tensor, "m d"] | Float[Tensor, "n k d"] | None = None,
    ) -> Inputs:
        return Inputs.of({"queries": queries, "documents": documents, "negatives": negatives})

    def entries(self, stated: CallInputs) -> list[Entry]:
        towers = min(2, len(stated.inputs.rows))
        return [stated.held(1.6), Summed(towers * stated.width * stated.wide)]

    def compute(self, batch: Batch) -> Tensor:
        settings, names = batch.settings, [*batch.rows]
        towers = [tower for tower in (names[:1], names[1:]) if tower]
        means = batch.sum(torch.stack([_part_of_mean(batch, tower) for tower in towers]), gradient="complete")
        weights = (settings.query_weight, settings.document_weight)
        return torch.stack([w * x for w, x in zip(weights, means.square().sum(1), strict=False)]).sum()


def _part_of_mean(batch: Batch, names: list[str]) -> Float[Tensor, " d"]:
    """Return this rank's part of the mean activations of the embeddings of these names, whose sum over ranks is the mean."""
    rows = [batch.prepared(batch.rows[name], normalize=False) for name in names]
    total = sum(batch.shards[name].total * x.shape[1:-1].numel() for name, x in zip(names, rows, strict=True))
    return torch.stack([x.abs().flatten(0, -2).sum(0) for x in rows]).sum(0) / total
