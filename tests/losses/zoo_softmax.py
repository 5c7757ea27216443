"""The softmax and sigmoid losses over pairs, each with its paper's equation written out pair by pair."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.pairs import ContrastMode
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.loss_base.temperature import LearnableTemperature
from contrastive_zoo.losses.distillation import ClipDistillation
from contrastive_zoo.losses.info_nce import MILNCE, Clip
from contrastive_zoo.losses.mnrl import GIST, MNRL
from contrastive_zoo.losses.multi_positive import MultiPositive, NPairs
from contrastive_zoo.losses.nt_xent import DCL, DCLW, HCL, Debiased
from contrastive_zoo.losses.sigmoid import SigLIP, SupSigmoid
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon, TupletMargin
from tests.zoo import Entry, dense_clip, dense_siglip, dense_sup_con, each_anchor, itself, log_sum, mean, row, unit

# --------------------------------------------------------------------------------------------------------- two towers


def second_tower(z: Tensor) -> Tensor:
    """Keys made of queries, row by row, for losses that are called with labels here."""
    return z.flip(1) + 0.5 * z


class MultiPositiveOfOne(MultiPositive):
    """Keys are made of the embeddings, and have their labels."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        return super().inputs(z, second_tower(z), labels)


class SeveralTargets(MultiPositive):
    """Keys of the embedding's class and, a third as much, of the next one."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        ids, weights = (
            torch.stack([labels, labels + 1], 1),
            torch.stack([z.new_full((len(z),), x) for x in (3.0, 1.0)], 1),
        )
        return super().inputs(z, torch.cat([second_tower(z), z.sin()]), ids, labels.repeat(2), weights)


def dense_multi_positive(
    z: Tensor, labels: Tensor, temperature: Any, duplicates: str = "positive", symmetric: bool = False
) -> Tensor:
    same = labels[:, None] == labels

    def direction(q: Tensor, k: Tensor) -> Tensor:
        s = q @ k.T / temperature
        if duplicates == "positive":
            return F.cross_entropy(s, same / same.sum(1, keepdim=True, dtype=s.dtype))
        left_out = same & ~itself(z) if duplicates == "ignore" else torch.zeros_like(same)
        return F.cross_entropy(s.masked_fill(left_out, -torch.inf), torch.arange(len(z)))

    q, k = unit(z), unit(second_tower(z))
    return (direction(q, k) + direction(k, q)) / 2 if symmetric else direction(q, k)


def dense_several_targets(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    q, k, of_keys = unit(z), unit(torch.cat([second_tower(z), z.sin()])), labels.repeat(2)
    logits = q @ k.T / temperature
    targets = 3.0 * (labels[:, None] == of_keys) + (labels[:, None] + 1 == of_keys).double()
    return F.cross_entropy(logits, targets / targets.sum(1, keepdim=True))


def teacher(*rows: Tensor) -> list[Tensor]:
    """Another embedding of the same samples."""
    return [(3 * x).sin().detach() for x in rows]


class ClipDistillationOfViews(ClipDistillation):
    """The teacher's embeddings are made of the student's."""

    def inputs(self, x: Tensor, y: Tensor) -> Inputs:
        return super().inputs(x, y, *teacher(x, y))


def dense_distillation(
    x: Tensor, y: Tensor, temperature: Any, weight: float = 0.5, teacher_temperature: float = 0.07
) -> Tensor:
    x, y, u, v = (unit(rows) for rows in (x, y, *teacher(x, y)))
    s, t, eye = x @ y.T / temperature, u @ v.T / teacher_temperature, torch.eye(len(x), dtype=x.dtype)
    targets = [(1 - weight) * eye + weight * logits.softmax(1) for logits in (t, t.T)]
    return (F.cross_entropy(s, targets[0]) + F.cross_entropy(s.T, targets[1])) / 2


class MILNCEOfViews(MILNCE):
    """Each view after the first is a candidate text."""

    def inputs(self, video: Tensor, *texts: Tensor) -> Inputs:
        return super().inputs(video, torch.stack(texts, 1))


def dense_mil_nce(video: Tensor, *texts: Tensor, temperature: Any, denominator: str = "exact") -> Tensor:
    s = torch.stack([video @ text.T / temperature for text in texts])
    own, others = s.diagonal(dim1=1, dim2=2).T, torch.cat([s, s.mT]).masked_fill(itself(video), -torch.inf)
    twice = [own] if denominator == "reference" else []
    return (torch.cat([own, *twice, *others], 1).logsumexp(1) - own.logsumexp(1)).mean()


class MNRLOfViews(MNRL):
    """Queries, documents, and hard negatives: one of every query, and a second of those whose row says so."""

    def inputs(self, q: Tensor, d: Tensor, one: Tensor, two: Tensor) -> Inputs:
        return super().inputs(q, d, *hard_negatives(q, d, one, two))


def hard_negatives(_: Tensor, __: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    more = two[:, 0] > 0
    every = torch.arange(len(one))
    return torch.cat([one, two[more]]), torch.cat([every, every[more]])


class MNRLWithIds(MNRLOfViews):
    """Ids of documents, negatives and queries are made of their values, and meet by chance."""

    def inputs(self, q: Tensor, d: Tensor, one: Tensor, two: Tensor) -> Inputs:
        negatives, owners = hard_negatives(q, d, one, two)
        return MNRL.inputs(self, q, d, negatives, owners, id_of(d), id_of(negatives), id_of(4 * q))


def id_of(x: Tensor) -> Tensor:
    return x[:, -1].detach().floor().int()


def dense_mnrl(
    *views: Tensor,
    temperature: Any,
    directions: tuple[str, ...] = ("query_to_doc",),
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    with_ids: bool = False,
    false_negative_margin: float = math.inf,
    margin_strategy: str = "absolute",
    mask_doc_to_doc: bool = True,
) -> Tensor:
    negatives, owners = hard_negatives(*views)
    q, d, documents, is_pair = unit(views[0]), unit(views[1]), unit(torch.cat([views[1], negatives])), itself(views[0])
    is_own = torch.cat([is_pair, owners == torch.arange(len(q))[:, None]], 1)
    cos, mined = {"query_to_doc": q @ documents.T, "query_to_query": q @ q.T}, torch.arange(len(documents)) >= len(q)
    cos |= {"doc_to_query": d @ q.T, "doc_to_doc": d @ documents.T}
    hard = {
        "in_batch_negatives": ~is_own,
        "hard_negatives": is_own & mined,
        "all_negatives": ~is_own | mined,
    }.get(hardness_mode or "", torch.zeros_like(is_own))
    logits = {name: x / temperature for name, x in cos.items()}
    logits["query_to_doc"] = logits["query_to_doc"] + (hardness_strength * cos["query_to_doc"].detach()).where(hard, 0)
    same = torch.zeros_like(is_own)
    if with_ids:
        same = id_of(views[1])[:, None] == id_of(torch.cat([views[1], negatives]))
        same[:, : len(q)] |= id_of(4 * views[0])[:, None] == id_of(4 * views[0])
    own = (q * d).sum(1, keepdim=True)
    largest = own + false_negative_margin * (own.abs() if margin_strategy == "relative" else 1) + 1e-12
    for name, x in cos.items():
        compared = mask_doc_to_doc or name != "doc_to_doc"
        left_out = same[:, : x.shape[1]] | (x > largest) if compared else same
        left_out = left_out & ~(is_own & ~mined)[:, : x.shape[1]]  # the positive never is
        if name in ("query_to_query", "doc_to_doc"):
            left_out = left_out | is_own[:, : x.shape[1]]
        logits[name] = logits[name].masked_fill(left_out, -torch.inf)
    chosen = [logits[name] for name in directions]
    each = torch.stack([x.logsumexp(1) for x in chosen]).mean(0) if partition_mode == "per_direction" else None
    return ((torch.cat(chosen, 1).logsumexp(1) if each is None else each) - own[:, 0] / temperature).mean()


class GISTOfViews(GIST):
    """The guide's embeddings are made of the others."""

    def inputs(self, a: Tensor, p: Tensor) -> Inputs:
        return super().inputs(a, p, *teacher(a, p))


class GISTWithIds(GIST):
    """One negative of every anchor, and ids that meet by chance."""

    def inputs(self, a: Tensor, p: Tensor, x: Tensor) -> Inputs:
        guides = teacher(a, p, x)
        return super().inputs(a, p, *guides[:2], x, guides[2], id_of(p), id_of(x), id_of(4 * a))


def dense_gist(
    *views: Tensor, temperature: Any, margin: float = 0.0, margin_strategy: str = "absolute", with_ids: bool = False
) -> Tensor:
    (a, p, *x), (ga, gp, *gx) = map(unit, views), map(unit, teacher(*views))
    agreed, own = (ga * gp).sum(1, keepdim=True), (a * p).sum(1, keepdim=True)
    closest = agreed - margin * (agreed.abs() if margin_strategy == "relative" else 1)
    same = torch.zeros_like(a @ torch.cat([p, *x]).T, dtype=torch.bool)
    if with_ids:
        same = id_of(views[1])[:, None] == id_of(torch.cat(views[1:]))
        same[:, : len(a)] |= id_of(4 * views[0])[:, None] == id_of(4 * views[0])
    same[:, : len(a)] |= itself(a)
    blocks = [(a, ga, [p, *x], [gp, *gx]), (a, ga, [a], [ga]), (p, gp, [p], [gp])]
    kept = []
    for first, guide, others, guides in blocks:
        s = first @ torch.cat(others).T
        kept.append(s.masked_fill(same[:, : s.shape[1]] | (guide @ torch.cat(guides).T > closest), -torch.inf))
    return (torch.cat([own, *kept], 1) / temperature).logsumexp(1).mean() - own.mean() / temperature


# ---------------------------------------------------------------------------------------------------------- one tower


def dense_dcl(
    a: Tensor, b: Tensor, temperature: Any, sigma: float | None = None, denominators: str = "joint"
) -> Tensor:
    views, n, losses = [unit(a), unit(b)], len(a), []
    alike = torch.stack([(views[0][i] @ views[1][i]).detach() for i in range(n)])
    weights = torch.ones(n) if sigma is None else 2 - (alike / sigma).exp() / (alike / sigma).exp().mean()
    for k in range(2):
        for i in range(n):
            sums = [[views[k][i] @ view[j] / temperature for j in range(n) if j != i] for view in views]
            if n > 1:
                joint = log_sum([*sums[0], *sums[1]])
                push = joint if denominators == "joint" else log_sum(sums[0]) + log_sum(sums[1])
                losses.append(push - weights[i] * (views[0][i] @ views[1][i]) / temperature)
    return mean(losses, a, b)


def dense_hcl(a: Tensor, b: Tensor, temperature: Any, tau_plus: float = 0.1, beta: float = 1.0) -> Tensor:
    z, n, losses = unit(torch.cat([a, b])), len(a), []
    m = 2 * n - 2
    for i in range(2 * n if n > 1 else 0):
        positive = (z[i] @ z[(i + n) % (2 * n)] / temperature).exp()
        negatives = torch.stack([(z[i] @ z[k] / temperature).exp() for k in range(2 * n) if k % n != i % n])
        hard = (negatives**beta * negatives).sum() / (negatives**beta).mean()
        true = (hard - tau_plus * m * positive) / (1 - tau_plus)
        losses.append(-(positive / (positive + true.clamp(min=m * math.exp(-1 / temperature)))).log())
    return mean(losses, a, b)


def dense_debiased(a: Tensor, b: Tensor, temperature: Any) -> Tensor:
    return dense_hcl(a, b, temperature, beta=0.0)


@each_anchor
def dense_sup_con_in(
    u: Tensor, i: int, positives: list[int], negatives: list[int], temperature: Any
) -> Iterator[Tensor]:
    if positives:
        every = log_sum([u[i] @ u[k] / temperature for k in positives + negatives])
        chances = [(u[i] @ u[p] / temperature - every).exp() for p in positives]
        yield -(sum(chances) / len(positives)).log()


@each_anchor
def dense_sincere(
    u: Tensor, i: int, positives: list[int], negatives: list[int], temperature: Any, average: str = "anchors"
) -> Iterator[Tensor]:
    hard = [u[i] @ u[k] / temperature for k in negatives]
    of_pairs = [log_sum([x, *hard]) - x for x in (u[i] @ u[p] / temperature for p in positives)]
    if average == "pairs":
        yield from of_pairs
    elif of_pairs:
        yield torch.stack(of_pairs).mean()


@each_anchor
def dense_tuplet_margin(
    u: Tensor, i: int, positives: list[int], negatives: list[int], temperature: Any, margin: float = 5.73
) -> Iterator[Tensor]:
    for p in positives:
        cos, beta = u[i] @ u[p], math.radians(margin)
        is_line = (
            1 - cos.item() ** 2 < 1e-15
        )  # an angle of 0 or 180 degrees, where that of a rounded cosine has 8 digits
        slack = cos * math.cos(beta) if is_line else (cos.acos() - beta).cos()
        yield log_sum([0 * slack, *((u[i] @ u[n] - slack) / temperature for n in negatives)])


@each_anchor
def dense_nca(u: Tensor, i: int, positives: list[int], negatives: list[int], temperature: Any) -> Iterator[Tensor]:
    if positives:
        near = {k: -(u[i] - u[k]).square().sum() / temperature for k in positives + negatives}
        yield log_sum(list(near.values())) - log_sum([near[p] for p in positives])


def dense_n_pairs(z: Tensor, labels: Tensor, temperature: Any, l2: float = 0.0) -> Tensor:
    members = [(labels == c).nonzero().flatten().tolist() for c in labels.unique()]
    x, y = ([z[rows[k]] for rows in members if len(rows) > 1] for k in range(2))
    if not x:
        return 0 * z.sum()
    a, b = torch.stack(x), torch.stack(y)
    norms = l2 * (a.square().sum(1) + b.square().sum(1)).mean()
    return F.cross_entropy(a @ b.T / temperature, torch.arange(len(a))) + norms


def dense_sup_sigmoid(z: Tensor, labels: Tensor, temperature: Any, bias: float = -10.0) -> Tensor:
    logits = unit(z) @ unit(z).T / temperature + bias
    terms = -F.logsigmoid(logits.where(labels[:, None] == labels, -logits))
    return terms.masked_fill(itself(z), 0).sum() / len(z)


def learnt(cls: Any) -> Any:
    """The class, whose own temperature is learnable and starts at the given one to the last bit of 64."""

    def make(temperature: Any = 0.07, **settings: Any) -> Any:
        if isinstance(temperature, float):
            log_scale = torch.tensor([-math.log(temperature)], dtype=torch.float64)
            temperature = LearnableTemperature(temperature, max_scale=math.inf)
            temperature.log_scale.data = log_scale
        return cls(temperature=temperature, **settings)

    return make


ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
BOTH = ("query_to_doc", "doc_to_query")


class SupConOfViews(SupCon):
    """Views of samples without labels."""

    contrast_mode: ContrastMode = "one"
    base_temperature = 0.07

    def inputs(self, *views: Tensor) -> Inputs:
        return super().inputs(torch.stack(views, 1))


def dense_sup_con_of_views(*views: Tensor, temperature: Any, contrast_mode: str = "one") -> Tensor:
    labels = torch.arange(len(views[0])).repeat(len(views))
    losses = dense_sup_con(torch.cat(views), labels, temperature, reduction="none")
    return (losses[: len(views[0])] if contrast_mode == "one" else losses).mean() * temperature / 0.07


class SupConOfMask(SupCon):
    """Positives of the same class and of the next one, which is not symmetric; two views of each sample."""

    contrast_mode: ContrastMode = "one"

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        return super().inputs(torch.stack([z, second_tower(z)], 1), labels)

    def compute(self, batch: Batch) -> Tensor:
        labels = batch.rows["labels"]
        of_all = batch.gathered(labels)
        mask = (labels[:, None] == of_all) | (labels[:, None] + 1 == of_all)
        return super().compute(replace(batch, rows={"embeddings": batch.rows["embeddings"], "mask": mask}))


def dense_sup_con_of_mask(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    rows, n, steps = unit(torch.cat([z, second_tower(z)])), len(z), labels.repeat(2) - labels[:, None]
    not_itself = ~itself(rows)[:n]
    positive = ((steps == 0) | (steps == 1)) & not_itself
    log_shares = (rows[:n] @ rows.T / temperature).masked_fill(~not_itself, -torch.inf).log_softmax(1)
    return -(log_shares.where(positive, 0).sum(1) / positive.sum(1)).mean()


QWEN3 = ("query_to_doc", "query_to_query", "doc_to_doc")
MASKED = {"with_ids": True, "false_negative_margin": -0.05, "margin_strategy": "relative", "mask_doc_to_doc": False}
HARD = {"hardness_mode": "all_negatives", "hardness_strength": 3.0}

ENTRIES: list[Entry] = [
    row("Clip", learnt(Clip), dense_clip, "views"),
    row("SigLIP", learnt(SigLIP), dense_siglip, "views"),
    row("SupSigmoid", learnt(SupSigmoid), dense_sup_sigmoid, "labels"),
    row("MultiPositive, duplicates positive", MultiPositiveOfOne, dense_multi_positive, "labels"),
    row("MultiPositive, ignored", MultiPositiveOfOne, dense_multi_positive, "labels", duplicates="ignore"),
    row("MultiPositive, negative", MultiPositiveOfOne, dense_multi_positive, "labels", duplicates="negative"),
    row("MultiPositive, symmetric", MultiPositiveOfOne, dense_multi_positive, "labels", symmetric=True),
    row("MultiPositive, several targets", SeveralTargets, dense_several_targets, "labels"),
    row("DCL", DCL, dense_dcl, "views"),
    row("DCLW", DCLW, dense_dcl, "views", sigma=0.5),
    row("DCLW, per view", DCLW, dense_dcl, "views", sigma=0.5, denominators="per_view"),
    row("HCL", HCL, dense_hcl, "views"),
    row("Debiased", Debiased, dense_debiased, "views"),
    row("MNRL", MNRLOfViews, dense_mnrl, "views", 4),
    row("MNRL, all directions", MNRLOfViews, dense_mnrl, "views", 4, directions=ALL, **HARD),
    row("MNRL, symmetric", MNRLOfViews, dense_mnrl, "views", 4, directions=BOTH, partition_mode="per_direction"),
    row("MNRL, masked", MNRLWithIds, dense_mnrl, "views", 4, directions=ALL, **MASKED, **HARD),
    row("MNRL, Qwen3", MNRLOfViews, dense_mnrl, "views", 4, directions=QWEN3, false_negative_margin=0.1),
    row("GIST", GISTOfViews, dense_gist, "views"),
    row("GIST, masked", GISTWithIds, dense_gist, "views", 3, margin=0.3, margin_strategy="relative", with_ids=True),
    row("ClipDistillation", ClipDistillationOfViews, dense_distillation, "views"),
    row("SupCon, in", partial(SupCon, variant="in"), dense_sup_con_in, "labels"),
    row("SupCon, one view's anchors", SupConOfViews, dense_sup_con_of_views, "views", 3),
    row("SupCon, mask", SupConOfMask, dense_sup_con_of_mask, "labels"),
    row("SINCERE", SINCERE, dense_sincere, "labels"),
    row("SINCERE, pairs", SINCERE, dense_sincere, "labels", average="pairs"),
    row("NCA", NCA, dense_nca, "labels"),
    row("TupletMargin", TupletMargin, dense_tuplet_margin, "labels"),
    row("MILNCE", MILNCEOfViews, dense_mil_nce, "views", 3),
    row("MILNCE, reference", MILNCEOfViews, dense_mil_nce, "views", 3, denominator="reference"),
]

ORDERED: list[Entry] = [
    row("NPairs", NPairs, dense_n_pairs, "labels"),
    row("NPairs, l2", NPairs, dense_n_pairs, "labels", l2=0.1),
]
"""Losses that care which of a class's embeddings come first. The invariants of order, which ask one shuffle whether a loss
does, may take them for such that do not."""
