"""Self-distillation: predictions of one view point at a teacher's output of another, without negatives."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import move_towards, of_size
from contrastive_zoo.loss_base.settings import Momentum, Positive, Reduction, Size, Temperature, field
from contrastive_zoo.ranks.devices import state_problem
from contrastive_zoo.ranks.row_checks import described, views_problem


class NegativeCosine(Loss):
    r"""Compute minus the cosine of each prediction and its target; targets have no gradient.

        loss_i = − p_i·z_i / (‖p_i‖ ‖z_i‖)

    SimSiam's loss is ½ loss(p1, z2) + ½ loss(p2, z1). BYOL's is 2 + 2 loss for each direction, with a momentum encoder's
    targets. There are no negatives, so the loss of a batch is a mean over its samples, which is right also for shards
    of different size. lightly's NegativeCosineSimilarity has gradients with respect to targets that are not detached.

    Called as ``loss(predictions, targets)``, p and z, [n, d] each.

    Examples:
        >>> NegativeCosine()(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor(-0.6000)

    Source: Chen & He 2021, eq. 1, https://arxiv.org/abs/2011.10566; Grill et al. 2020, eq. 2,
    https://arxiv.org/abs/2006.07733
    """

    reduction: Reduction = "mean"

    def inputs(self, predictions: Float[Tensor, "n d"], targets: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": predictions, "view 1": targets}, views_problem((predictions, targets)))

    def compute(self, batch: Batch) -> Tensor:
        predictions, targets = batch.rows.values()
        p, z = (batch.prepared(x, normalize=True) for x in (predictions, targets.detach()))
        return batch.reduce(-(p * z).sum(1), reduction=self.reduction)


class DINO(Loss):
    r"""Compute the self-distillation loss without labels.

    With s^v the student's outputs of view v, g^u the teacher's of view u and c the centre,

        loss_i = − mean over u and v ≠ u of Σ_k softmax_k((g^u_i − c) / τ_t) log softmax_k(s^v_i / τ_s)

    The centre is the buffer ``centre``. In training mode each call first uses the buffer and then moves it towards the mean
    of the teacher's rows of all ranks: c ← m c + (1 − m) mean. It is equal on every rank, and equal to that of one
    process.

    Called as ``loss(student, teacher)``:

    - student: outputs of v views of a sample, the teacher's first: ``torch.stack(outputs, 1)``, [n, v, k]. n may differ
      between ranks.
    - teacher: outputs of the first g of these views, [n, g, k], used without gradient. [n, k] for both is one view each;
      the two views differ.

    Args:
        out_dim: k.
        centre_momentum: m, 0 … 1.
        temperature: τ_s > 0; a tensor or a module is learnable.
        teacher_temperature: τ_t > 0. Set ``loss.teacher_temperature`` for a schedule.

    Raises:
        ValueError: an out_dim above what memory holds, or a centre of another width.

    Examples:
        >>> same = torch.zeros(3, 4)
        >>> DINO(4)(same, same)   # log 4
        tensor(1.3863)

    Source: Caron et al. 2021, eq. 3 and algorithm 1, https://arxiv.org/abs/2104.14294
    """

    out_dim: Size = field(kw_only=False)
    centre_momentum: Momentum = 0.9
    temperature: Temperature = 0.1
    teacher_temperature: Positive = 0.04
    reduction: Reduction = "mean"

    centre: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.out_dim = int(self.out_dim)
        self.centre = nn.Buffer(of_size(type(self).__name__, lambda: torch.zeros(size), out_dim=size))

    def inputs(
        self,
        student: Float[Tensor, "n v k"] | Float[Tensor, "n k"],
        teacher: Float[Tensor, "n g k"] | Float[Tensor, "n k"],
    ) -> Inputs:
        return Inputs({"student": student, "teacher": teacher}, _outputs_problem(student, teacher, self.centre))

    def compute(self, batch: Batch) -> Tensor:
        student, teacher = batch.rows["student"], batch.rows["teacher"].detach()
        s, g = (batch.prepared(x if x.ndim == 3 else x[:, None], normalize=False) for x in (student, teacher))
        predicted = (batch.scale(batch.settings.temperature) * s).log_softmax(2)
        expected = ((g - self.centre.to(g.dtype)) / batch.settings.teacher_temperature).softmax(2)
        losses = -matmul(expected, predicted.mT)  # of teacher's view u, student's view v
        views = losses.shape[1:]
        pairs = math.prod(views)
        if student.ndim == 3:  # a view is not compared with itself
            losses = losses * (1 - torch.eye(*views, dtype=losses.dtype, device=losses.device))
            pairs -= min(views)
        loss = batch.reduce(losses.sum((1, 2)) / pairs, reduction=self.reduction)
        if self.training:
            self._move_centre(batch, teacher)
        return loss

    @torch.no_grad()
    def _move_centre(self, batch: Batch, teacher: Tensor) -> None:
        rows = teacher.flatten(0, -2).to(self.centre.dtype)
        total = batch.sum(torch.cat([rows.sum(0), rows.new_full((1,), len(rows))]), gradient="complete")
        move_towards(self.centre, total[:-1] / total[-1], 1 - batch.settings.centre_momentum)


def _outputs_problem(student: Tensor, teacher: Tensor, centre: Tensor) -> str | None:
    fits = student.ndim == teacher.ndim and student.ndim in (2, 3) and student.is_floating_point()
    if not fits or len(student) != len(teacher) or student.shape[-1] != teacher.shape[-1]:
        return (
            f"student and teacher are [n, views, k], or [n, k], got "
            f"student {described(student)}, teacher {described(teacher)}."
        )
    if student.ndim == 3 and not (1 <= teacher.shape[1] <= student.shape[1] and student.shape[1] > 1):
        return (
            f"the student sees two or more views and the teacher the first of them, got {student.shape[1]} from the "
            f"student and {teacher.shape[1]} from the teacher."
        )
    if centre.shape != student.shape[-1:]:
        got = f"got {described(centre)} for {described(student)}"
        return f"the centre is as wide as outputs, {got}. Construct DINO(out_dim=…)."
    return state_problem("centre values", centre, student)
