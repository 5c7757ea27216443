"""CLIP with a teacher: its similarities are the targets of the student's."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem, positive_problem, towers_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows, sample_indices
from contrastive_zoo.world import ALONE, World


@uncompiled
def clip_distillation(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    teacher_images: Float[Tensor, "n e"],
    teacher_texts: Float[Tensor, "n e"],
    *,
    temperature: float | Tensor = 0.07,
    teacher_temperature: float = 0.07,
    weight: float = 0.5,
    symmetric: bool = True,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""CLIP's loss with targets that are partly a teacher's softmax over all ranks' rows.

    With S = x yᵀ / t of the student's unit rows, T = u vᵀ / t' of the teacher's, both of all ranks,

        targets = (1 − λ) · I + λ · softmax(T)
        loss = ½ · cross_entropy(S, targets) + ½ · cross_entropy(Sᵀ, targets of Tᵀ)

    open_clip's DistillClipLoss returns two numbers, which are this for λ = 0 and for λ = 1; their sum, which it trains
    on, is twice this for λ = ½. No gradient reaches the teacher, and nothing N × N is held of either.

    Args:
        images: [n, d], n may differ between ranks.
        texts: [n, d], row i belongs to row i of images.
        teacher_images: [n, e], of the same samples.
        teacher_texts: [n, e].
        temperature: t > 0, dimensionless; a tensor is learnable.
        teacher_temperature: t' > 0, the teacher's own.
        weight: λ from 0, no teacher, to 1, nothing else.
        symmetric: both directions; otherwise only from images to texts.
        normalize: put the student's and the teacher's rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows of different number, a weight out of range, or what any :class:`Loss` refuses.

    Example:
        >>> eye, undecided = torch.eye(2), torch.ones(2, 2)
        >>> clip_distillation(eye, eye, undecided, undecided, temperature=1.0, weight=1.0)   # log(e + 1) − ½
        tensor(0.8133)

    Source: Hinton et al. 2015, eq. 1, https://arxiv.org/abs/1503.02531, on CLIP's logits
    """
    problem = _problem(images, texts, teacher_images, teacher_texts)
    problem = problem or _settings_problem(teacher_temperature, weight)
    named = {"images": images, "texts": texts, "teacher_images": teacher_images, "teacher_texts": teacher_texts}
    settings: dict[str, Any] = {"teacher_temperature": teacher_temperature, "weight": weight}
    shards, *_ = begin(
        "ClipDistillation", named, problem=problem, reduction=reduction, world=world, temperature=temperature,
        symmetric=symmetric, normalize=normalize, **settings,
    )  # fmt: skip
    x, y = (prepare_rows(rows, normalize=normalize, world=world) for rows in (images, texts))
    u, v = (prepare_rows(rows.detach(), normalize=normalize, world=world) for rows in (teacher_images, teacher_texts))
    pairs = sample_indices(shards, x)
    loss = BlockLoss(_taught, temperature=temperature, **settings)

    def direction(anchors: Tensor, columns: Tensor, teachers: tuple[Tensor, Tensor]) -> Tensor:
        return sum_over_anchors(
            loss, anchors, pairs, candidates=columns, candidate_ids=pairs, companions=[teachers], shards=shards,
            reduction=reduction, world=world,
        )  # fmt: skip

    there = direction(x, y, (u, v))
    return (there + direction(y, x, (v, u))) / 2 if symmetric else there


def _settings_problem(teacher_temperature: float, weight: float) -> str | None:
    rule = "weight is the teacher's share, 0 to 1"
    wrong = number_problem(rule, low=0, high=1, weight=weight)
    return wrong or positive_problem(teacher_temperature=teacher_temperature)


class ClipDistillation(Loss, function=clip_distillation, check=_settings_problem): ...


def _taught(
    block: AnchorBlock, temperature: Tensor, teacher_temperature: float, weight: float
) -> tuple[Tensor, Tensor]:
    ((teachers, of_columns),) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    targets = weight * (teachers @ of_columns.T / teacher_temperature).softmax(1).to(logits.dtype)
    targets = targets + (1 - weight) * block.positive
    return logits.logsumexp(1) - (targets * logits).sum(1), torch.ones_like(block.ids, dtype=torch.bool)


def _problem(images: Tensor, texts: Tensor, teacher_images: Tensor, teacher_texts: Tensor) -> str | None:
    rule = "row i is one sample everywhere"
    if len(teacher_images) != len(images):
        return f"{rule}, got teacher_images {kind(teacher_images)} and images {kind(images)}."
    found = towers_problem(rule, images=images, texts=texts)
    return found or towers_problem(rule, teacher_images=teacher_images, teacher_texts=teacher_texts)
