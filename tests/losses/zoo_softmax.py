"""The softmax and sigmoid losses over pairs, each with its paper's equation written out pair by pair."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.pairs import ContrastMode
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.temperature import LearnableTemperature
from contrastive_zoo.losses.distillation import ClipDistillation
from contrastive_zoo.losses.info_nce import MILNCE, Clip
from contrastive_zoo.losses.mnrl import GIST, MNRL
from contrastive_zoo.losses.multi_positive import MultiPositive, NPairs
from contrastive_zoo.losses.nt_xent import DCL, DCLW, HCL, Debiased
from contrastive_zoo.losses.sigmoid import SigLIP, SupSigmoid
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon, TupletMargin
from tests.zoo import Entry, anchors, dense_clip, dense_siglip, log_sum, mean, unit

# --------------------------------------------------------------------------------------------------------- two towers


def second_tower(z: Tensor) -> Tensor:
    """Keys made of queries, row by row, for losses that are called with labels here."""
    return z.flip(1) + 0.5 * z


class MultiPositiveOfOne(MultiPositive):
    """Keys are made of the embeddings, and have their labels."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        return super().inputs(z, second_tower(z), labels)


class SeveralTargets(MultiPositive):
    """Keys of the row's class and, a third as much, of the next one."""

    def inputs(self, z: Tensor, labels: Tensor) -> Inputs:
        ids, weights = (
            torch.stack([labels, labels + 1], 1),
            torch.stack([z.new_full((len(z),), x) for x in (3.0, 1.0)], 1),
        )
        return super().inputs(z, torch.cat([second_tower(z), z.sin()]), ids, labels.repeat(2), weights)


def dense_multi_positive(
    z: Tensor, labels: Tensor, temperature: Any, duplicates: str = "positive", symmetric: bool = False
) -> Tensor:
    def direction(q: Tensor, k: Tensor) -> Tensor:
        losses = []
        for i in range(len(q)):
            s = [q[i] @ k[j] / temperature for j in range(len(k))]
            same = [j for j in range(len(k)) if labels[j] == labels[i]]
            positives = same if duplicates == "positive" else [i]
            left = [s[j] for j in range(len(k)) if duplicates != "ignore" or j == i or j not in same]
            losses.append(log_sum(left) - sum(s[p] for p in positives) / len(positives))
        return torch.stack(losses).mean()

    q, k = unit(z), unit(second_tower(z))
    return (direction(q, k) + direction(k, q)) / 2 if symmetric else direction(q, k)


def dense_several_targets(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    q, k, of_keys = unit(z), unit(torch.cat([second_tower(z), z.sin()])), labels.repeat(2)
    logits = q @ k.T / temperature
    targets = 3.0 * (labels[:, None] == of_keys) + (labels[:, None] + 1 == of_keys).double()
    return F.cross_entropy(logits, targets / targets.sum(1, keepdim=True))


def teacher(*rows: Tensor) -> list[Tensor]:
    """Another embedding of the same rows."""
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
    n, losses = len(video), []
    for i in range(n):
        own = [video[i] @ text[i] / temperature for text in texts]
        there = [video[i] @ text[j] / temperature for text in texts for j in range(n) if j != i]
        back = [video[j] @ text[i] / temperature for text in texts for j in range(n) if j != i]
        twice = own if denominator == "reference" else []
        losses.append(log_sum([*own, *twice, *there, *back]) - log_sum(own))
    return torch.stack(losses).mean()


class MNRLOfViews(MNRL):
    """Queries, documents, and hard negatives: one of every query, and a second of those whose row says so."""

    def inputs(self, q: Tensor, d: Tensor, one: Tensor, two: Tensor) -> Inputs:
        return super().inputs(q, d, *hard_negatives(q, d, one, two))


def hard_negatives(_: Tensor, __: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    more = two[:, 0] > 0
    every = torch.arange(len(one))
    return torch.cat([one, two[more]]), torch.cat([every, every[more]])


def dense_mnrl(
    *views: Tensor,
    temperature: Any,
    directions: tuple[str, ...] = ("query_to_doc",),
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
) -> Tensor:
    negatives, owners = hard_negatives(*views)
    q, d, x = unit(views[0]), unit(views[1]), unit(negatives)
    n, losses = len(q), []
    for i in range(n):
        terms: dict[str, list[Tensor]] = {name: [] for name in directions}
        for j in range(n):
            terms["query_to_doc"].append(q[i] @ d[j] / temperature)
            if "query_to_query" in directions and j != i:
                terms["query_to_query"].append(q[i] @ q[j] / temperature)
            if "doc_to_query" in directions:
                terms["doc_to_query"].append(d[i] @ q[j] / temperature)
            if "doc_to_doc" in directions and j != i:
                terms["doc_to_doc"].append(d[i] @ d[j] / temperature)
        for k, owner in enumerate(owners):
            hard = q[i] @ x[k]
            own = bool(owner == i)
            extra = {
                "in_batch_negatives": 0 if own else 1,
                "hard_negatives": 1 if own else 0,
                "all_negatives": 1,
            }.get(hardness_mode or "", 0)
            terms["query_to_doc"].append(hard / temperature + extra * hardness_strength * hard.detach())
            if "doc_to_doc" in directions and not own:
                terms["doc_to_doc"].append(d[i] @ x[k] / temperature)
        for j in range(n):  # other queries' documents are in-batch negatives
            if j != i and hardness_mode in ("in_batch_negatives", "all_negatives"):
                terms["query_to_doc"][j] = terms["query_to_doc"][j] + hardness_strength * (q[i] @ d[j]).detach()
        sums = [log_sum(x) for x in terms.values() if x]
        every = log_sum(sums) if partition_mode == "joint" else torch.stack(sums).mean()
        losses.append(every - q[i] @ d[i] / temperature)
    return torch.stack(losses).mean()


class GISTOfViews(GIST):
    """The guide's embeddings are made of the others."""

    def inputs(self, a: Tensor, p: Tensor) -> Inputs:
        return super().inputs(a, p, *teacher(a, p))


def dense_gist(
    a: Tensor, p: Tensor, temperature: Any, margin: float = 0.0, margin_strategy: str = "absolute"
) -> Tensor:
    a, p, ga, gp = (unit(rows) for rows in (a, p, *teacher(a, p)))
    relative = margin_strategy == "relative"
    losses = []
    for i in range(len(a)):
        agreed = ga[i] @ gp[i]
        closest = agreed - margin * (agreed.abs() if relative else 1)
        kept = [a[i] @ p[i]]
        for j in range(len(a)):
            if j != i:
                blocks = [(a[i] @ p[j], ga[i] @ gp[j]), (a[i] @ a[j], ga[i] @ ga[j]), (p[i] @ p[j], gp[i] @ gp[j])]
                kept += [s for s, guide in blocks if not guide > closest]
        losses.append((torch.stack(kept) / temperature).logsumexp(0) - a[i] @ p[i] / temperature)
    return torch.stack(losses).mean()


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


def dense_sup_con_in(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    u, losses = unit(z), []
    for i, positives, negatives in anchors(labels):
        if positives:
            every = log_sum([u[i] @ u[k] / temperature for k in positives + negatives])
            chances = [(u[i] @ u[p] / temperature - every).exp() for p in positives]
            losses.append(-(sum(chances) / len(positives)).log())
    return mean(losses, z)


def dense_sincere(z: Tensor, labels: Tensor, temperature: Any, average: str = "anchors") -> Tensor:
    u, losses = unit(z), []
    for i, positives, negatives in anchors(labels):
        hard = [u[i] @ u[k] / temperature for k in negatives]
        of_pairs = [log_sum([x, *hard]) - x for x in (u[i] @ u[p] / temperature for p in positives)]
        losses += of_pairs if average == "pairs" else [torch.stack(of_pairs).mean()] if of_pairs else []
    return mean(losses, z)


def dense_tuplet_margin(z: Tensor, labels: Tensor, temperature: Any, margin: float = 5.73) -> Tensor:
    u, losses = unit(z), []
    for i, positives, negatives in anchors(labels):
        for p in positives:
            cos = (u[i] @ u[p]).clamp(-1 + 1e-15, 1 - 1e-15)
            slack = (cos.acos() - math.radians(margin)).cos()
            losses.append(log_sum([0 * slack, *((u[i] @ u[n] - slack) / temperature for n in negatives)]))
    return mean(losses, z)


def dense_nca(z: Tensor, labels: Tensor, temperature: Any) -> Tensor:
    u, losses = unit(z), []
    for i, positives, negatives in anchors(labels):
        if positives:
            near = {k: -(u[i] - u[k]).square().sum() / temperature for k in positives + negatives}
            losses.append(log_sum(list(near.values())) - log_sum([near[p] for p in positives]))
    return mean(losses, z)


def dense_n_pairs(z: Tensor, labels: Tensor, temperature: Any, l2: float = 0.0) -> Tensor:
    members = [(labels == c).nonzero().flatten().tolist() for c in labels.unique()]
    x, y = ([z[rows[k]] for rows in members if len(rows) > 1] for k in range(2))
    if not x:
        return 0 * z.sum()
    a, b = torch.stack(x), torch.stack(y)
    norms = l2 * (a.square().sum(1) + b.square().sum(1)).mean()
    return F.cross_entropy(a @ b.T / temperature, torch.arange(len(a))) + norms


def dense_sup_sigmoid(z: Tensor, labels: Tensor, temperature: Any, bias: float = -10.0) -> Tensor:
    u, total = unit(z), 0 * z.sum()
    for i in range(len(u)):
        for j in range(len(u)):
            if i != j:
                sign = 1 if labels[i] == labels[j] else -1
                total = total - F.logsigmoid(sign * (u[i] @ u[j] / temperature + bias))
    return total / len(z)


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
    z, n = [unit(view) for view in views], len(views[0])
    every, losses = [(i, v) for i in range(n) for v in range(len(z))], []
    for i, v in [(i, v) for i, v in every if v == 0 or contrast_mode == "all"]:
        others = [x for x in every if x != (i, v)]
        s = {(j, w): z[v][i] @ z[w][j] / temperature for j, w in others}
        positives = [s[x] for x in others if x[0] == i]
        losses.append(log_sum(list(s.values())) - torch.stack(positives).mean())
    return mean(losses) * temperature / 0.07


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
    rows, n, losses = unit(torch.cat([z, second_tower(z)])), len(z), []
    for i in range(n):
        s = {j: rows[i] @ rows[j] / temperature for j in range(2 * n) if j != i}
        positives = [s[j] for j in s if int(labels[j % n] - labels[i]) in (0, 1)]
        losses.append(log_sum(list(s.values())) - torch.stack(positives).mean())
    return mean(losses)


def row(name: str, cls: Any, dense: Any, call: str, views: int = 2, **fixed: Any) -> Entry:
    """An entry whose settings mean the same to the loss and to its formula."""
    return Entry(name, partial(cls, **fixed), partial(dense, **fixed), call, views)  # type: ignore[arg-type]  # a str


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
    row("GIST", GISTOfViews, dense_gist, "views"),
    row("GIST, relative margin", GISTOfViews, dense_gist, "views", margin=0.3, margin_strategy="relative"),
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
"""Losses that care which of a class's rows come first. The invariants of order, which ask one shuffle whether a loss does,
may take them for such that do not."""
