"""DINO: a student predicts, from every crop of a sample, the centred and sharpened outputs of a teacher for large crops."""

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
from contrastive_zoo.ranks.row_checks import described


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
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an out_dim below 1 or above what memory holds, a centre_momentum outside 0 … 1, outputs that do not
            pair, a centre of another width, a temperature that is not positive, NaN or infinite rows, widths or dtypes
            that differ between ranks, or no rows on any rank.

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
        return Inputs({"student": student, "teacher": teacher}, _problem(student, teacher, self.centre))

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
        """Move the centre by one step towards the mean of the teacher's rows of all ranks."""
        rows = teacher.flatten(0, -2).to(self.centre.dtype)
        total = batch.sum(torch.cat([rows.sum(0), rows.new_full((1,), len(rows))]), gradient="complete")
        move_towards(self.centre, total[:-1] / total[-1], 1 - batch.settings.centre_momentum)


def _problem(student: Tensor, teacher: Tensor, centre: Tensor) -> str | None:
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
