"""Score sets of tokens by late interaction, in tiles: the sum over query tokens of the best document token.

With q_ia the tokens of query i, d_jb those of document j, w(i, a, j) the first b of the largest q_ia·d_jb, and an incoming
gradient G of S,

    S_ij = Σ_a max_b q_ia·d_jb      dq_ia = Σ_j G_ij d_{j, w(i,a,j)}      dd_jb = Σ_{i, a: w(i,a,j) = b} G_ij q_ia

With a floor f_ia, S_ij is the mean over the query's tokens a for which max_b q_ia·d_jb ≥ f_ia.

The selected tokens are cached for the backward pass as far as the memory budget allows; others are computed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.exchange import GatherExchange, Operand, Ring, Sweep
from contrastive_zoo.engine.masked import masked_indices, tie_width
from contrastive_zoo.engine.pairwise import first_of_equals
from contrastive_zoo.engine.precision import concatenated, matmul, matmul_rounding, without_autocast
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
    gathered: Tensor | None = None  # what is sent, of all ranks, if losses of a sum share it or ``top_k`` needs it

    def all_lengths(self, world: World) -> tuple[Tensor, Sequence[int]]:
        """Return the numbers of tokens of the sets of all ranks, and the same on the host, which waits for no device."""
        lengths = gather_rows(self.lengths, self.shards, world)
        if devices.on_cpu(lengths):
            return lengths, lengths.tolist()
        by_rank = world.exchange([*self.read, *[0] * (max(self.shards.sizes) - len(self.read))])
        return lengths, [x for of, size in zip(by_rank, self.shards.sizes, strict=True) for x in of[:size]]


def late_interaction_scores(batch: Batch, *, normalize: bool, top_k: int | None = None) -> Float[Tensor, "n M"]:
    """Return the scores of the local queries and the documents of all ranks, and then of further documents, [n, M].

    The batch has the number of tokens of each set, also on the host, and ``tokens of`` these sets, queries first. ``top_k``
    is how many tokens of all documents count for a query token; None is all of them.
    """
    sets: list[TokenSets] = []
    for name, read in batch.host.items():
        tokens, shards = batch.rows[f"tokens of {name}"], batch.shards[f"tokens of {name}"]
        prepared, factors = batch.prepared(tokens, normalize=normalize), batch.factors([tokens])
        gathered = None
        if sets:  # queries stay on their rank
            gathered = batch.gather_shared(f"tokens of {name}", normalize=normalize if factors is None else None)
            if gathered is None and top_k is not None:
                gathered = gather_rows((prepared if factors is None else factors[0]).detach(), shards, batch.world)
        of_set = batch.rows[name], batch.shards[name], shards, read, None if factors is None else factors[0], gathered
        sets.append(TokenSets(prepared, *of_set))
    queries, *others = sets[0], *map(_with_first_of_equals, sets[1:])
    floor = None  # of each query token, the least similarity that counts
    if top_k is not None:
        tokens = torch.cat([batch.prepared(x.gathered, normalize=normalize) for x in others if x.gathered is not None])
        floor = _kth_largest(queries.tokens.detach(), tokens, top_k)
    return concatenated(*(_max_sim_scores(batch, queries, x, floor, unit_norm=normalize) for x in others), dim=1)


@torch.no_grad()
@without_autocast
def _kth_largest(queries: Float[Tensor, "t d"], tokens: Float[Tensor, "T d"], k: int) -> Float[Tensor, " t"]:
    """Return which similarity each query token's k best tokens have at least, less what another matmul may round."""
    floor = queries.new_full((len(queries),), -torch.inf)
    for part in tiling.row_blocks(len(queries), len(tokens), queries.dtype) if k < len(tokens) else ():
        floor[part] = (queries[part] @ tokens.T).topk(k).values[:, -1]
    lengths, longest = torch.linalg.vector_norm(queries, dim=1), torch.linalg.vector_norm(tokens, dim=1).amax()
    return floor - tie_width(floor) * lengths * longest


def _with_first_of_equals(sets: TokenSets) -> TokenSets:
    of_token = set_of_token(sets.lengths, len(sets.tokens)).to(sets.tokens)
    first = first_of_equals(torch.cat([sets.tokens.detach(), of_token[:, None]], 1))
    # only where their gradient goes: what ranks send and have gathered may not depend on the tokens of one of them
    return sets if first is None else replace(sets, tokens=sets.tokens[first])


def _max_sim_scores(
    batch: Batch, queries: TokenSets, documents: TokenSets, floor: Tensor | None, *, unit_norm: bool
) -> Float[Tensor, "n M"]:
    """Return ``torch.einsum("iad,jbd->ijab", q, d).max(3).values.sum(2)`` of all ranks' documents, over valid tokens."""
    lengths, read = documents.all_lengths(batch.world)
    if batch.plan.is_plain:
        tokens = all_gather(documents.tokens, shards=documents.token_shards, process_group=batch.world)
        products = matmul(queries.tokens, tokens.T)
        best = [x.max(1).values for x in products.split([*read], 1)]
        return _scores_of(torch.stack(best, 1) if best else products, queries.lengths, floor)[0]
    of_queries, of_documents = queries.factors, documents.factors
    factors = None if of_queries is None or of_documents is None else (of_queries, of_documents)
    sweep = MaxSimSweep(
        query_lengths=queries.lengths, document_lengths=lengths, read_lengths=read, document_shards=documents.shards,
        row_shards=queries.token_shards, column_shards=documents.token_shards, world=batch.world, factors=factors,
        unit_norm=unit_norm, floor=floor,
    )  # fmt: skip
    return _MaxSim.apply(sweep, queries.tokens, documents.tokens, documents.gathered)


class _MaxSim(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, sweep: "MaxSimSweep", queries: Tensor, documents: Tensor, gathered: Tensor | None) -> Tensor:
        ctx.sweep, exchange = sweep, sweep.exchange(documents, gathered)
        ctx.cached = CachedLogits(learns=sweep.learns and any(ctx.needs_input_grad))
        with matmul_rounding(sweep.dtype, queries.device.type):
            scores, counts, positions = sweep.scores(sweep.row_factors(queries), exchange, ctx.cached)
        ctx.save_for_backward(queries, documents, exchange.gathered, counts, *positions)
        return scores

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        queries, documents, gathered, counts, *positions = ctx.saved_tensors
        dscores = dscores.contiguous() if counts is None else dscores / counts
        sweep = ctx.sweep
        with torch.no_grad(), matmul_rounding(sweep.dtype, queries.device.type):
            dqueries, ddocuments = (
                x.new_zeros(x.shape) if needed else None
                for x, needed in zip((queries, documents), ctx.needs_input_grad[1:3], strict=True)
            )
            exchange = sweep.exchange(documents, gathered)
            parts = sweep.gradients(sweep.row_factors(queries), exchange, dscores, positions, dqueries, ddocuments)
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


@dataclass(frozen=True, kw_only=True)
class MaxSimSweep(Sweep):
    """Compute the tiles of the local queries, document block by document block; rows and columns are tokens."""

    query_lengths: Tensor
    document_lengths: Tensor  # of all ranks
    read_lengths: Sequence[int]  # the same on the host
    document_shards: Shards
    floor: Tensor | None = None  # of the local queries

    def operand(self, rows: Tensor) -> Operand:
        """Return factors about as long as unit rows: the largest product of very short ones must not underflow."""
        factors: Operand = super().operand(rows)
        if factors.inverse is None:
            return factors
        mantissa = torch.frexp(factors.inverse).mantissa  # the rest is a power of two, which rounds nothing
        return Operand(rows * (factors.inverse / mantissa)[:, None], mantissa)

    def blocks(self, queries: Tensor, columns: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of a rank's documents: their columns of the scores, and which of the rank's tokens they have."""
        height, width = tiling.tile_size(queries.dtype.itemsize, on_cpu=queries.is_cpu)
        sizes = width, max(1, height * width // max(1, len(queries)))
        for sets, index in padded_blocks(self.document_lengths[columns], self.read_lengths[columns], *sizes):
            yield columns.start + sets, index

    def _visits(self, exchange: GatherExchange | Ring) -> Iterator[tuple[Tensor, slice]]:
        """Yield each rank's document tokens, and the columns of its documents."""
        for block, tokens in zip(exchange.blocks, exchange, strict=True):
            yield tokens, Shards(self.document_shards.sizes, block.ahead).local

    def scores(
        self, queries: Tensor, exchange: GatherExchange | Ring, cached: CachedLogits
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Return scores, what sums were divided by, and each block's selected tokens; None where they do not fit."""
        scores = queries.new_empty(len(self.query_lengths), len(self.document_lengths))
        counts = None if self.floor is None else torch.empty_like(scores)
        positions: list[Tensor | None] = []
        left = self.operand(queries)
        for tokens, of_rank in self._visits(exchange):
            right = self.operand(tokens)
            for columns, block in self.blocks(queries, of_rank):
                documents, longest = block.shape
                keep = cached.reserve(len(queries) * documents * small_integer(longest).itemsize)
                best, position = best_tokens(left, right, block, self.floor, select=keep)
                scores[:, columns], of_block = _scores_of(best, self.query_lengths, self.floor)
                if counts is not None and of_block is not None:
                    counts[:, columns] = of_block
                positions.append(position)
        return scores, counts, positions

    def gradients(
        self, queries: Tensor, exchange: GatherExchange | Ring, dscores: Tensor, positions: Sequence[Any], *totals: Any
    ) -> Iterator[Tensor]:
        """Add the gradients of the queries and of the local documents to their totals; yield those of other documents."""
        stored, (dqueries, ddocuments) = iter(positions), totals
        left, sets = self.operand(queries), set_of_token(self.query_lengths, len(queries))
        for visit, (tokens, of_rank) in enumerate(self._visits(exchange)):
            right = self.operand(tokens)
            total = ddocuments if visit == 0 or ddocuments is None else tokens.new_zeros(tokens.shape)
            for columns, block in self.blocks(queries, of_rank):
                position = next(stored)
                if position is None:
                    _, position = best_tokens(left, right, block, self.floor, select=True)
                assert position is not None  # it was asked for
                weights, position = dscores[:, columns][sets], position.long()
                if self.floor is not None:
                    weights = weights.where(position < block.shape[1], 0)
                    position = position.clamp(max=block.shape[1] - 1)
                if dqueries is not None and len(queries):
                    selected = block[torch.arange(len(block), device=block.device), position]
                    dqueries += F.embedding_bag(selected, _unit(right), mode="sum", per_sample_weights=weights)
                if total is not None and len(queries):
                    total.index_add_(0, block.flatten(), sum_selected(_unit(left), weights, position, block.shape[1]))
            if visit > 0 and total is not None:
                yield total


def _unit(tokens: Operand) -> Tensor:
    return tokens.rows if tokens.inverse is None else tokens.rows * tokens.inverse[:, None]


def best_tokens(
    queries: Operand, tokens: Operand, index: Tensor, floor: Tensor | None = None, *, select: bool
) -> tuple[Tensor, Tensor | None]:
    """Return each query token's largest similarity to tokens [b, L] of documents, and which has it; L if below the floor."""
    rows, candidates = queries.rows, tokens.rows[index.flatten()].T
    best = rows.new_empty(len(rows), len(index))
    position = torch.empty_like(best, dtype=small_integer(index.shape[1])) if select else None
    height = max(1, tiling.tile_bytes(on_cpu=rows.is_cpu) // (index.numel() * rows.dtype.itemsize))
    for top in range(0, len(rows), height):
        part = slice(top, top + height)
        similarity = rows[part] @ candidates
        if tokens.inverse is not None:
            similarity *= tokens.inverse[index.flatten()]
        similarity = similarity.view(-1, *index.shape)
        if position is None:
            torch.amax(similarity, 2, out=best[part])
        else:
            best[part], position[part] = similarity.max(2)
    best = best if queries.inverse is None else best * queries.inverse[:, None]
    if position is not None and floor is not None:
        position.masked_fill_(best < floor[:, None], index.shape[1])
    return best, position


def small_integer(positions: int) -> torch.dtype:
    # of a position, or their number for none
    return torch.uint8 if positions < 2**8 else torch.int16 if positions < 2**15 else torch.int32


def padded_blocks(
    lengths: Int[Tensor, " n"], read: Sequence[int], tokens: int, sets: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of at most so many sets and tokens, the longest first: indices of sets, [b], and of tokens, [b, L]."""
    start = lengths.cumsum(0) - lengths
    size, order = lengths.sort(descending=True, stable=True)
    descending, first = sorted(read, reverse=True), 0
    while first < len(order):
        longest = descending[first]
        block = slice(first, first + max(1, min(sets, tokens // longest)))
        position = torch.arange(longest, device=lengths.device).expand(len(order[block]), longest)
        # a shorter set repeats its first token, so that a maximum needs no mask
        index = start[order[block], None] + position.where(position < size[block, None], 0)
        yield order[block], index
        first = block.stop


def _scores_of(
    best: Float[Tensor, "t k"], lengths: Int[Tensor, " n"], floor: Float[Tensor, " t"] | None
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"] | None]:
    """Return sums over query tokens, or means over those that reach the floor and their number."""
    if floor is None:
        return sum_by_set(best, lengths), None
    reached = best >= floor[:, None]
    counts = sum_by_set(reached.to(best), lengths).clamp(min=1)
    return sum_by_set(best.where(reached, 0), lengths) / counts, counts


def sum_by_set(values: Float[Tensor, "t k"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    return values.new_zeros(len(lengths), values.shape[1]).index_add_(0, set_of_token(lengths, len(values)), values)


def set_of_token(lengths: Int[Tensor, " n"], tokens: int) -> Int[Tensor, " t"]:
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=tokens)


def sum_selected(
    rows: Float[Tensor, "t d"], weights: Float[Tensor, "t b"], position: Int[Tensor, "t b"], length: int
) -> Float[Tensor, "c d"]:
    """Return ``onehot.T @ rows``, onehot being ``weights`` at the tokens ``position`` of b sets of ``length`` tokens."""
    sets = position.shape[1]
    key = position + length * torch.arange(sets, device=position.device)
    key, order = key.flatten().sort(stable=True)
    starts = torch.searchsorted(key, torch.arange(sets * length, device=key.device))
    return F.embedding_bag(order // sets, rows, starts, mode="sum", per_sample_weights=weights.flatten()[order])
