"""Losses of margins over pairs and triplets, and each one's definition from its paper, over all pairs or triplets."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.zoo import itself, log_sums, masks, mean_over, roots, row, softplus, unit


def squares(z: Tensor) -> Tensor:
    return (z[:, None] - z).square().sum(2)


def noise_to_signal(z: Tensor) -> Tensor:
    """Of each anchor and candidate; 0 of a single feature, which has no variance."""
    return (z - z[:, None]).var(2) / z.var(1)[:, None] if z.shape[1] > 1 else 0 * z @ z.T


METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "distance": lambda z: roots(squares(z)),
    "similarity": lambda z: -z @ z.T,
    "noise": noise_to_signal,
}


def dense_contrastive(z, labels, metric="distance", pos_margin=0.0, neg_margin=1.0, power=1, average="nonzero"):
    d, (positive, negative) = METRICS[metric](unit(z)), masks(labels)
    low, high = (-pos_margin, -neg_margin) if metric == "similarity" else (pos_margin, neg_margin)
    of_positives, of_negatives = (d - low).relu()[positive] ** power, (high - d).relu()[negative] ** power
    return mean_over(of_positives, average) + mean_over(of_negatives, average)


def dense_triplet(z, labels, margin=0.3, metric="distance", mining="all", soft=False, average="nonzero") -> Tensor:
    d, (positive, negative) = METRICS[metric](unit(z)), masks(labels)
    if mining == "hard":
        farthest, nearest = d.masked_fill(~positive, -torch.inf).amax(1), d.masked_fill(~negative, torch.inf).amin(1)
        x = (farthest - nearest)[positive.any(1) & negative.any(1)] + margin
    else:
        differences, mined = d[:, :, None] - d[:, None], positive[:, :, None] & negative[:, None]
        if mining == "semi-hard":
            mined &= (differences < 0) & (differences > -margin)
        x = differences[mined] + margin
    return mean_over(softplus(x) if soft else x.relu(), average)


def dense_multi_similarity(z: Tensor, labels: Tensor, epsilon: float | None = None) -> Tensor:
    s, (positive, negative) = unit(z) @ unit(z).T, masks(labels)
    if epsilon is not None:
        highest = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
        lowest = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
        positive, negative = positive & (s < highest + epsilon), negative & (s > lowest - epsilon)
    of_positives, of_negatives = log_sums(-2 * (s - 0.5), positive), log_sums(50 * (s - 0.5), negative)
    return mean_over(softplus(of_positives) / 2 + softplus(of_negatives) / 50)


def dense_circle(z: Tensor, labels: Tensor, m: float = 0.4, gamma: float = 80) -> Tensor:
    s, (positive, negative) = unit(z) @ unit(z).T, masks(labels)
    of_negatives = log_sums(gamma * (s.detach() + m).relu() * (s - m), negative)
    of_positives = log_sums(-gamma * (1 + m - s.detach()).relu() * (s - 1 + m), positive)
    return mean_over(softplus(of_negatives + of_positives)[positive.any(1) & negative.any(1)])


def dense_lifted(z: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    d, (positive, negative) = roots(squares(unit(z))), masks(labels)
    near = log_sums(margin - d, negative, empty=0.0)
    hinges = (d + torch.logaddexp(near[:, None], near)).relu() ** 2 / 2
    return mean_over(hinges[positive & negative.any(1, keepdim=True)])


def dense_generalized_lifted(z: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    d, (positive, negative) = roots(squares(unit(z))), masks(labels)
    extremes = log_sums(d, positive, empty=0.0) + log_sums(margin - d, negative, empty=0.0)
    return mean_over(extremes.relu()[positive.any(1) & negative.any(1)])


def dense_margin(z: Tensor, labels: Tensor, beta: float, nu: float, num_classes: int = 0) -> Tensor:
    d, (positive, negative) = roots(squares(unit(z))), masks(labels)
    triplets = positive[:, :, None] & negative[:, None]
    far, near = ((sign * (d - beta) + 0.2).relu() for sign in (1, -1))
    losses = (far[:, :, None] + near[:, None])[triplets]
    active = ((far > 0).int()[:, :, None] + (near > 0).int()[:, None])[triplets].sum()
    of_classes = nu * beta * len(losses) if num_classes else 0
    return (losses.sum() + of_classes) / active.clamp(min=1) + (0 if num_classes else nu * beta)


def dense_ranked_list(z: Tensor, labels: Tensor, margin: float = 0.4, alpha: float = 1.2, t_n: float = 10.0) -> Tensor:
    d, (positive, negative) = roots(squares(unit(z))), masks(labels)

    def weighted(hinges: Tensor, mask: Tensor, t: float) -> Tensor:
        weights = (t * hinges).exp().where(mask & (hinges > 0), 0)
        total = weights.sum(1)
        return (weights * hinges).sum(1) / total.where(total > 0, 1)

    return mean_over(weighted(d - alpha + margin, positive, 0.0) + weighted(alpha - d, negative, t_n)) / 2


def dense_fast_ap(z: Tensor, labels: Tensor, num_bins: int = 10) -> Tensor:
    (positive, negative), width = masks(labels), 4 / num_bins
    nodes = width * torch.arange(num_bins + 1, dtype=z.dtype)
    kernels = (1 - (squares(unit(z))[..., None] - nodes).abs() / width).relu()
    of_positives, of_all = ((kernels * mask[..., None]).sum(1) for mask in (positive, positive | negative))
    found, ranked = of_positives.cumsum(1), of_all.cumsum(1)
    precision = (of_positives * found / ranked.where(ranked > 0, 1)).sum(1)
    return mean_over((1 - precision / positive.sum(1).clamp(min=1))[positive.any(1)])


def soft_order(z: Tensor, temperature: float) -> Tensor:
    """[i, p, k]: how much embedding k is more similar to anchor i than embedding p is."""
    s = unit(z) @ unit(z).T
    return ((s[:, None] - s[:, :, None]) / temperature).sigmoid()


def dense_smooth_ap(z: Tensor, labels: Tensor, temperature: float, with_self: bool = False) -> Tensor:
    (positive, negative), others = masks(labels), ~itself(z)
    relevant, order = positive | itself(z) if with_self else positive, soft_order(z, temperature)
    among, of_all = ((order * (x[:, None] & others)).sum(2) + 1 for x in (relevant, relevant | negative))
    precision = (among / of_all).where(relevant, 0).sum(1) / relevant.sum(1).clamp(min=1)
    return mean_over((1 - precision)[positive.any(1)])


def dense_angular(z: Tensor, labels: Tensor, alpha: float = 40.0) -> Tensor:
    s, (positive, negative), tan2 = unit(z) @ unit(z).T, masks(labels), math.tan(math.radians(alpha)) ** 2
    angles = 4 * tan2 * (s[:, None] + s) - 2 * (1 + tan2) * s[..., None]
    return mean_over(softplus(log_sums(angles, negative[:, None]))[positive & negative.any(1, keepdim=True)])


def dense_threshold_consistent(z: Tensor, labels: Tensor) -> Tensor:
    s, (positive, negative) = unit(z) @ unit(z).T, masks(labels)
    return mean_over((0.9 - s)[positive & (s <= 0.9)]) + mean_over((s - 0.5)[negative & (s >= 0.5)])


def in_two_dimensions(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return z, torch.stack([labels % 3, labels // 3], 1)


def dense_rank_n_contrast(z: Tensor, labels: Tensor, temperature, metric="distance", normalize=False) -> Tensor:
    logits, others = -METRICS[metric](unit(z) if normalize else z) / temperature, ~itself(z)
    labels = labels.flatten(1) if labels.ndim > 1 else labels[:, None]
    far = (labels[:, None] - labels).abs().sum(2)
    farther = (far[:, None] >= far[:, :, None]) & others[:, None]
    losses = (log_sums(logits[:, None].expand(farther.shape), farther, empty=0.0) - logits).where(others, 0)
    return losses.sum(1).mean() / max(1, len(z) - 1)


COSINES = {"metric": "similarity", "normalize": True}
SIMILARITY = {"metric": "similarity", "pos_margin": 0.9, "neg_margin": 0.2}

ENTRIES = [
    row("Contrastive", dense_contrastive, "labels"),
    row("Contrastive, as in the paper", dense_contrastive, "labels", power=2, average="all"),
    row("Contrastive, similarity", dense_contrastive, "labels", **SIMILARITY),
    row("SignalToNoise", partial(dense_contrastive, metric="noise"), "labels"),
    row("Triplet", dense_triplet, "labels", margin=0.3),
    row("Triplet, mean of all", dense_triplet, "labels", margin=0.3, average="all"),
    row("Triplet, similarity", dense_triplet, "labels", margin=0.3, metric="similarity"),
    row("Triplet, soft", dense_triplet, "labels", margin=0.0, soft=True),
    row("Triplet, hard", dense_triplet, "labels", margin=0.3, mining="hard"),
    row("Triplet, hard and soft", dense_triplet, "labels", margin=0.3, mining="hard", soft=True, average="all"),
    row("Triplet, semi-hard", dense_triplet, "labels", margin=0.3, mining="semi-hard"),
    row("Triplet, semi-hard and soft", dense_triplet, "labels", margin=0.3, mining="semi-hard", soft=True),
    row("MultiSimilarity", dense_multi_similarity, "labels"),
    row("MultiSimilarity, mined", dense_multi_similarity, "labels", epsilon=0.1),
    row("Circle", dense_circle, "labels"),
    row("LiftedStructure", dense_lifted, "labels"),
    row("GeneralizedLiftedStructure", dense_generalized_lifted, "labels"),
    row("Margin", dense_margin, "labels", beta=1.25, nu=0.1),
    row("Margin, by class", dense_margin, "labels", beta=1.25, nu=0.1, num_classes=100),
    row("RankedList", dense_ranked_list, "labels"),
    row("FastAP", dense_fast_ap, "labels"),
    row("SmoothAP", dense_smooth_ap, "labels", temperature=0.1),
    row("Angular", dense_angular, "labels"),
    row("ThresholdConsistentMargin", dense_threshold_consistent, "labels"),
    row("SmoothAP, with self", dense_smooth_ap, "labels", temperature=0.1, with_self=True),
    row("RankNContrast", dense_rank_n_contrast, "labels", lambda z, labels: (z, labels / 3)),
    row("RankNContrast, two labels", dense_rank_n_contrast, "labels", in_two_dimensions, **COSINES),
]
