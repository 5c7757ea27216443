"""Softmax or sigmoid over pairs: of views, of two towers, and of labelled embeddings."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from contrastive_zoo.engine.anchor_block import class_numbers, only_positives
from contrastive_zoo.engine.batch import Batch, Candidates, Reduction, is_embedding
from contrastive_zoo.engine.precision import concatenated
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.sigmoid import sum_over_sigmoid_pairs
from contrastive_zoo.engine.small_batch import Comparison, small_batch_info_nce, small_batch_siglip
from contrastive_zoo.engine.softmax import log_sum_exps
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, cross_entropy_of_several, log_sum_exp, smooths
from contrastive_zoo.engine.softmax_sweep import Partners
from contrastive_zoo.ranks.world import Shards


@dataclass(frozen=True)
class _Pairs:
    batch: Batch
    temperature: float | Tensor
    normalize: bool  # whether embeddings are normalised to unit length first

    @cached_property
    def _names(self) -> list[str]:
        return [name for name, x in self.batch.rows.items() if is_embedding(x)]

    @cached_property
    def rows(self) -> list[Tensor]:
        return [self.batch.prepared(self.batch.rows[name], normalize=self.normalize) for name in self._names]

    @cached_property
    def factors(self) -> list[Tensor] | None:
        """What matmuls and messages take in place of embeddings of 16 bits; None of others."""
        return self.batch.factors([self.batch.rows[name] for name in self._names])

    @cached_property
    def scale(self) -> float | Tensor:
        """1 / t, with the gradient of all ranks."""
        return self.batch.scale(self.temperature)

    def _gather_shared(self, *indices: int) -> Tensor | None:
        """The embeddings of all ranks as ranks send them, of these indices, if losses of a sum share them."""
        normalize = self.normalize if self.factors is None else None
        return self.batch.gather_shared(*(self._names[i] for i in indices), normalize=normalize)

    @property
    def _settings(self) -> dict[str, Any]:
        world, plan = self.batch.world, self.batch.plan
        return {"scale": self.scale, "unit_norm": self.normalize, "world": world, "arithmetic": plan.arithmetic}


class ViewPairs(_Pairs):
    """Similarities z_i·z_k / t of all views of all samples; the positives of an anchor are the other views of its sample."""

    def cross_entropy(self, reduction: Reduction) -> Float[Tensor, "..."]:
        """Reduce ``logsumexp(others and positives) - mean(positives)`` over all anchors, in nats."""
        batch = self.batch
        if batch.plan.arithmetic == "one operator":
            return small_batch_info_nce(
                batch, *batch.rows.values(), temperature=self.temperature, comparison="views", reduction=reduction
            )
        others, positives = self.sums()
        losses = cross_entropy_of_several(positives, others)
        return batch.reduce(losses.to(self.rows[0].dtype), reduction=reduction)

    def sums(self) -> tuple[Float[Tensor, " a"], Float[Tensor, "p a"]]:
        """Return the log-sum-exps over all but the anchor and its positives, view after view, and the positives' logits."""
        n, count = len(self.rows[0]), len(self.rows)
        others, _, logits = log_sum_exps(
            concatenated(*self.rows), partners=Partners([n * step for step in range(1, count)]),
            factors=None if self.factors is None else [concatenated(*self.factors)],
            row_shards=self.batch.samples.times(count), gathered=self._gather_shared(*range(count)), **self._settings,
        )  # fmt: skip
        # each pair counts for both of its views; logits[step - 1] are those of a view and the one ``step`` later
        by_step = [x.unflatten(0, (count - step, -1)) for step, x in enumerate(logits, 1)]
        of_view = [[by_step[abs(v - u) - 1][min(u, v)] for u in range(count) if u != v] for v in range(count)]
        return others, torch.stack([torch.stack(x) for x in of_view], 1).flatten(1)


def means_over_other_samples(
    batch: Batch, temperature: float | Tensor, normalize: bool, *, two_towers: bool
) -> tuple[float | Tensor, Float[Tensor, "2 n"], Tensor | float]:
    """Return t, logarithms of both views' means of exp(z_i·z_k / t) over other samples, 0 without any; positives' logits.

    Of two towers only the other one's embeddings are compared, and their logits are those less the positive's, which is
    then 0. t may be the local embeddings', [2, n], or samples', [1, n].
    """
    t: float | Tensor
    if isinstance(temperature, Tensor) and temperature.ndim == 2:
        a, b = TowerPairs(batch, 1.0, normalize).rows
        of_views, samples, others = temperature.to(a), batch.samples, list[Tensor]()
        how: Any = {"scale": 1.0, "columnwise": False, "world": batch.world, "arithmetic": batch.plan.arithmetic}
        for x, other, of_view in ((a, b, of_views[0]), (b, a, of_views[-1])):
            columns, offsets = ([other], [0]) if two_towers else ([a, b], [0, len(a)])
            how |= {"row_shards": samples, "column_shards": samples.times(len(columns)), "partners": Partners(offsets)}
            others.append(log_sum_exps(x / of_view[:, None], torch.cat(columns), **how)[0])
        t, sums, positive = of_views, torch.stack(others), (a * b).sum(1) / of_views
    elif two_towers:
        towers = TowerPairs(batch, temperature, normalize)
        *both, positive = (x for x in towers.sums(symmetric=True) if x is not None)
        t, sums = 1 / towers.scale, torch.stack(both)
    else:
        views = ViewPairs(batch, temperature, normalize)
        t, (sums, positive) = 1 / views.scale, (x.view(2, -1) for x in views.sums())
    means = sums - math.log(max(1, batch.total - 1)) - (positive if two_towers else math.log(2))
    return t, means.masked_fill(means == -torch.inf, 0), 0.0 if two_towers else positive


Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
"""Which tower's embeddings are compared with which; a key is the document of its query."""


class TowerPairs(_Pairs):
    """Similarities q_i·k_j / t of two towers, whose embeddings of the same index are positives of each other.

    The first two of the batch's embeddings are the towers, [n, d]; the third, if there is one, further negatives: [m, d] of
    all queries, or [n, m, d] of one query each.
    """

    def cross_entropy(
        self,
        reduction: Reduction,
        *,
        symmetric: bool = False,
        in_batch_negatives: bool = True,
        label_smoothing: float | Tensor = 0.0,
    ) -> Float[Tensor, "..."]:
        """Reduce ``logsumexp(logits of all candidates) - logit of the own key`` over all queries, in nats.

        With label smoothing ε the subtrahend is 1 − ε times that logit, and ε times the mean of all candidates' logits.
        """
        batch = self.batch
        if batch.plan.arithmetic == "one operator":
            comparison: Comparison = "rows and columns" if symmetric else "rows"
            return small_batch_info_nce(
                batch, *batch.rows.values(), temperature=self.temperature, comparison=comparison, reduction=reduction
            )
        q, k, *extra = self.rows
        other_queries = None
        if in_batch_negatives:
            other_keys, other_queries, positive = self.sums(symmetric=symmetric)
            others = [other_keys]
        else:
            positive = self.scale * (q * k).sum(-1)
            others = [torch.full_like(positive, -torch.inf)]
        for index, (x, shards) in enumerate(zip(extra, self.negative_shards, strict=True), 2):
            if x.ndim == 3:
                others.append(torch.logsumexp(self.scale * (q[:, None] * x).sum(-1), 1))
            elif shards.total:
                others.append(self.sum_over(index))
        losses = cross_entropy(positive, log_sum_exp(torch.stack(others), 0))
        if other_queries is not None:
            losses = (losses + cross_entropy(positive, other_queries)) / 2
        if smooths(label_smoothing):
            mean = self._mean_logits(symmetric=symmetric, in_batch_negatives=in_batch_negatives)
            losses = losses + label_smoothing * (positive - mean)
        return batch.reduce(losses.to(q.dtype), reduction=reduction)

    def _mean_logits(self, *, symmetric: bool, in_batch_negatives: bool) -> Float[Tensor, " n"]:
        """Return the mean logit of each query's candidates, and of each key's if symmetric: products with their sum."""
        batch, (q, k, *extra) = self.batch, self.rows

        def sum_of(x: Tensor) -> Tensor:
            return batch.sum(x.sum(0), gradient="partial")

        total, count = (sum_of(k), batch.total) if in_batch_negatives else (k, 1)
        for x, shards in zip(extra, self.negative_shards, strict=True):
            more = (x.sum(1), x.shape[1]) if x.ndim == 3 else (sum_of(x), shards.total)
            total, count = total + more[0], count + more[1]
        mean = self.scale * (q * total).sum(-1) / count
        return (mean + self.scale * (k * sum_of(q)).sum(-1) / batch.total) / 2 if symmetric else mean

    def sums(
        self, *, symmetric: bool = False
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None, Float[Tensor, " n"]]:
        """Return log-sum-exps over other queries' keys, over other keys' queries if asked, and positives' logits."""
        other_keys, other_queries, (positive,) = self._compare(0, 1, columnwise=symmetric, partners=Partners([0]))
        return other_keys, other_queries, positive

    def sums_by_direction(
        self, directions: Collection[Direction]
    ) -> tuple[dict[Direction, Float[Tensor, " n"]], Float[Tensor, " n"]]:
        """Return each direction's log-sum-exps over all but the pair itself, and the positives' logits."""
        over_keys, over_queries, positive = self.sums(symmetric="doc_to_query" in directions)
        for index, shards in enumerate(self.negative_shards, 2):
            if shards.total:  # otherwise messages of no rows
                over_keys = log_sum_exp(torch.stack([over_keys, self.sum_over(index)]), 0)
        sums: dict[Direction, Tensor] = {"query_to_doc": over_keys}
        if over_queries is not None:
            sums["doc_to_query"] = over_queries
        towers: dict[Direction, int] = {"query_to_query": 0, "doc_to_doc": 1}
        for direction, tower in towers.items():
            if direction in directions:
                sums[direction], *_ = self._compare(tower, tower)
        return sums, positive

    def sum_over(self, index: int) -> Float[Tensor, " n"]:
        """Return the queries' log-sum-exps over further candidates of all ranks, [m, d], the embeddings of this index."""
        return self._compare(0, index, column_shards=self.negative_shards[index - 2], columnwise=False)[0]

    def _compare(self, rows: int, columns: int, **how: Any) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return log-sum-exps of the embeddings of one index over those of another one, or over others of the same."""
        factors = None if self.factors is None else (self.factors[rows], self.factors[columns])
        return log_sum_exps(
            self.rows[rows], None if rows == columns else self.rows[columns], factors=factors,
            row_shards=self.batch.samples, gathered=self._gather_shared(columns), **self._settings, **how,
        )  # fmt: skip

    def binary_cross_entropy(
        self, reduction: Reduction, bias: float | Tensor, ids: Tensor | None = None, key_ids: Tensor | None = None
    ) -> Float[Tensor, "..."]:
        """Reduce ``-logsigmoid(±(q_i·k_j / t + bias)).sum(1)`` over all queries: + for the own key, − for others.

        With ids + is for all keys with the query's id, key_ids None being the same.
        """
        batch = self.batch
        if batch.plan.arithmetic == "one operator":
            return small_batch_siglip(
                batch, *batch.rows.values(), temperature=self.temperature, bias=bias, reduction=reduction
            )
        x, y = self.rows
        if batch.plan.is_plain or ids is not None:
            loss = BlockLoss(_sigmoid, temperature=self.temperature, bias=bias)
            return reduce_rows(
                batch, loss, x, batch.indices() if ids is None else ids.long(), candidates=y,
                candidate_ids=None if key_ids is None else key_ids.long(),
                candidate_shards=batch.shards[self._names[1]], reduction=reduction,
            )  # fmt: skip
        return sum_over_sigmoid_pairs(
            x, y, scale=1 / self.temperature, bias=bias, unit_norm=self.normalize, factors=self.factors,
            shards=batch.samples, reduction=reduction, world=batch.world, arithmetic=batch.plan.arithmetic,
            gathered=self._gather_shared(1),
        )  # fmt: skip

    @cached_property
    def negative_shards(self) -> list[Shards]:
        return [self.batch.shards[name] for name in self._names[2:]]


def _sigmoid(block: AnchorBlock, temperature: float | Tensor, bias: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return −Σ log σ(± logit) over the pairs of each anchor: + for positives, − for negatives."""
    logits = block.anchors @ block.candidates.T / temperature + bias
    signed = logits.where(block.positive, -logits)
    pairs = -torch.nn.functional.logsigmoid(signed).where(block.positive | block.negative, 0)
    return pairs.sum(1), torch.ones_like(block.ids, dtype=torch.bool)


@dataclass(frozen=True)
class LabelledPairs(_Pairs):
    """Similarities z_i·z_k / t of all embeddings; the positives of an anchor are the others with its label.

    The first of the batch's tensors are embeddings, [n, d] or [n, v, d]. Labels None make each sample a class of its own;
    of labels [n, C] a loss of blocks says which are positives.
    """

    labels: Integer[Tensor, "n ..."] | Bool[Tensor, "n ..."] | None

    @cached_property
    def views(self) -> int:
        return self.batch.first.shape[1] if self.batch.first.ndim == 3 else 1

    @cached_property
    def samples(self) -> Int[Tensor, " a"]:
        return self.batch.indices().repeat_interleave(self.views)

    @cached_property
    def ids(self) -> Int[Tensor, " a"]:
        of_class = None if self.labels is None or self.labels.ndim == 2 else self.labels
        return self.samples if of_class is None else of_class.long().repeat_interleave(self.views)

    @cached_property
    def candidates(self) -> Candidates:
        """The anchors, sample by sample, which are candidates, too."""
        return self.batch.candidates(next(iter(self.batch.rows)), normalize=self.normalize)

    def sums(self) -> tuple[Float[Tensor, " a"], Float[Tensor, " a"], Int[Tensor, " a"]]:
        """Return log-sum-exps of all others but an anchor's only positive, means of positives' logits, and their numbers."""
        batch, z, shards = self.batch, self.candidates.local, self.batch.samples.times(self.views)
        all_ids = batch.gather_detached(self.ids, shards)
        if self.views == 1:
            batch.note_labels(all_ids)
        class_index, counts = class_numbers(all_ids)
        local = class_index[shards.local]
        sums = batch.sum(z.new_zeros(len(counts), z.shape[1]).index_add(0, local, z), gradient="partial")
        positives = counts[local] - 1
        mean = self.scale * (z * (sums.index_select(0, local) - z)).sum(-1) / positives.clamp(min=1)
        only = only_positives(class_index, counts)
        others, *_ = log_sum_exps(
            z, factors=None if self.factors is None else [self.factors[0].flatten(0, -2)], row_shards=shards,
            excluded=None if only is None else only[shards.local], gathered=self._gather_shared(0), **self._settings,
        )  # fmt: skip
        return others, mean, positives

    def reduce_rows(self, loss: BlockLoss, reduction: Reduction, *, mask: Tensor | None = None) -> Float[Tensor, "..."]:
        """Reduce a loss of blocks, whose positives may be given by a mask, or by labels [n, C].

        The rows of the mask [n, N] and the candidates' samples, or the labels of both, are the loss's companions.
        """
        companions = [] if mask is None else [(mask.bool().repeat_interleave(self.views, 0), self.samples)]
        if self.labels is not None and self.labels.ndim == 2:
            companions = [(labels := self.labels.bool().repeat_interleave(self.views, 0), labels)]
        return reduce_rows(
            self.batch, loss, self.candidates, self.ids, times=self.views, companions=companions, reduction=reduction
        )
