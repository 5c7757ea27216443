"""Distillation: a teacher's similarities or scores are the targets of the student's."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, blocks_of, reduce_towers
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Constant, Positive, Reduction, Share, Temperature
from contrastive_zoo.loss_base.shapes import candidates_problem


class ClipDistillation(Loss, engine="rows"):
    r"""Compute CLIP's loss with targets that mix the identity with a teacher's softmax over all ranks' embeddings.

    With S = x yᵀ / t of the student's unit embeddings, T = u vᵀ / t' of the teacher's, both of all ranks,

        targets = (1 − λ) · I + λ · softmax(T)
        loss = ½ · cross_entropy(S, targets) + ½ · cross_entropy(Sᵀ, targets of Tᵀ)

    open_clip's DistillClipLoss trains on twice this loss for λ = ½. The teacher gets no gradient.

    Called as ``loss(images, texts, teacher_images, teacher_texts)``, x and y, [n, d], and u and v, [n, e], of the same
    samples.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        teacher_temperature: t' > 0.
        weight: λ from 0 (no teacher) to 1 (teacher only).
        symmetric: whether to average both directions; otherwise only from images to texts.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye, uniform = torch.eye(2), torch.ones(2, 2)
        >>> ClipDistillation(temperature=1.0, weight=1.0)(eye, eye, uniform, uniform)   # log(e + 1) − ½
        tensor(0.8133)

    Source: Hinton et al. 2015, eq. 1, https://arxiv.org/abs/1503.02531, on CLIP's logits
    """

    temperature: Temperature = 0.07
    teacher_temperature: Positive = 0.07
    weight: Share = 0.5
    symmetric: bool = True
    normalize: bool = True
    reduction: Reduction = "mean"

    def inputs(
        self,
        images: Float[Tensor, "n d"],
        texts: Float[Tensor, "n d"],
        teacher_images: Float[Tensor, "n e"],
        teacher_texts: Float[Tensor, "n e"],
    ) -> Inputs:
        teachers = {"teacher_images": teacher_images, "teacher_texts": teacher_texts}
        return Inputs({"images": images, "texts": texts, **teachers})

    def entries(self, stated: CallInputs) -> list[Entry]:
        of_teacher = stated.inputs.rows["teacher_images"].shape[1]
        how: Any = {"companions": [of_teacher * stated.wide], "matmuls": 3 + of_teacher / max(1, stated.width)}
        directions, loss = [("images", "texts"), ("texts", "images")], BlockLoss.of(_distilled, stated.settings)
        return [blocks_of(loss, [x], [y], reduction=self.reduction, **how) for x, y in directions[: 1 + self.symmetric]]

    def compute(self, batch: Batch) -> Tensor:
        _, _, *teachers = batch.rows.values()
        x, y = (batch.candidates(name, normalize=self.normalize) for name in ("images", "texts"))
        u, v = (batch.prepared(rows.detach(), normalize=self.normalize) for rows in teachers)
        loss = BlockLoss.of(_distilled, batch.settings)
        return reduce_towers(batch, loss, (x, y), [(u, v)], symmetric=self.symmetric, reduction=self.reduction)


def _distilled(
    block: AnchorBlock, temperature: Tensor, teacher_temperature: float, weight: float
) -> tuple[Tensor, Tensor]:
    ((teacher_anchors, teacher_candidates),) = block.companions
    logits = block.anchors @ block.candidates.T / temperature
    of_teacher = teacher_anchors @ teacher_candidates.T / teacher_temperature
    every = torch.ones_like(block.positive)
    shares = (of_teacher - masked_log_sum_exp(of_teacher, every)[:, None]).exp().to(logits.dtype)
    targets = weight * shares + (1 - weight) * block.positive.to(logits.dtype)
    losses = masked_log_sum_exp(logits, every) - (targets * logits).sum(1)
    return losses, torch.ones_like(block.ids, dtype=torch.bool)


class MarginMSE(Loss, engine="statistics"):
    r"""Compute the squared error of the difference between the similarities of a positive and of each negative.

    With q, p, n the queries, their positives and their k negatives, and m the teacher's margins,

        loss_i = mean_k ( q_i·p_i − q_i·n_ik − m_ik )²

    Equal to sentence-transformers' MarginMSELoss, which takes each negative as a column: ``torch.stack(columns, 1)``.

    Called as ``loss(queries, positives, negatives, margins)``, q and p, [n, d], n, [n, k, d], the same k everywhere, and m,
    [n, k], without gradient: of scores [n, 1 + k], positive first, ``scores[:, :1] - scores[:, 1:]``.

    Args:
        normalize: the original does not.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> q, p, n = torch.eye(2), torch.eye(2), torch.zeros(2, 1, 2)
        >>> MarginMSE()(q, p, n, torch.tensor([[1.0], [3.0]]))   # (1 − 1)² and (1 − 3)²
        tensor(2.)

    Source: Hofstätter et al. 2020, https://arxiv.org/abs/2010.02666
    """

    normalize: bool = False
    reduction: Reduction = "mean"

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        negatives: Float[Tensor, "n k d"],
        margins: Float[Tensor, "n k"],
    ) -> Inputs:
        rows = {"queries": queries, "positives": positives, "negatives": negatives, "margins": margins}
        return Inputs(rows, candidates_problem("negatives", negatives, at_least=1))

    def compute(self, batch: Batch) -> Tensor:
        *rows, margins = batch.rows.values()
        q, p, n = (batch.prepared(x, normalize=self.normalize) for x in rows)
        differences = (q[:, None] * (p[:, None] - n)).sum(2)
        errors = (differences - margins.detach().to(q.dtype)).square()
        return batch.reduce(errors.mean(1), reduction=self.reduction)


class ScoreDistillation(Loss, engine="statistics"):
    r"""Compute the Kullback-Leibler divergence of the student's distribution over k candidates from the teacher's.

    With q the queries, c their k candidates and y the teacher's scores of these,

        loss_i = t² KL( softmax_k(y_ik / t')  ‖  softmax_k(q_i·c_ik / t) )

    Equal to sentence-transformers' DistillKLDivLoss, which takes each candidate as a column: ``torch.stack(columns, 1)``.

    Called as ``loss(queries, candidates, scores)``, q, [n, d], c, [n, k, d], the same k ≥ 2 everywhere, and y, [n, k],
    without gradient.

    Args:
        temperature: t > 0, the student's.
        teacher_temperature: t' > 0.
        normalize: the original does not.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> q, c = torch.tensor([[1.0]]), torch.tensor([[[0.0], [0.0]]])
        >>> ScoreDistillation()(q, c, torch.tensor([[50.0, 0.0]]))   # log 2
        tensor(0.6931)

    Source: Hinton et al. 2015, eq. 1 and §2, https://arxiv.org/abs/1503.02531
    """

    temperature: Temperature = 1.0
    teacher_temperature: Constant = 1.0
    normalize: bool = False
    reduction: Reduction = "mean"

    def inputs(
        self, queries: Float[Tensor, "n d"], candidates: Float[Tensor, "n k d"], scores: Float[Tensor, "n k"]
    ) -> Inputs:
        rows = {"queries": queries, "candidates": candidates, "scores": scores}
        return Inputs(rows, candidates_problem("candidates", candidates, at_least=2))

    def compute(self, batch: Batch) -> Tensor:
        *rows, scores = batch.rows.values()
        q, c = (batch.prepared(x, normalize=self.normalize) for x in rows)
        targets = (scores.detach().to(q.dtype) / batch.settings.teacher_temperature).log_softmax(1)
        scale = batch.scale(batch.settings.temperature)
        predicted = (scale * (q[:, None] * c).sum(2)).log_softmax(1)
        losses = F.kl_div(predicted, targets, reduction="none", log_target=True).sum(1) / scale**2
        return batch.reduce(losses, reduction=self.reduction)
