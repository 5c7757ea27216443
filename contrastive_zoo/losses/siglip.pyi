# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.temperature import LearnableScaleLoss
from contrastive_zoo.world import ALONE, World

def siglip(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.1,
    logit_bias: float | Tensor = -10.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the binary cross-entropy of all pairs, summed over texts and averaged over images.

    With x, y the unit rows of all ranks, z_ij = 1 for i = j and −1 otherwise,

        loss = −1/N · Σ_i Σ_j log σ( z_ij · (x_i·y_j / t + b) )

    Dense: ``-logsigmoid((2 * eye(N) - 1) * (x @ y.T / t + b)).sum() / N``. Equal to open_clip's ``SigLipLoss`` on one
    process, with logit_scale = 1/t.

    Args:
        images: [n, d], n may differ between ranks.
        texts: [n, d], row i belongs to row i of images.
        temperature: t > 0, dimensionless; a tensor is learnable.
        logit_bias: b; a negative start matches the many negatives. A tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' images (nats per image), ``"sum"``, or ``"none"`` for the local images, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> siglip(torch.eye(2), torch.eye(2), temperature=1.0, logit_bias=0.0)   # log(1 + e⁻¹) + log 2
        tensor(1.0064)

    Source: Zhai et al. 2023, §3.2 and algorithm 1, https://arxiv.org/abs/2303.15343
    """

def bias_problem(logit_bias: float | Tensor) -> str | None:
    """Return what is wrong with a bias, or None."""

class SigLIP(LearnableScaleLoss):
    """Compute the binary cross-entropy of all pairs, summed over texts and averaged over images.

    With x, y the unit rows of all ranks, z_ij = 1 for i = j and −1 otherwise,

        loss = −1/N · Σ_i Σ_j log σ( z_ij · (x_i·y_j / t + b) )

    Dense: ``-logsigmoid((2 * eye(N) - 1) * (x @ y.T / t + b)).sum() / N``. Equal to open_clip's ``SigLipLoss`` on one
    process, with logit_scale = 1/t.

    Temperature and bias are learnable; the settings are their initial values.

    ``loss.logit_scale``, log(1/t) without a bound, and ``loss.logit_bias`` are open_clip's parameters of these names.

    Called as ``loss(images, texts)``:

    - images: [n, d], n may differ between ranks.
    - texts: [n, d], row i belongs to row i of images.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        logit_bias: b; a negative start matches the many negatives. A tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' images (nats per image), ``"sum"``, or ``"none"`` for the local images, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an initial bias that is no finite number.
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> SigLIP(temperature=1.0, logit_bias=0.0)(torch.eye(2), torch.eye(2)).detach()   # log(1 + e⁻¹) + log 2
        tensor(1.0064)

    Source: Zhai et al. 2023, §3.2 and algorithm 1, https://arxiv.org/abs/2303.15343
    """

    temperature: float | Tensor | nn.Module
    logit_bias: float | Tensor
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        logit_bias: float | Tensor = -10.0,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, images: Float[Tensor, "n d"], texts: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...

def binary_cross_entropy(block: AnchorBlock, temperature: Tensor, logit_bias: Tensor) -> Rows:
    """Return −Σ log σ(± logit) over the pairs of each anchor: + for positives, − for negatives."""
