"""MIL-NCE: each video has several candidate texts, some of which match."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.engine.tower_pairs import TowerPairs
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Reduction, Temperature
from contrastive_zoo.ranks.row_checks import described, rows_problem


class MILNCE(Loss):
    r"""Compute multiple-instance NCE: the candidates of a video against all pairs with another sample.

    With v the videos and y_i1 … y_ik the candidate texts of video i, of all ranks,

        P_i = Σ_k exp(v_i·y_ik / t)
        N_i = Σ_{j≠i} Σ_k [ exp(v_i·y_jk / t) + exp(v_j·y_ik / t) ]
        loss = mean_i [ log(P_i + N_i) − log P_i ]

    which is the paper's equation, ``denominator="exact"``. The authors' code counts the positives once in
    either direction, log(2 P_i + N_i), so that the loss of a perfect model is log 2 per video: ``"reference"``.

    Called as ``loss(videos, texts)``:

    - videos: [n, d], n may differ between ranks.
    - texts: [n, k, d], the same k everywhere.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable. The paper has none.
        denominator: ``"exact"`` or ``"reference"``.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' videos (nats per video), ``"sum"``, or ``"none"`` for the local videos, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: texts that are not k ≥ 1 per video, an unknown denominator, or what any :class:`Loss` refuses.

    Examples:
        >>> MILNCE()(torch.eye(2), torch.eye(2)[:, None])   # log(e + 2) − 1
        tensor(0.5514)

    Source: Miech et al. 2020, eq. 1, https://arxiv.org/abs/1912.06430
    """

    temperature: Temperature = 1.0
    denominator: Literal["exact", "reference"] = "exact"
    normalize: bool = False
    reduction: Reduction = "mean"

    supports_ring = True

    def inputs(self, videos: Float[Tensor, "n d"], texts: Float[Tensor, "n k d"]) -> Inputs:
        problem = rows_problem("videos", videos)
        fits = texts.ndim == 3 and videos.ndim > 0 and len(texts) == len(videos) and texts.shape[1] >= 1
        if problem is None and (not fits or texts.shape[-1] != videos.shape[-1] or texts.dtype != videos.dtype):
            problem = (
                f"texts are k >= 1 candidates per video, [n, k, d], got "
                f"{described(texts)} for videos {described(videos)}."
            )
        return Inputs({"videos": videos, "texts": texts}, problem)

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        other_texts, other_videos, positives = pairs.sums(symmetric=True)
        assert other_videos is not None  # because it is symmetric
        of_video = other_videos.view(batch.rows["texts"].shape[:2])
        negative = log_sum_exp(torch.cat([other_texts[:, None], of_video], 1), 1)
        positive = torch.stack(positives).logsumexp(0)
        if self.denominator == "reference":  # log(2 P + N) − log P = log 2 + log(1 + N / 2P)
            losses = math.log(2) + cross_entropy(positive, negative - math.log(2))
        else:
            losses = cross_entropy(positive, negative)
        return batch.reduce(losses, reduction=self.reduction)
