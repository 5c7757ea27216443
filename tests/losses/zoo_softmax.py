"""The softmax and sigmoid losses over pairs, each with its paper's equation written out pair by pair."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from tests.zoo import Entry, dense_clip, dense_siglip, info_nce, itself, row, unit

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def second_tower(z: Tensor) -> Tensor:
    """Keys made of queries, without rounding, for losses that are called with labels here."""
    return z.roll(1, 1)


def two_towers(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return z, second_tower(z), labels


def several_targets(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Keys of the embedding's class and, a third as much, of the next one."""
    keys, weights = torch.cat([second_tower(z), -z.flip(1)]), z.detach().new_tensor([3.0, 1.0]).repeat(len(z), 1)
    return z, keys, torch.stack([labels, labels + 1], 1), labels.repeat(2), weights


def dense_multi_positive(q, k, ids, key_ids=None, weights=None, *, temperature, duplicates="positive", symmetric=False):
    weights = q.new_ones(len(q), 1) if weights is None else weights
    matches = ids.view(len(q), -1, 1) == (ids if key_ids is None else key_ids)
    targets = (weights[..., None] * matches).sum(1)

    def direction(q: Tensor, k: Tensor) -> Tensor:
        s = unit(q) @ unit(k).T / temperature
        if duplicates == "positive":
            return F.cross_entropy(s, targets / targets.sum(1, keepdim=True))
        left_out = (targets > 0) & ~itself(s)
        return F.cross_entropy(s.masked_fill(left_out, -torch.inf), torch.arange(len(s)))

    return (direction(q, k) + direction(k, q)) / 2 if symmetric else direction(q, k)


def dense_smoothed(q: Tensor, k: Tensor, x: Tensor, temperature, label_smoothing: float, symmetric: bool) -> Tensor:
    how = (1 / temperature, "mean", label_smoothing)
    losses = [info_nce(unit(q), unit(torch.cat([k, x])), *how), info_nce(unit(k), unit(q), *how)]
    return torch.stack(losses[: 1 + symmetric]).mean()


def own_negatives(q: Tensor, k: Tensor, *negatives: Tensor) -> tuple[Tensor, ...]:
    return q, k, torch.stack(negatives, 1)


def dense_smoothed_pairs(q: Tensor, k: Tensor, x: Tensor, temperature: Any, label_smoothing: float) -> Tensor:
    candidates = F.normalize(torch.cat([k[:, None], x], 1), dim=2)
    logits = (unit(q)[:, None] * candidates).sum(2) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q)).long(), label_smoothing=label_smoothing)


def captions(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return z, torch.cat([second_tower(z), z.flip(1)]), labels, torch.cat([labels, labels + 1])


def dense_siglip_ids(x: Tensor, y: Tensor, ids: Tensor, text_ids: Tensor | None = None, *, temperature: Any) -> Tensor:
    same = (ids[:, None] == (ids if text_ids is None else text_ids)).double()
    logits = unit(x) @ unit(y).T / temperature - 10
    return F.binary_cross_entropy_with_logits(logits, same, reduction="sum") / len(x)


def teacher(*rows: Tensor) -> list[Tensor]:
    return [x.detach().roll(2, 1).clamp(-1, 1) for x in rows]


def with_teacher(*rows: Tensor) -> list[Tensor]:
    return [*rows, *teacher(*rows)]


def dense_distillation(*rows: Tensor, temperature: Any, weight=0.5, teacher_temperature=0.07) -> Tensor:
    x, y, u, v = map(unit, rows)
    s, t, eye = x @ y.T / temperature, u @ v.T / teacher_temperature, torch.eye(len(x), dtype=x.dtype)
    targets = [(1 - weight) * eye + weight * logits.softmax(1) for logits in (t, t.T)]
    return (F.cross_entropy(s, targets[0]) + F.cross_entropy(s.T, targets[1])) / 2


def mined(q: Tensor, d: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
    """Queries, documents, and hard negatives: one of every query, and a second of some queries, or of none."""
    more = two[:, 0] > 0
    every = torch.arange(len(one))
    owners = every.where(two[:, -1] > -0.5, -1)
    return q, d, torch.cat([one, two[more]]), torch.cat([every, owners[more]])


def with_ids(q: Tensor, d: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
    """Ids of documents, negatives and queries are made of their values, and meet by chance."""
    _, _, negatives, owners = mined(q, d, one, two)
    return q, d, negatives, owners, id_of(d), id_of(negatives), id_of(4 * q)


def of_datasets(q: Tensor, d: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor | None, ...]:
    """Data sets are made of values, some pairs have none; a third of the negatives has no owner."""
    q, d, negatives, owners = mined(q, d, one, two)
    return q, d, negatives, owners.where(negatives[:, 0] < 0.4, -1), None, None, None, id_of(2 * q).clamp(min=-1)


def id_of(x: Tensor) -> Tensor:
    return x[:, -1].detach().floor().int()


def of_equal_ids(shape: Tensor, *ids: Tensor) -> Tensor:
    """[n, m]: which candidates, documents first, have the id of an anchor, given those of documents, negatives, queries."""
    same = torch.zeros_like(shape, dtype=torch.bool)
    if ids:
        documents, negatives, queries = ids
        same |= documents[:, None] == torch.cat([documents, negatives])
        same[:, : len(queries)] |= queries[:, None] == queries
    return same


def dense_mnrl(
    q, d, negatives, owners, *ids, temperature, directions=ALL[:1], partition_mode="joint", hardness_mode=None,
    hardness_strength=0.0, false_negative_margin=math.inf, margin_strategy="absolute", mask_doc_to_doc=True,
) -> Tensor:  # fmt: skip
    q, d, documents, is_pair = unit(q), unit(d), unit(torch.cat([d, negatives])), itself(q)
    is_own = torch.cat([is_pair, owners == torch.arange(len(q))[:, None]], 1)
    cos, is_mined = {"query_to_doc": q @ documents.T, "query_to_query": q @ q.T}, torch.arange(len(documents)) >= len(q)
    cos |= {"doc_to_query": d @ q.T, "doc_to_doc": d @ documents.T}
    hard = {
        "in_batch_negatives": ~is_own,
        "hard_negatives": is_own & is_mined,
        "all_negatives": ~is_own | is_mined,
    }.get(hardness_mode or "", torch.zeros_like(is_own))
    logits = {name: x / temperature for name, x in cos.items()}
    logits["query_to_doc"] = logits["query_to_doc"] + (hardness_strength * cos["query_to_doc"].detach()).where(hard, 0)
    same, own = of_equal_ids(is_own, *ids), (q * d).sum(1, keepdim=True)
    largest = own + false_negative_margin * (own.abs() if margin_strategy == "relative" else 1) + 1e-12
    for name, x in cos.items():
        compared = mask_doc_to_doc or name != "doc_to_doc"
        left_out = same[:, : x.shape[1]] | (x > largest) if compared else same
        left_out = left_out & ~(is_own & ~is_mined)[:, : x.shape[1]]  # the positive never is
        if name in ("query_to_query", "doc_to_doc"):
            left_out = left_out | is_own[:, : x.shape[1]]
        logits[name] = logits[name].masked_fill(left_out, -torch.inf)
    chosen = [logits[name] for name in directions]
    each = torch.stack([x.logsumexp(1) for x in chosen]).mean(0) if partition_mode == "per_direction" else None
    return ((torch.cat(chosen, 1).logsumexp(1) if each is None else each) - own[:, 0] / temperature).mean()


def dense_mnrl_of_datasets(q, d, negatives, owners, *ids, temperature, directions=ALL[:1], in_batch_negatives=True):
    """The batches of the data sets side by side; a pair without others is a data set."""
    n, total = len(q), 0 * q.sum()
    datasets = ids[-1] if in_batch_negatives else torch.full((n,), -1)
    datasets = datasets.where(datasets >= 0, -1 - torch.arange(n))
    for dataset in datasets.unique():
        rows = (datasets == dataset).nonzero().flatten()
        places = torch.full((n + 1,), -2)  # of the queries in this batch; the last one is of owner −1
        places[rows], places[-1] = torch.arange(len(rows)), -1
        seen = places[owners] > -2
        batch = q[rows], d[rows], negatives[seen], places[owners[seen]]
        total = total + len(rows) * dense_mnrl(*batch, temperature=temperature, directions=directions)
    return total / n


def guided(a: Tensor, p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """One negative of every anchor."""
    guides = teacher(a, p, x)
    return a, p, *guides[:2], x, guides[2]


def dense_gist(a, p, ga, gp, *negatives, temperature: Any, margin: float = 0.0, margin_strategy="absolute") -> Tensor:
    a, p, ga, gp, *pair = (unit(x) for x in (a, p, ga, gp, *negatives))
    x, gx = pair[:1], pair[1:]
    agreed, own = (ga * gp).sum(1, keepdim=True), (a * p).sum(1, keepdim=True)
    closest = agreed - margin * (agreed.abs() if margin_strategy == "relative" else 1)
    blocks = [(a, ga, [p, *x], [gp, *gx]), (a, ga, [a], [ga]), (p, gp, [p], [gp])]
    kept = []
    for first, guide, others, guides in blocks:
        s = first @ torch.cat(others).T
        left_out = torch.eye(*s.shape, dtype=torch.bool) | (guide @ torch.cat(guides).T > closest)
        kept.append(s.masked_fill(left_out, -torch.inf))
    return (torch.cat([own, *kept], 1) / temperature).logsumexp(1).mean() - own.mean() / temperature


def dense_dcl(a: Tensor, b: Tensor, temperature: Any, sigma: float | None = None) -> Tensor:
    a, b, n, losses = unit(a), unit(b), len(a), []
    paired = (a * b).sum(1)
    attraction = (paired.detach() / sigma).exp() if sigma else torch.ones_like(paired)
    weighted = (2 - attraction / attraction.mean()) * paired / temperature
    for x, y in ((a, b), (b, a)) if n > 1 else ():
        sums = [(x @ z.T / temperature)[~itself(x)].view(n, -1).logsumexp(1) for z in (x, y)]
        losses.append(torch.logaddexp(*sums) - weighted)
    return torch.stack(losses).mean() if losses else 0 * (a + b).sum()


def dense_hcl(a: Tensor, b: Tensor, temperature: Any, tau_plus: float = 0.1, beta: float = 1.0) -> Tensor:
    z, samples, m = unit(torch.cat([a, b])), torch.arange(len(a)).repeat(2), 2 * len(a) - 2
    shares = (z @ z.T / temperature).exp()
    negatives = shares[samples[:, None] != samples].view(len(z), m)
    positive = torch.cat([shares.diagonal(len(a)), shares.diagonal(-len(a))])
    hard = (negatives**beta * negatives).sum(1) / (negatives**beta).mean(1)
    true = ((hard - tau_plus * m * positive) / (1 - tau_plus)).clamp(min=m * math.exp(-1 / temperature))
    return -(positive / (positive + true)).log().mean() if m else 0 * z.sum()


def dense_info_loob(x: Tensor, y: Tensor, temperature: Any) -> Tensor:
    s = unit(x) @ unit(y).T / temperature
    others = s.masked_fill(itself(s), -torch.inf)
    return ((others.logsumexp(1) + others.logsumexp(0)) / 2 - s.diagonal()).mean() if len(s) > 1 else 0 * s.sum()


def modalities(*views: Tensor) -> tuple[Tensor, ...]:
    """Embeddings of which each modality has a feature of its own, so that they span a volume."""
    own = torch.eye(len(views), dtype=views[0].dtype, device=views[0].device)
    return tuple(torch.cat([z, x.expand(len(z), -1)], 1) for z, x in zip(views, own, strict=True))


def dense_gram(*views: Tensor, temperature: Any, label_smoothing: float = 0.0) -> Tensor:
    anchors, *others = map(unit, views)
    n, targets = len(anchors), torch.arange(len(anchors))
    vectors = torch.stack([anchors[:, None].expand(-1, n, -1), *(x.expand(n, -1, -1) for x in others)], 2)
    logits = -(vectors @ vectors.mT).det().abs().sqrt() / temperature
    return sum(F.cross_entropy(x, targets, label_smoothing=label_smoothing) for x in (logits, logits.T)) / 2


def learnt(cls: Any) -> Any:
    """The class, whose own temperature is learnable and starts at the given one to the last bit of 64."""

    def make(temperature: Any = 0.07, **settings: Any) -> Any:
        if isinstance(temperature, float):
            log_scale = torch.tensor([-math.log(temperature)], dtype=torch.float64)
            temperature = cz.LearnableTemperature(temperature, max_scale=math.inf)
            temperature.log_scale.data = log_scale
        return cls(temperature=temperature, **settings)

    return make


BOTH = ("query_to_doc", "doc_to_query")
SMOOTHED, OWN_KEY = {"label_smoothing": 0.3}, {"in_batch_negatives": False}
QWEN3 = ("query_to_doc", "query_to_query", "doc_to_doc")
MASKED = {"false_negative_margin": -0.05, "margin_strategy": "relative", "mask_doc_to_doc": False}
HARD = {"hardness_mode": "all_negatives", "hardness_strength": 3.0}
OTHERS, OWN = ({**HARD, "hardness_mode": mode} for mode in ("in_batch_negatives", "hard_negatives"))

ENTRIES: list[Entry] = [
    row("Clip", dense_clip, kind=learnt(cz.Clip)),
    row("Clip, smoothed", dense_clip, kind=learnt(cz.Clip), label_smoothing=0.1),
    row("InfoLOOB", dense_info_loob),
    row("GRAM", dense_gram, "views", modalities, 3),
    row("GRAM, four modalities", dense_gram, "views", modalities, 4, label_smoothing=0.1),
    row("InfoNCE, smoothed", dense_smoothed, "views", None, 3, symmetric=False, **SMOOTHED),
    row("InfoNCE, smoothed both ways", dense_smoothed, "views", None, 3, symmetric=True, **SMOOTHED),
    row("InfoNCE, smoothed pairs", dense_smoothed_pairs, "views", own_negatives, 4, **SMOOTHED, **OWN_KEY),
    row("SigLIP", dense_siglip, kind=learnt(cz.SigLIP)),
    row("SigLIP, ids", dense_siglip_ids, "labels", two_towers),
    row("SigLIP, captions", dense_siglip_ids, "labels", captions),
    row("MultiPositive, duplicates positive", dense_multi_positive, "labels", two_towers),
    row("MultiPositive, ignored", dense_multi_positive, "labels", two_towers, duplicates="ignore"),
    row("MultiPositive, symmetric", dense_multi_positive, "labels", two_towers, symmetric=True),
    row("MultiPositive, several targets", dense_multi_positive, "labels", several_targets),
    row("DCL", dense_dcl, "views"),
    row("DCL, weighted", dense_dcl, "views", sigma=0.5),
    row("HCL", dense_hcl, "views"),
    row("HCL, debiased", dense_hcl, "views", beta=0.0),
    row("MNRL", dense_mnrl, "views", mined, 4),
    row("MNRL, all directions", dense_mnrl, "views", mined, 4, directions=ALL, **HARD),
    row("MNRL, symmetric", dense_mnrl, "views", mined, 4, directions=BOTH, partition_mode="per_direction"),
    row("MNRL, masked", dense_mnrl, "views", with_ids, 4, directions=ALL, **MASKED, **OTHERS),
    row("MNRL, Qwen3", dense_mnrl, "views", mined, 4, directions=QWEN3, false_negative_margin=0.1, **OWN),
    row("MNRL, data sets", dense_mnrl_of_datasets, "views", of_datasets, 4, directions=ALL),
    row("MNRL, own negatives", dense_mnrl_of_datasets, "views", mined, 4, **OWN_KEY),
    row("GIST", dense_gist, "views", with_teacher, 2),
    row("GIST, masked", dense_gist, "views", guided, 3, margin=0.3, margin_strategy="relative"),
    row("ClipDistillation", dense_distillation, "views", with_teacher, 2),
]
