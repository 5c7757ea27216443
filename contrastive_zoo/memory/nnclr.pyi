# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.memory.memory_loss import MemoryLoss
from contrastive_zoo.world import ALONE, World

def nnclr(
    projections1: Float[Tensor, "n d"],
    projections2: Float[Tensor, "n d"],
    predictions1: Float[Tensor, "n d"],
    predictions2: Float[Tensor, "n d"],
    *,
    memory: Float[Tensor, "m d"],
    filled: Int[Tensor, ""] | None = None,
    temperature: float | Tensor = 0.1,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute InfoNCE between the neighbours of one view's projections and the other view's predictions.

    With z the projections and p the predictions of two views, unit rows of all ranks, Q the unit rows of the memory and
    NN(z) = argmax_{q∈Q} z·q,

        loss = ( InfoNCE(NN(z¹), p²) + InfoNCE(NN(z²), p¹) ) / 2

    with :func:`info_nce` at temperature t. Neighbours have no gradient. As long as Q is empty, z takes the place of NN(z).

    Args:
        projections1: z¹, [n, d]; n may differ between ranks.
        projections2: z², [n, d].
        predictions1: p¹, [n, d], the predictor's output for z¹.
        predictions2: p², [n, d].
        memory: Q, [m, d], equal on every rank; the ``queue`` of :class:`NNCLR`.
        filled: how many rows of ``memory`` are in Q, the first ones, on its device; None is all.
        temperature: t > 0; a tensor is learnable.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> nnclr(eye, eye, eye, eye, memory=torch.empty(0, 2), temperature=1.0)   # log(e + 1) − 1
        tensor(0.3133)
        >>> nnclr(eye, eye, eye, eye, memory=eye[:1], temperature=1.0)   # row 2 has the neighbour of row 1: + ½
        tensor(0.8133)

    Source: Dwibedi et al. 2021, eqs. 2-4, https://arxiv.org/abs/2104.14548
    """

class NNCLR(MemoryLoss):
    """Compute InfoNCE between the neighbours of one view's projections and the other view's predictions.

    With z the projections and p the predictions of two views, unit rows of all ranks, Q the unit rows of the memory and
    NN(z) = argmax_{q∈Q} z·q,

        loss = ( InfoNCE(NN(z¹), p²) + InfoNCE(NN(z²), p¹) ) / 2

    with :func:`info_nce` at temperature t. Neighbours have no gradient. As long as Q is empty, z takes the place of NN(z).

    The memory holds the projections of the first view of earlier calls; :class:`MemoryLoss` documents it.

    Called as ``loss(projections1, projections2, predictions1, predictions2)``:

    - projections1: z¹, [n, d]; n may differ between ranks.
    - projections2: z², [n, d].
    - predictions1: p¹, [n, d], the predictor's output for z¹.
    - predictions2: p², [n, d].

    Args:
        size: number of embeddings in the memory.
        embedding_size: d.
        temperature: t > 0; a tensor is learnable.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: rows that do not belong together, a memory of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> eye, loss = torch.eye(2), NNCLR(1, embedding_size=2, temperature=1.0)
        >>> loss(eye, eye, eye, eye), loss(eye, eye, eye, eye)   # then all have the neighbour (0, 1)
        (tensor(0.3133), tensor(0.8133))

    Source: Dwibedi et al. 2021, eqs. 2-4, https://arxiv.org/abs/2104.14548
    """

    size: int
    embedding_size: int
    temperature: float | Tensor | nn.Module
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        size: int,
        embedding_size: int,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        projections1: Float[Tensor, "n d"],
        projections2: Float[Tensor, "n d"],
        predictions1: Float[Tensor, "n d"],
        predictions2: Float[Tensor, "n d"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
