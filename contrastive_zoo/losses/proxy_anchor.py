"""Cosines of embeddings and class weights without a softmax over classes: ProxyAnchor and P2SGrad."""

from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.settings import Number, Positive, Reduction


class ProxyAnchor(ClassLoss):
    r"""Compute a loss whose anchors are proxies, and whose positives and negatives are the rows of the global batch.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; the proxies are ``weights``, [C, d], of :class:`ClassLoss`.
    With s the cosines of rows x and proxies p, X⁺(p) the rows of p's class and P⁺ the proxies that have some,

        loss = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X⁺(p)} exp(−α (s_xp − δ)))  +  1/C Σ_p log(1 + Σ_{x∉X⁺(p)} exp(α (s_xp + δ)))

    in nats per proxy. The sums over rows are two numbers per proxy, reduced over all ranks.

    Args:
        margin: δ, in units of the cosine.
        alpha: α > 0, dimensionless.

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


class P2SGrad(ClassLoss):
    r"""Compute the mean squared error of cosines to all C classes, whose gradient is the probability-to-similarity gradient.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; :class:`ClassLoss` documents ``weights``, [C, d].
    Dense: ``mse_loss(z @ w.T, one_hot(y))``, with z the unit rows, w the unit weights, y the labels.

        loss_i = 1/C Σ_j (z_i·w_j − [j = y_i])²

    The sum over classes is z_i·G z_i with G = Σ_j w_j w_jᵀ, a d × d matrix, so no N × C matrix exists. The value and the
    gradient of embeddings are those of pytorch-metric-learning's P2SGradLoss. That class overwrites its weights by
    their unit vectors at each call; here the gradient passes through their normalisation instead.

    Examples:
        >>> loss = P2SGrad(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([0, 0])).detach()   # 0 and (1 + 1) / 2
        tensor(0.5000)

    Source: Zhang et al. 2019, eq. 11, https://arxiv.org/abs/1905.02479
    """

    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        pairs = self.pairs(batch)
        z, w = pairs.embeddings, batch.shared(pairs.centers[:, 0])
        squares = (matmul(z, matmul(w.T, w)) * z).sum(1)
        of_target = (z * w.index_select(0, pairs.targets)).sum(1)
        return batch.reduce((squares - 2 * of_target + 1) / len(w), reduction=self.reduction)
