# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.world import ALONE, World

def nca(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute −log of the probability that a stochastic neighbour is of the anchor's class.

    With z the rows of all ranks, P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(−‖z_i − z_k‖² / t)  −  log Σ_{p∈P(i)} exp(−‖z_i − z_p‖² / t)

    averaged over the anchors that have a positive, the paper's alternative to the sum of the probabilities. Equal to
    pytorch-metric-learning's NCALoss with ``softmax_scale=1/t``, which leaves out anchors whose probability underflows.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, in units of squared distance; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> nca(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """

class NCA(LabelledLoss):
    """Compute −log of the probability that a stochastic neighbour is of the anchor's class.

    With z the rows of all ranks, P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(−‖z_i − z_k‖² / t)  −  log Σ_{p∈P(i)} exp(−‖z_i − z_p‖² / t)

    averaged over the anchors that have a positive, the paper's alternative to the sum of the probabilities. Equal to
    pytorch-metric-learning's NCALoss with ``softmax_scale=1/t``, which leaves out anchors whose probability underflows.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, in units of squared distance; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> NCA()(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """

    temperature: float | Tensor | nn.Module
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 1.0,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
