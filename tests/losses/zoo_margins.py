"""Losses of margins over pairs and triplets, and each one's definition, anchor by anchor, from its paper."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

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
from tests.zoo import Entry, anchors, log_sum, mean, unit


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


def dense_multi_similarity(
    z: Tensor,
    labels: Tensor,
    alpha: float = 2,
    beta: float = 50,
    base: float = 0.5,
    epsilon: float | None = None,
) -> Tensor:
    z = unit(z)
    losses = []
    for i, ps, ns in anchors(labels):
        sp, sn = [z[i] @ z[p] for p in ps], [z[i] @ z[n] for n in ns]
        if epsilon is not None:
            sp, sn = (
                [s for s in sp if any(s < x + epsilon for x in sn)],
                [s for s in sn if any(s > x - epsilon for x in sp)],
            )
        zero = 0 * z.sum()
        positive_terms = log_sum([zero, *(-alpha * (s - base) for s in sp)]) / alpha
        negative_terms = log_sum([zero, *(beta * (s - base) for s in sn)]) / beta
        losses.append(positive_terms + negative_terms)
    return mean(losses, z)


def dense_circle(z: Tensor, labels: Tensor, m: float = 0.4, gamma: float = 80) -> Tensor:
    z, losses = unit(z), []
    for i, ps, ns in anchors(labels):
        if ps and ns:
            sp, sn = (torch.stack([z[i] @ z[j] for j in js]) for js in (ps, ns))
            negative_terms = gamma * (sn.detach() + m).relu() * (sn - m)
            positive_terms = -gamma * (1 + m - sp.detach()).relu() * (sp - 1 + m)
            both = (negative_terms[:, None] + positive_terms).flatten()
            losses.append(log_sum([0 * both[0], *both]))
    return mean(losses, z)


def dense_lifted(z: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    z, losses = unit(z), []
    table = anchors(labels)
    for i, ps, ns in table:
        for p in ps if ns else []:
            near = [margin - distance(z[k], z[n]) for k in (i, p) for n in table[k][2]]
            losses.append((distance(z[i], z[p]) + log_sum(near)).relu() ** 2 / 2)
    return mean(losses, z)


def dense_generalized_lifted(z: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    z, losses = unit(z), []
    for i, ps, ns in anchors(labels):
        if ps and ns:
            positive_terms = log_sum([distance(z[i], z[p]) for p in ps])
            losses.append((positive_terms + log_sum([margin - distance(z[i], z[n]) for n in ns])).relu())
    return mean(losses, z)


def dense_margin(
    z: Tensor, labels: Tensor, margin: float = 0.2, beta: float = 1.25, nu: float = 0.0, num_classes: int = 0
) -> Tensor:
    z, losses, active = unit(z), [], 0
    for i, ps, ns in anchors(labels):
        for p in ps:
            for n in ns:
                two = (distance(z[i], z[p]) - beta + margin).relu(), (beta - distance(z[i], z[n]) + margin).relu()
                active += int(two[0] > 0) + int(two[1] > 0)
                losses.append(two[0] + two[1] + (nu * beta if num_classes else 0))
    return mean(losses, z, count=active) + (0 if num_classes else nu * beta)


def dense_ranked_list(
    z: Tensor, labels: Tensor, margin: float = 0.4, alpha: float = 1.2, t_p: float = 0.0, t_n: float = 10.0, **_: Any
) -> Tensor:
    z, losses = unit(z), []

    def weighted(hinges: list[Tensor], t: float) -> Tensor:
        found = [x for x in hinges if x > 0]
        weights = [(t * x).exp() for x in found]
        return sum(w * x for w, x in zip(weights, found, strict=True)) / sum(weights) if found else 0 * z.sum()

    for i, ps, ns in anchors(labels):
        positive_terms = weighted([distance(z[i], z[p]) - alpha + margin for p in ps], t_p)
        losses.append((positive_terms + weighted([alpha - distance(z[i], z[n]) for n in ns], t_n)) / 2)
    return mean(losses, z)


def dense_fast_ap(z: Tensor, labels: Tensor, bins: int = 10) -> Tensor:
    z, losses, width = unit(z), [], 4 / bins
    for i, ps, ns in anchors(labels):
        if not ps:
            continue

        def histogram(js: list[int], i: int = i) -> list[Tensor]:
            measure = [(z[i] - z[j]).square().sum() for j in js]
            return [
                sum(((1 - (x - width * k).abs() / width).relu() for x in measure), 0 * z.sum()) for k in range(bins + 1)
            ]

        of_positives, of_all = histogram(ps), histogram(ps + ns)
        precision, found, ranked = 0 * z.sum(), 0 * z.sum(), 0 * z.sum()
        for mine, every in zip(of_positives, of_all, strict=True):
            found, ranked = found + mine, ranked + every
            if ranked > 0:
                precision = precision + mine * found / ranked
        losses.append(1 - precision / len(ps))
    return mean(losses, z)


def dense_smooth_ap(z: Tensor, labels: Tensor, temperature: float, with_self: bool = False) -> Tensor:
    z, losses = unit(z), []
    for i, ps, ns in anchors(labels):
        if not ps:
            continue
        s, relevant = z @ z[i], sorted([*ps, i]) if with_self else ps

        def rank(p: int, js: list[int], s: Tensor = s) -> Tensor:
            return 1 + sum((((s[k] - s[p]) / temperature).sigmoid() for k in js if k != p), 0 * s[0])

        precision = sum(rank(p, relevant) / rank(p, relevant + ns) for p in relevant)
        losses.append(1 - precision / len(relevant))
    return mean(losses, z)


def dense_angular(z: Tensor, labels: Tensor, alpha: float = 40.0) -> Tensor:
    z, losses, tan2 = unit(z), [], math.tan(math.radians(alpha)) ** 2
    for i, ps, ns in anchors(labels):
        for p in ps if ns else []:
            angles = [4 * tan2 * (z[i] + z[p]) @ z[n] - 2 * (1 + tan2) * z[i] @ z[p] for n in ns]
            losses.append(log_sum([0 * z.sum(), *angles]))
    return mean(losses, z)


def dense_threshold_consistent(z: Tensor, labels: Tensor) -> Tensor:
    z = unit(z)
    low = [0.9 - z[i] @ z[p] for i, ps, _ in anchors(labels) for p in ps if z[i] @ z[p] <= 0.9]
    high = [z[i] @ z[n] - 0.5 for i, _, ns in anchors(labels) for n in ns if z[i] @ z[n] >= 0.5]
    return mean(low, z) + mean(high, z)


def dense_pnp(
    z: Tensor, labels: Tensor, temperature: float, variant: str = "O", alpha: float = 1.0, with_self: bool = False
) -> Tensor:
    z, losses = unit(z), []
    for i, ps, ns in anchors(labels):
        s = z @ z[i]
        ranks = [
            sum((torch.sigmoid((s[n] - s[p]) / temperature) for n in ns), 0 * s.sum())
            for p in [*ps, *([i] if with_self else [])]
        ]
        if ps:
            losses.append(torch.stack([1 - (1 + r) ** -alpha if variant == "Dq" else r for r in ranks]).mean())
    return mean(losses, z)


def entry(name: str, cls: Any, dense: Callable[..., Tensor], **fixed: Any) -> Entry:
    """Of a loss without a learnt temperature, whose settings mean the same to its definition."""

    def make(temperature: Any = None, **more: Any) -> Any:
        return cls(**fixed, **more)

    def definition(z: Tensor, labels: Tensor, temperature: Any = None) -> Tensor:
        return dense(z, labels, **fixed)

    return Entry(name, make, definition, call="labels")


SIMILARITY = {"metric": "similarity", "pos_margin": 0.9, "neg_margin": 0.2}

ENTRIES = [
    entry("Contrastive", Contrastive, dense_contrastive),
    entry("Contrastive, as in the paper", Contrastive, dense_contrastive, power=2, average="all"),
    entry("Contrastive, similarity", Contrastive, dense_contrastive_of_similarities, **SIMILARITY),
    entry("SignalToNoise", SignalToNoise, partial(dense_contrastive, measure=noise_to_signal)),
    entry("Triplet", Triplet, dense_triplet, margin=0.3),
    entry("Triplet, mean of all", Triplet, dense_triplet, margin=0.3, average="all"),
    entry("Triplet, similarity", Triplet, dense_triplet, margin=0.3, metric="similarity"),
    entry("Triplet, soft", Triplet, dense_triplet, margin=0.0, soft=True),
    entry("Triplet, hard", Triplet, dense_triplet, margin=0.3, mining="hard"),
    entry("Triplet, hard and soft", Triplet, dense_triplet, margin=0.3, mining="hard", soft=True, average="all"),
    entry("Triplet, semi-hard", Triplet, dense_triplet, margin=0.3, mining="semi-hard"),
    entry("Triplet, semi-hard and soft", Triplet, dense_triplet, margin=0.3, mining="semi-hard", soft=True),
    entry("MultiSimilarity", MultiSimilarity, dense_multi_similarity),
    entry("MultiSimilarity, mined", MultiSimilarity, dense_multi_similarity, epsilon=0.1),
    entry("Circle", Circle, dense_circle),
    entry("LiftedStructure", LiftedStructure, dense_lifted),
    entry("GeneralizedLiftedStructure", GeneralizedLiftedStructure, dense_generalized_lifted),
    entry("Margin", Margin, dense_margin, beta=1.25, nu=0.1),
    entry("Margin, by class", Margin, dense_margin, beta=1.25, nu=0.1, num_classes=100),
    entry("RankedList", RankedList, dense_ranked_list),
    entry("FastAP", FastAP, dense_fast_ap),
    entry("SmoothAP", SmoothAP, dense_smooth_ap, temperature=0.1),
    entry("Angular", Angular, dense_angular),
    entry("ThresholdConsistentMargin", ThresholdConsistentMargin, dense_threshold_consistent),
    entry("PNP", PNP, dense_pnp, temperature=0.2),
    entry("PNP, Dq", PNP, dense_pnp, temperature=0.2, variant="Dq", alpha=1.5, with_self=True),
]
