"""ProxyAnchor: each proxy is an anchor for all rows of the batch, with the hardest rows weighted most."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.classes import log1p_sum_exp_by_class
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.class_loss import ClassLoss, begin_with_classes
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.world import ALONE, World


@checked
def proxy_anchor(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"],
    margin: float = 0.1,
    alpha: float = 32.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute a loss whose anchors are proxies, and whose positives and negatives are the rows of the global batch.

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
    several = f"there is one proxy a class, got weights {list(weights.shape)}. Leave sub_centers at 1."
    problem = _settings_problem(margin, alpha) if weights.ndim == 2 else several
    z, targets, proxies, *_ = begin_with_classes(
        "ProxyAnchor", embeddings, labels, weights, margin=margin, alpha=alpha, problem=problem, world=world
    )
    positive_term, negative_term, counts = log1p_sum_exp_by_class(
        z, targets, proxies, shift=real(margin), scale=real(alpha), world=world
    )
    return positive_term.sum() / (counts > 0).sum() + negative_term.mean()  # a proxy without such rows has 0


def _settings_problem(margin: float, alpha: float) -> str | None:
    return positive_problem(alpha=alpha) or number_problem(margin=margin)


class ProxyAnchor(ClassLoss, function=proxy_anchor, check=_settings_problem):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Examples:
        >>> import torch
        >>> loss = ProxyAnchor(2, 2, margin=0.0, alpha=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(1 + 1/e) + log 2
        tensor(1.0064)
    """

    refused = ("sub_centers", "shard_over")
