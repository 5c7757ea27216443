"""Predictions of one view point at what another view gives, without negatives: a teacher's output, or a cluster."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.classes import draw_weights
from contrastive_zoo.engine.cost import Entry, Local, Shared, Summed
from contrastive_zoo.engine.precision import at_least_float32, concatenated, matmul
from contrastive_zoo.engine.statistics import balanced_assignment
from contrastive_zoo.loss_base.families import ViewLoss, of_views
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import (
    Bounds,
    Constant,
    Momentum,
    NonNegative,
    Reduction,
    Size,
    Temperature,
    field,
)
from contrastive_zoo.loss_base.shapes import candidates_problem
from contrastive_zoo.loss_base.state import Averages
from contrastive_zoo.ranks.devices import state_problem
from contrastive_zoo.ranks.row_checks import ValueRule, described, safe_index


class NegativeCosine(Loss, engine="statistics"):
    r"""Compute minus the cosine of each prediction and its target; targets have no gradient.

        loss_i = − p_i·z_i / (‖p_i‖ ‖z_i‖)

    SimSiam's loss is ½ loss(p1, z2) + ½ loss(p2, z1). BYOL's is 2 + 2 loss for each direction, with a momentum encoder's
    targets.

    Called as ``loss(predictions, targets)``, p and z, [n, d] each.

    Args:
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> NegativeCosine()(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(-0.6000)

    Source: Chen & He 2021, eq. 1, https://arxiv.org/abs/2011.10566; Grill et al. 2020, eq. 2,
    https://arxiv.org/abs/2006.07733
    """

    reduction: Reduction = "mean"

    def inputs(self, predictions: Float[Tensor, "n d"], targets: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": predictions, "view 1": targets})

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [stated.held(2.25), *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        predictions, targets = batch.rows.values()
        p, z = (batch.prepared(x, normalize=True) for x in (predictions, targets.detach()))
        return batch.reduce(-(p * z).sum(1), reduction=self.reduction)


# Sinkhorn's iterations converge linearly, and each is a message: the authors have 3
_ITERATIONS = Bounds("0 <= iterations <= 10000", low=0, high=10_000, whole=True)


class DINO(Loss, Averages, engine="statistics"):
    r"""Compute the self-distillation loss without labels.

    With s^v the student's outputs of view v, g^u the teacher's of view u and c the centre,

        loss_i = − mean over u and v ≠ u of Σ_k softmax_k((g^u_i − c) / τ_t) log softmax_k(s^v_i / τ_s)

    The centre is the buffer ``centre``, equal on every rank. In training mode each call moves it after use towards the mean
    of the teacher's outputs of all ranks: c ← m c + (1 − m) mean. If a step has several calls, use
    :func:`contrastive_zoo.one_step`. With ``centering="sinkhorn"``, as in DINOv3, the centre is not used: the teacher's
    distributions are the balanced assignment of its outputs of all ranks, Sinkhorn's iterations on exp(g / τ_t).

    Called as ``loss(student, teacher)``:

    - student: outputs of v views of a sample, the teacher's first: ``torch.stack(outputs, 1)``, [n, v, k]. n may differ
      between ranks.
    - teacher: outputs of the first g of these views, [n, g, k], used without gradient, in any dtype. [n, k] for both is one
      view each; the two views differ.

    Args:
        out_dim: k.
        centering: ``"mean"`` or ``"sinkhorn"``.
        iterations: number of Sinkhorn iterations, 0 … 10,000.
        centre_momentum: m, 0 … 1.
        temperature: τ_s > 0.
        teacher_temperature: τ_t > 0. Set ``loss.teacher_temperature`` for a schedule.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> same = torch.zeros(3, 4)
        >>> DINO(4)(same, same)   # log 4
        tensor(1.3863)

    Source: Caron et al. 2021, eq. 3 and algorithm 1, https://arxiv.org/abs/2104.14294; Siméoni et al. 2025 (DINOv3),
    https://arxiv.org/abs/2508.10104
    """

    out_dim: Size = field(kw_only=False)
    centering: Literal["mean", "sinkhorn"] = "mean"
    iterations: Annotated[int, _ITERATIONS] = 3
    centre_momentum: Momentum = 0.9
    temperature: Temperature = 0.1
    teacher_temperature: Constant = 0.04
    reduction: Reduction = "mean"

    centre: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.centre = nn.Buffer(torch.zeros(self.out_dim))

    def inputs(
        self,
        student: Float[Tensor, "n v k"] | Float[Tensor, "n k"],
        teacher: Float[Tensor, "n g c"] | Float[Tensor, "n c"],  # c is k, in any dtype
    ) -> Inputs:
        return Inputs({"student": student, "teacher": teacher}, self._outputs_problem(student, teacher))

    def entries(self, stated: CallInputs) -> list[Entry]:
        if self.centering == "sinkhorn":
            return [*[Summed(self.out_dim * stated.wide)] * (2 * self.iterations), *super().entries(stated)]
        centre = Summed(self.centre.nbytes + self.centre.dtype.itemsize)
        return [*([centre] if self.moves else []), *super().entries(stated)]

    def compute(self, batch: Batch) -> Tensor:
        losses = self.cross_entropies(batch)
        views = losses.shape[1:]
        pairs = math.prod(views)
        if batch.rows["student"].ndim == 3:  # a view is not compared with itself
            losses = losses * (1 - torch.eye(*views, dtype=losses.dtype, device=losses.device))
            pairs -= min(views)
        return self.result(batch, batch.reduce(losses.sum((1, 2)) / pairs, reduction=self.reduction))

    def cross_entropies(self, batch: Batch) -> Float[Tensor, "n g v"]:
        """Return those of each view of the teacher and of the student."""
        of_both, settings = (batch.rows["student"], batch.rows["teacher"].detach()), batch.settings
        s, g = (batch.prepared(x if x.ndim == 3 else x[:, None], normalize=False) for x in of_both)
        predicted = (batch.scale(settings.temperature) * s).log_softmax(2)
        outputs, t = g.flatten(0, 1).to(s.dtype), settings.teacher_temperature
        if self.centering == "sinkhorn":
            expected = balanced_assignment(batch, outputs, epsilon=t, iterations=settings.iterations)
        else:
            expected = ((outputs - self.centre.to(s.dtype)) / t).softmax(1)
        return -matmul(expected.view(g.shape), predicted.mT)

    def result(self, batch: Batch, loss: Tensor) -> Tensor:
        """Return the loss; in training, move the centre."""
        if self.moves:
            rows = batch.rows["teacher"].detach().flatten(0, -2).to(self.centre.dtype)
            total = batch.sum(torch.cat([rows.sum(0), rows.new_full((1,), len(rows))]), gradient="complete")
            self.record((batch.settings.centre_momentum, total))
        return loss

    @property
    def moves(self) -> bool:
        return super().moves and self.centering != "sinkhorn"

    def averages(self, sums: Tensor) -> dict[str, Tensor]:
        return {"centre": (sums[:-1] / sums[-1]).where(sums[-1] > 0, self.centre.to(sums))}

    def _outputs_problem(self, student: Tensor, teacher: Tensor) -> str | None:
        if student.ndim != teacher.ndim or student.shape[-1] != teacher.shape[-1]:
            s, t = described(student), described(teacher)
            return f"student and teacher are [n, views, k], or [n, k], got student {s}, teacher {t}."
        if student.ndim == 3 and not (1 <= teacher.shape[1] <= student.shape[1] and student.shape[1] > 1):
            got = f"got {student.shape[1]} from the student and {teacher.shape[1]} from the teacher"
            return f"the student sees two or more views and the teacher the first of them, {got}."
        if self.centre.shape != student.shape[-1:]:
            got = f"got {described(self.centre)} for {described(student)}"
            return f"the centre is as wide as outputs, {got}. Construct {type(self).__name__}(out_dim=…)."
        return state_problem("centre values", self.centre, student)


class IBOT(DINO):
    r"""Compute the self-distillation loss of masked patches; each image has the mean over its own.

    With s the student's outputs of the masked patches, g the teacher's of the same patches, M(i) those of image i and c the
    centre,

        loss_i = − mean_{a∈M(i)} Σ_k softmax_k((g_a − c) / τ_t) log softmax_k(s_a / τ_s)

    An image without masked patches has the loss 0, and counts in the mean over images. The masked patches of all ranks move
    the centre, as outputs do in :class:`DINO`; ``centering="sinkhorn"`` balances them instead. Equal on one process to
    lightly's IBOTPatchLoss, and to ``forward_masked`` of DINOv2 and DINOv3.

    Called as ``loss(student, teacher, counts)``:

    - student, teacher: [m, k], image after image, as ``outputs[mask]``; the teacher's have no gradient, and any dtype.
    - counts: [n] integers, how many each image has: ``mask.flatten(1).sum(1)``. They add up to m.

    Args:
        out_dim: k.
        centering: ``"mean"`` or ``"sinkhorn"``.
        iterations: number of Sinkhorn iterations, 0 … 10,000.
        centre_momentum: m, 0 … 1.
        temperature: τ_s > 0.
        teacher_temperature: τ_t > 0. Set ``loss.teacher_temperature`` for a schedule.
        reduction: ``"mean"`` over all ranks' images, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> patches = torch.zeros(3, 4)
        >>> IBOT(4)(patches, patches, torch.tensor([1, 0, 2]))   # (log 4 + 0 + log 4) / 3
        tensor(0.9242)

    Source: Zhou et al. 2022, eq. 2, https://arxiv.org/abs/2111.07832; Oquab et al. 2023 (DINOv2),
    https://arxiv.org/abs/2304.07193
    """

    def inputs(  # type: ignore[override]  # of patches
        self, student: Float[Tensor, "m k"], teacher: Float[Tensor, "m c"], counts: Int[Tensor, " n"]
    ) -> Inputs:
        patches, images = len(student), len(counts)

        def counts_problem(numbers: Sequence[float]) -> str | None:
            total, least = numbers
            if total == patches and least >= 0:
                return None
            words = f"counts are the numbers of masked patches of images, and add up to {patches} as patches came"
            return f"{words}, got a sum of {total:.0f}, least {least:.0f}."

        problem = self._outputs_problem(student, teacher) or (counts_problem((0, 0)) if images == 0 else None)
        rule = ValueRule(counts, lambda x: torch.stack([x.long().sum(), x.long().amin()]), counts_problem)
        return Inputs({"counts": counts, "student": student, "teacher": teacher}, problem, values=[rule])

    def compute(self, batch: Batch) -> Tensor:
        losses, counts = self.cross_entropies(batch).flatten(), batch.rows["counts"].long()
        patch = torch.arange(len(losses), device=losses.device)
        image = safe_index(torch.searchsorted(counts.cumsum(0), patch, right=True), len(counts))
        of_images = losses.new_zeros(len(counts)).index_add(0, image, losses / counts[image].clamp(min=1))
        return self.result(batch, batch.reduce(of_images, reduction=self.reduction))


class _ClusterLoss(Loss, engine="statistics"):
    """A loss of similarities to prototypes, the parameter ``prototypes``, of which a loss compares directions."""

    num_prototypes: Size = field(kw_only=False)
    embedding_size: Size = field(kw_only=False)
    temperature: Temperature = 0.1

    prototypes: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        local = slice(0, self.num_prototypes)
        self.prototypes = nn.Parameter(draw_weights(self.num_prototypes, self.embedding_size, local=local))

    def compared(self, inputs: Inputs, embeddings: Tensor) -> Inputs:
        """Return the inputs of a call with what must be right of the prototypes for these embeddings."""
        prototypes, d, problem = self.prototypes, embeddings.shape[-1], inputs.problem
        if prototypes.ndim != 2 or prototypes.shape[1] != d or not prototypes.is_floating_point():
            problem = problem or f"prototypes are [clusters, d] with d={d} as views, got {described(prototypes)}."
        problem = problem or state_problem("prototypes", prototypes, embeddings)
        return replace(inputs, problem=problem, compared={"prototypes": list(prototypes.shape)})

    def entries(self, stated: CallInputs) -> list[Entry]:
        products = Local([*stated.inputs.rows], 6 * self.prototypes.numel(), 5 * self.num_prototypes * stated.wide)
        joined = stated.held(3)  # views in one tensor, and its gradient
        return [*super().entries(stated), joined, Shared(self.prototypes.nbytes), products]

    def similarities(self, batch: Batch, rows: Float[Tensor, "... d"]) -> Float[Tensor, "... K"]:
        """Return the cosines of embeddings and prototypes."""
        z = batch.prepared(rows, normalize=True)
        unit = F.normalize(at_least_float32(batch.shared(self.prototypes)), dim=1).to(z.dtype)
        return matmul(z.flatten(0, -2), unit.T).view(*z.shape[:-1], len(unit))


class SwAV(_ClusterLoss, ViewLoss, engine="statistics"):
    r"""Compute the loss of swapped predictions of cluster assignments.

    Called as ``loss(view1, view2, …)``, two or more of [n, d], the full-size crops first.
    With z the unit embeddings of view v, c the unit prototypes, and q the balanced assignment of view u's embeddings of all
    ranks,

        loss_i = − mean over u ≤ code_views and v ≠ u of Σ_k q^u_ik log softmax_k(z^v_i·c / t)

    The codes q carry no gradient. They come from Sinkhorn's iterations on exp(z·c / ε). The parameter is
    ``loss.prototypes``, [K, d], drawn standard normal; the loss normalises it, as the authors do before a step.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        num_prototypes: K.
        embedding_size: the width of embeddings, d.
        epsilon: ε > 0, the temperature of the assignments.
        iterations: number of Sinkhorn iterations, 0 … 10,000; 0 is a softmax.
        code_views: number of first views that give codes; the other views only predict.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = SwAV(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"prototypes": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2)).detach()   # codes are one-hot: log(e + 1) − 1
        tensor(0.3133)

    Source: Caron et al. 2020, eqs. 2-5, https://arxiv.org/abs/2006.09882
    """

    epsilon: Constant = 0.05
    iterations: Annotated[int, _ITERATIONS] = 3
    code_views: Size = 2
    reduction: Reduction = "mean"

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        stated, too_few = of_views(views), None
        if self.code_views > len(views):
            too_few = f"1 <= code_views <= {len(views)}, got {self.code_views}."
        return self.compared(replace(stated, problem=stated.problem or too_few), views[0])

    def entries(self, stated: CallInputs) -> list[Entry]:
        codes = [Summed(self.code_views * self.num_prototypes * stated.wide)] * (2 * self.iterations)
        return [*super().entries(stated), *codes]

    def compute(self, batch: Batch) -> Tensor:
        settings, views = batch.settings, len(batch.rows)
        scale = batch.scale(settings.temperature)
        rows = concatenated(*(x[None] for x in batch.rows.values()))
        scores = self.similarities(batch, rows)  # view, sample, cluster
        of_codes = scores.detach()[: settings.code_views]
        codes = balanced_assignment(batch, of_codes, epsilon=settings.epsilon, iterations=settings.iterations)
        predicted = (scale * scores).log_softmax(2)
        losses = [-(q * predicted[v]).sum(1) for u, q in enumerate(codes) for v in range(views) if v != u]
        return batch.reduce(torch.stack(losses).mean(0), reduction=self.reduction)


class MSN(_ClusterLoss, engine="statistics"):
    r"""Compute the loss of masked Siamese networks: masked views predict the cluster of the whole image.

    With z^m the student's unit embeddings of view m of all ranks, y the teacher's, c the unit prototypes, and B the balanced
    assignment, Sinkhorn's iterations,

        p^m_i = softmax_k(z^m_i·c / t),      q_i = B( softmax_k(y_i·c / t') ),      a = mean of p over i and m
        loss  = − mean over i and m of Σ_k q_ik log p^m_ik  +  λ Σ_k a_k log a_k

    The targets q carry no gradient. The last term is minus the entropy of a, the mean over the samples of all ranks. The
    authors' code adds λ log K. The parameter is ``loss.prototypes``, [K, d], drawn standard normal; the loss normalises it.

    Called as ``loss(student, teacher)``:

    - student: [n, d], or [n, m, d] for m masked views: ``torch.stack(views, 1)``. n may differ between ranks.
    - teacher: [n, d], a momentum encoder's embeddings of another view, used without gradient.

    Args:
        num_prototypes: K.
        embedding_size: the width of embeddings, d.
        temperature: t > 0; a tensor or module is learnable.
        teacher_temperature: t' > 0, the paper's temperature times that of its sharpening.
        iterations: number of Sinkhorn iterations, 0 … 10,000; 0 leaves the teacher's softmax, the authors have 3.
        entropy_weight: λ ≥ 0.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = MSN(2, 2, temperature=1.0, teacher_temperature=0.25)
        >>> _ = loss.load_state_dict({"prototypes": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2)).detach()   # log(e + 1) − e⁴/(e⁴ + 1) − log 2
        tensor(-0.3619)

    Source: Assran et al. 2022, eq. 1, https://arxiv.org/abs/2204.07141
    """

    teacher_temperature: Constant = 0.025
    iterations: Annotated[int, _ITERATIONS] = 0
    entropy_weight: NonNegative = 1.0

    def inputs(self, student: Float[Tensor, "n m d"] | Float[Tensor, "n d"], teacher: Float[Tensor, "n d"]) -> Inputs:
        no_views = candidates_problem("student", student, at_least=1) if student.ndim == 3 else None
        return self.compared(Inputs({"student": student, "teacher": teacher}, no_views), teacher)

    def entries(self, stated: CallInputs) -> list[Entry]:
        sums = [Summed(self.num_prototypes * stated.wide)] * (2 * self.iterations + 2)
        return [*super().entries(stated), *sums]

    def compute(self, batch: Batch) -> Tensor:
        student, teacher = batch.rows.values()
        views = student if student.ndim == 3 else student[:, None]
        scores = self.similarities(batch, concatenated(views, teacher.detach()[:, None], dim=1))
        predicted = (batch.scale(batch.settings.temperature) * scores[:, :-1]).log_softmax(2)
        sharpened = (scores[:, -1].detach() / batch.settings.teacher_temperature).log_softmax(1)
        targets = balanced_assignment(batch, sharpened, epsilon=1.0, iterations=self.iterations)
        losses = -(targets[:, None] * predicted).sum(2).mean(1)
        total = batch.log_sum_exp(predicted.flatten(0, 1).logsumexp(0), gradient="complete")
        mean = total - math.log(batch.total * views.shape[1])  # its logarithm
        return batch.reduce(losses) + batch.settings.entropy_weight * (mean.exp() * mean).sum().to(losses.dtype)
