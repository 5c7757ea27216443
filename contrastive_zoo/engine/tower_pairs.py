"""Softmax or sigmoid over the pairs of two towers: row i of one belongs to row i of the other."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Reduction, is_embedding
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.implementation import is_dense, is_one_call
from contrastive_zoo.engine.row_statistics import Rows, Sum
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.engine.sigmoid import sum_over_sigmoid_pairs
from contrastive_zoo.engine.small_batch import small_batch_info_nce, small_batch_siglip, uses_small_batch_path
from contrastive_zoo.engine.softmax import cross_log_sum_exp, self_log_sum_exp
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.ranks.world import Shards

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
"""Which tower's embeddings are compared with which; a key is the document of its query."""


@dataclass(frozen=True)
class TowerPairs:
    """Similarities q_i·k_j / t of two towers, whose rows of the same index are positives of each other.

    Args:
        batch: the first two of its embeddings are the towers, [n, d], or keys [n, k, d], k of each query; the third, if
            there is one, further negatives: [m, d] of all queries, or [n, m, d] of one query each.
        temperature: t.
        normalize: whether embeddings are normalised to unit length first.

    Examples:
        >>> towers = {"queries": torch.eye(2), "keys": torch.eye(2)}
        >>> batch = Batch(towers, dict.fromkeys(towers, Shards((2,))))
        >>> TowerPairs(batch, 1.0, True).cross_entropy("mean")   # log(e + 1) − 1
        tensor(0.3133)
    """

    batch: Batch
    temperature: float | Tensor
    normalize: bool

    def cross_entropy(
        self, reduction: Reduction, *, symmetric: bool = False, in_batch_negatives: bool = True
    ) -> Float[Tensor, "..."]:
        """Reduce ``logsumexp(logits of all candidates) - logit of the own key`` over all queries, in nats.

        Args:
            reduction: of the queries' losses.
            symmetric: whether to average with the direction from keys to queries.
            in_batch_negatives: whether other queries' keys are candidates.
        """
        batch, (queries, keys, *negatives) = self.batch, self.batch.rows.values()
        others = sum(x.total for x in self.negative_shards)
        on_kernel = batch.kernels.compute(
            batch.name,
            batch.total,
            batch.total + others,
            unsupported=_unsupported(negatives, symmetric, in_batch_negatives),
        )
        small = not on_kernel and not negatives and self.normalize
        if small and uses_small_batch_path(queries, reduction, batch.world):
            return small_batch_info_nce(
                queries, keys, temperature=self.temperature, comparison="rows and columns" if symmetric else "rows",
                reduction=reduction, own=batch.own,
            )  # fmt: skip
        q, k, *extra = self.rows
        if on_kernel and is_one_call(reduction, batch.world):
            from contrastive_zoo.engine.kernels import softmax  # imported here: Triton is optional

            candidates = torch.cat([k, *extra]) if extra else k
            compute = softmax.clip if symmetric else softmax.info_nce
            return compute(q.to(queries.dtype), candidates.to(queries.dtype), batch.scale(self.temperature))
        losses = self._losses(symmetric=symmetric, in_batch_negatives=in_batch_negatives, on_kernel=on_kernel)
        return batch.reduce(losses.to(q.dtype), reduction=reduction)

    def sums(
        self, *, symmetric: bool = False, on_kernel: bool = False
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " k"] | None, list[Float[Tensor, " n"]]]:
        """Return the log-sum-exps over other queries' keys, over other keys' queries if asked, and the positives' logits.

        With keys [n, k, d] the second has one for each key, query by query, and the third is of length k.
        """
        samples, (q, k, *_) = self.batch.samples, self.rows
        count = k.shape[1] if k.ndim == 3 else 1
        return cross_log_sum_exp(
            q, k.flatten(0, -2), scale=self.scale, row_shards=samples, column_shards=samples.times(count),
            columnwise=symmetric, partner_offsets=range(count), stride=count, unit_norm=self.normalize,
            dtype=self.batch.first.dtype, on_kernel=on_kernel, world=self.batch.world,
        )  # fmt: skip

    def sums_by_direction(
        self, directions: Collection[Direction], *, unsupported: str | None = None
    ) -> tuple[dict[Direction, Float[Tensor, " n"]], Float[Tensor, " n"]]:
        """Return the log-sum-exps of each direction over all but the pair itself, and the positives' logits.

        Further negatives, [m, d], are candidates of queries only.

        Args:
            directions: ``"query_to_doc"`` and any others.
            unsupported: why Triton kernels cannot compute them, for who has chosen them.
        """
        batch, samples, (q, k, *extra) = self.batch, self.batch.samples, self.rows
        columns = batch.total + sum(shards.total for shards in self.negative_shards)
        on_kernel = batch.kernels.compute(batch.name, batch.total, columns, unsupported=unsupported)
        over_keys, over_queries, (positive,) = self.sums(symmetric="doc_to_query" in directions, on_kernel=on_kernel)
        for x, shards in zip(extra, self.negative_shards, strict=True):
            if shards.total:  # otherwise messages of no rows
                further = self.sum_over(x, shards, on_kernel=on_kernel)
                over_keys = log_sum_exp(torch.stack([over_keys, further]), 0)
        sums: dict[Direction, Tensor] = {"query_to_doc": over_keys}
        if over_queries is not None:
            sums["doc_to_query"] = over_queries
        towers: dict[Direction, Tensor] = {"query_to_query": q, "doc_to_doc": k}
        for direction, tower in towers.items():
            if direction in directions:
                sums[direction], _ = self_log_sum_exp(
                    tower, scale=self.scale, unit_norm=self.normalize, dtype=batch.first.dtype, shards=samples,
                    on_kernel=on_kernel, world=batch.world,
                )  # fmt: skip
        return sums, positive

    def sum_over(self, candidates: Tensor, shards: Shards, *, on_kernel: bool) -> Float[Tensor, " n"]:
        """Return the queries' log-sum-exps over further candidates of all ranks."""
        return cross_log_sum_exp(
            self.rows[0], candidates, scale=self.scale, row_shards=self.batch.samples, column_shards=shards,
            columnwise=False, unit_norm=self.normalize, dtype=self.batch.first.dtype, on_kernel=on_kernel,
            world=self.batch.world,
        )[0]  # fmt: skip

    def binary_cross_entropy(self, reduction: Reduction, bias: float | Tensor) -> Float[Tensor, "..."]:
        """Reduce ``-logsigmoid(±(q_i·k_j / t + bias)).sum(1)`` over all queries: + for the own key, − for others."""
        batch, (queries, keys) = self.batch, self.batch.rows.values()
        unsupported = "computes SigLIP with reduction='mean' or 'sum'" if reduction == "none" else None
        on_kernel = batch.kernels.compute(batch.name, batch.total, batch.total, unsupported=unsupported)
        if not on_kernel and self.normalize and uses_small_batch_path(queries, reduction, batch.world):
            return small_batch_siglip(
                queries, keys, temperature=self.temperature, bias=bias, reduction=reduction, own=batch.own
            )
        x, y = (batch.prepared(rows, normalize=self.normalize) for rows in (queries, keys))
        scale = 1 / self.temperature
        if on_kernel and is_one_call(reduction, batch.world):
            from contrastive_zoo.engine.kernels import sigmoid  # imported here: Triton is optional

            return sigmoid.siglip(x.to(queries.dtype), y.to(queries.dtype), scale, bias)
        where: dict[str, Any] = {"shards": batch.samples, "reduction": reduction, "world": batch.world}
        if is_dense():
            ids, loss = batch.indices(), sigmoid_block_loss(self.temperature, bias)
            return sum_over_anchors(loss, x, ids, candidates=y, candidate_ids=ids, **where)
        x, y = batch.rounded(x, queries), batch.rounded(y, keys)
        return sum_over_sigmoid_pairs(x, y, scale=scale, bias=bias, dtype=queries.dtype, on_kernel=on_kernel, **where)

    def _losses(self, *, symmetric: bool, in_batch_negatives: bool, on_kernel: bool) -> Tensor:
        q, k, *extra = self.rows
        other_queries = None
        if in_batch_negatives:
            other_keys, other_queries, (positive,) = self.sums(symmetric=symmetric, on_kernel=on_kernel)
            others = [other_keys]
        else:
            positive = self.scale * (q * k).sum(-1)
            others = [torch.full_like(positive, -torch.inf)]
        for x, shards in zip(extra, self.negative_shards, strict=True):
            if x.ndim == 3:
                others.append(torch.logsumexp(self.scale * (q[:, None] * x).sum(-1), 1))
            elif shards.total:
                others.append(self.sum_over(x, shards, on_kernel=on_kernel))
        losses = cross_entropy(positive, log_sum_exp(torch.stack(others), 0))
        return losses if other_queries is None else (losses + cross_entropy(positive, other_queries)) / 2

    @cached_property
    def rows(self) -> list[Tensor]:
        """The towers, and further negatives, prepared for matmuls."""
        arguments = [x for x in self.batch.rows.values() if is_embedding(x)]
        return [self.batch.rounded(self.batch.prepared(x, normalize=self.normalize), x) for x in arguments]

    @cached_property
    def negative_shards(self) -> list[Shards]:
        """The splits of further negatives over the ranks."""
        return [self.batch.shards[name] for name, x in self.batch.rows.items() if is_embedding(x)][2:]

    @cached_property
    def scale(self) -> float | Tensor:
        """1 / t, with the gradient of all ranks."""
        return self.batch.scale(self.temperature)


def _unsupported(negatives: list[Tensor], symmetric: bool, in_batch_negatives: bool) -> str | None:
    """Return which softmax over two towers kernels do not compute, in words; None if they do."""
    if not in_batch_negatives:
        return "computes InfoNCE with in_batch_negatives=True only"
    if negatives and (symmetric or negatives[0].ndim != 2):
        return "computes InfoNCE with negatives of all queries, [m, d], if it is not symmetric"
    return None


def sigmoid_block_loss(temperature: float | Tensor, bias: float | Tensor) -> BlockLoss:
    """Return the sigmoid loss of a block of anchors: the dense definition, and the comparison with a memory."""
    return BlockLoss(_sigmoid, temperature=temperature, bias=bias)


def _sigmoid(block: AnchorBlock, temperature: float | Tensor, bias: float | Tensor) -> Rows:
    """Return −Σ log σ(± logit) over the pairs of each anchor: + for positives, − for negatives."""
    logits = block.anchors @ block.candidates.T / temperature + bias
    signed = logits.where(block.positive, -logits)
    pairs = -torch.nn.functional.logsigmoid(signed).where(block.positive | block.negative, 0)
    (losses,) = yield (Sum(pairs.sum(1)),)
    return losses, torch.ones_like(block.ids, dtype=torch.bool)
