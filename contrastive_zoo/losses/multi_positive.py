"""Softmax over pairs that are given, not aligned: several positives of a query, and one pair of each class."""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Candidates
from contrastive_zoo.engine.cost import Blocks, Entry, Gathered
from contrastive_zoo.engine.masked import masked_log_sum_exp
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
        return [Blocks([x], [y], **how) for x, y in directions]

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.candidates(name, normalize=self.normalize) for name in ("queries", "keys"))
        ids, weights = batch.rows["ids"], batch.rows.get("weights")
        ids_of_keys = batch.rows.get("key_ids", ids)
        targets = ids[:, None] if ids.ndim == 1 else ids
        weights = torch.ones_like(targets) if weights is None else weights.detach().view(targets.shape)
        loss = BlockLoss(
            _block_losses, temperature=batch.settings.temperature, paired="key_ids" not in batch.rows,
            duplicates=self.duplicates,
        )  # fmt: skip

        def direction(anchors: Candidates, candidates: Candidates) -> Tensor:
            return reduce_rows(
                batch, loss, anchors, batch.indices(), candidates=candidates, candidate_ids=batch.indices("keys"),
                candidate_shards=batch.shards["keys"], reduction=self.reduction,
                companions=[(targets, ids_of_keys), (weights.to(q.local), ids_of_keys)],
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


class NPairs(LabelledLoss, engine="rows"):
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

    def entries(self, stated: CallInputs) -> list[Entry]:
        """Return what it costs at most, if each embedding is an anchor and a candidate: that depends on the labels."""
        names, learnt = ["embeddings"], stated.learnt("temperature")
        blocks = Blocks(names, names, parameters=learnt, reduction="none", width=stated.width)
        return [Gathered(["labels"], 8), blocks, *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        z, ids = batch.prepared(batch.rows["embeddings"], normalize=self.normalize), batch.rows["labels"].long()
        all_ids = batch.gather_detached(ids)
        order = all_ids.argsort(stable=True)
        position = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=z.device))
        start = torch.searchsorted(all_ids[order], all_ids)
        index_in_class = position - start
        has_pair = torch.searchsorted(all_ids[order], all_ids, right=True) - start > 1
        first, second = (index_in_class == 0) & has_pair, index_in_class == 1
        return between_classes(
            batch, z, z, (first, second), temperature=batch.settings.temperature, reduction=self.reduction
        )


def between_classes(
    batch: Batch,
    anchors: Float[Tensor, "n d"],
    candidates: Float[Tensor, "n d"],
    selected: tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]],
    *,
    temperature: float | Tensor,
    reduction: Reduction,
) -> Float[Tensor, "..."]:
    """Reduce the cross-entropies of selected anchors over selected candidates, of all ranks one of each class."""
    shards, ids = batch.samples, batch.rows["labels"].long()
    x, y = (chosen[shards.local].nonzero().flatten() for chosen in selected)
    of_anchors, of_candidates = (shards.selected(chosen) for chosen in selected)
    losses = reduce_rows(
        batch, BlockLoss(_pair_losses, temperature=temperature), anchors[x], ids[x], candidates=candidates[y],
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
