"""CLIP distillation: a teacher's similarities are the targets of the student's."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem, positive_problem, towers_problem
from contrastive_zoo.loss_base.graph_operator import in_graph
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows, sample_indices
from contrastive_zoo.world import ALONE, World


@in_graph
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
    r"""Compute CLIP's loss with targets that mix the identity with a teacher's softmax over all ranks' rows.

    With S = x yᵀ / t of the student's unit rows, T = u vᵀ / t' of the teacher's, both of all ranks,

        targets = (1 − λ) · I + λ · softmax(T)
        loss = ½ · cross_entropy(S, targets) + ½ · cross_entropy(Sᵀ, targets of Tᵀ)

    open_clip's DistillClipLoss returns two numbers: this loss for λ = 0 and for λ = 1. It trains on their sum, twice this
    loss for λ = ½. The teacher gets no gradient, and neither N × N matrix is held.

    Args:
        images: [n, d], n may differ between ranks.
        texts: [n, d], row i belongs to row i of images.
        teacher_images: [n, e], of the same samples.
        teacher_texts: [n, e].
        temperature: t > 0, dimensionless; a tensor is learnable.
        teacher_temperature: t' > 0, the teacher's temperature.
        weight: λ from 0 (no teacher) to 1 (teacher only).
        symmetric: whether to average both directions; otherwise only from images to texts.
        normalize: normalise embeddings of student and teacher to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows of different number, a weight out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, uniform = torch.eye(2), torch.ones(2, 2)
        >>> clip_distillation(eye, eye, uniform, uniform, temperature=1.0, weight=1.0)   # log(e + 1) − ½
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
    loss = BlockLoss(_distilled, temperature=temperature, **settings)

    def direction(anchors: Tensor, candidates: Tensor, teachers: tuple[Tensor, Tensor]) -> Tensor:
        return sum_over_anchors(
            loss, anchors, pairs, candidates=candidates, candidate_ids=pairs, companions=[teachers], shards=shards,
            reduction=reduction, world=world,
        )  # fmt: skip

    image_to_text = direction(x, y, (u, v))
    return (image_to_text + direction(y, x, (v, u))) / 2 if symmetric else image_to_text


def _settings_problem(teacher_temperature: float, weight: float) -> str | None:
    rule = "weight is the teacher's share, 0 to 1"
    wrong = number_problem(rule, low=0, high=1, weight=weight)
    return wrong or positive_problem(teacher_temperature=teacher_temperature)


class ClipDistillation(Loss, function=clip_distillation, check=_settings_problem):
    supports_ring = True


def _distilled(block: AnchorBlock, temperature: Tensor, teacher_temperature: float, weight: float) -> Rows:
    ((teacher_anchors, teacher_candidates),) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    of_teacher = teacher_anchors @ teacher_candidates.T / teacher_temperature
    every = torch.ones_like(block.positive)
    total, of_teachers = yield LogSumExp(logits, every), LogSumExp(of_teacher, every)
    targets = weight * (of_teacher - of_teachers[:, None]).exp().to(logits.dtype) + (1 - weight) * block.positive
    (expected,) = yield (Sum((targets * logits).sum(1)),)
    return total - expected, torch.ones_like(block.ids, dtype=torch.bool)


def _problem(images: Tensor, texts: Tensor, teacher_images: Tensor, teacher_texts: Tensor) -> str | None:
    rule = "row i is one sample everywhere"
    if len(teacher_images) != len(images):
        return f"{rule}, got teacher_images {kind(teacher_images)} and images {kind(images)}."
    found = towers_problem(rule, images=images, texts=texts)
    return found or towers_problem(rule, teacher_images=teacher_images, teacher_texts=teacher_texts)
