"""ProxyAnchor: each proxy pulls the rows of its class and pushes all others, the hardest most."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import replicated, sum_over_ranks
from contrastive_zoo.engine.classes import log_sum_exp_by_class, log_sum_exp_over_ranks
from contrastive_zoo.losses.class_loss import ClassLoss, begin_with_classes, positive
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
    r"""Proxies are the anchors, the rows of the global batch their positives and negatives.

    With s the cosines of rows x and proxies p, X⁺(p) the rows of p's class and P⁺ the proxies that have some,

        loss = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X⁺(p)} exp(−α (s_xp − δ)))  +  1/C Σ_p log(1 + Σ_{x∉X⁺(p)} exp(α (s_xp + δ)))

    The sums over rows are two numbers a proxy, taken over all ranks.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: the proxies [C, d], equal on every rank.
        margin: δ, in units of the cosine.
        alpha: α > 0, dimensionless.
        world: who else holds rows.

    Returns:
        Nats per proxy, the same on every rank.

    Raises:
        ValueError: labels that are missing, not one per row or no classes, proxies of another width or several a class,
            an alpha that is not positive, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows
            at all.

    Example:
        >>> eye = torch.eye(2)
        >>> proxy_anchor(eye, torch.arange(2), weights=eye, margin=0.0, alpha=1.0)   # log(1 + e⁻¹) + log(1 + e⁰)
        tensor(1.0064)

    Source: Kim et al. 2020, eq. 4, https://arxiv.org/abs/2003.13911
    """
    problem = positive("alpha", alpha)
    if weights.ndim != 2:
        problem = f"there is one proxy a class, got weights {list(weights.shape)}. Leave sub_centers at 1."
    z, own, proxies, *_ = begin_with_classes(
        "ProxyAnchor", embeddings, labels, weights, margin=margin, alpha=alpha, problem=problem, world=world
    )
    proxies = replicated(proxies, process_group=world)
    near, far = (
        log_sum_exp_over_ranks(x, gradient="complete", world=world)
        for x in log_sum_exp_by_class(z, own, proxies, shift=margin, scale=alpha)
    )
    rows = sum_over_ranks(torch.bincount(own, minlength=len(weights)), gradient="complete", world=world)
    pull, push = -F.logsigmoid(-near), -F.logsigmoid(-far)  # log(1 + exp(x)); 0 for a proxy without such rows
    return pull.sum() / (rows > 0).sum() + push.mean()


class ProxyAnchor(ClassLoss):
    """:func:`proxy_anchor` with its proxies and settings kept."""

    function = staticmethod(proxy_anchor)
    refused = ("sub_centers", "shard_over")
