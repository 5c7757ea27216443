"""DINO: a student predicts, from every crop of a sample, the centred and sharpened outputs of a teacher for large crops."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.devices import state_problem
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import is_number, number_problem, positive_problem
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.numbers import move_towards
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.session import refuse
from contrastive_zoo.sizes import of_size
from contrastive_zoo.world import ALONE, World


@checked
def dino(
    student: Float[Tensor, "n v k"] | Float[Tensor, "n k"],
    teacher: Float[Tensor, "n g k"] | Float[Tensor, "n k"],
    *,
    centre: Float[Tensor, " k"],
    temperature: float | Tensor = 0.1,
    teacher_temperature: float = 0.04,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the self-distillation loss without labels.

    With s^v the student's outputs of view v, g^u the teacher's of view u and c the centre,

        loss_i = − mean over u and v ≠ u of Σ_k softmax_k((g^u_i − c) / τ_t) log softmax_k(s^v_i / τ_s)

    Args:
        student: outputs of v views of a sample, the teacher's first: ``torch.stack(outputs, 1)``. n may differ between
            ranks.
        teacher: outputs of the first g of these views, used without gradient. [n, k] for both is one view each; the two
            views differ.
        centre: c; the buffer of :class:`DINO`.
        temperature: τ_s > 0; a tensor is learnable.
        teacher_temperature: τ_t > 0. Set ``loss.teacher_temperature`` for a schedule.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: outputs that do not pair, a centre of another width, a temperature that is not positive, NaN or
            infinite rows, widths or dtypes that differ between ranks, or no rows on any rank.

    Examples:
        >>> same = torch.zeros(3, 4)
        >>> dino(same, same, centre=torch.zeros(4))   # log 4
        tensor(1.3863)

    Source: Caron et al. 2021, eq. 3 and algorithm 1, https://arxiv.org/abs/2104.14294
    """
    problem = _problem(student, teacher, centre) or _settings_problem(teacher_temperature)
    begin(
        "DINO",
        {"student": student, "teacher": teacher},
        problem=problem,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        reduction=reduction,
        world=world,
    )
    s, g = (
        prepare_rows(x if x.ndim == 3 else x[:, None], normalize=False, world=world)
        for x in (student, teacher.detach())
    )
    predicted = (logit_scale(temperature, world) * s).log_softmax(2)
    losses = -matmul(
        ((g - centre.to(g.dtype)) / teacher_temperature).softmax(2), predicted.mT
    )  # of teacher's view u, student's view v
    views = losses.shape[1:]
    pairs = math.prod(views)
    if student.ndim == 3:  # a view is not compared with itself
        losses = losses * (1 - torch.eye(*views, dtype=losses.dtype, device=losses.device))
        pairs -= min(views)
    return reduce_anchors(losses.sum((1, 2)) / pairs, reduction=reduction, world=world)


def _settings_problem(teacher_temperature: float) -> str | None:
    return positive_problem(teacher_temperature=teacher_temperature)


class DINO(ConstructingLoss, function=dino, check=_settings_problem):
    """The centre is the buffer ``centre``.

    In training mode each call first uses the buffer and then moves it towards the mean of the teacher's rows of all
    ranks: c ← m c + (1 − m) mean. It is equal on every rank, and equal to that of one process.

    Args:
        out_dim: k.
        centre_momentum: m, 0 … 1.

    Raises:
        ValueError: an out_dim below 1 or above what memory holds, or a centre_momentum outside 0 … 1.

    Examples:
        >>> same = torch.zeros(3, 4)
        >>> DINO(4)(same, same)   # log 4
        tensor(1.3863)
    """

    made = ("centre",)
    centre: Tensor

    def __init__(self, out_dim: int, *, centre_momentum: float = 0.9, **settings: Any) -> None:
        if not (is_number(out_dim, low=1, whole=True) and is_number(centre_momentum, low=0, high=1)):
            raise ValueError(f"DINO: out_dim >= 1 and 0 <= centre_momentum <= 1, got {out_dim} and {centre_momentum}.")
        out_dim = int(out_dim)
        zeros = of_size("DINO", lambda: torch.zeros(out_dim), out_dim=out_dim)
        super().__init__(centre=nn.Buffer(zeros), **settings)
        self.out_dim, self.centre_momentum = out_dim, centre_momentum

    @traced_as(GraphModule.traced_forward)
    def forward(self, student: Tensor, teacher: Tensor, *, world: World | None = None) -> Tensor:  # type: ignore[override]  # rows by name
        """Return the loss, and move the centre by one step.

        Args:
            student: as in the function.
            teacher: as in the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
        """
        world = self.local() if world is None else world
        if problem := number_problem(low=0, high=1, centre_momentum=self.centre_momentum):
            refuse("DINO", problem, world=world)
        loss = super().forward(student, teacher, world=world)
        if self.training:
            self.move_centre(teacher, world)
        return loss

    @torch.no_grad()
    def move_centre(self, teacher: Tensor, world: World) -> None:
        """Move the centre by one step towards the mean of the teacher's rows of all ranks."""
        rows = teacher.flatten(0, -2).to(self.centre.dtype)
        total = torch.cat([rows.sum(0), rows.new_full((1,), len(rows))])
        total = sum_over_ranks(total, gradient="complete", world=world)
        move_towards(self.centre, total[:-1] / total[-1], 1 - self.centre_momentum)


def _problem(student: Tensor, teacher: Tensor, centre: Tensor) -> str | None:
    fits = student.ndim == teacher.ndim and student.ndim in (2, 3) and student.is_floating_point()
    if not fits or len(student) != len(teacher) or student.shape[-1] != teacher.shape[-1]:
        return (
            f"student and teacher are [n, views, k], or [n, k], got student {kind(student)}, teacher {kind(teacher)}."
        )
    if student.ndim == 3 and not (1 <= teacher.shape[1] <= student.shape[1] and student.shape[1] > 1):
        return (
            f"the student sees two or more views and the teacher the first of them, got {student.shape[1]} from the "
            f"student and {teacher.shape[1]} from the teacher."
        )
    if centre.shape != student.shape[-1:]:
        return f"the centre is as wide as outputs, got {kind(centre)} for {kind(student)}. Construct DINO(out_dim=…)."
    return state_problem("centre values", centre, student)
