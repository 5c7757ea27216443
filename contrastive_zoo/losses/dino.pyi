# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.world import ALONE, World

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
    """Compute the self-distillation loss without labels.

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

class DINO(ConstructingLoss):
    """Compute the self-distillation loss without labels.

    With s^v the student's outputs of view v, g^u the teacher's of view u and c the centre,

        loss_i = − mean over u and v ≠ u of Σ_k softmax_k((g^u_i − c) / τ_t) log softmax_k(s^v_i / τ_s)

    The centre is the buffer ``centre``.

    In training mode each call first uses the buffer and then moves it towards the mean of the teacher's rows of all
    ranks: c ← m c + (1 − m) mean. It is equal on every rank, and equal to that of one process.

    Called as ``loss(student, teacher)``:

    - student: outputs of v views of a sample, the teacher's first: ``torch.stack(outputs, 1)``. n may differ between
      ranks.
    - teacher: outputs of the first g of these views, used without gradient. [n, k] for both is one view each; the two
      views differ.

    Args:
        out_dim: k.
        centre_momentum: m, 0 … 1.
        temperature: τ_s > 0; a tensor is learnable.
        teacher_temperature: τ_t > 0. Set ``loss.teacher_temperature`` for a schedule.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an out_dim below 1 or above what memory holds, or a centre_momentum outside 0 … 1.
        ValueError: outputs that do not pair, a centre of another width, a temperature that is not positive, NaN or
            infinite rows, widths or dtypes that differ between ranks, or no rows on any rank.

    Examples:
        >>> same = torch.zeros(3, 4)
        >>> DINO(4)(same, same)   # log 4
        tensor(1.3863)

    Source: Caron et al. 2021, eq. 3 and algorithm 1, https://arxiv.org/abs/2104.14294
    """

    out_dim: int
    centre_momentum: float
    temperature: float | Tensor | nn.Module
    teacher_temperature: float
    reduction: Reduction
    check_finite: bool
    centre: Tensor

    def __init__(
        self,
        out_dim: int,
        *,
        centre_momentum: float = 0.9,
        temperature: float | Tensor | nn.Module = 0.1,
        teacher_temperature: float = 0.04,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        student: Float[Tensor, "n v k"] | Float[Tensor, "n k"],
        teacher: Float[Tensor, "n g k"] | Float[Tensor, "n k"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
    def move_centre(self, teacher: Tensor, world: World) -> None:
        """Move the centre by one step towards the mean of the teacher's rows of all ranks."""
