"""What a plan costs a rank: messages, bytes, multiplications and memory, by formulas that tests compare with counted ones.

A loss says which entries of the engines its ``compute`` calls, as data: :class:`Pairs`, :class:`Blocks`, :class:`Summed`, …
:func:`cost_of` adds up what they send, multiply and hold on the path that :func:`~contrastive_zoo.engine.plan.choose` took.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from contrastive_zoo.engine.exchange import RankBlock, schedule
from contrastive_zoo.engine.plan import Plan, Situation
from contrastive_zoo.ranks.adjoints import Gradient
from contrastive_zoo.ranks.world import FEW_RANKS, HEADER_BYTES, SMALL_MESSAGE, SMALL_MESSAGE_OF_MANY, Shards

FLOAT, SUM = 4, 8  # bytes of what engines compute with, and of their sums


class Pairs(NamedTuple):
    """Log-sum-exps of the similarities of anchors and candidates over rows and, ``columnwise``, over columns."""

    anchors: Sequence[str]
    candidates: Sequence[str] = ()  # none: one tower, the anchors themselves
    columnwise: bool = True
    learns_scale: bool = False
    messages_of_bounds: Sequence[
        int
    ] = ()  # bytes of the messages that bound the logits, or ask whether a sum underflowed


class Signs(NamedTuple):
    """A sigmoid of every pair; gradients are computed in the forward pass."""

    anchors: Sequence[str]
    candidates: Sequence[str] = ()
    labels: bool = False  # whether labels are gathered


class Blocks(NamedTuple):
    """A sum over anchors, some at a time, against the candidates of all ranks; gradients come in the forward pass."""

    anchors: Sequence[str]
    candidates: Sequence[str] = ()
    known_by: int = SUM  # bytes of what says which candidates are positives
    companions: Sequence[int] = ()  # bytes of what else comes with a candidate, a message each
    parameters: Sequence[int] = ()  # bytes of learnable settings, a message each
    terms: int = 1  # columns of losses; the mean of each of several is known after the whole sweep
    reduced: bool = True
    summed: bool = False
    matmuls: float = 3.0  # of N × d × N, forward and backward


class Summed(NamedTuple):
    """Numbers that ranks add up, or take the largest of; their ``"partial"`` gradients are added up, too."""

    bytes: int
    gradient: Gradient | None = None
    backward: bool = False  # whether only gradients are added up


class Gathered(NamedTuple):
    """Rows that every rank receives; their ``"partial"`` gradients return to the ranks that hold them."""

    rows: Sequence[str]
    bytes: int  # of a row
    gradient: Gradient | None = None


class Local(NamedTuple):
    """Matrix products of this rank's rows, which send nothing."""

    flop: int
    bytes: int = 0  # held until the backward pass


Entry = Pairs | Signs | Blocks | Summed | Gathered | Local


class Message(NamedTuple):
    """A message of a step, or the transfers of a ring, as one rank sends it."""

    name: str
    bytes: int
    backward: bool = False
    times: int = 1


class Cost(NamedTuple):
    """What a step costs one rank."""

    sent: Sequence[Message] = ()
    matmul_flop: int = 0
    peak_bytes: int = 0

    @property
    def messages(self) -> int:
        return sum(x.times for x in self.sent)

    @property
    def backward_messages(self) -> int:
        return sum(x.times for x in self.sent if x.backward)

    @property
    def bytes_sent(self) -> int:
        return sum(x.bytes for x in self.sent)


@dataclass
class _Ledger:
    """What a rank sends, written down message by message."""

    situation: Situation
    ring: bool
    kernel: bool = False
    sent: list[Message] = field(default_factory=list)
    gathered: set[tuple[str, ...]] = field(default_factory=set)  # which a sum of losses gathers once

    @property
    def others(self) -> int:
        return self.situation.world_size - 1

    def shards(self, names: Sequence[str]) -> Shards:
        """Return the split of the embeddings of some tensors, those of a rank one tensor after the other."""
        first, *more = (self.situation.rows[name] for name in names)
        split = first.shards.times(first.embeddings)
        for x in more:
            split = split.plus(x.shards.times(x.embeddings))
        return split

    def sizes(self, names: Sequence[str]) -> tuple[int, int, int]:
        """Return the width of the embeddings, and the bytes of their elements on the wire and in engines."""
        first = self.situation.rows[names[0]]
        return first.width, first.itemsize, max(FLOAT, first.itemsize)

    def send(self, name: str, size: int, *, backward: bool = False, count: int = 1) -> None:
        if self.others:
            self.sent.append(Message(name, size, backward, count))

    def to_all(self, name: str, size: int, *, backward: bool = False) -> None:
        self.send(name, self.others * size, backward=backward)

    def sum(self, name: str, size: int, *, backward: bool = False) -> None:
        """Note an all-reduce: a small one is a gather that each rank adds up, gloo's ring sends 2 (W − 1) / W of others."""
        ranks = self.situation.world_size
        is_small = size * ranks <= (SMALL_MESSAGE if ranks <= FEW_RANKS else SMALL_MESSAGE_OF_MANY)
        self.send(name, self.others * size if is_small else 2 * self.others * size // ranks, backward=backward)

    def blocks(self, anchors: Shards, candidates: Shards, *, half: bool) -> list[RankBlock]:
        """Return the blocks of other ranks' candidates that this rank computes."""
        return schedule(anchors, candidates, half=half)[1:]

    def bring(self, names: Sequence[str], blocks: Sequence[RankBlock], row: int, *, backward: bool = False) -> None:
        """Note that candidates come here: all at once, or from rank to rank."""
        if self.ring:
            rows = sum(max(1, x.sent.stop - x.sent.start) for x in blocks)
            self.send("candidates, rank by rank", rows * row, backward=backward, count=len(blocks))
        elif not backward and tuple(names) not in self.gathered:
            self.gathered.add(tuple(names))
            self.to_all("gather of candidates", max(self.shards(names).sizes) * row)

    def give_back(
        self, name: str, blocks: Sequence[RankBlock], row: int, *, ring: bool, backward: bool = False
    ) -> None:
        """Note that what was computed for other ranks' candidates returns to them."""
        counts = [x.columns.stop - x.columns.start for x in blocks]
        if ring:
            self.send(name, sum(max(1, n) for n in counts) * row, backward=backward, count=len(blocks))
        else:
            self.send(name, sum(counts) * row, backward=backward)

    def gather_together(self) -> None:
        """Note the gather of all tensors: those of equal split share a message."""
        by_split: dict[Shards, int] = {}
        for x in self.situation.rows.values():
            by_split[x.shards] = by_split.get(x.shards, 0) + x.bytes
        for split, row in by_split.items():
            self.to_all("gather of all tensors", max(split.sizes) * row)

    def pairs(self, entry: Pairs) -> None:
        names, half = entry.candidates or entry.anchors, not entry.candidates
        (d, item, wide), columns = self.sizes(names), self.shards(names)
        blocks = self.blocks(self.shards(entry.anchors), columns, half=half)
        numbers = 2 if self.kernel else 1
        self.bring(names, blocks, d * item)
        for size in entry.messages_of_bounds:
            self.sum("bound of logits", size)
        if entry.columnwise:
            self.give_back("sums of columns", blocks, numbers * wide, ring=False)
            self.to_all("statistics of columns", max(columns.sizes) * (numbers + 1) * wide, backward=True)
        self.bring(names, blocks, d * item, backward=True)
        self.give_back("gradients of candidates", blocks, d * wide, ring=self.ring, backward=True)
        if entry.learns_scale:
            self.sum("gradient of the scale", wide, backward=True)

    def signs(self, entry: Signs) -> None:
        names = entry.candidates or entry.anchors
        (d, item, wide), columns = self.sizes(names), self.shards(names)
        blocks = self.blocks(self.shards(entry.anchors), columns, half=False)
        if entry.labels:
            self.to_all("gather of labels", max(columns.sizes) * SUM)
        self.bring(names, blocks, d * item)
        self.give_back("gradients of candidates", blocks, d * wide, ring=self.ring)
        self.sum("gradients of scale and bias", 2 * wide)
        self.sum("sum of losses", SUM)

    def sum_over_blocks(self, entry: Blocks) -> None:
        names = entry.candidates or entry.anchors
        (d, item, wide), columns = self.sizes(names), self.shards(names)
        blocks = self.blocks(self.shards(entry.anchors), columns, half=False)
        later = self.later(entry)
        for size in (entry.known_by, *entry.companions):
            self.to_all("gather of what candidates are known by", max(columns.sizes) * size)
        self.bring(names, blocks, d * item)
        self.give_back("gradients of candidates", blocks, d * wide, ring=False, backward=later)
        for size in entry.parameters:
            self.sum("gradient of a setting", size, backward=later)
        if entry.reduced:
            self.sum("sums and counts", 2 * entry.terms * SUM)

    def later(self, entry: Blocks) -> bool:
        """Return whether the weight of an anchor is known in the backward pass only."""
        return not entry.reduced or (entry.terms > 1 and not entry.summed)

    def gather(self, entry: Gathered) -> None:
        split = self.shards(entry.rows)
        self.to_all("gather", max(split.sizes) * entry.bytes)
        if entry.gradient == "partial":
            self.give_back("gradients", self.blocks(split, split, half=False), entry.bytes, ring=False, backward=True)

    def add(self, entry: Summed) -> None:
        if not entry.backward:
            self.sum("sum", entry.bytes)
        if entry.gradient == "partial":
            self.sum("sum of gradients", entry.bytes, backward=True)

    def note(self, entry: Entry) -> None:
        match entry:
            case Pairs():
                self.pairs(entry)
            case Signs():
                self.signs(entry)
            case Blocks():
                self.sum_over_blocks(entry)
            case Gathered():
                self.gather(entry)
            case Summed():
                self.add(entry)


def cost_of(plan: Plan, situation: Situation, entries: Sequence[Sequence[Entry]], *, learns: bool = True) -> Cost:
    """Return what a step costs a rank; ``entries`` are those of the loss, or of each member of a sum."""
    ledger = _Ledger(situation, ring=plan.movement == "ring")
    ledger.to_all("handshake", HEADER_BYTES + (situation.payload_bytes if plan.movement == "with the handshake" else 0))
    if plan.work == "all on every rank" and plan.movement == "gather":
        ledger.gather_together()
    if plan.work == "own anchors":
        for of, entries_of in zip(plan.members or [plan], entries, strict=True):
            ledger.kernel = of.arithmetic == "kernel"
            for entry in entries_of:
                ledger.note(entry)
    sent = [x for x in ledger.sent if learns or not x.backward]
    first = next((index for index, x in enumerate(sent) if x.backward), None)
    if first is not None:  # ranks meet before the first message of a backward pass
        sent.insert(first, Message("header of the backward pass", ledger.others * HEADER_BYTES, True))
    return Cost(sent)
