"""Losses of annotated pairs, and of a teacher's scores, each written out over all pairs."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.losses.zoo_softmax import second_tower, teacher
from tests.zoo import Entry, itself, row, unit


def scored(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Some pairs have equal scores."""
    return z, second_tower(z), labels / 3


def of_parity(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return z, second_tower(z), labels % 2


def angle(q: Tensor, k: Tensor) -> Tensor:
    """The product of complex numbers, q times the conjugate of k."""
    q, k = (unit(F.pad(x, (0, x.shape[1] % 2))) for x in (q, k))
    m = q.shape[1] // 2
    real = q[:, :m] * k[:, :m] + q[:, m:] * k[:, m:]
    imaginary = q[:, m:] * k[:, :m] - q[:, :m] * k[:, m:]
    return (real + imaginary).sum(1).abs()


def dense_cosent(q: Tensor, k: Tensor, scores: Tensor, temperature: Any = 0.05, similarity: str = "cosine") -> Tensor:
    s = ((unit(q) * unit(k)).sum(1) if similarity == "cosine" else angle(q, k)) / temperature
    differences = (s[:, None] - s)[scores[:, None] < scores]
    return torch.cat([0 * s.sum()[None], differences]).logsumexp(0)


def dense_online_contrastive(q: Tensor, k: Tensor, labels: Tensor) -> Tensor:
    distance = 1 - (unit(q) * unit(k)).sum(1)
    positives, negatives = distance[labels == 1], distance[labels == 0]
    near = (negatives.min() if len(negatives) else positives.mean()).detach()
    far = (positives.max() if len(positives) else negatives.mean()).detach()
    hard = positives[positives > near].square().sum() + (0.5 - negatives[negatives < far]).relu().square().sum()
    return hard + 0 * distance.sum()


def dense_mega_batch_margin(q: Tensor, k: Tensor) -> Tensor:
    s, n = unit(q) @ unit(k).T, len(q)
    others = s[~itself(s)].view(n, -1).amax(1) if n > 1 else s.new_zeros(1)
    return (0.8 - s.diagonal()).relu().mean() + (others - 0.3).relu().mean()


def scores_of(*rows: Tensor) -> Tensor:
    return torch.stack([x[:, 0] for x in teacher(*rows)], 1)


def margins_of(q: Tensor, p: Tensor, *negatives: Tensor) -> tuple[Tensor, ...]:
    margins = scores_of(p, p).to(torch.float64) - scores_of(*negatives)
    return q, p, torch.stack(negatives, 1), margins


def dense_margin_mse(q: Tensor, p: Tensor, negatives: Tensor, margins: Tensor) -> Tensor:
    differences = (q * p).sum(1, keepdim=True) - (q[:, None] * negatives).sum(2)
    return (differences - margins.to(q.dtype)).square().mean()


def scored_candidates(q: Tensor, *candidates: Tensor) -> tuple[Tensor, ...]:
    return q, torch.stack(candidates, 1), scores_of(*candidates)


def dense_score_distillation(q: Tensor, candidates: Tensor, scores: Tensor, temperature: Any = 1.0) -> Tensor:
    student = (q[:, None] * candidates).sum(2) / temperature
    targets = (scores / 0.7).softmax(1)
    return (targets * (targets.log() - student.log_softmax(1))).sum(1).mean() * temperature**2


COOL = {"teacher_temperature": 0.7}

ENTRIES = [
    row("CoSENT", dense_cosent, "labels", scored),
    row("CoSENT, angle", dense_cosent, "labels", scored, similarity="angle"),
    row("OnlineContrastive", dense_online_contrastive, "labels", of_parity, reduction="sum"),
    row("MegaBatchMargin", dense_mega_batch_margin),
    row("MarginMSE", dense_margin_mse, "views", margins_of, 4),
    row("ScoreDistillation", dense_score_distillation, "views", scored_candidates, 4, **COOL),
]


def dense_xtr(q: Tensor, q_mask: Tensor | None, sets: list[tuple[Tensor, Tensor | None]], top_k: int) -> Tensor:
    """Query by query, token by token."""
    masked = ((d, d[..., 0] * 0 + 1 if mask is None else mask) for d, mask in sets)
    documents = [x[mask != 0] for of_set in masked for x, mask in zip(*of_set, strict=True)]
    scores = []
    for i, tokens in enumerate(q):
        found: list[list[Tensor]] = [[] for _ in documents]
        for token in unit(tokens if q_mask is None else tokens[q_mask[i] != 0]):
            products = [unit(x) @ token for x in documents]
            least = torch.cat(products).sort(descending=True).values[:top_k][-1] - 1e-12
            for j, x in enumerate(products):
                found[j] += [x.max(dim=0).values] if (x >= least).any() else []
        scores.append(torch.stack([torch.stack(x).mean() if x else 0 * q.sum() for x in found]))
    return torch.stack(scores)


def dense_scores(q: Tensor, d: Tensor, q_mask: Tensor | None, d_mask: Tensor | None, token_reduction: str) -> Tensor:
    q, d = F.normalize(q, dim=2), F.normalize(d, dim=2)
    products = torch.einsum("iad,jbd->ijab", q, d)
    if d_mask is not None:
        products = products.masked_fill(d_mask[:, None] == 0, -torch.inf)
    best = products.max(3).values
    valid = torch.ones(q.shape[:2], dtype=q.dtype) if q_mask is None else (q_mask != 0).to(q.dtype)
    scores = torch.einsum("ija,ia->ij", best, valid)
    return scores / valid.sum(1, keepdim=True) if token_reduction == "mean" else scores


def dense_max_sim(
    queries, documents, query_mask=None, document_mask=None, negatives=None, negative_mask=None,
    *, temperature=1.0, token_reduction="sum", hardest=False, top_k=None,
) -> Tensor:  # fmt: skip
    """MaxSim, or, against the hardest document alone, MaxSimPairwise."""
    further = [] if negatives is None else [(negatives, negative_mask)]
    sets = [(documents, document_mask), *further]
    scores = torch.cat([dense_scores(queries, x, query_mask, mask, token_reduction) for x, mask in sets], 1)
    logits = (scores if top_k is None else dense_xtr(queries, query_mask, sets, top_k)) / temperature
    if hardest:
        own = torch.eye(*logits.shape, dtype=torch.bool)
        if logits.shape[1] < 2:
            return 0 * logits.sum()
        return F.softplus(logits.masked_fill(own, -torch.inf).amax(1) - logits.diagonal(), threshold=40).mean()
    return F.cross_entropy(logits, torch.arange(len(queries)))


dense_pairwise = partial(dense_max_sim, hardest=True)


def tokens_of(q: Tensor, d: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Tokens made of embeddings without rounding: 3 of a query, 4 of a document, 2 of a negative; some are not valid.

    Queries are padded by a large token on ranks that have an odd number of them.
    """
    queries = torch.stack([q, q.flip(1), -q.roll(1, 1)], 1)
    documents = torch.stack([d, -d.flip(1), d.roll(1, 1), -d], 1)
    query_mask = torch.stack([q[:, 0] > -torch.inf, q[:, 0] > 0, q[:, -1] > 0], 1)
    document_mask = torch.stack([d[:, 0] > 0, d[:, -1] > 0, d[:, 0] > -torch.inf, d[:, 0] < 0], 1).long()
    negatives = [(torch.stack([x, -x], 1), torch.stack([x[:, 0] > -torch.inf, x[:, 0] > 0], 1)) for x in more]
    queries = F.pad(queries, (0, 0, 0, len(q) % 2), value=100.0)
    query_mask = F.pad(query_mask, (0, len(q) % 2))
    return queries, documents, query_mask, document_mask, *(x for of_view in negatives for x in of_view)


def three_kinds(q: Tensor, d: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    queries, documents, *masks = tokens_of(q.roll(1, 1), d, *more)
    rows = queries, documents, q, d, q.relu(), d.flip(1).relu(), *masks[:2]
    return *rows, *(x for of in more for x in (masks[2], of, of.roll(1, 1).relu(), masks[3]))


def dense_m3(*rows: Tensor, temperature: Any, distillation: float = 0.5) -> Tensor:
    queries, documents, q, d, x, y, *masks = rows
    scores = unit(q) @ unit(d).T, x @ y.T, dense_scores(queries, documents, *masks[:2], "mean")
    if masks[2:]:
        tokens, n, z, mask = masks[2:]
        further = unit(q) @ unit(n).T, x @ z.T, dense_scores(queries, tokens, masks[0], mask, "mean")
        scores = tuple(torch.cat(pair, 1) for pair in zip(scores, further, strict=True))
    s1, s2, s3 = (s / temperature for s in scores)
    total = s1 + 0.3 * s2 + s3
    own = [F.cross_entropy(s, torch.arange(len(q))) for s in (s1, s2, s3, total)]
    taught = [F.cross_entropy(s, total.detach().softmax(1)) for s in (s1, s2, s3)]
    contrastive = (own[0] + 0.1 * own[1] + own[2] + own[3]) / 4
    return (1 - distillation) * contrastive + distillation * (taught[0] + 0.1 * taught[1] + taught[2]) / 3


TOKENS: list[Entry] = [
    row("MaxSim", dense_max_sim, "views", tokens_of),
    row("MaxSim, negatives", dense_max_sim, "views", tokens_of, 3, token_reduction="mean"),
    row("MaxSim, XTR", dense_max_sim, "views", tokens_of, top_k=3),
    row("MaxSim, XTR and negatives", dense_max_sim, "views", tokens_of, 3, top_k=2),
    row("M3", dense_m3, "views", three_kinds),
    row("M3, negatives", dense_m3, "views", three_kinds, 3, distillation=0.8),
    row("MaxSimPairwise", dense_pairwise, "views", tokens_of),
    row("MaxSimPairwise, negatives", dense_pairwise, "views", tokens_of, 3),
]
