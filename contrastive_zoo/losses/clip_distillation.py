"""CLIP distillation: a teacher's similarities are the targets of the student's."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.row_statistics import LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Bounds, Positive, Reduction, Temperature
from contrastive_zoo.ranks.row_checks import described, rows_problem, towers_problem


class ClipDistillation(Loss):
    r"""Compute CLIP's loss with targets that mix the identity with a teacher's softmax over all ranks' rows.

    With S = x yᵀ / t of the student's unit rows, T = u vᵀ / t' of the teacher's, both of all ranks,

        targets = (1 − λ) · I + λ · softmax(T)
        loss = ½ · cross_entropy(S, targets) + ½ · cross_entropy(Sᵀ, targets of Tᵀ)

    open_clip's DistillClipLoss returns two numbers: this loss for λ = 0 and for λ = 1. It trains on their sum, twice this
    loss for λ = ½. The teacher gets no gradient, and neither N × N matrix is held.

    Called as ``loss(images, texts, teacher_images, teacher_texts)``:

    - images: [n, d], n may differ between ranks.
    - texts: [n, d], row i belongs to row i of images.
    - teacher_images: [n, e], of the same samples.
    - teacher_texts: [n, e].

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        teacher_temperature: t' > 0, the teacher's temperature.
        weight: λ from 0 (no teacher) to 1 (teacher only).
        symmetric: whether to average both directions; otherwise only from images to texts.
        normalize: normalise embeddings of student and teacher to unit length first.
        reduction: ``"mean"`` over all ranks' pairs (nats per pair), ``"sum"``, or ``"none"`` for the local pairs, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: rows of different number, a weight out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, uniform = torch.eye(2), torch.ones(2, 2)
        >>> ClipDistillation(temperature=1.0, weight=1.0)(eye, eye, uniform, uniform)   # log(e + 1) − ½
        tensor(0.8133)

    Source: Hinton et al. 2015, eq. 1, https://arxiv.org/abs/1503.02531, on CLIP's logits
    """

    temperature: Temperature = 0.07
    teacher_temperature: Positive = 0.07
    weight: Annotated[float, Bounds("weight is the teacher's share, 0 to 1", low=0, high=1)] = 0.5
    symmetric: bool = True
    normalize: bool = True
    reduction: Reduction = "mean"

    supports_ring = True

    def inputs(
        self,
        images: Float[Tensor, "n d"],
        texts: Float[Tensor, "n d"],
        teacher_images: Float[Tensor, "n e"],
        teacher_texts: Float[Tensor, "n e"],
    ) -> Inputs:
        rows = {"images": images, "texts": texts, "teacher_images": teacher_images, "teacher_texts": teacher_texts}
        return Inputs(rows, _problem(images, texts, teacher_images, teacher_texts))

    def compute(self, batch: Batch) -> Tensor:
        images, texts, *teachers = batch.rows.values()
        arguments = (images, texts, *(x.detach() for x in teachers))
        x, y, u, v = (batch.prepared(rows, normalize=self.normalize) for rows in arguments)
        settings = {name: getattr(batch.settings, name) for name in ("temperature", "teacher_temperature", "weight")}
        pairs, loss = batch.indices(), BlockLoss(_distilled, **settings)

        def direction(anchors: Tensor, candidates: Tensor, teachers: tuple[Tensor, Tensor]) -> Tensor:
            return reduce_rows(
                batch, loss, anchors, pairs, candidates=candidates, candidate_ids=pairs, companions=[teachers],
                reduction=self.reduction,
            )  # fmt: skip

        image_to_text = direction(x, y, (u, v))
        return (image_to_text + direction(y, x, (v, u))) / 2 if self.symmetric else image_to_text


def _distilled(block: AnchorBlock, temperature: Tensor, teacher_temperature: float, weight: float) -> Rows:
    ((teacher_anchors, teacher_candidates),) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    of_teacher = teacher_anchors @ teacher_candidates.T / teacher_temperature
    every = torch.ones_like(block.positive)
    total, of_teachers = yield LogSumExp(logits, every), LogSumExp(of_teacher, every)
    targets = weight * (of_teacher - of_teachers[:, None]).exp().to(logits.dtype) + (1 - weight) * block.positive.to(
        logits.dtype
    )
    (expected,) = yield (Sum((targets * logits).sum(1)),)
    return total - expected, torch.ones_like(block.ids, dtype=torch.bool)


def _problem(images: Tensor, texts: Tensor, teacher_images: Tensor, teacher_texts: Tensor) -> str | None:
    rule = "row i is one sample everywhere"
    if problem := rows_problem("images", images) or rows_problem("teacher_images", teacher_images):
        return problem
    if len(teacher_images) != len(images):
        return f"{rule}, got teacher_images {described(teacher_images)} and images {described(images)}."
    result = towers_problem(rule, images=images, texts=texts)
    return result or towers_problem(rule, teacher_images=teacher_images, teacher_texts=teacher_texts)
