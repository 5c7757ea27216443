# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.world import ALONE, World

def proxy_anchor(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"],
    margin: float = 0.1,
    alpha: float = 32.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute a loss whose anchors are proxies, and whose positives and negatives are the rows of the global batch.

    With s the cosines of rows x and proxies p, X⁺(p) the rows of p's class and P⁺ the proxies that have some,

        loss = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X⁺(p)} exp(−α (s_xp − δ)))  +  1/C Σ_p log(1 + Σ_{x∉X⁺(p)} exp(α (s_xp + δ)))

    in nats per proxy. The sums over rows are two numbers per proxy, reduced over all ranks.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: the proxies [C, d], equal on every rank.
        margin: δ, in units of the cosine.
        alpha: α > 0, dimensionless.
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, proxies of another shape, an alpha <= 0, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> proxy_anchor(torch.eye(2), torch.arange(2), weights=torch.eye(2), margin=0.0, alpha=1.0)   # log(1 + 1/e) + log 2
        tensor(1.0064)

    Source: Kim et al. 2020, eq. 4, https://arxiv.org/abs/2003.13911
    """

class ProxyAnchor(ClassLoss):
    """Compute a loss whose anchors are proxies, and whose positives and negatives are the rows of the global batch.

    With s the cosines of rows x and proxies p, X⁺(p) the rows of p's class and P⁺ the proxies that have some,

        loss = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X⁺(p)} exp(−α (s_xp − δ)))  +  1/C Σ_p log(1 + Σ_{x∉X⁺(p)} exp(α (s_xp + δ)))

    in nats per proxy. The sums over rows are two numbers per proxy, reduced over all ranks.

    The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        margin: δ, in units of the cosine.
        alpha: α > 0, dimensionless.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, proxies of another shape, an alpha <= 0, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> loss = ProxyAnchor(2, 2, margin=0.0, alpha=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(1 + 1/e) + log 2
        tensor(1.0064)

    Source: Kim et al. 2020, eq. 4, https://arxiv.org/abs/2003.13911
    """

    num_classes: int
    embedding_size: int
    margin: float
    alpha: float
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        margin: float = 0.1,
        alpha: float = 32.0,
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
