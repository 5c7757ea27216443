"""What a plan costs a rank: messages, bytes, multiplications and memory, by formulas that tests compare with counted ones.

A loss says which entries of the engines its ``compute`` calls, and each notes its cost in a :class:`Ledger`. Messages that
depend on values are not counted, such as those of a sweep that runs again because a sum lost precision.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias

import torch

from contrastive_zoo.engine.exchange import lengths, schedule
from contrastive_zoo.engine.plan import Plan, Rows, Situation
from contrastive_zoo.engine.softmax_arithmetic import shift_window
from contrastive_zoo.engine.tiling import BLOCK_BYTES, block_height, budget, tile_size
from contrastive_zoo.ranks.randomness import state_bytes
from contrastive_zoo.ranks.world import FEW_RANKS, HEADER_BYTES, SMALL_MESSAGE, SMALL_MESSAGE_OF_MANY, Shards

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
    """What a rank sends, multiplies and holds, written down message by message."""

    situation: Situation
    plan: Plan
    classes: int | None
    rows: Mapping[str, Rows]
    prefix: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors of a member, in the call
    gathered: set[str] = field(default_factory=set)  # tensors, by their names in the call
    sent: list[Message] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)  # what the arguments do not say, in order
    flop: Number = 0
    kept: Number = 0  # bytes, until the backward pass
    cache: Number = 0  # bytes, until a sum of losses is computed
    peak: Number = 0
    backward_peak: Number = 0  # above what is kept

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
        width, item = width or min(first.width, self.prefix or first.width), first.itemsize
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
        is_small = size * ranks <= (SMALL_MESSAGE if ranks <= FEW_RANKS else SMALL_MESSAGE_OF_MANY)
        directly = is_small and self.situation.on_cpu
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

    def bounds(self, entry: "Pairs", wide: int) -> Iterable[int]:
        """Yield the bytes of the messages by which ranks on a CPU bound logits, and ask if a sum lost precision."""
        if not self.situation.on_cpu or self.plan.arithmetic == "kernel":
            return
        if not entry.unit_norm:
            yield 2 * wide
        window, _ = shift_window(torch.float64 if wide > FLOAT else torch.float32)
        if not entry.unit_norm or entry.scale is None or entry.scale > window:
            yield FLOAT

    def hold(self, kept: Number = 0, forward: Number = 0, backward: Number = 0) -> None:
        """Note bytes that are held until the backward pass, and beside them for a moment of either pass."""
        self.kept += kept
        self.peak = max(self.peak, self.kept + self.cache + forward)
        self.backward_peak = max(self.backward_peak, backward)

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


class Pairs(NamedTuple):
    """Log-sum-exps of the similarities of anchors and candidates over rows and, ``columnwise``, over columns."""

    anchors: Names
    candidates: Names | Stored = ()  # none: one tower, the anchors themselves
    scale: Number | None = None  # None if it is learnt
    unit_norm: bool = True
    columnwise: bool = True
    narrow: bool = True  # whether embeddings of 16 bits are sent as they came

    def note(self, to: Ledger) -> None:
        names, learns = self.candidates or self.anchors, not isinstance(self.candidates, Stored)
        of = to.prepare(self.anchors, self.candidates, half=True, copies=int(self.unit_norm))
        kernel = to.plan.arithmetic == "kernel"
        if to.plan.arithmetic == "one operator":
            to.one_operator(of, self.anchors, 3 if self.scale is None and to.situation.world_size > 1 else 2)
            return
        if to.plan.arithmetic == "plain":
            both = self.columnwise and not of.one_tower  # a matrix for either direction
            to.flop += 2 * of.width * of.pairs * (6 if both else 3)
            to.hold((4.5 if both else 2.5) * of.pairs * of.wide, backward=2 * of.pairs * of.wide + of.both)
            return
        item = of.item if self.narrow else of.wide
        to.bring(names, of, item)
        to.hold(to.arrived(of, item))
        for size in to.bounds(self, of.wide):
            to.sum("bound of logits", size)
        if self.columnwise:
            to.give_back("sums of columns", of, (1 + kernel) * of.wide)
            to.to_all("statistics of columns", of.largest * (2 + kernel) * of.wide, backward=True)
        to.bring(names, of, item, backward=True)
        if learns:
            to.give_back("gradients of candidates", of, of.row, ring=to.ring, backward=True)
        # each tile is multiplied once, and again in the backward pass if it was not kept
        n, (height, scratch) = of.anchors, to.tile(of)
        scratch *= not kernel
        diagonal = n // height * height**2 + (n % height) ** 2 if of.one_tower else 0
        others = of.pairs - (n * n + diagonal) // 2 if of.one_tower else of.pairs
        cached = 0 if kernel else min(budget(), (diagonal + others) * of.wide)
        again = diagonal + others - cached // of.wide
        to.flop += 2 * of.width * (2 * diagonal + (2 + learns) * others + again)
        factors = (n + of.candidates.size) * of.row if of.item < FLOAT else 0  # in float32
        to.hold(cached, scratch, of.both + factors + to.moving(of) + 2 * scratch)


class Signs(NamedTuple):
    """A sigmoid of every pair; gradients are computed in the forward pass if the losses are reduced."""

    anchors: Names
    candidates: Names = ()  # none: the anchors themselves, with labels
    reduced: bool = True

    def note(self, to: Ledger) -> None:
        of = to.prepare(self.anchors, self.candidates)
        if not self.candidates:
            to.to_all("gather of labels", of.largest * SUM)
        if to.plan.arithmetic == "one operator":
            to.one_operator(of, self.anchors, 3)
            return
        for backward in (False,) if self.reduced else (False, True):
            learns = self.reduced or backward
            if backward and not to.ring:
                to.to_all("gather of candidates", of.largest * of.width * of.item, backward=True)
            to.bring(self.candidates or self.anchors, of, of.item, backward=backward)
            if learns:
                to.give_back("gradients of candidates", of, of.row, ring=to.ring, backward=backward)
                to.sum("gradients of scale and bias", 2 * of.wide, backward=backward)
            to.flop += 2 * of.width * of.pairs * (3 if learns else 1)
        if self.reduced:
            to.sum("sum of losses", SUM)
        gradients, (_, scratch) = (of.anchors + of.candidates.size) * of.row, to.tile(of)
        arrived = to.arrived(of, of.item)
        if arrived and (padded := of.largest * to.ranks) > of.candidates.total:  # which were joined
            arrived += padded * of.width * of.item
        to.hold(gradients, arrived + 2 * scratch + of.anchors * of.row + to.moving(of), 2 * gradients)


class Blocks(NamedTuple):
    """A sum over anchors, some at a time, against the candidates of all ranks."""

    anchors: Names
    candidates: Names | Stored = ()  # none: the anchors themselves
    ids: str = ""  # the tensor that says which candidates are positives; none: indices of samples
    companions: Sequence[int | str] = ()  # what else comes with a candidate, a message each: so many bytes, or a tensor
    parameters: Sequence[int] = ()  # bytes of learnable settings, a message each
    terms: int = 1  # the number of means that are added
    reduction: str = "mean"
    watched: bool = False  # whether ranks ask each other if the loss has drawn random numbers
    width: int = 0  # of candidates that are made for this entry, such as concatenated features
    matmuls: Number = 3  # of N × d × N, forward and backward

    def note(self, to: Ledger) -> None:
        # whether the weight of an anchor is known in the backward pass only
        later = self.reduction == "none" or (self.terms > 1 and self.reduction == "mean")
        of = to.prepare(self.anchors, self.candidates, width=self.width)
        if self.ids:
            to.gather_once("gather of labels", self.ids, to.rows[self.ids].bytes if to.shares else SUM)
        else:
            to.to_all("gather of indices", of.largest * SUM)
        for x in self.companions:
            if isinstance(x, str):
                to.gather_once("gather of what comes with candidates", x, to.rows[x].bytes)
            else:
                to.to_all("gather of what comes with candidates", of.largest * x)
        to.bring((self.candidates or self.anchors) if not self.width else (), of, of.wide)
        to.give_back("gradients of candidates", of, of.row, backward=later)
        for size in self.parameters:
            to.sum("gradient of a setting", size, backward=later)
        if self.reduction != "none":
            to.sum("sums and counts", (3 if self.watched else 2) * self.terms * SUM)
        elif self.watched:
            to.sum("whether the loss has drawn random numbers", FLOAT)
        to.flop += 2 * of.width * of.pairs * (self.matmuls + later)
        local, total = (of.anchors + of.candidates.size) * of.row, of.candidates.total * of.row
        height = block_height(of.candidates.total * of.wide, budget(), on_cpu=to.situation.on_cpu)
        matrices = _MATRICES * min(of.anchors, height) * of.candidates.total * of.wide
        arrived, sweep = to.arrived(of, of.wide), 2 * total + max(total, matrices)
        to.hold(local if self.width else 0)
        if later:
            to.hold(arrived, matrices, local + sweep)
        else:
            to.hold(local, arrived + sweep, local)


class Summed(NamedTuple):
    """Numbers that ranks add up, or take the largest of; ``partial`` gradients are added up, too."""

    bytes: int
    partial: bool = False
    each: Literal["", "class", "sample"] = ""  # of what there are so many bytes for each
    more: int = 0  # bytes besides

    def note(self, to: Ledger) -> None:
        first = next(iter(to.rows.values()))
        samples, on_cpu = (
            first.shards.total,
            to.situation.on_cpu,
        )  # elsewhere the number of classes would have to be read
        classes = to.classes or max(1, samples // 2) if on_cpu else samples * max(1, first.embeddings)
        if self.each == "class" and on_cpu and to.ranks > 1:
            of = "as these labels have, on every rank the same" if to.classes else "of two samples each"
            to.assumed[f"{classes:,} classes, {of}"] = None
        size = self.more + self.bytes * {"class": classes, "sample": samples, "": 1}[self.each]
        to.sum("sum", size)
        to.hold(forward=2 * size)
        if self.partial:
            to.sum("sum of gradients", size, backward=True)


class Shared(NamedTuple):
    """A parameter that each rank uses for its own embeddings: its gradients are added up."""

    bytes: int

    def note(self, to: Ledger) -> None:
        to.sum("gradient of a parameter", self.bytes, backward=True)


class Gathered(NamedTuple):
    """Rows that every rank receives, as many as embeddings of these tensors, or samples of those without any."""

    rows: Names
    bytes: int  # of a row

    def note(self, to: Ledger) -> None:
        shards = to.shards(self.rows)
        if to.rows[self.rows[0]].embeddings == 0:
            to.gather_once("gather", self.rows[0], self.bytes)
        else:
            to.to_all("gather", max(shards.sizes) * self.bytes)
        to.hold(forward=shards.total * self.bytes if to.ranks > 1 else 0)


class Tokens(NamedTuple):
    """Late interaction: the best document token of each query token."""

    queries: str
    documents: str
    mean_length: Number  # of documents, in tokens

    def note(self, to: Ledger) -> None:
        of = to.prepare([self.queries], [self.documents])
        to.hold(to.arrived(of, of.item))
        to.to_all("gather of lengths", max(to.rows[self.documents.removeprefix("tokens of ")].shards.sizes) * SUM)
        for backward in (False, True):
            to.bring([self.documents], of, of.item, backward=backward)
        to.give_back("gradients of documents", of, of.row, ring=to.ring, backward=True)
        to.flop += 2 * of.width * of.pairs
        positions = min(budget(), of.pairs / max(1, self.mean_length)) + of.anchors * of.row / 16
        _, scratch = to.tile(of)
        to.hold(positions, 2 * scratch, of.both + max(to.moving(of), 3 * scratch))


class Classes(NamedTuple):
    """A comparison of this rank's embeddings with the weights of all classes, some embeddings at a time."""

    rows: Names
    centers: int  # weight vectors of all classes

    def note(self, to: Ledger) -> None:
        of = to.prepare(self.rows)
        rows, weights = of.anchors * of.row, self.centers * of.row
        height = max(1, BLOCK_BYTES // max(1, 4 * self.centers * of.wide))
        at_once = of.anchors <= height
        matrix = min(height, of.anchors) * self.centers * of.wide
        to.flop += 2 * of.width * of.anchors * self.centers * (3 if at_once else 4)
        kept, later = (3, 4) if at_once else (0, 6)
        to.hold(2 * weights + kept * matrix, backward=2 * weights + 2 * rows + later * matrix)


class Local(NamedTuple):
    """Matrix products and memory of this rank alone, for each of its embeddings in some tensors, or altogether."""

    rows: Names = ()
    flop: Number = 0
    bytes: float = 0  # held until the backward pass

    def note(self, to: Ledger) -> None:
        count = to.shards(self.rows).size if self.rows else 1
        to.flop += count * self.flop
        to.hold(count * self.bytes)


class UserCode(NamedTuple):
    """A loss from elsewhere, which draws rank 0's random numbers where every rank computes all of it."""

    has_state: bool = False  # whether buffers move on all ranks or on none

    def note(self, to: Ledger) -> None:
        to.assumed["code from elsewhere holds and multiplies nothing"] = None
        if to.plan.work == "all on every rank":
            rank, others = next(iter(to.rows.values())).shards.rank, to.situation.world_size - 1
            copies = 0 if rank else others.bit_length()  # along a tree
            to.sent.append(Message("random numbers of rank 0", copies * state_bytes()))
            if self.has_state:
                to.sent.append(Message("whether the loss failed", others * SUM))


class Member(NamedTuple):
    """What a loss inside another one calls, ``names`` being the outer loss's names of its tensors."""

    member: int | None  # among the members of a sum; None of a loss with the outer one's plan
    names: Mapping[str, str]
    entries: "Sequence[Entry]"
    width: int | None = None  # features of the embeddings' prefix

    def note(self, to: Ledger) -> None:
        outer = to.rows, to.names, to.prefix, to.plan
        to.rows = {name: to.rows[merged] for name, merged in self.names.items()}
        to.names = {name: to.names.get(merged, merged) for name, merged in self.names.items()}
        if self.member is not None:
            to.plan = to.plan.members[self.member]
        to.prefix = min(filter(None, (to.prefix, self.width)), default=None)
        for entry in self.entries:
            entry.note(to)
        to.rows, to.names, to.prefix, to.plan = outer


Entry: TypeAlias = Pairs | Signs | Blocks | Summed | Shared | Gathered | Tokens | Classes | Local | UserCode | Member

_MATRICES = 8  # as large as a block's similarities, of most losses


def cost_of(plan: Plan, situation: Situation, entries: Sequence[Entry], *, classes: int | None = None) -> Cost:
    """Return what a step of a loss with these entries costs the rank of the shards; classes None: each has two samples."""
    ledger, others = Ledger(situation, plan, classes, situation.rows), situation.world_size - 1
    if others:
        payload = situation.payload_bytes if plan.movement == "with the handshake" else 0
        ledger.sent.append(Message("handshake", others * (HEADER_BYTES + payload)))
        ledger.hold(forward=situation.world_size * (HEADER_BYTES + payload))
        if payload:
            ledger.hold(sum(x.shards.total * x.bytes for x in situation.rows.values()) + situation.world_size * payload)
    if plan.work == "all on every rank" and plan.movement == "gather":
        ledger.gather_together()
    for entry in entries:
        entry.note(ledger)
    sent = ledger.sent
    first = next((index for index, x in enumerate(sent) if x.backward), None)
    if first is not None:  # ranks meet before the first message of a backward pass
        sent.insert(first, Message("header of the backward pass", others * HEADER_BYTES, True))
    peak = max(ledger.peak, ledger.kept + ledger.backward_peak)
    return Cost(sent, round(ledger.flop), round(peak), [*ledger.assumed])
