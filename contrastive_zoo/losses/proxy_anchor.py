"""ProxyAnchor: each proxy is an anchor for all rows of the batch, with the hardest rows weighted most."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.settings import Number, Positive


class ProxyAnchor(ClassLoss):
    r"""Compute a loss whose anchors are proxies, and whose positives and negatives are the rows of the global batch.

    With s the cosines of rows x and proxies p, X⁺(p) the rows of p's class and P⁺ the proxies that have some,

        loss = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X⁺(p)} exp(−α (s_xp − δ)))  +  1/C Σ_p log(1 + Σ_{x∉X⁺(p)} exp(α (s_xp + δ)))

    in nats per proxy. The sums over rows are two numbers per proxy, reduced over all ranks.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, the proxies [C, d]; :class:`ClassLoss` documents how it is drawn and shared.

    Args:
        num_classes: C.
        embedding_size: d.
        margin: δ, in units of the cosine.
        alpha: α > 0, dimensionless.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, proxies of another shape, an alpha <= 0, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = ProxyAnchor(2, 2, margin=0.0, alpha=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(1 + 1/e) + log 2
        tensor(1.0064)

    Source: Kim et al. 2020, eq. 4, https://arxiv.org/abs/2003.13911
    """

    margin: Number = 0.1
    alpha: Positive = 32.0

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.settings
        positive, negative, counts = self.pairs(batch).log1p_sum_exp_by_class(settings.margin, settings.alpha)
        return positive.sum() / (counts > 0).sum() + negative.mean()  # a proxy without such rows has 0
