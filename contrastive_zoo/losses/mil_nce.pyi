# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

Denominator = Literal["exact", "reference"]

def mil_nce(
    videos: Float[Tensor, "n d"],
    texts: Float[Tensor, "n k d"],
    *,
    temperature: float | Tensor = 1.0,
    denominator: Denominator = "exact",
    normalize: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute multiple-instance NCE: the candidates of a video against all pairs with another sample.

    With v the videos and y_i1 … y_ik the candidate texts of video i, of all ranks,

        P_i = Σ_k exp(v_i·y_ik / t)
        N_i = Σ_{j≠i} Σ_k [ exp(v_i·y_jk / t) + exp(v_j·y_ik / t) ]
        loss = mean_i [ log(P_i + N_i) − log P_i ]

    which is the paper's equation, ``denominator="exact"``. The authors' code counts the positives once in
    either direction, log(2 P_i + N_i), so that the loss of a perfect model is log 2 per video: ``"reference"``.

    Args:
        videos: [n, d], n may differ between ranks.
        texts: [n, k, d], the same k everywhere.
        temperature: t > 0, dimensionless; a tensor is learnable. The paper has none.
        denominator: ``"exact"`` or ``"reference"``.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' videos (nats per video), ``"sum"``, or ``"none"`` for the local videos, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: texts that are not k ≥ 1 per video, an unknown denominator, or what any :class:`Loss` refuses.

    Examples:
        >>> mil_nce(torch.eye(2), torch.eye(2)[:, None])   # log(e + 2) − 1
        tensor(0.5514)

    Source: Miech et al. 2020, eq. 1, https://arxiv.org/abs/1912.06430
    """

class MILNCE(Loss):
    """Compute multiple-instance NCE: the candidates of a video against all pairs with another sample.

    With v the videos and y_i1 … y_ik the candidate texts of video i, of all ranks,

        P_i = Σ_k exp(v_i·y_ik / t)
        N_i = Σ_{j≠i} Σ_k [ exp(v_i·y_jk / t) + exp(v_j·y_ik / t) ]
        loss = mean_i [ log(P_i + N_i) − log P_i ]

    which is the paper's equation, ``denominator="exact"``. The authors' code counts the positives once in
    either direction, log(2 P_i + N_i), so that the loss of a perfect model is log 2 per video: ``"reference"``.

    Called as ``loss(videos, texts)``:

    - videos: [n, d], n may differ between ranks.
    - texts: [n, k, d], the same k everywhere.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable. The paper has none.
        denominator: ``"exact"`` or ``"reference"``.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' videos (nats per video), ``"sum"``, or ``"none"`` for the local videos, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: texts that are not k ≥ 1 per video, an unknown denominator, or what any :class:`Loss` refuses.

    Examples:
        >>> MILNCE()(torch.eye(2), torch.eye(2)[:, None])   # log(e + 2) − 1
        tensor(0.5514)

    Source: Miech et al. 2020, eq. 1, https://arxiv.org/abs/1912.06430
    """

    temperature: float | Tensor | nn.Module
    denominator: Denominator
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 1.0,
        denominator: Denominator = "exact",
        normalize: bool = False,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, videos: Float[Tensor, "n d"], texts: Float[Tensor, "n k d"], *, world: World | None = None
    ) -> Tensor: ...
