"""InfoNCE: classify each query's own key among all keys of the global batch; CLIP's loss is its symmetric form."""

from dataclasses import replace

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.tower_pairs import TowerPairs
from contrastive_zoo.loss_base.families import TowerLoss
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.settings import Reduction, Temperature


class InfoNCE(TowerLoss):
    r"""Compute the cross-entropy of key i for query i; row i of queries belongs to row i of keys.

    With q, k the unit rows of all ranks and X(i) the extra negatives that query i sees,

        loss = mean_i [ log ( Σ_j exp(q_i·k_j / t) + Σ_{x∈X(i)} exp(q_i·x / t) )  −  q_i·k_i / t ]

    Without extra negatives this is ``cross_entropy(q @ k.T / t, arange(N))``; with ``symmetric``, it is
    the mean of that and of ``cross_entropy(k @ q.T / t, arange(N))``, the CLIP loss. The N × N matrix is never held.
    Without ``in_batch_negatives`` the first sum has one term, q_i·k_i: MoCo's loss, over the own key and the queue.
    MoCo v3 multiplies the loss by 2t: ``WeightedSum([InfoNCE(temperature=t)], weights=[2 * t])``, with keys detached.

    Called as ``loss(queries, keys, negatives)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d].
    - negatives: [m, d] are candidates of every query of every rank (m may differ between ranks); [n, m, d] are candidates
      of one query each. In the symmetric direction only queries are candidates.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        symmetric: whether to average with the direction from keys to queries.
        in_batch_negatives: whether other queries' keys are negatives. If not, pass ``negatives``, and not symmetric.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries (nats per query), ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: negatives of another width or number, no negatives without in-batch negatives, or what any
            :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> InfoNCE(temperature=1.0)(eye, eye)   # log(e + 1) − 1
        tensor(0.3133)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748; symmetric: Radford et al. 2021, fig. 3,
    https://arxiv.org/abs/2103.00020; without negatives in the batch: He et al. 2020, eq. 1,
    https://arxiv.org/abs/1911.05722
    """

    temperature: Temperature = 0.07
    symmetric: bool = False
    in_batch_negatives: bool = True
    normalize: bool = True
    reduction: Reduction = "mean"

    has_kernels = supports_ring = True

    def settings_problem(self) -> str | None:
        alone = self.symmetric is True and self.in_batch_negatives is False
        return super().settings_problem() or (_OWN_KEY_ONLY if alone else None)

    def inputs(self, queries: Tensor, keys: Tensor, negatives: Tensor | None = None) -> Inputs:
        stated = super().inputs(queries, keys, negatives)
        return replace(stated, problem=_OWN_KEY_ONLY) if negatives is None and not self.in_batch_negatives else stated

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        return pairs.cross_entropy(self.reduction, symmetric=self.symmetric, in_batch_negatives=self.in_batch_negatives)


_OWN_KEY_ONLY = (
    "in_batch_negatives=False leaves a query its own key and the negatives: pass negatives, and not symmetric."
)
