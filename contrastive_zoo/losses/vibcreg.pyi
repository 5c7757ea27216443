# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def vibcreg(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 200.0,
    gamma: float = 1.0,
    eps: float = 0.0001,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the variance-invariance-better-covariance regularisation; embeddings are not normalised.

    With Cov the covariance (over N − 1) and R the correlation matrix of the features over the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d² · Σ_{k≠l} R(z)_kl² ]

    as solo-learn's vibcreg_loss_func. Correlations of a constant feature, and of a single row, are 0. The paper also
    whitens features by IterNorm at the end of the projector, which is a layer of the model.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        invariance: λ.
        variance: μ.
        covariance: ν.
        gamma: γ, the target standard deviation.
        eps: ε > 0.
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps that is not positive, a number that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> a = torch.tensor([[0.0, 0.0], [0.6, 0.6]])   # variances 0.18; both correlations are 1
        >>> vibcreg(a, a, variance=1.0, covariance=2.0, eps=0.07)   # 2 · (½ + 1)
        tensor(3.)

    Source: Lee & Aune 2021, https://arxiv.org/abs/2109.00783
    """

class VIbCReg(Loss):
    """Compute the variance-invariance-better-covariance regularisation; embeddings are not normalised.

    With Cov the covariance (over N − 1) and R the correlation matrix of the features over the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d² · Σ_{k≠l} R(z)_kl² ]

    as solo-learn's vibcreg_loss_func. Correlations of a constant feature, and of a single row, are 0. The paper also
    whitens features by IterNorm at the end of the projector, which is a layer of the model.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        invariance: λ.
        variance: μ.
        covariance: ν.
        gamma: γ, the target standard deviation.
        eps: ε > 0.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an eps that is not positive, a number that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> a = torch.tensor([[0.0, 0.0], [0.6, 0.6]])   # variances 0.18; both correlations are 1
        >>> VIbCReg(variance=1.0, covariance=2.0, eps=0.07)(a, a)   # 2 · (½ + 1)
        tensor(3.)

    Source: Lee & Aune 2021, https://arxiv.org/abs/2109.00783
    """

    invariance: float
    variance: float
    covariance: float
    gamma: float
    eps: float
    check_finite: bool

    def __init__(
        self,
        *,
        invariance: float = 25.0,
        variance: float = 25.0,
        covariance: float = 200.0,
        gamma: float = 1.0,
        eps: float = 0.0001,
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
