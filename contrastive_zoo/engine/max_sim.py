"""Score sets of tokens by late interaction, in tiles: the sum over query tokens of the best document token.

With q_ia the tokens of query i, d_jb those of document j, w(i, a, j) the first b of the largest q_ia·d_jb, and an incoming
gradient G of S,

    S_ij = Σ_a max_b q_ia·d_jb      dq_ia = Σ_j G_ij d_{j, w(i,a,j)}      dd_jb = Σ_{i, a: w(i,a,j) = b} G_ij q_ia

The selected tokens are cached for the backward pass as far as the memory budget allows; others are computed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.masked import masked_indices
from contrastive_zoo.engine.max_sim_sweep import MaxSimSweep, set_of_token, sum_by_set
from contrastive_zoo.engine.pairwise import first_of_equals
from contrastive_zoo.engine.precision import matmul_rounding, without_autocast
from contrastive_zoo.engine.tiling import CachedLogits
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.compiling import Function, differentiable_once
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World


@dataclass(frozen=True)
class TokenSets:
    """Sets of tokens of all ranks: this rank's tokens, one set after the other, and the split of all."""

    tokens: Float[Tensor, "t d"]
    lengths: Tensor  # of the local sets, at least 1
    shards: Shards
    token_shards: Shards
    read: Sequence[int]  # the lengths on the host
    factors: Tensor | None = None  # of an input of 16 bits, what is sent and multiplied in place of tokens
    gathered: Tensor | None = None  # what is sent, of all ranks, if losses of a sum share it

    def all_lengths(self, world: World) -> tuple[Tensor, Sequence[int]]:
        """Return the numbers of tokens of the sets of all ranks, and the same on the host, which waits for no device."""
        lengths = gather_rows(self.lengths, self.shards, world)
        if devices.on_cpu(lengths):
            return lengths, lengths.tolist()
        by_rank = world.exchange([*self.read, *[0] * (max(self.shards.sizes) - len(self.read))])
        return lengths, [x for of, size in zip(by_rank, self.shards.sizes, strict=True) for x in of[:size]]


def late_interaction_scores(batch: Batch, *, normalize: bool) -> Float[Tensor, "n M"]:
    """Return the scores of the local queries and the documents of all ranks, and then of further documents, [n, M].

    The batch has the number of tokens of each set, also on the host, and ``tokens of`` these sets, queries first.
    """
    sets = []
    for name, read in batch.host.items():
        tokens, shards = batch.rows[f"tokens of {name}"], batch.shards[f"tokens of {name}"]
        prepared, factors = batch.prepared(tokens, normalize=normalize), batch.factors([tokens])
        gathered = batch.gather_shared(f"tokens of {name}", normalize=normalize if factors is None else None)
        of_set = batch.rows[name], batch.shards[name], shards, read, None if factors is None else factors[0], gathered
        sets.append(TokenSets(prepared, *of_set))
    queries, *others = sets
    how: Any = {"unit_norm": normalize, "world": batch.world, "plain": batch.plan.is_plain}
    parts = [max_sim_scores(queries, _with_first_of_equals(x), **how) for x in others]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _with_first_of_equals(sets: TokenSets) -> TokenSets:
    of_token = set_of_token(sets.lengths, len(sets.tokens)).to(sets.tokens)
    first = first_of_equals(torch.cat([sets.tokens.detach(), of_token[:, None]], 1))
    if first is None:
        return sets
    factors = None if sets.factors is None else sets.factors[first]
    return replace(sets, tokens=sets.tokens[first], factors=factors, gathered=None)


@without_autocast
def max_sim_scores(
    queries: TokenSets, documents: TokenSets, *, unit_norm: bool = False, world: World, plain: bool = False
) -> Float[Tensor, "n M"]:
    """Return ``torch.einsum("iad,jbd->ijab", q, d).max(3).values.sum(2)`` of all ranks' documents, over valid tokens."""
    lengths, read = documents.all_lengths(world)
    if plain:
        tokens = all_gather(documents.tokens, shards=documents.token_shards, process_group=world)
        products = queries.tokens @ tokens.T
        best = [x.max(1).values for x in products.split([*read], 1)]
        return sum_by_set(torch.stack(best, 1) if best else products, queries.lengths)
    factors = None
    if queries.factors is not None and documents.factors is not None:
        factors = queries.factors, documents.factors
    sweep = MaxSimSweep(
        query_lengths=queries.lengths, document_lengths=lengths, read_lengths=read, document_shards=documents.shards,
        row_shards=queries.token_shards, column_shards=documents.token_shards, world=world, factors=factors,
        unit_norm=unit_norm,
    )  # fmt: skip
    scores: Tensor = _MaxSim.apply(sweep, queries.tokens, documents.tokens, documents.gathered)
    return scores


class _MaxSim(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, sweep: MaxSimSweep, queries: Tensor, documents: Tensor, gathered: Tensor | None) -> Tensor:
        ctx.sweep, exchange = sweep, sweep.exchange(documents, gathered)
        ctx.cached = CachedLogits(learns=sweep.learns and any(ctx.needs_input_grad))
        with matmul_rounding(sweep.dtype, queries.device.type):
            scores, positions = sweep.scores(sweep.row_factors(queries), exchange, ctx.cached)
        ctx.save_for_backward(queries, documents, exchange.gathered, *positions)
        return scores

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        queries, documents, gathered, *positions = ctx.saved_tensors
        sweep = ctx.sweep
        with torch.no_grad(), matmul_rounding(sweep.dtype, queries.device.type):
            dqueries, ddocuments = (
                x.new_zeros(x.shape) if needed else None
                for x, needed in zip((queries, documents), ctx.needs_input_grad[1:3], strict=True)
            )
            exchange = sweep.exchange(documents, gathered)
            parts = sweep.gradients(
                sweep.row_factors(queries), exchange, dscores.contiguous(), positions, dqueries, ddocuments
            )
            sweep.complete(exchange, ddocuments, parts)
            ctx.cached.release()
        return None, *(differentiable_once(x, queries, documents) for x in (dqueries, ddocuments)), None


def read_lengths(rows: Mapping[str, Tensor], masks: Mapping[str, Tensor | None]) -> dict[str, list[int]]:
    """Return the number of valid tokens, not 0 in a mask [n, L], of each set, by name; the host waits once for all."""
    counts = {name: (mask != 0).sum(1) for name, mask in masks.items() if mask is not None}
    if waiting := {name: x for name, x in counts.items() if not devices.on_cpu(x)}:
        together = torch.cat([*waiting.values()]).cpu().split([len(x) for x in waiting.values()])
        counts |= dict(zip(waiting, together, strict=True))
    return {name: counts[name].tolist() if name in counts else [x.shape[1]] * len(x) for name, x in rows.items()}


def packed_tokens(
    rows: Float[Tensor, "n L d"], mask: Bool[Tensor, "n L"] | Int[Tensor, "n L"] | None, count: int
) -> tuple[Float[Tensor, "t d"], Int[Tensor, " n"]]:
    """Return the ``count`` tokens that a mask calls valid (None: all), set after set, and each set's number."""
    if mask is None:
        return rows.flatten(0, 1), torch.full((len(rows),), rows.shape[1], device=rows.device)
    valid = mask.to(rows.device) != 0
    if devices.on_cpu(rows):
        return rows[valid], valid.sum(1)
    columns, _ = masked_indices(valid.view(1, -1), count)
    return rows.flatten(0, 1).index_select(0, columns[0]), valid.sum(1)
