"""Score sets of tokens by late interaction, in tiles: the sum over query tokens of the best document token.

With q_ia the tokens of query i and d_jb those of document j,

    S_ij = Σ_a max_b q_ia·d_jb        w(i, a, j) = argmax_b q_ia·d_jb

and for an incoming gradient G of S the backward pass needs only the selected tokens,

    dq_ia = Σ_j G_ij d_{j, w(i,a,j)}        dd_jb = Σ_{i, a: w(i,a,j) = b} G_ij q_ia

which is 1 / L of the multiplications of the forward pass. Of equal products the first token is selected, and gets all of
the gradient. A matmul may round the products of equal tokens differently, so the first of a document's equal tokens stands
in for the others.

Similarities of tokens exist one tile at a time. The selected tokens, one small integer for each query token and document,
are cached for the backward pass as far as the memory budget allows; others are computed again. Only valid tokens are
sent. Documents are gathered, or pass from rank to rank in a ring.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.exchange import GatherExchange, Ring, start_exchange
from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.masked import masked_indices
from contrastive_zoo.engine.pairwise import first_of_equals
from contrastive_zoo.engine.precision import inverse_norms, matmul_rounding, multiplied, without_autocast
from contrastive_zoo.engine.tiling import CachedLogits, keep_freed_memory
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.compiling import Function, differentiable_once
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World


@dataclass(frozen=True)
class TokenSets:
    """Sets of tokens of all ranks: this rank's tokens, one set after the other, and the split of all.

    ``lengths`` are the numbers of tokens of the local sets, at least 1, and ``read`` the same on the host.
    """

    tokens: Float[Tensor, "t d"]
    lengths: Tensor
    shards: Shards
    token_shards: Shards
    read: Sequence[int]
    factors: Tensor | None = None  # of an input of 16 bits, what is sent and multiplied in place of tokens

    def all_lengths(self, world: World) -> tuple[Tensor, Sequence[int]]:
        """Return the numbers of tokens of the sets of all ranks, and the same on the host, which waits for no device."""
        lengths = gather_rows(self.lengths, self.shards, world)
        if world.size == 1:
            return lengths, self.read
        if devices.on_cpu(lengths):
            return lengths, lengths.tolist()
        by_rank = world.exchange([*self.read, *[0] * (max(self.shards.sizes) - len(self.read))])
        return lengths, [x for of, size in zip(by_rank, self.shards.sizes, strict=True) for x in of[:size]]


def late_interaction_scores(batch: Batch, *, normalize: bool) -> Float[Tensor, "n M"]:
    """Return the scores of the local queries and the documents of all ranks, and then of further documents, [n, M].

    The batch has the number of tokens of each set, also on the host, and ``tokens of`` these sets, by the names of what
    they are: queries first, then documents, then what else they are compared with.
    """
    sets = []
    for name, read in batch.host.items():
        tokens, shards = batch.rows[f"tokens of {name}"], batch.shards[f"tokens of {name}"]
        prepared, factors = batch.prepared(tokens, normalize=normalize), batch.factors([tokens])
        of_set = batch.rows[name], batch.shards[name], shards, read, None if factors is None else factors[0]
        sets.append(TokenSets(prepared, *of_set))
    queries, *others = sets
    others = [_with_first_of_equals(x) for x in others]
    parts = [max_sim_scores(queries, documents, unit_norm=normalize, world=batch.world) for documents in others]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _with_first_of_equals(sets: TokenSets) -> TokenSets:
    of_token = set_of_token(sets.lengths, len(sets.tokens)).to(sets.tokens)
    first = first_of_equals(torch.cat([sets.tokens.detach(), of_token[:, None]], 1))
    if first is None:
        return sets
    return replace(sets, tokens=sets.tokens[first], factors=None if sets.factors is None else sets.factors[first])


@without_autocast
def max_sim_scores(
    queries: TokenSets, documents: TokenSets, *, unit_norm: bool = False, world: World
) -> Float[Tensor, "n M"]:
    """Return the scores of the local queries and the documents of all ranks, [n, M].

    Equal to ``torch.einsum("iad,jbd->ijab", q, d).max(3).values.sum(2)`` where all tokens are valid.
    ``unit_norm``: tokens have norms of at most 1; if they came in 16 bits, products are divided by the norms of these.
    """
    lengths, read = documents.all_lengths(world)
    if is_dense():
        return _dense_scores(queries, documents, read, world)
    factors = None
    if queries.factors is not None and documents.factors is not None:
        factors = queries.factors, documents.factors
    known = documents.shards, documents.token_shards, world, factors, unit_norm and factors is not None
    sweep = MaxSimSweep(queries.lengths, lengths, read, *known)
    scores: Tensor = _MaxSim.apply(sweep, queries.tokens, documents.tokens)
    return scores


def _dense_scores(queries: TokenSets, documents: TokenSets, lengths: Sequence[int], world: World) -> Tensor:
    tokens = all_gather(documents.tokens, shards=documents.token_shards, process_group=world)
    products = queries.tokens @ tokens.T
    best = [x.max(1).values for x in products.split(list(lengths), 1)]
    return sum_by_set(torch.stack(best, 1) if best else products, queries.lengths)


@dataclass(frozen=True)
class MaxSimSweep:
    """Compute the tiles of the local queries, document block by document block, in the order in which they arrive."""

    query_lengths: Tensor
    document_lengths: Tensor  # of all ranks
    read_lengths: Sequence[int]  # the same on the host
    document_shards: Shards
    token_shards: Shards
    world: World
    factors: tuple[Tensor, Tensor] | None  # of queries and documents
    normalizes: bool  # whether products of factors are divided by their norms
    learns: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.factors is None else self.factors[0].dtype

    def query_factors(self, queries: Tensor) -> Tensor:
        return multiplied(queries, None if self.factors is None else self.factors[0])

    def exchange(self, documents: Tensor, gathered: Tensor | None = None) -> GatherExchange | Ring:
        sent = None if self.factors is None else self.factors[1]
        return start_exchange(documents, self.token_shards, self.world, sent, gathered=gathered)

    def _unit(self, factors: Tensor) -> Tensor:
        return factors * inverse_norms(factors)[:, None] if self.normalizes else factors

    def _visits(
        self, exchange: GatherExchange | Ring, queries: Tensor
    ) -> Iterator[tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
        """Yield each rank's document tokens, and its blocks of documents: columns of the scores, and indices of tokens."""
        elements = tiling.tile_bytes(queries) // queries.dtype.itemsize
        sizes = tiling.tile_shape(queries)[1], max(1, elements // max(1, len(queries)))
        for block, tokens in zip(exchange.blocks, exchange, strict=True):
            columns = Shards(self.document_shards.sizes, block.ahead).local
            blocks = padded_blocks(self.document_lengths[columns], self.read_lengths[columns], *sizes)
            yield tokens, [(columns.start + sets, index) for sets, index in blocks]

    def _best(self, queries: Tensor, tokens: Tensor, index: Tensor, *, select: bool) -> tuple[Tensor, Tensor | None]:
        """Return the largest similarity of each query token to the tokens of each document, [t, b], and its position.

        Where products are divided by norms, those of the queries are left out: the largest is the same.
        """
        candidates = tokens[index.flatten()].T
        norms = inverse_norms(candidates.T) if self.normalizes else None
        best = queries.new_empty(len(queries), len(index))
        position = torch.empty_like(best, dtype=_small_integer(index.shape[1])) if select else None
        height = max(1, tiling.tile_bytes(queries) // (index.numel() * queries.dtype.itemsize))
        for top in range(0, len(queries), height):
            rows = slice(top, top + height)
            similarity = queries[rows] @ candidates
            if norms is not None:
                similarity *= norms
            similarity = similarity.view(-1, *index.shape)
            if position is None:
                torch.amax(similarity, 2, out=best[rows])
            else:
                best[rows], position[rows] = similarity.max(2)
        return best, position

    def scores(
        self, queries: Tensor, exchange: GatherExchange | Ring, cached: CachedLogits
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the scores, and the positions of the selected tokens of each block; None where they do not fit."""
        scores = queries.new_empty(len(self.query_lengths), len(self.document_lengths))
        positions: list[Tensor | None] = []
        norms = inverse_norms(queries)[:, None] if self.normalizes else None
        for tokens, blocks in self._visits(exchange, queries):
            for columns, index in blocks:
                small = _small_integer(index.shape[1])
                keep = cached.reserve(len(queries) * len(index) * small.itemsize)
                best, position = self._best(queries, tokens, index, select=keep)
                scores[:, columns] = sum_by_set(best if norms is None else best * norms, self.query_lengths)
                positions.append(position)
        return scores, positions

    def gradients(
        self, queries: Tensor, exchange: GatherExchange | Ring, dscores: Tensor, positions: Sequence[Any], *totals: Any
    ) -> Iterator[Tensor]:
        """Add the gradients of the queries and of the local documents to their totals; yield those of other documents."""
        stored, (dqueries, ddocuments) = iter(positions), totals
        of_token = set_of_token(self.query_lengths, len(queries))
        unit_queries = self._unit(queries)
        for visit, (tokens, blocks) in enumerate(self._visits(exchange, queries)):
            unit_tokens = self._unit(tokens)
            total = ddocuments if visit == 0 or ddocuments is None else torch.zeros_like(tokens)
            for columns, index in blocks:
                position = next(stored)
                if position is None:
                    _, position = self._best(queries, tokens, index, select=True)
                assert position is not None  # it was asked for
                weights, position = dscores[:, columns][of_token], position.long()
                if dqueries is not None and len(queries):
                    selected = index[torch.arange(len(index), device=index.device), position]
                    dqueries += F.embedding_bag(selected, unit_tokens, mode="sum", per_sample_weights=weights)
                if total is not None and len(queries):
                    total.index_add_(0, index.flatten(), sum_selected(unit_queries, weights, position, index.shape[1]))
            if visit > 0 and total is not None:
                yield total


class _MaxSim(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, sweep: MaxSimSweep, queries: Tensor, documents: Tensor) -> Tensor:
        keep_freed_memory(queries)
        ctx.sweep, exchange = sweep, sweep.exchange(documents)
        ctx.cached = CachedLogits(learns=sweep.learns and any(ctx.needs_input_grad))
        with matmul_rounding(sweep.dtype, queries.device.type):
            scores, positions = sweep.scores(sweep.query_factors(queries), exchange, ctx.cached)
        ctx.save_for_backward(queries, documents, exchange.gathered, *positions)
        return scores

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        queries, documents, gathered, *positions = ctx.saved_tensors
        sweep = ctx.sweep
        with torch.no_grad(), matmul_rounding(sweep.dtype, queries.device.type):
            dqueries, ddocuments = (
                torch.zeros_like(x) if needed else None
                for x, needed in zip((queries, documents), ctx.needs_input_grad[1:], strict=True)
            )
            exchange = sweep.exchange(documents, gathered)
            parts = sweep.gradients(
                sweep.query_factors(queries), exchange, dscores.contiguous(), positions, dqueries, ddocuments
            )
            if ddocuments is None:
                for _ in parts:  # it yields nothing, but fills dqueries
                    pass
            else:
                exchange.return_gradients(ddocuments, parts)
            ctx.cached.release()
        return None, *(differentiable_once(x, queries, documents) for x in (dqueries, ddocuments))


def _small_integer(positions: int) -> torch.dtype:
    return torch.uint8 if positions <= 2**8 else torch.int16 if positions <= 2**15 else torch.int32


def read_lengths(rows: Mapping[str, Tensor], masks: Mapping[str, Tensor | None]) -> dict[str, list[int]]:
    """Return the number of valid tokens, not 0 in a mask [n, L], of each set, by name; the host waits once for all."""
    arguments = {name: mask for name, mask in masks.items() if mask is not None}
    counts = dict(zip(arguments, _counts([*arguments.values()]), strict=True))
    return {name: counts.get(name, [x.shape[1]] * len(x)) for name, x in rows.items()}


def _counts(masks: Sequence[Tensor]) -> list[list[int]]:
    """Return the number of valid tokens of each set, by mask; those that are on an accelerator are read together."""
    counts = [(mask != 0).sum(1) for mask in masks]
    waiting = [index for index, x in enumerate(counts) if not devices.on_cpu(x)]
    if waiting:
        together = torch.cat([counts[index] for index in waiting]).cpu()
        for index, x in zip(waiting, together.split([len(masks[index]) for index in waiting]), strict=True):
            counts[index] = x
    return [x.tolist() for x in counts]


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


def padded_blocks(
    lengths: Int[Tensor, " n"], read: Sequence[int], tokens: int, sets: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of packed sets, the longest first: the indices of the sets, [b], and of their tokens, [b, L].

    A set that is shorter than the longest of its block repeats its first token. A maximum over the tokens is then that
    over the set, and needs no mask. ``lengths`` are at least 1, and ``read`` the same on the host. A block has at most
    so many ``sets``, and so many ``tokens`` unless it is one set.
    """
    start = lengths.cumsum(0) - lengths
    size, order = lengths.sort(descending=True, stable=True)
    descending, first = sorted(read, reverse=True), 0
    while first < len(order):
        longest = descending[first]
        block = slice(first, first + max(1, min(sets, tokens // longest)))
        position = torch.arange(longest, device=lengths.device).expand(len(order[block]), longest)
        index = start[order[block], None] + position.where(position < size[block, None], 0)
        yield order[block], index
        first = block.stop


def sum_by_set(values: Float[Tensor, "t k"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Return the sums of the rows of each set."""
    return values.new_zeros(len(lengths), values.shape[1]).index_add_(0, set_of_token(lengths, len(values)), values)


def set_of_token(lengths: Int[Tensor, " n"], tokens: int) -> Int[Tensor, " t"]:
    """Return the index of the set of each of so many tokens."""
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=tokens)


def sum_selected(
    rows: Float[Tensor, "t d"], weights: Float[Tensor, "t b"], position: Int[Tensor, "t b"], length: int
) -> Float[Tensor, "c d"]:
    """Return, for each token of b sets of ``length`` tokens, the weighted sum of the rows that selected it, [b length, d].

    Row a selected token ``position[a, k]`` of set k, with the weight ``weights[a, k]``. Equal to ``onehot.T @ rows``,
    with onehot the weights at their tokens, [t, b length]; it takes 1 / length of the multiplications.
    """
    sets = position.shape[1]
    key = position + length * torch.arange(sets, device=position.device)
    key, order = key.flatten().sort(stable=True)
    starts = torch.searchsorted(key, torch.arange(sets * length, device=key.device))
    return torch.nn.functional.embedding_bag(
        order // sets, rows, starts, mode="sum", per_sample_weights=weights.flatten()[order]
    )
