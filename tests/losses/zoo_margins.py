"""Losses of margins over pairs and triplets, and each one's definition, anchor by anchor, from its paper."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from contrastive_zoo.losses.pair_margins import (
    Contrastive,
    Margin,
    RankedList,
    SignalToNoise,
    ThresholdConsistentMargin,
)
from contrastive_zoo.losses.ranking import PNP, FastAP, SmoothAP
from contrastive_zoo.losses.soft_margins import Circle, GeneralizedLiftedStructure, LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.triplet import Angular, Triplet
from tests.zoo import anchors, each_anchor, log_sum, mean, row, unit


def distance(a: Tensor, b: Tensor) -> Tensor:
    squared = (a - b).square().sum()
    return squared.sqrt() if squared > 1e-14 else 0 * squared


def nonzero(losses: list[Tensor], z: Tensor) -> Tensor:
    return mean([x for x in losses if x > 0], z)


def minus_cosine(a: Tensor, b: Tensor) -> Tensor:
    return -(a @ b)


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


AVERAGES = {"nonzero": nonzero, "all": mean}
MEASURES = {"distance": distance, "similarity": minus_cosine}


def dense_contrastive(
    z: Tensor,
    labels: Tensor,
    measure: Callable[[Tensor, Tensor], Tensor] = distance,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    power: int = 1,
    average: str = "nonzero",
) -> Tensor:
    z, of = unit(z), AVERAGES[average]
    positive_terms = [(measure(z[i], z[p]) - pos_margin).relu() ** power for i, ps, _ in anchors(labels) for p in ps]
    negative_terms = [(neg_margin - measure(z[i], z[n])).relu() ** power for i, _, ns in anchors(labels) for n in ns]
    return of(positive_terms, z) + of(negative_terms, z)


def dense_contrastive_of_similarities(
    z: Tensor, labels: Tensor, metric: str, pos_margin: float, neg_margin: float
) -> Tensor:
    return dense_contrastive(z, labels, MEASURES[metric], -pos_margin, -neg_margin)


def noise_to_signal(a: Tensor, b: Tensor) -> Tensor:
    if len(a) == 1:
        return 0 * (a + b).sum()
    return (b - a).var() / a.var()


def dense_triplet(
    z: Tensor,
    labels: Tensor,
    margin: float = 0.3,
    metric: str = "distance",
    mining: str = "all",
    soft: bool = False,
    average: str = "nonzero",
) -> Tensor:
    z, measure, losses = unit(z), MEASURES[metric], []
    for i, ps, ns in anchors(labels):
        near, far = [measure(z[i], z[p]) for p in ps], [measure(z[i], z[n]) for n in ns]
        if mining == "hard" and ps and ns:
            near, far = [torch.stack(near).max()], [torch.stack(far).min()]
        kept = [x - y + margin for x in near for y in far if mining != "semi-hard" or x < y < x + margin]
        losses += [softplus(x) if soft else x.relu() for x in kept]
    return AVERAGES[average](losses, z)


@each_anchor
def dense_multi_similarity(
    z: Tensor, i: int, ps: list[int], ns: list[int], alpha: float = 2, beta: float = 50, epsilon: float | None = None
) -> Iterator[Tensor]:
    of_positives, of_negatives, zero = [z[i] @ z[p] for p in ps], [z[i] @ z[n] for n in ns], 0 * z.sum()
    if epsilon is not None:
        of_positives, of_negatives = (
            [s for s in of_positives if any(s < x + epsilon for x in of_negatives)],
            [s for s in of_negatives if any(s > x - epsilon for x in of_positives)],
        )
    positive_term = log_sum([zero, *(-alpha * (s - 0.5) for s in of_positives)]) / alpha
    yield positive_term + log_sum([zero, *(beta * (s - 0.5) for s in of_negatives)]) / beta


@each_anchor
def dense_circle(
    z: Tensor, i: int, ps: list[int], ns: list[int], m: float = 0.4, gamma: float = 80
) -> Iterator[Tensor]:
    if ps and ns:
        of_positives, of_negatives = (torch.stack([z[i] @ z[j] for j in js]) for js in (ps, ns))
        negative_terms = gamma * (of_negatives.detach() + m).relu() * (of_negatives - m)
        positive_terms = -gamma * (1 + m - of_positives.detach()).relu() * (of_positives - 1 + m)
        both = (negative_terms[:, None] + positive_terms).flatten()
        yield log_sum([0 * both[0], *both])


def dense_lifted(z: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    z, losses, table = unit(z), [], anchors(labels)
    for i, ps, ns in table:
        for p in ps if ns else []:
            near = [margin - distance(z[k], z[n]) for k in (i, p) for n in table[k][2]]
            losses.append((distance(z[i], z[p]) + log_sum(near)).relu() ** 2 / 2)
    return mean(losses, z)


@each_anchor
def dense_generalized_lifted(z: Tensor, i: int, ps: list[int], ns: list[int], margin: float = 1.0) -> Iterator[Tensor]:
    if ps and ns:
        positive_term = log_sum([distance(z[i], z[p]) for p in ps])
        yield (positive_term + log_sum([margin - distance(z[i], z[n]) for n in ns])).relu()


def dense_margin(
    z: Tensor, labels: Tensor, margin: float = 0.2, beta: float = 1.25, nu: float = 0.0, num_classes: int = 0
) -> Tensor:
    z, losses, active = unit(z), [], 0
    for i, p, n in ((i, p, n) for i, ps, ns in anchors(labels) for p in ps for n in ns):
        two = (distance(z[i], z[p]) - beta + margin).relu(), (beta - distance(z[i], z[n]) + margin).relu()
        active += int(two[0] > 0) + int(two[1] > 0)
        losses.append(two[0] + two[1] + (nu * beta if num_classes else 0))
    return mean(losses, z, count=active) + (0 if num_classes else nu * beta)


@each_anchor
def dense_ranked_list(
    z: Tensor, i: int, ps: list[int], ns: list[int], margin: float = 0.4, alpha: float = 1.2, t_n: float = 10.0
) -> Iterator[Tensor]:
    def weighted(hinges: list[Tensor], t: float) -> Tensor:
        positive = [x for x in hinges if x > 0]
        weights = [(t * x).exp() for x in positive]
        return sum(w * x for w, x in zip(weights, positive, strict=True)) / sum(weights) if positive else 0 * z.sum()

    positive_term = weighted([distance(z[i], z[p]) - alpha + margin for p in ps], 0.0)
    yield (positive_term + weighted([alpha - distance(z[i], z[n]) for n in ns], t_n)) / 2


@each_anchor
def dense_fast_ap(z: Tensor, i: int, ps: list[int], ns: list[int], num_bins: int = 10) -> Iterator[Tensor]:
    zero, width = 0 * z.sum(), 4 / num_bins

    def histogram(js: list[int]) -> list[Tensor]:
        squares = [(z[i] - z[j]).square().sum() for j in js]
        return [sum(((1 - (x - width * k).abs() / width).relu() for x in squares), zero) for k in range(num_bins + 1)]

    precision, positives, ranked = zero, zero, zero
    for of_positives, of_all in zip(histogram(ps), histogram(ps + ns), strict=True):
        positives, ranked = positives + of_positives, ranked + of_all
        if ranked > 0:
            precision = precision + of_positives * positives / ranked
    if ps:
        yield 1 - precision / len(ps)


@each_anchor
def dense_smooth_ap(
    z: Tensor, i: int, ps: list[int], ns: list[int], temperature: float, with_self: bool = False
) -> Iterator[Tensor]:
    s, relevant = z @ z[i], sorted([*ps, i]) if with_self else ps

    def rank(p: int, js: list[int]) -> Tensor:
        return 1 + sum((((s[k] - s[p]) / temperature).sigmoid() for k in js if k != p), 0 * s[0])

    if ps:
        yield 1 - sum(rank(p, relevant) / rank(p, relevant + ns) for p in relevant) / len(relevant)


@each_anchor
def dense_angular(z: Tensor, i: int, ps: list[int], ns: list[int], alpha: float = 40.0) -> Iterator[Tensor]:
    tan2 = math.tan(math.radians(alpha)) ** 2
    for p in ps if ns else []:
        angles = [4 * tan2 * (z[i] + z[p]) @ z[n] - 2 * (1 + tan2) * z[i] @ z[p] for n in ns]
        yield log_sum([0 * z.sum(), *angles])


def dense_threshold_consistent(z: Tensor, labels: Tensor) -> Tensor:
    z = unit(z)
    low = [0.9 - z[i] @ z[p] for i, ps, _ in anchors(labels) for p in ps if z[i] @ z[p] <= 0.9]
    high = [z[i] @ z[n] - 0.5 for i, _, ns in anchors(labels) for n in ns if z[i] @ z[n] >= 0.5]
    return mean(low, z) + mean(high, z)


@each_anchor
def dense_pnp(
    z: Tensor, i: int, ps: list[int], ns: list[int], temperature: float, variant: str = "O", with_self: bool = False
) -> Iterator[Tensor]:
    s, relevant = z @ z[i], [*ps, *([i] if with_self else [])]
    ranks = [sum((torch.sigmoid((s[n] - s[p]) / temperature) for n in ns), 0 * s.sum()) for p in relevant]
    if ps:
        yield torch.stack([1 - (1 + r) ** -1.5 if variant == "Dq" else r for r in ranks]).mean()


SIMILARITY = {"metric": "similarity", "pos_margin": 0.9, "neg_margin": 0.2}

ENTRIES = [
    row("Contrastive", Contrastive, dense_contrastive, "labels"),
    row("Contrastive, as in the paper", Contrastive, dense_contrastive, "labels", power=2, average="all"),
    row("Contrastive, similarity", Contrastive, dense_contrastive_of_similarities, "labels", **SIMILARITY),
    row("SignalToNoise", SignalToNoise, partial(dense_contrastive, measure=noise_to_signal), "labels"),
    row("Triplet", Triplet, dense_triplet, "labels", margin=0.3),
    row("Triplet, mean of all", Triplet, dense_triplet, "labels", margin=0.3, average="all"),
    row("Triplet, similarity", Triplet, dense_triplet, "labels", margin=0.3, metric="similarity"),
    row("Triplet, soft", Triplet, dense_triplet, "labels", margin=0.0, soft=True),
    row("Triplet, hard", Triplet, dense_triplet, "labels", margin=0.3, mining="hard"),
    row(
        "Triplet, hard and soft", Triplet, dense_triplet, "labels", margin=0.3, mining="hard", soft=True, average="all"
    ),
    row("Triplet, semi-hard", Triplet, dense_triplet, "labels", margin=0.3, mining="semi-hard"),
    row("Triplet, semi-hard and soft", Triplet, dense_triplet, "labels", margin=0.3, mining="semi-hard", soft=True),
    row("MultiSimilarity", MultiSimilarity, dense_multi_similarity, "labels"),
    row("MultiSimilarity, mined", MultiSimilarity, dense_multi_similarity, "labels", epsilon=0.1),
    row("Circle", Circle, dense_circle, "labels"),
    row("LiftedStructure", LiftedStructure, dense_lifted, "labels"),
    row("GeneralizedLiftedStructure", GeneralizedLiftedStructure, dense_generalized_lifted, "labels"),
    row("Margin", Margin, dense_margin, "labels", beta=1.25, nu=0.1),
    row("Margin, by class", Margin, dense_margin, "labels", beta=1.25, nu=0.1, num_classes=100),
    row("RankedList", RankedList, dense_ranked_list, "labels"),
    row("FastAP", FastAP, dense_fast_ap, "labels"),
    row("SmoothAP", SmoothAP, dense_smooth_ap, "labels", temperature=0.1),
    row("Angular", Angular, dense_angular, "labels"),
    row("ThresholdConsistentMargin", ThresholdConsistentMargin, dense_threshold_consistent, "labels"),
    row("PNP", PNP, dense_pnp, "labels", temperature=0.2),
    row("PNP, Dq", PNP, dense_pnp, "labels", temperature=0.2, variant="Dq", alpha=1.5, with_self=True),
]
