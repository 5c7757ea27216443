"""Softmax over pairs that are given, not aligned: several positives of a query, one pair or a centroid of each class."""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from contrastive_zoo.engine.anchor_block import class_numbers
from contrastive_zoo.engine.batch import Batch, Candidates
from contrastive_zoo.engine.cost import Blocks, Entry, Gathered, Summed
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.precision import unit_rows
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Reduction, Temperature
from contrastive_zoo.ranks.row_checks import ValueRule, described

Duplicates = Literal["positive", "ignore"]


class MultiPositive(Loss, engine="rows"):
    r"""Compute InfoNCE with all keys of the query's ids as targets.

    With q, k the unit embeddings of all ranks, s_ij = q_i·k_j / t and targets p_i, a distribution over keys,

        loss_i = log Σ_{j∈C(i)} exp(s_ij)  −  Σ_j p_ij s_ij

    which is ``cross_entropy(s, p)`` for C(i) all keys, with p_ij ∝ Σ_l w_il [key j has id ids_il]. A query without a key
    does not count.

    Called as ``loss(queries, keys, ids, key_ids, weights)``:

    - queries, keys: [n, d] and [m, d], m may differ between ranks.
    - ids: [n] integers, or [n, k] for several targets; an id without a key, such as −1, is padding.
    - key_ids: [m] integers; None where row i of keys belongs to row i of queries, and has its id.
    - weights: [n, k], non-negative; None weights all ids equally.

    Args:
        temperature: t > 0.
        duplicates: where row i of queries belongs to row i of keys, and has one id, what other keys of its id are, such as a
            caption that occurs twice: ``"positive"``, targets as key i, or ``"ignore"``, left out of C(i).
        symmetric: whether to average with the direction from keys to queries, for paired embeddings with one id each.
        normalize: normalise embeddings first.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye, ids = torch.eye(2), torch.tensor([5, 5])
        >>> MultiPositive(temperature=1.0)(eye, eye, ids)   # log(e + 1) − ½
        tensor(0.8133)
        >>> MultiPositive(temperature=1.0, duplicates="ignore")(eye, eye, ids)   # log e − 1
        tensor(0.)

    Source: van den Oord et al. 2018, eq. 4, https://arxiv.org/abs/1807.03748, with the targets of Yang et al. 2022
    (UniCL), https://arxiv.org/abs/2204.03610
    """

    temperature: Temperature = 0.07
    duplicates: Duplicates = "positive"
    symmetric: bool = False
    normalize: bool = True
    reduction: Reduction = "mean"

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "m d"],
        ids: Int[Tensor, " n"] | Int[Tensor, "n k"],
        key_ids: Int[Tensor, " m"] | None = None,
        weights: Shaped[Tensor, "n k"] | Shaped[Tensor, " n"] | None = None,
    ) -> Inputs:
        rows = {"queries": queries, "keys": keys, "ids": ids, "key_ids": key_ids, "weights": weights}
        problem = _pairing_problem(queries, keys, ids, key_ids, weights)
        only_paired = self.symmetric or self.duplicates == "ignore"
        if problem is None and only_paired and (key_ids is not None or weights is not None):
            problem = "symmetric and duplicates='ignore' are for paired rows: leave key_ids and weights out."
        if weights is None:
            return Inputs.of(rows, problem)
        negative = f"weights are non-negative, one per id, got some of {described(weights)} that are negative or NaN."
        rule = ValueRule(weights, lambda x: (x >= 0).all(), lambda valid: None if valid[0] else negative)
        return Inputs.of(rows, problem, values=[rule])

    def entries(self, stated: CallInputs) -> list[Entry]:
        ids = "key_ids" if "key_ids" in stated.inputs.rows else "ids"
        directions = [("queries", "keys"), ("keys", "queries")][: 1 + self.symmetric]
        how: Any = {"companions": [ids, ids], "parameters": stated.learnt("temperature"), "reduction": self.reduction}
        return [Blocks([x], [y], matrices=6, **how) for x, y in directions]

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.candidates(name, normalize=self.normalize) for name in ("queries", "keys"))
        ids, weights = batch.rows["ids"], batch.rows.get("weights")
        ids_of_keys = batch.rows.get("key_ids", ids)
        targets = ids[:, None] if ids.ndim == 1 else ids
        weights = torch.ones_like(targets) if weights is None else weights.detach().view(targets.shape)
        loss = BlockLoss.of(_block_losses, batch.settings, paired="key_ids" not in batch.rows)

        def direction(anchors: Candidates, candidates: Candidates) -> Tensor:
            return reduce_rows(
                batch, loss, anchors, batch.indices(), candidates=candidates, candidate_ids=batch.indices("keys"),
                reduction=self.reduction, companions=[(targets, ids_of_keys), (weights.to(q.local), ids_of_keys)],
            )  # fmt: skip

        return (direction(q, k) + direction(k, q)) / 2 if self.symmetric else direction(q, k)


def _block_losses(
    block: AnchorBlock, temperature: Tensor, paired: bool, duplicates: Duplicates
) -> tuple[Tensor, Tensor]:
    logits = block.anchors @ block.candidates.T / temperature
    (target_ids, ids_of_keys), (weights, _) = block.companions
    targets = torch.zeros_like(logits)
    for target, weight in zip(target_ids.unbind(1), weights.unbind(1), strict=True):
        targets = targets + weight[:, None] * (target[:, None] == ids_of_keys)
    candidates = torch.ones_like(block.positive)
    if paired and duplicates == "ignore":
        candidates, targets = block.positive | (targets == 0), block.positive.to(logits.dtype)
    matched = targets > 0
    of_targets = masked_log_sum_exp(logits, matched, empty=0.0)
    of_others = masked_log_sum_exp(logits, candidates & ~matched)
    total = targets.sum(1)
    mean = (targets * logits).sum(1) / total.where(total > 0, 1)
    # a log-sum-exp of one target is that target up to rounding, which a solved batch would lose its digits to
    several = cross_entropy(of_targets, of_others) + (of_targets - mean)
    return cross_entropy(mean, of_others).where(matched.sum(1) == 1, several), total > 0


def _pairing_problem(
    queries: Tensor, keys: Tensor, ids: Tensor, key_ids: Tensor | None, weights: Tensor | None
) -> str | None:
    if key_ids is None and (len(queries) != len(keys) or ids.ndim != 1):
        paired = f"queries {described(queries)} with ids {described(ids)}"
        return f"key_ids are missing: {paired} do not pair with keys {described(keys)}."
    if weights is not None and weights.shape != ids.shape:
        return f"weights are non-negative, one per id, got {described(weights)} for ids {described(ids)}."
    return None


class _ClassesLoss(LabelledLoss, engine="rows"):
    def entries(self, stated: CallInputs) -> list[Entry]:
        """Return what it costs at most, if each embedding is an anchor and a class: that depends on the labels."""
        names, learnt = ["embeddings"], stated.learnt("temperature")
        blocks = Blocks(names, names, parameters=learnt, reduction="none", width=stated.width)
        return [Gathered(["labels"], 8), blocks, *self.reduced()]


class NPairs(_ClassesLoss):
    r"""Compute the multi-class N-pair loss: for each class's first embedding, find its second among those of all.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers.
    With x_c, y_c the first two embeddings, in rank order, of the C classes that have two,

        loss = mean_c [ log Σ_b exp(x_c·y_b / t)  −  x_c·y_c / t ]

    which is ``cross_entropy(x @ y.T / t, arange(C))``. The paper adds squared norms. With ``normalize=True`` equal to
    pytorch-metric-learning's NPairsLoss. For views use ``InfoNCE(temperature=1.0, normalize=False)``.

    Args:
        temperature: t > 0, in units of dot products. The paper has none.
        normalize: the paper does not.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> NPairs()(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Sohn 2016, §3.2, https://papers.nips.cc/paper/6200-improved-deep-metric-learning-with-multi-class-n-pair-loss-objective
    """

    temperature: Temperature = 1.0
    normalize: bool = False
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        z, ids = batch.prepared(batch.rows["embeddings"], normalize=self.normalize), batch.rows["labels"].long()
        all_ids = batch.gather_detached(ids)
        order = all_ids.argsort(stable=True)
        position = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=z.device))
        start = torch.searchsorted(all_ids[order], all_ids)
        index_in_class = position - start
        has_pair = torch.searchsorted(all_ids[order], all_ids, right=True) - start > 1
        first, second = (index_in_class == 0) & has_pair, index_in_class == 1
        return between_classes(batch, z, z, (first, second), self.reduction)


def between_classes(
    batch: Batch,
    anchors: Float[Tensor, "n d"],
    candidates: Float[Tensor, "n d"],
    selected: tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]],
    reduction: Reduction,
) -> Float[Tensor, "..."]:
    """Reduce the cross-entropies of selected anchors over selected candidates, of all ranks one of each class."""
    shards, ids = batch.samples, batch.rows["labels"].long()
    x, y = (chosen[shards.local].nonzero().flatten() for chosen in selected)
    of_anchors, of_candidates = (shards.selected(chosen) for chosen in selected)
    losses = reduce_rows(
        batch, BlockLoss.of(_pair_losses, batch.settings), anchors[x], ids[x], candidates=candidates[y],
        candidate_ids=ids[y], shards=of_anchors, candidate_shards=of_candidates, reduction="none",
    )  # fmt: skip
    losses = anchors.new_zeros(len(anchors)).index_add(0, x, losses)
    if reduction != "mean":
        return batch.reduce(losses, reduction=reduction)
    return batch.reduce(losses, reduction="sum") / selected[0].sum().clamp(min=1)


def _pair_losses(block: AnchorBlock, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = block.anchors @ block.candidates.T / temperature
    positive = logits.where(block.positive, 0).sum(1)
    return cross_entropy(positive, masked_log_sum_exp(logits, ~block.positive)), block.positive.any(1)


class _CentroidLoss(_ClassesLoss):
    temperature: Temperature = 0.1
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        labels, *others = super().entries(stated)
        return [labels, Summed(stated.width * stated.wide, partial=True, by_class=True), *others]


class _Classes(NamedTuple):
    """Sums over classes, and what all ranks know of the embeddings of all."""

    sums: Float[Tensor, "n d"]  # for each local embedding, over its class, but for the last one if so asked
    sizes: Int[Tensor, "n 1"]  # for each local embedding, of its class
    counts: Int[Tensor, " N"]  # for each embedding of all ranks, the size of its class
    is_last: Bool[Tensor, " N"]  # whether an embedding is the last one of its class

    @classmethod
    def of(cls, batch: Batch, z: Float[Tensor, "n d"], *, with_last: bool = True) -> "_Classes":
        classes, counts = class_numbers(batch.gather_detached(batch.rows["labels"].long()))
        local, index = batch.samples.local, torch.arange(len(classes), device=z.device)
        is_last = torch.zeros_like(counts).scatter_reduce(0, classes, index, "amax")[classes] == index
        added = z if with_last else z.where(~is_last[local, None], 0)
        by_class = z.new_zeros(len(counts), z.shape[1]).index_add(0, classes[local], added)
        sums = batch.sum(by_class, gradient="partial")[classes[local]]
        return cls(sums, counts[classes[local], None], counts[classes], is_last)


class GE2E(_CentroidLoss):
    r"""Compute the generalised end-to-end loss: each embedding is classified among the centroids of all classes.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers: speakers, of which a batch holds several utterances.
    With z the unit embeddings of all ranks, c_k the mean of class k, m_i the mean of the others of z_i's class y_i,

        loss = mean_i [ log( exp(x_i) + Σ_{k≠y_i} exp(cos(z_i, c_k) / t) )  −  x_i ],      x_i = cos(z_i, m_i) / t

    over the embeddings whose class has others. This is the paper's softmax variant, with a mean in place of its sum. The
    paper's w is 1/t, and its b cancels.

    Args:
        temperature: t > 0; 0.1 is the paper's first w of 10. A tensor or module is learnable.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> GE2E(temperature=1.0)(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wan et al. 2018, eqs. 5-9, https://arxiv.org/abs/1710.10467
    """

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*self.scale_of(stated)[1], *super().entries(stated)]

    def compute(self, batch: Batch) -> Tensor:
        z, shards = batch.prepared(batch.rows["embeddings"], normalize=True), batch.samples
        ids, classes = batch.rows["labels"].long(), _Classes.of(batch, z)
        last, counts = classes.is_last[shards.local].nonzero().flatten(), classes.counts[shards.local]
        others = reduce_rows(
            batch, BlockLoss.of(_of_other_classes, batch.settings), z, ids,
            candidates=unit_rows((classes.sums / classes.sizes)[last]), candidate_ids=ids[last],
            candidate_shards=shards.selected(classes.is_last), reduction="none",
        )  # fmt: skip
        mates = unit_rows((classes.sums - z) / (classes.sizes - 1).clamp(min=1))
        positive = batch.scale(batch.settings.temperature) * (z * mates).sum(1)
        losses = cross_entropy(positive, others.masked_fill(counts == batch.total, -torch.inf))
        return batch.reduce(losses.to(z.dtype), counts > 1, reduction=self.reduction)


def _of_other_classes(block: AnchorBlock, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = block.anchors @ block.candidates.T / temperature
    return masked_log_sum_exp(logits, block.negative), block.negative.any(1)


class AngularPrototypical(_CentroidLoss):
    r"""Compute the angular prototypical loss: each class's last embedding is classified among the means of the others.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers: speakers, of which a batch holds several utterances.
    With q_k the last unit embedding, in rank order, of the K classes that have two or more, and c_k the mean of the
    class's other unit embeddings,

        loss = mean_k [ log Σ_l exp(cos(q_k, c_l) / t)  −  cos(q_k, c_k) / t ]

    which is ``cross_entropy(normalize(q) @ normalize(c).T / t, arange(K))``. The paper's w is 1/t, and its b cancels.

    Args:
        temperature: t > 0; 0.1 is the paper's first w of 10. A tensor or module is learnable.
        reduction: ``"mean"`` over all ranks' classes, ``"sum"``, or ``"none"`` for the local embeddings, 0 for most.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.eye(2).repeat(2, 1)
        >>> AngularPrototypical(temperature=1.0)(z, torch.tensor([0, 1, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)

    Source: Chung et al. 2020, §2.3, https://arxiv.org/abs/2003.11982
    """

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.rows["embeddings"], normalize=True)
        classes = _Classes.of(batch, z, with_last=False)
        queries, others = classes.is_last & (classes.counts > 1), (classes.sizes - 1).clamp(min=1)
        return between_classes(batch, z, unit_rows(classes.sums / others), (queries, queries), self.reduction)
