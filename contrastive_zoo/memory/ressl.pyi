# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.memory.memory_loss import MemoryLoss
from contrastive_zoo.world import ALONE, World

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
    """Compute the cross-entropy of the student's distribution over the memory, with the teacher's as target.

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

class ReSSL(MemoryLoss):
    """Compute the cross-entropy of the student's distribution over the memory, with the teacher's as target.

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
        temperature: t > 0, the student's; a tensor is learnable.
        teacher_temperature: t' > 0, smaller than t.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, a temperature that is not positive, or what
            any :class:`Loss` refuses.

    Examples:
        >>> eye, loss = torch.eye(2), ReSSL(8, embedding_size=2, temperature=1.0, teacher_temperature=1e-3)
        >>> loss(eye, eye), loss(eye, eye)
        (tensor(0.), tensor(0.3133))

    Source: Zheng et al. 2021, eqs. 3-5, https://arxiv.org/abs/2107.09282
    """

    size: int
    embedding_size: int
    temperature: float | Tensor | nn.Module
    teacher_temperature: float
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        size: int,
        embedding_size: int,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        teacher_temperature: float = 0.04,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, student: Float[Tensor, "n d"], teacher: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
