"""ReSSL: the student's similarities to a memory of earlier embeddings follow the teacher's."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.settings import Positive, Reduction, Temperature
from contrastive_zoo.losses.memory_loss import MemoryLoss, unfilled


class ReSSL(MemoryLoss):
    r"""Compute the cross-entropy of the student's distribution over the memory, with the teacher's as target.

    With q and k the unit rows of student and teacher and x_j the unit rows of the memory,

        loss_i = − Σ_j softmax_j(k_i·x_j / t') log softmax_j(q_i·x_j / t)

    The teacher has no gradient. Samples of a batch are not compared with each other: a rank needs its own n × m logits
    only. Without a memory there is no loss.

    The memory holds the teacher's rows of earlier calls; :class:`MemoryLoss` documents it.

    Called as ``loss(student, teacher)``:

    - student: q, [n, d]; n may differ between ranks.
    - teacher: k, [n, d], a momentum encoder's embeddings of weakly augmented views.

    Args:
        size: number of embeddings in the memory.
        embedding_size: d.
        temperature: t > 0, the student's; a tensor or a module is learnable.
        teacher_temperature: t' > 0, smaller than t.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, a temperature that is not positive, or what
            any :class:`Loss` refuses.

    Examples:
        >>> eye, loss = torch.eye(2), ReSSL(8, embedding_size=2, temperature=1.0, teacher_temperature=1e-3)
        >>> loss(eye, eye), loss(eye, eye)   # the memory is empty; then log(e + 1) − 1
        (tensor(0.), tensor(0.3133))

    Source: Zheng et al. 2021, eqs. 3-5, https://arxiv.org/abs/2107.09282
    """

    temperature: Temperature = 0.1
    teacher_temperature: Positive = 0.04
    reduction: Reduction = "mean"

    def inputs(self, student: Float[Tensor, "n d"], teacher: Float[Tensor, "n d"]) -> Inputs:
        return self.stated_rows("row i of both is one sample", student=student, teacher=teacher)

    def compute(self, batch: Batch) -> Tensor:
        student, teacher = batch.rows.values()
        memory, filled = self.earlier()
        q, k = (batch.prepared(rows, normalize=True) for rows in (student, teacher.detach()))
        candidates = torch.nn.functional.normalize(memory.to(q), dim=1)
        student_rows = batch.scale(batch.settings.temperature) * q
        teacher_rows = k / batch.settings.teacher_temperature
        losses = _cross_entropies(student_rows, teacher_rows, candidates, unfilled(memory, filled))
        exists = torch.full_like(losses, len(memory) > 0)
        valid = exists if filled is None else (filled > 0).to(losses).expand_as(losses)
        value = batch.reduce(losses, valid, reduction=self.reduction)
        self.remember(teacher, batch)
        return value


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
