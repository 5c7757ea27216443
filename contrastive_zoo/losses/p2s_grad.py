"""P2SGrad: the squared error of cosines between rows and class weights, without margin and scale."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.settings import Reduction


class P2SGrad(ClassLoss):
    r"""Compute the mean squared error of cosines to all C classes, whose gradient is the probability-to-similarity gradient.

    Dense: ``mse_loss(z @ w.T, one_hot(y))``, with z the unit rows, w the unit weights, y the labels.

        loss_i = 1/C Σ_j (z_i·w_j − [j = y_i])²

    The sum over classes is z_i·G z_i with G = Σ_j w_j w_jᵀ, a d × d matrix, so no N × C matrix exists. The value and the
    gradient of embeddings are those of pytorch-metric-learning's P2SGradLoss. That class overwrites its weights by
    their unit vectors at each call; here the gradient passes through their normalisation instead.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, [C, d]; :class:`ClassLoss` documents how it is drawn and shared.

    Args:
        num_classes: C.
        embedding_size: d.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, or what any :class:`Loss` refuses.

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
        own = (z * w.index_select(0, pairs.targets)).sum(1)
        return batch.reduce((squares - 2 * own + 1) / len(w), reduction=self.reduction)
