"""MaxSimPairwise: each query's own document against the hardest other one, by late-interaction scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.loss_base.late_interaction import LateInteractionLoss, Scores
from contrastive_zoo.loss_base.settings import Temperature


class MaxSimPairwise(LateInteractionLoss):
    r"""Compute the softplus of the hardest document's score minus that of the query's own.

    With S the scores of :class:`MaxSim`, of the documents and negatives D of all ranks,

        loss = mean_i log(1 + exp( (max_{j∈D, j≠i} S_ij − S_ii) / t ))

    Equal to colpali-engine's ``ColbertPairwiseCELoss()`` on one process, for unit tokens without padding; releases that
    normalise scores have ``token_reduction="mean"``. A query without another document does not count. Documents of equal
    score share the gradient of the maximum.

    Called as ``loss(queries, documents, query_mask, document_mask, negatives, negative_mask)``:

    - queries: [n, a, d] tokens; n and the number of tokens a may differ between ranks.
    - documents: [n, b, d] tokens; document i belongs to query i, b may differ between ranks.
    - query_mask: [n, a], which tokens are valid (not 0); at least one of each query. None is all of them.
    - document_mask: [n, b], likewise.
    - negatives: [m, c, d] tokens of hard negatives, candidates of every query of every rank; m and c may differ between
      ranks. If one rank passes them, all must: a rank without any passes [0, 1, d].
    - negative_mask: [m, c], likewise.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        token_reduction: ``"sum"`` over the query's tokens, or ``"mean"``.
        normalize: normalise each token to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: as :class:`MaxSim`.

    Examples:
        >>> tokens = torch.eye(2)[:, None].repeat(1, 3, 1)               # 3 equal tokens each
        >>> MaxSimPairwise()(tokens, tokens, torch.tensor([[1, 0, 0], [1, 0, 0]]))   # log(1 + e⁻¹)
        tensor(0.3133)

    Source: Faysse et al. 2024 (ColPali), §4.1, https://arxiv.org/abs/2407.01449
    """

    temperature: Temperature = 1.0

    def compute(self, batch: Batch) -> Tensor:
        result = self.scores(batch)
        losses = _losses(result, batch.scale(batch.settings.temperature))
        counts = torch.full_like(losses, result.scores.shape[1] > 1, dtype=torch.bool)
        return batch.reduce(losses, counts, reduction=self.reduction)


@without_autocast
def _losses(found: Scores, scale: float | Tensor) -> Tensor:
    others = found.scores.masked_fill(found.own, -torch.inf)
    hardest = others.amax(1) if found.scores.shape[1] > 1 else torch.zeros_like(found.positive)
    return F.softplus(scale * (hardest - found.positive), threshold=40)
