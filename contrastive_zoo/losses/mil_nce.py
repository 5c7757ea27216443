"""MIL-NCE: each video has several candidate texts, some of which match."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy, log_sum_exp
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.softmax import cross_log_sum_exp
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import rows_problem, word_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows, round_to_input_dtype
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World

Denominator = Literal["exact", "reference"]


@checked
def mil_nce(
    videos: Float[Tensor, "n d"],
    texts: Float[Tensor, "n k d"],
    *,
    temperature: float | Tensor = 1.0,
    denominator: Denominator = "exact",
    normalize: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute multiple-instance NCE: the candidates of a video against all pairs with another sample.

    With v the videos and y_i1 … y_ik the candidate texts of video i, of all ranks,

        P_i = Σ_k exp(v_i·y_ik / t)
        N_i = Σ_{j≠i} Σ_k [ exp(v_i·y_jk / t) + exp(v_j·y_ik / t) ]
        loss = mean_i [ log(P_i + N_i) − log P_i ]

    which is the paper's equation, ``denominator="exact"``. The authors' code counts the positives once in
    either direction, log(2 P_i + N_i), so that the loss of a perfect model is log 2 per video: ``"reference"``.

    Args:
        videos: [n, d], n may differ between ranks.
        texts: [n, k, d], the same k everywhere.
        temperature: t > 0, dimensionless; a tensor is learnable. The paper has none.
        denominator: ``"exact"`` or ``"reference"``.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' videos (nats per video), ``"sum"``, or ``"none"`` for the local videos, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: texts that are not k ≥ 1 per video, an unknown denominator, or what any :class:`Loss` refuses.

    Examples:
        >>> mil_nce(torch.eye(2), torch.eye(2)[:, None])   # log(e + 2) − 1
        tensor(0.5514)

    Source: Miech et al. 2020, eq. 1, https://arxiv.org/abs/1912.06430
    """
    problem = rows_problem("videos", videos)
    fits = texts.ndim == 3 and videos.ndim > 0 and len(texts) == len(videos) and texts.shape[1] >= 1
    if problem is None and (not fits or texts.shape[-1] != videos.shape[-1] or texts.dtype != videos.dtype):
        problem = f"texts are k >= 1 candidates per video, [n, k, d], got {kind(texts)} for videos {kind(videos)}."
    problem = problem or _settings_problem(denominator)
    settings: dict[str, Any] = {"temperature": temperature, "denominator": denominator}
    named = {"videos": videos, "texts": texts}
    shards, *_ = begin(
        "MILNCE", named, problem=problem, reduction=reduction, normalize=normalize, world=world, **settings
    )
    scale = logit_scale(temperature, world)
    v, y = (
        round_to_input_dtype(prepare_rows(rows, normalize=normalize, world=world), rows, world)
        for rows in (videos, texts)
    )

    other_texts, other_videos, positives = cross_log_sum_exp(
        v,
        y.flatten(0, 1),
        scale=scale,
        row_shards=shards,
        column_shards=shards.times(y.shape[1]),
        unit_norm=normalize,
        dtype=videos.dtype,
        partner_offsets=range(y.shape[1]),
        stride=y.shape[1],
        world=world,
    )
    assert other_videos is not None  # columnwise is the default
    negative = log_sum_exp(torch.cat([other_texts[:, None], other_videos.view(y.shape[:2])], 1), 1)
    positive = torch.stack(positives).logsumexp(0)
    if denominator == "reference":  # log(2 P + N) − log P = log 2 + log(1 + N / 2P)
        losses = math.log(2) + cross_entropy(positive, negative - math.log(2))
    else:
        losses = cross_entropy(positive, negative)
    return reduce_anchors(losses, reduction=reduction, world=world)


def _settings_problem(denominator: str) -> str | None:
    return word_problem("denominator", denominator, Denominator)


class MILNCE(Loss, function=mil_nce, check=_settings_problem):
    supports_ring = True
