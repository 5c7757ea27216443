"""DINO: a student predicts, from every crop of a sample, what a centred, sharpened teacher says of the large ones."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.losses.base import begin, logit_scale, prepared, views_problem
from contrastive_zoo.losses.class_loss import Maker, positive
from contrastive_zoo.meeting import kind
from contrastive_zoo.world import ALONE, World


def dino(
    *student: Float[Tensor, "n k"],
    teacher: Sequence[Float[Tensor, "n k"]] | None = None,
    centre: Float[Tensor, " k"],
    temperature: float | Tensor = 0.1,
    teacher_temperature: float = 0.04,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Self-distillation without labels.

    With s^v the student's outputs of view v, g^u the teacher's of view u and c the centre,

        loss_i = − mean over u and v ≠ u of Σ_k softmax_k((g^u_i − c) / τ_t) log softmax_k(s^v_i / τ_s)

    Args:
        student: two or more views of [n, k], the large crops first; n may differ between ranks.
        teacher: one or more of [n, k], of the first views in this order, used without gradient; None takes the
            student's first two.
        centre: c; :class:`DINO` keeps it.
        temperature: τ_s > 0; a tensor is learnt.
        teacher_temperature: τ_t > 0. Set ``loss.teacher_temperature`` for a schedule.
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for my samples.
        world: who else holds rows.

    Returns:
        Nats per sample, the same on every rank; [n] for ``"none"``.

    Raises:
        ValueError: fewer than two views, views of different shape, a centre of another width, a temperature that is not
            positive, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> same = torch.zeros(3, 4)
        >>> dino(same, same, centre=torch.zeros(4))   # log 4
        tensor(1.3863)

    Source: Caron et al. 2021, eq. 3 and algorithm 1, https://arxiv.org/abs/2104.14294
    """
    taught = [x.detach() for x in (student[:2] if teacher is None else teacher)]
    named = {f"student {index}": x for index, x in enumerate(student)}
    named |= {f"teacher {index}": x for index, x in enumerate(taught)}
    problem = views_problem(student) or _problem(student, taught, centre)
    begin(
        "DINO",
        named,
        problem=problem or positive("teacher_temperature", teacher_temperature),
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        reduction=reduction,
        world=world,
    )
    scale = logit_scale(temperature, world)
    predicted = [(scale * prepared(x, normalize=False)).log_softmax(1) for x in student]
    targets = [((prepared(x, normalize=False) - centre) / teacher_temperature).softmax(1) for x in taught]
    losses = [-(q * p).sum(1) for u, q in enumerate(targets) for v, p in enumerate(predicted) if v != u]
    return reduce_anchors(torch.stack(losses).mean(0), reduction=reduction, world=world)


class DINO(Maker):
    """:func:`dino` with its settings and the centre kept.

    While training, each call moves the buffer ``centre`` towards the mean of the teacher's rows of all ranks, after it
    was used: c ← m c + (1 − m) mean. It is equal on every rank, and to that of one process.

    Args:
        out_dim: k.
        centre_momentum: m, 0 … 1.
        settings: as the function takes them.
    """

    function = staticmethod(dino)
    made = ("centre", "teacher")
    centre: Tensor

    def __init__(self, out_dim: int, *, centre_momentum: float = 0.9, **settings: Any) -> None:
        if not (out_dim >= 1 and 0 <= centre_momentum <= 1):
            raise ValueError(f"DINO: out_dim >= 1 and 0 <= centre_momentum <= 1, got {out_dim} and {centre_momentum}.")
        super().__init__(centre=nn.Buffer(torch.zeros(out_dim)), teacher=None, **settings)
        self.out_dim, self.centre_momentum = out_dim, centre_momentum

    def forward(  # type: ignore[override]
        self, *student: Tensor, teacher: Sequence[Tensor] | None = None, world: World | None = None
    ) -> Tensor:
        """The loss of these views, and a step of the centre.

        Args:
            student: as the function takes them.
            teacher: as the function takes them.
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
        """
        world = self.local() if world is None else world
        loss = dino(*student, **{**self.settings(), "teacher": teacher}, world=world)
        if self.training:
            self._move(student[:2] if teacher is None else teacher, world)
        return loss

    @torch.no_grad()
    def _move(self, teacher: Sequence[Tensor], world: World) -> None:
        rows = torch.cat(list(teacher)).to(self.centre.dtype)
        total = torch.cat([rows.sum(0), rows.new_tensor([len(rows)])])
        total = sum_over_ranks(total, gradient="complete", world=world)
        self.centre.lerp_(total[:-1] / total[-1], 1 - self.centre_momentum)


def _problem(student: Sequence[Tensor], teacher: Sequence[Tensor], centre: Tensor) -> str | None:
    for index, x in enumerate(teacher):
        if x.shape != student[0].shape:
            return f"teacher and student pair row by row, got teacher {index} {kind(x)} for student {kind(student[0])}."
    if not 1 <= len(teacher) <= len(student):
        return f"the teacher sees the first of the student's {len(student)} views, got {len(teacher)} from the teacher."
    if centre.shape != student[0].shape[1:]:
        return (
            f"the centre is as wide as outputs, got {kind(centre)} for {kind(student[0])}. Construct DINO(out_dim=…)."
        )
    return None
