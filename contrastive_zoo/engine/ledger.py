"""What a rank sends, multiplies and holds in a step, written down message by message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch

from contrastive_zoo.engine.exchange import lengths, schedule
from contrastive_zoo.engine.plan import Plan, Rows, Situation
from contrastive_zoo.engine.softmax_arithmetic import shift_window
from contrastive_zoo.engine.tiling import budget, tile_size
from contrastive_zoo.ranks.world import SMALL_MESSAGE, Shards

FLOAT, SUM = 4, 8  # bytes of what engines compute with at least, and of their sums, labels and indices

EMBEDDINGS = "gather of candidates", "gather of all tensors", "candidates, rank by rank"
"""The messages that bring embeddings to a rank."""


class Message(NamedTuple):
    """A message of a step, or the transfers of a ring, as one rank sends it."""

    name: str
    bytes: int
    backward: bool = False
    times: int = 1


@dataclass(frozen=True)
class Cost:
    """What a step costs one rank."""

    sent: Sequence[Message]
    matmul_flop: int  # of matrix products, a multiplication and an addition being two
    peak_bytes: int  # what the loss holds at its peak, beside the embeddings
    assumed: Sequence[str]  # what the cost depends on and the arguments do not say

    @property
    def messages(self) -> int:
        return sum(x.times for x in self.sent)

    @property
    def backward_messages(self) -> int:
        return sum(x.times for x in self.sent if x.backward)

    @property
    def bytes_sent(self) -> int:
        return sum(x.bytes for x in self.sent)


class Stored(NamedTuple):
    """So many embeddings of a memory, of which each rank compares an even share."""

    total: int


Number: TypeAlias = int | float

Names: TypeAlias = Sequence[str]
"""Tensors of a call, whose embeddings stand one tensor after the other."""


class _Sizes(NamedTuple):
    """What is compared: numbers of embeddings, of bytes, and of similarities."""

    anchors: int  # of this rank
    candidates: Shards
    one_tower: bool
    width: int
    item: int  # bytes of an element as sent
    wide: int  # and as computed with
    row: int  # bytes of an embedding as computed with
    both: int  # of the local anchors and of the local candidates, and of their gradients
    largest: int  # candidates of the largest shard, by which a gather is padded
    pairs: int  # the similarities that this rank computes, its own block of one tower being counted whole
    columns: Sequence[int]  # candidates of other ranks that are compared here, rank by rank
    visiting: Sequence[int]  # local candidates that other ranks compare


@dataclass
class Ledger:
    situation: Situation
    plan: Plan
    classes: int | None
    rows: Mapping[str, Rows]
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors of a member, in the call
    gathered: set[str] = field(default_factory=set)  # tensors, by their names in the call
    sent: list[Message] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)  # what the arguments do not say, in order
    flop: Number = 0
    kept: Number = 0  # bytes, until the backward pass
    cache: Number = 0  # bytes, until a sum of losses is computed
    peak: Number = 0
    backward_peak: Number = 0  # above what is kept
    available: Number = field(default_factory=budget)  # bytes of the budget that are left for cached logits

    def __post_init__(self) -> None:
        self.ranks = self.situation.world_size if self.plan.work == "own anchors" else 1
        self.ring = self.plan.movement == "ring"
        self.shares = bool(self.plan.members) and self.ranks > 1 and not self.ring  # gathers once for all members

    def shards(self, names: Names | Stored) -> Shards:
        """Return the split of embeddings, those of a rank one tensor after the other."""
        if isinstance(names, Stored):
            self.assumed["a memory that is full"] = None
            ranks, rank = self.situation.world_size, next(iter(self.rows.values())).shards.rank
            split = Shards(tuple((names.total + r) // ranks for r in reversed(range(ranks))), rank)
        else:
            rows = (self.rows[name] for name in names)
            split = reduce(Shards.plus, (x.shards.times(max(1, x.embeddings)) for x in rows))
        return split if self.ranks > 1 else Shards((split.total,))

    def prepare(
        self, anchors: Names, candidates: Names | Stored = (), *, half: bool = False, width: int = 0, copies: int = 1
    ) -> _Sizes:
        """Note ``copies`` of embeddings, of several views one after the other, and one in float32; return their sizes."""
        rows, columns, one_tower = self.shards(anchors), self.shards(candidates or anchors), not candidates
        first = self.rows[anchors[0] if isinstance(candidates, Stored) or one_tower else candidates[0]]
        blocks = schedule(rows, columns, half=half and one_tower)
        pairs = sum((x.rows.stop - x.rows.start) * count for x, count in zip(blocks, lengths(blocks), strict=True))
        visiting = [x.sent.stop - x.sent.start for x in blocks[1:]]
        width, item = width or first.width, first.itemsize
        row = width * max(FLOAT, item)
        both = (rows.size if one_tower else rows.size + columns.size) * row
        narrow, several = item < FLOAT, one_tower and len(anchors) > 1
        self.hold((copies + narrow + several * (1 + narrow / 2)) * both)
        return _Sizes(
            rows.size, columns, one_tower, width, item, max(FLOAT, item), row, both, max(columns.sizes), pairs,
            lengths(blocks[1:]), visiting,
        )  # fmt: skip

    def send(self, name: str, size: int, *, backward: bool = False, count: int = 1) -> None:
        if self.ranks > 1 and count:
            self.sent.append(Message(name, size, backward, count))

    def to_all(self, name: str, size: int, *, backward: bool = False) -> None:
        self.send(name, (self.ranks - 1) * size, backward=backward)

    def sum(self, name: str, size: int, *, backward: bool = False) -> None:
        """Note an all-reduce: small ones are gathered and added up in rank order; a ring sends 2 (W − 1) / W of others."""
        ranks = self.ranks
        directly = size * ranks <= SMALL_MESSAGE and self.situation.on_cpu
        self.send(name, (ranks - 1) * size if directly else 2 * (ranks - 1) * size // ranks, backward=backward)

    def bring(self, names: Names | Stored, of: _Sizes, item: int, *, backward: bool = False) -> None:
        """Note that candidates come here: all at once, or from rank to rank. None: they are made for an entry."""
        if self.ring:
            size = sum(max(1, n) for n in of.visiting) * of.width * item
            self.send("candidates, rank by rank", size, backward=backward, count=len(of.visiting))
        elif self.shares and names and not isinstance(names, Stored):
            for name in () if backward else names:
                self.gather_once("gather of candidates", name, self.rows[name].bytes)
        elif not backward:
            self.to_all("gather of candidates", of.largest * of.width * item)

    def gather_once(self, name: str, tensor: str, size: int) -> None:
        """Note a gather of a tensor, unless the sum of losses has it already."""
        shards, in_call = self.rows[tensor].shards, self.names.get(tensor, tensor)
        if not (self.shares and in_call in self.gathered):
            self.to_all(name, max(shards.sizes) * size)
            self.cache += shards.total * size if self.shares else 0
        self.gathered.add(in_call)

    def give_back(self, name: str, of: _Sizes, row: int, *, ring: bool = False, backward: bool = False) -> None:
        """Note that what was computed for other ranks' candidates returns to them."""
        rows = sum(max(1, n) if ring else n for n in of.columns)
        self.send(name, rows * row, backward=backward, count=len(of.columns) if ring else 1)

    def gather_together(self) -> None:
        """Note the gather of all tensors: those of equal split share a message."""
        by_split: dict[Shards, int] = {}
        for x in self.situation.rows.values():
            by_split[x.shards] = by_split.get(x.shards, 0) + x.bytes
        for split, row in by_split.items():
            size = max(split.sizes) * row
            self.sent.append(Message("gather of all tensors", (self.situation.world_size - 1) * size))
            self.hold(split.total * row, self.situation.world_size * size + split.size * row)

    def bound(self, scale: Number | None, wide: int, *, unit_norm: bool) -> None:
        """Note that ranks on a CPU bound logits, and ask if a sum lost precision."""
        if not self.situation.on_cpu or self.plan.arithmetic == "kernel":
            return
        if not unit_norm:
            self.sum("bound of logits", 2 * wide)
        window, _ = shift_window(torch.float64 if wide > FLOAT else torch.float32)
        if not unit_norm or scale is None or scale > window:
            self.sum("bound of logits", FLOAT)

    def hold(self, kept: Number = 0, forward: Number = 0, backward: Number = 0) -> None:
        """Note bytes that are held until the backward pass, and beside them for a moment of either pass."""
        self.kept += kept
        self.peak = max(self.peak, self.kept + self.cache + forward)
        self.backward_peak = max(self.backward_peak, backward)

    def cached(self, size: Number) -> Number:
        """Return how many of these bytes are cached: as many as fit into what earlier entries leave of the budget."""
        cached = min(self.available, size)
        self.available -= cached
        return cached

    def arrived(self, of: _Sizes, item: int) -> int:
        return 0 if self.ring or self.ranks == 1 else of.candidates.total * of.width * item

    def moving(self, of: _Sizes) -> int:
        """Return the bytes of candidates' gradients on their way to their ranks, and of a ring's candidates."""
        largest = max(of.columns, default=0)
        if self.ring:
            return 7 * largest * of.row
        return (sum(of.columns) + sum(of.visiting) + largest + (self.ranks > 1) * of.candidates.size) * of.row

    def tile(self, of: _Sizes) -> tuple[int, int]:
        """Return the height of a tile, and the bytes of its similarities."""
        height, width = tile_size(of.wide, on_cpu=self.situation.on_cpu)
        return height, min(height, of.anchors) * min(width, of.largest) * of.wide

    def one_operator(self, of: _Sizes, anchors: Names, matrices: int) -> None:
        """Note a small batch, whose matrices are held whole; gradients are those of this rank's embeddings."""
        split = self.rows[anchors[0]].shards
        share = split.size / max(1, split.total)
        self.flop += 2 * of.width * of.pairs * (1 + (1 if of.one_tower else 2) * share)
        self.hold(of.both, matrices * of.pairs * of.wide)
