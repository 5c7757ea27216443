"""ReSSL: the student's similarities to a memory of earlier embeddings follow the teacher's."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.compiling import traced_as, uncompiled
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.loss_base.checks import positive_problem, towers_problem
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.memory.memory_loss import MemoryLoss, memory_problem, unfilled
from contrastive_zoo.session import refuse
from contrastive_zoo.world import ALONE, World


@uncompiled
def ressl(
    student: Float[Tensor, "n d"],
    teacher: Float[Tensor, "n d"],
    *,
    memory: Float[Tensor, "m d"],
    filled: Int[Tensor, ""] | None = None,
    temperature: float | Tensor = 0.1,
    teacher_temperature: float = 0.04,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the cross-entropy of the student's distribution over the memory, with the teacher's as target.

    With q and k the unit rows of student and teacher and x_j the unit rows of the memory,

        loss_i = − Σ_j softmax_j(k_i·x_j / t') log softmax_j(q_i·x_j / t)

    The teacher has no gradient. Samples of a batch are not compared with each other: a rank needs its own n × m logits
    only. Without a memory there is no loss.

    Args:
        student: q, [n, d]; n may differ between ranks.
        teacher: k, [n, d], a momentum encoder's embeddings of weakly augmented views.
        memory: x, [m, d], equal on every rank; the ``queue`` of :class:`ReSSL`.
        filled: how many rows of ``memory`` count, the first ones, on its device; None is all.
        temperature: t > 0, the student's; a tensor is learnable.
        teacher_temperature: t' > 0, smaller than t.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, a temperature that is not positive, or what
            any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> ressl(eye, eye, memory=eye, temperature=1.0, teacher_temperature=1e-3)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Zheng et al. 2021, eqs. 3-5, https://arxiv.org/abs/2107.09282
    """
    problem = towers_problem("row i of both is one sample", "Pass as many of each.", student=student, teacher=teacher)
    problem = problem or memory_problem(memory, student, filled) or _settings_problem(teacher_temperature)
    if problem is not None:
        refuse("ReSSL", problem, world=world)
    begin(
        "ReSSL", {"student": student, "teacher": teacher}, memory=list(memory.shape),
        temperature=temperature, teacher_temperature=teacher_temperature, reduction=reduction, world=world,
    )  # fmt: skip
    q, k = (prepare_rows(rows, normalize=True, world=world) for rows in (student, teacher.detach()))
    candidates = torch.nn.functional.normalize(memory.to(q), dim=1)
    student_rows, teacher_rows = logit_scale(temperature, world) * q, k / real(teacher_temperature)
    losses = _cross_entropies(student_rows, teacher_rows, candidates, unfilled(memory, filled))
    valid = torch.full_like(losses, len(memory) > 0) if filled is None else (filled > 0).to(losses).expand_as(losses)
    return reduce_anchors(losses, valid, reduction=reduction, world=world)


def _settings_problem(teacher_temperature: float) -> str | None:
    return positive_problem(teacher_temperature=teacher_temperature)


class ReSSL(MemoryLoss, function=ressl, check=_settings_problem):
    """The memory holds the teacher's rows of earlier calls; :class:`MemoryLoss` documents it.

    Examples:
        >>> eye, loss = torch.eye(2), ReSSL(8, embedding_size=2, temperature=1.0, teacher_temperature=1e-3)
        >>> loss(eye, eye), loss(eye, eye)
        (tensor(0.), tensor(0.3133))
    """

    @traced_as(GraphModule.traced_forward)
    def forward(self, student: Tensor, teacher: Tensor, *, world: World | None = None) -> Tensor:  # type: ignore[override]  # rows by name
        """Return the loss, and add the teacher's rows to the memory.

        Args:
            student: as in the function.
            teacher: as in the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
        """
        world = self.local() if world is None else world
        loss = super().forward(student, teacher, world=world)
        self.remember(teacher, world)
        return loss


@without_autocast
def _cross_entropies(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "n d"],
    candidates: Float[Tensor, "m d"],
    unused: Bool[Tensor, " m"] | None,
) -> Float[Tensor, " n"]:
    targets, logits = matmul(k, candidates.T), matmul(q, candidates.T)
    if unused is not None:  # −inf would make 0 · −inf of them
        targets, logits = (x.masked_fill(unused, torch.finfo(x.dtype).min) for x in (targets, logits))
    return -(targets.softmax(1) * logits.log_softmax(1)).sum(1)
