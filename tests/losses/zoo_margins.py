"""Losses of margins over pairs and triplets, and each one's definition, anchor by anchor, from its paper."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.losses.angular import Angular
from contrastive_zoo.losses.circle import Circle
from contrastive_zoo.losses.contrastive import Contrastive
from contrastive_zoo.losses.fast_ap import FastAP
from contrastive_zoo.losses.generalized_lifted_structure import GeneralizedLiftedStructure
from contrastive_zoo.losses.lifted_structure import LiftedStructure
from contrastive_zoo.losses.margin import Margin
from contrastive_zoo.losses.multi_similarity import MultiSimilarity
from contrastive_zoo.losses.pnp import PNP
from contrastive_zoo.losses.ranked_list import RankedList
from contrastive_zoo.losses.signal_to_noise import SignalToNoise
from contrastive_zoo.losses.smooth_ap import SmoothAP
from contrastive_zoo.losses.threshold_consistent_margin import ThresholdConsistentMargin
from contrastive_zoo.losses.triplet import Triplet
from tests.zoo import Entry


class Anchor(NamedTuple):
    i: int
    positives: list[int]
    negatives: list[int]


def anchors(labels: Tensor) -> Iterator[Anchor]:
    ids = labels.tolist()
    for i, mine in enumerate(ids):
        yield Anchor(
            i, [j for j, x in enumerate(ids) if x == mine and j != i], [j for j, x in enumerate(ids) if x != mine]
        )


def distance(a: Tensor, b: Tensor) -> Tensor:
    squared = (a - b).square().sum()
    return squared.sqrt() if squared > 1e-14 else 0 * squared


def mean(losses: list[Tensor], z: Tensor, count: int | None = None) -> Tensor:
    """Of those found; a connected 0 if there are none."""
    return (
        torch.stack(losses).sum() / max(1, len(losses) if count is None else count) + 0 * z.sum()
        if losses
        else 0 * z.sum()
    )


def nonzero(losses: list[Tensor], z: Tensor) -> Tensor:
    return mean([x for x in losses if x > 0], z)


def dense_contrastive(
    z: Tensor,
    labels: Tensor,
    measure: Callable[[Tensor, Tensor], Tensor] = distance,
    margins: tuple[float, float] = (0.0, 1.0),
    power: int = 1,
    average: Callable[[list[Tensor], Tensor], Tensor] = nonzero,
    **_: Any,
) -> Tensor:
    z = F.normalize(z, dim=1)
    positive_terms = [(measure(z[i], z[p]) - margins[0]).relu() ** power for i, ps, _ in anchors(labels) for p in ps]
    negative_terms = [(margins[1] - measure(z[i], z[n])).relu() ** power for i, _, ns in anchors(labels) for n in ns]
    return average(positive_terms, z) + average(negative_terms, z)


def noise_to_signal(a: Tensor, b: Tensor) -> Tensor:
    if len(a) == 1:
        return 0 * (a + b).sum()
    return (b - a).var() / a.var()


def dense_snr(z: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return dense_contrastive(z, labels, noise_to_signal)


def dense_triplet(
    z: Tensor,
    labels: Tensor,
    margin: float = 0.3,
    measure: Callable[[Tensor, Tensor], Tensor] = distance,
    keep: Callable[[Tensor, Tensor, float], Any] = lambda ap, an, margin: True,
    hinge: Callable[[Tensor], Tensor] = torch.relu,
    average: Callable[[list[Tensor], Tensor], Tensor] = nonzero,
    **_: Any,
) -> Tensor:
    z = F.normalize(z, dim=1)
    pairs = [(measure(z[i], z[p]), measure(z[i], z[n])) for i, ps, ns in anchors(labels) for p in ps for n in ns]
    return average([hinge(ap - an + margin) for ap, an in pairs if keep(ap, an, margin)], z)


def semi_hard(ap: Tensor, an: Tensor, margin: float) -> bool:
    return bool(ap < an < ap + margin)


def dense_batch_hard(
    z: Tensor, labels: Tensor, margin: float = 0.3, hinge: Any = torch.relu, average: Any = nonzero, **_: Any
) -> Tensor:
    z, losses = F.normalize(z, dim=1), []
    for i, ps, ns in anchors(labels):
        if ps and ns:
            farthest = torch.stack([distance(z[i], z[p]) for p in ps]).max()
            nearest = torch.stack([distance(z[i], z[n]) for n in ns]).min()
            losses.append(hinge(farthest - nearest + margin))
    return average(losses, z)


def log_sum_exp(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).logsumexp(0)


def dense_multi_similarity(
    z: Tensor,
    labels: Tensor,
    alpha: float = 2,
    beta: float = 50,
    base: float = 0.5,
    epsilon: float | None = None,
    **_: Any,
) -> Tensor:
    z = F.normalize(z, dim=1)
    losses = []
    for i, ps, ns in anchors(labels):
        sp, sn = [z[i] @ z[p] for p in ps], [z[i] @ z[n] for n in ns]
        if epsilon is not None:
            sp, sn = (
                [s for s in sp if any(s < x + epsilon for x in sn)],
                [s for s in sn if any(s > x - epsilon for x in sp)],
            )
        zero = 0 * z.sum()
        positive_terms = log_sum_exp([zero, *(-alpha * (s - base) for s in sp)]) / alpha
        negative_terms = log_sum_exp([zero, *(beta * (s - base) for s in sn)]) / beta
        losses.append(positive_terms + negative_terms)
    return mean(losses, z)


def dense_circle(z: Tensor, labels: Tensor, m: float = 0.4, gamma: float = 80, **_: Any) -> Tensor:
    z, losses = F.normalize(z, dim=1), []
    for i, ps, ns in anchors(labels):
        if ps and ns:
            sp, sn = (torch.stack([z[i] @ z[j] for j in js]) for js in (ps, ns))
            negative_terms = gamma * (sn.detach() + m).relu() * (sn - m)
            positive_terms = -gamma * (1 + m - sp.detach()).relu() * (sp - 1 + m)
            both = (negative_terms[:, None] + positive_terms).flatten()
            losses.append(log_sum_exp([0 * both[0], *both]))
    return mean(losses, z)


def dense_lifted(z: Tensor, labels: Tensor, margin: float = 1.0, **_: Any) -> Tensor:
    z, losses = F.normalize(z, dim=1), []
    table = list(anchors(labels))
    for i, ps, ns in table:
        for p in ps if ns else []:
            near = [margin - distance(z[k], z[n]) for k in (i, p) for n in table[k].negatives]
            losses.append((distance(z[i], z[p]) + log_sum_exp(near)).relu() ** 2 / 2)
    return mean(losses, z)


def dense_generalized_lifted(z: Tensor, labels: Tensor, margin: float = 1.0, **_: Any) -> Tensor:
    z, losses = F.normalize(z, dim=1), []
    for i, ps, ns in anchors(labels):
        if ps and ns:
            positive_terms = log_sum_exp([distance(z[i], z[p]) for p in ps])
            losses.append((positive_terms + log_sum_exp([margin - distance(z[i], z[n]) for n in ns])).relu())
    return mean(losses, z)


def dense_margin(z: Tensor, labels: Tensor, margin: float = 0.2, beta: Any = 1.25, nu: float = 0.0, **_: Any) -> Tensor:
    z, losses, active = F.normalize(z, dim=1), [], 0
    by_class = isinstance(beta, Tensor) and beta.ndim == 1
    for i, ps, ns in anchors(labels):
        b = beta[labels[i]] if by_class else beta
        for p in ps:
            for n in ns:
                two = (distance(z[i], z[p]) - b + margin).relu(), (b - distance(z[i], z[n]) + margin).relu()
                active += int(two[0] > 0) + int(two[1] > 0)
                losses.append(two[0] + two[1] + (nu * b if by_class else 0))
    return mean(losses, z, active) + (0 if by_class else nu * beta)


def dense_ranked_list(
    z: Tensor, labels: Tensor, margin: float = 0.4, alpha: float = 1.2, t_p: float = 0.0, t_n: float = 10.0, **_: Any
) -> Tensor:
    z, losses = F.normalize(z, dim=1), []

    def weighted(hinges: list[Tensor], t: float) -> Tensor:
        found = [x for x in hinges if x > 0]
        weights = [(t * x).exp() for x in found]
        return sum(w * x for w, x in zip(weights, found, strict=True)) / sum(weights) if found else 0 * z.sum()

    for i, ps, ns in anchors(labels):
        positive_terms = weighted([distance(z[i], z[p]) - alpha + margin for p in ps], t_p)
        losses.append((positive_terms + weighted([alpha - distance(z[i], z[n]) for n in ns], t_n)) / 2)
    return mean(losses, z)


def dense_fast_ap(z: Tensor, labels: Tensor, bins: int = 10, **_: Any) -> Tensor:
    z, losses, width = F.normalize(z, dim=1), [], 4 / bins
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


def dense_smooth_ap(z: Tensor, labels: Tensor, t: float = 0.1, with_self: bool = False, **_: Any) -> Tensor:
    z, losses = F.normalize(z, dim=1), []
    for i, ps, ns in anchors(labels):
        if not ps:
            continue
        s, relevant = z @ z[i], sorted([*ps, i]) if with_self else ps

        def rank(p: int, js: list[int], s: Tensor = s) -> Tensor:
            return 1 + sum((((s[k] - s[p]) / t).sigmoid() for k in js if k != p), 0 * s[0])

        precision = sum(rank(p, relevant) / rank(p, relevant + ns) for p in relevant)
        losses.append(1 - precision / len(relevant))
    return mean(losses, z)


def dense_angular(z: Tensor, labels: Tensor, alpha: float = 40.0, **_: Any) -> Tensor:
    z, losses, tan2 = F.normalize(z, dim=1), [], math.tan(math.radians(alpha)) ** 2
    for i, ps, ns in anchors(labels):
        for p in ps if ns else []:
            angles = [4 * tan2 * (z[i] + z[p]) @ z[n] - 2 * (1 + tan2) * z[i] @ z[p] for n in ns]
            losses.append(log_sum_exp([0 * z.sum(), *angles]))
    return mean(losses, z)


def entry(name: str, cls: Any, dense: Callable[..., Tensor], **settings: Any) -> Entry:
    """Of a loss without a temperature."""

    def make(temperature: Any = None, **more: Any) -> Any:
        return cls(**settings, **more)

    return Entry(name, make, dense, call="labels")


def minus_cosine(a: Tensor, b: Tensor) -> Tensor:
    return -(a @ b)


def dense_threshold_consistent(z: Tensor, labels: Tensor, **_: Any) -> Tensor:
    z = F.normalize(z, dim=1)
    low = [0.9 - z[i] @ z[p] for i, ps, _ in anchors(labels) for p in ps if z[i] @ z[p] <= 0.9]
    high = [z[i] @ z[n] - 0.5 for i, _, ns in anchors(labels) for n in ns if z[i] @ z[n] >= 0.5]
    return mean(low, z) + mean(high, z)


def dense_pnp(
    z: Tensor, labels: Tensor, penalty: Callable[[Tensor], Tensor] = lambda r: r, with_self: bool = False, **_: Any
) -> Tensor:
    z, losses = F.normalize(z, dim=1), []
    for i, ps, ns in anchors(labels):
        s = z @ z[i]
        terms = [
            penalty(sum((torch.sigmoid((s[n] - s[p]) / 0.2) for n in ns), 0 * s.sum()))
            for p in [*ps, *([i] if with_self else [])]
        ]
        if ps:
            losses.append(torch.stack(terms).mean())
    return mean(losses, z)


def with_settings(dense: Callable[..., Tensor], **settings: Any) -> Callable[..., Tensor]:
    return lambda z, labels, **_: dense(z, labels, **settings)


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


ENTRIES = [
    entry("Contrastive", Contrastive, dense_contrastive),
    entry(
        "Contrastive, as in the paper",
        Contrastive,
        with_settings(dense_contrastive, power=2, average=mean),
        power=2,
        average="all",
    ),
    entry(
        "Contrastive, similarity",
        Contrastive,
        with_settings(dense_contrastive, measure=minus_cosine, margins=(-0.9, -0.2)),
        metric="similarity",
        pos_margin=0.9,
        neg_margin=0.2,
    ),
    entry("SignalToNoise", SignalToNoise, dense_snr),
    entry("Triplet", Triplet, dense_triplet, margin=0.3),
    entry("Triplet, mean of all", Triplet, with_settings(dense_triplet, average=mean), margin=0.3, average="all"),
    entry(
        "Triplet, similarity",
        Triplet,
        with_settings(dense_triplet, measure=minus_cosine),
        margin=0.3,
        metric="similarity",
    ),
    entry("Triplet, soft", Triplet, with_settings(dense_triplet, margin=0.0, hinge=softplus), margin=0.0, soft=True),
    entry("Triplet, hard", Triplet, dense_batch_hard, margin=0.3, mining="hard"),
    entry(
        "Triplet, hard and soft",
        Triplet,
        with_settings(dense_batch_hard, hinge=softplus, average=mean),
        margin=0.3,
        mining="hard",
        soft=True,
        average="all",
    ),
    entry("Triplet, semi-hard", Triplet, with_settings(dense_triplet, keep=semi_hard), margin=0.3, mining="semi-hard"),
    entry(
        "Triplet, semi-hard and soft",
        Triplet,
        with_settings(dense_triplet, keep=semi_hard, hinge=softplus),
        margin=0.3,
        mining="semi-hard",
        soft=True,
    ),
    entry("MultiSimilarity", MultiSimilarity, dense_multi_similarity),
    entry("MultiSimilarity, mined", MultiSimilarity, with_settings(dense_multi_similarity, epsilon=0.1), epsilon=0.1),
    entry("Circle", Circle, dense_circle),
    entry("LiftedStructure", LiftedStructure, dense_lifted),
    entry("GeneralizedLiftedStructure", GeneralizedLiftedStructure, dense_generalized_lifted),
    entry("Margin", Margin, with_settings(dense_margin, nu=0.1), beta=1.25, nu=0.1),
    entry(
        "Margin, by class",
        Margin,
        with_settings(dense_margin, beta=torch.full((100,), 1.25).double(), nu=0.1),
        nu=0.1,
        beta=1.25,
        num_classes=100,
    ),
    entry("RankedList", RankedList, dense_ranked_list),
    entry("FastAP", FastAP, dense_fast_ap),
    Entry(
        "SmoothAP", lambda temperature=None, **more: SmoothAP(temperature=0.1, **more), dense_smooth_ap, call="labels"
    ),
    entry("Angular", Angular, dense_angular),
    entry("ThresholdConsistentMargin", ThresholdConsistentMargin, dense_threshold_consistent),
    Entry("PNP", lambda temperature=None, **more: PNP(temperature=0.2, **more), dense_pnp, call="labels"),
    Entry(
        "PNP, Dq",
        lambda temperature=None, **more: PNP(temperature=0.2, variant="Dq", alpha=1.5, with_self=True, **more),
        with_settings(dense_pnp, penalty=lambda r: 1 - (1 + r) ** -1.5, with_self=True),
        call="labels",
    ),
]
