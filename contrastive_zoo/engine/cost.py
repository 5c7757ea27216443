"""What a plan costs a rank: messages, bytes, multiplications and memory, by formulas that tests compare with counted ones.

A loss says which entries of the engines its ``compute`` calls, as data: :class:`Pairs`, :class:`Blocks`, :class:`Summed`, …
:func:`cost_of` adds up what they send, multiply and hold on the path that :func:`~contrastive_zoo.engine.plan.choose` took.

Some messages depend on values, and are not counted: a sweep of tiles runs again, and with it a ring's transfers, where a sum
of shifted exponentials lost precision; ranks compare whole arguments that look equal; a user's row loss that draws random
numbers is computed again by every rank. The memory of a matrix operation's own workspace is not counted either.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from contrastive_zoo.engine.exchange import RankBlock, schedule
from contrastive_zoo.engine.plan import Plan, Rows, Situation
from contrastive_zoo.engine.softmax_arithmetic import shift_window
from contrastive_zoo.engine.tiling import BLOCK_BYTES, TILE_BYTES, block_height, budget, tile_size
from contrastive_zoo.ranks.randomness import state_bytes
from contrastive_zoo.ranks.world import FEW_RANKS, HEADER_BYTES, SMALL_MESSAGE, SMALL_MESSAGE_OF_MANY, Shards

FLOAT, SUM = 4, 8  # bytes of what engines compute with at least, and of their sums, labels and indices


class Stored(NamedTuple):
    """Embeddings of a memory, of which each rank compares an even share."""

    total: int
    width: int
    itemsize: int = FLOAT


Number: TypeAlias = int | float

Names: TypeAlias = Sequence[str]
"""Tensors of a call, whose embeddings stand one tensor after the other."""


class Pairs(NamedTuple):
    """Log-sum-exps of the similarities of anchors and candidates over rows and, ``columnwise``, over columns."""

    anchors: Names
    candidates: Names | Stored = ()  # none: one tower, the anchors themselves
    scale: float | None = None  # None if it is learnt
    unit_norm: bool = True
    columnwise: bool = True
    narrow: bool = True  # whether embeddings of 16 bits are sent as they came


class Signs(NamedTuple):
    """A sigmoid of every pair; gradients are computed in the forward pass if the losses are reduced."""

    anchors: Names
    candidates: Names = ()  # none: the anchors themselves, with labels
    reduced: bool = True


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
    width: int | None = None  # of candidates that are made for this entry, such as concatenated features
    matmuls: float = 3  # of N × d × N, forward and backward

    @property
    def later(self) -> bool:
        """Whether the weight of an anchor is known in the backward pass only."""
        return self.reduction == "none" or (self.terms > 1 and self.reduction == "mean")


class Summed(NamedTuple):
    """Numbers that ranks add up, or take the largest of; ``partial`` gradients are added up, too."""

    bytes: int
    partial: bool = False
    each: Literal["", "class", "sample"] = ""  # of what there are so many bytes for each
    more: int = 0  # bytes besides


class Shared(NamedTuple):
    """A parameter that each rank uses for its own embeddings: its gradients are added up."""

    bytes: int


class Gathered(NamedTuple):
    """Rows that every rank receives, as many as embeddings of these tensors, or samples of those without any."""

    rows: Names
    bytes: int  # of a row


class Tokens(NamedTuple):
    """Late interaction: the best document token of each query token."""

    queries: str
    documents: str
    mean_length: float  # of documents, in tokens


class Classes(NamedTuple):
    """A comparison of this rank's embeddings with the weights of all classes, some embeddings at a time."""

    rows: Names
    centers: int  # weight vectors of all classes


class Local(NamedTuple):
    """Matrix products and memory of this rank alone, for each of its embeddings in some tensors, or altogether."""

    rows: Names = ()
    flop: float = 0
    bytes: float = 0  # held until the backward pass


class UserCode(NamedTuple):
    """A loss from elsewhere, which draws rank 0's random numbers where every rank computes all of it."""

    has_state: bool = False  # whether buffers move on all ranks or on none


class Member(NamedTuple):
    """What a loss inside another one calls, ``names`` being the outer loss's names of its tensors."""

    member: int | None  # among the members of a sum; None of a loss with the outer one's plan
    names: Mapping[str, str]
    entries: "Sequence[Entry]"
    width: int | None = None  # features of the embeddings' prefix


Entry: TypeAlias = Pairs | Signs | Blocks | Summed | Shared | Gathered | Tokens | Classes | Local | UserCode | Member


EMBEDDINGS = "gather of candidates", "gather of all tensors", "candidates, rank by rank"
"""The messages that bring embeddings to a rank."""


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


class _Sizes(NamedTuple):
    """The split of anchors and candidates, and the width and the bytes of an element as sent and as computed with."""

    anchors: Shards
    candidates: Shards
    width: int
    sent: int
    wide: int
    blocks: Sequence[RankBlock]  # of other ranks

    @property
    def pairs(self) -> int:
        """The similarities that this rank computes, its own block of one tower being counted whole."""
        return self.anchors.size * self.candidates.size + sum(_length(x.rows) * _length(x.columns) for x in self.blocks)

    @property
    def local(self) -> int:
        """Bytes of the local candidates, as computed with."""
        return self.candidates.size * self.row

    @property
    def row(self) -> int:
        return self.width * self.wide

    @property
    def returned(self) -> int:
        """Bytes of the gradients that are sent and that arrive, and of the one that is computed last."""
        sent, arrive = ([_length(x.columns) for x in self.blocks], [_length(x.sent) for x in self.blocks])
        return (sum(sent) + sum(arrive) + max(sent, default=0)) * self.row


@dataclass
class _Ledger:
    """What a rank sends, multiplies and holds, written down message by message."""

    situation: Situation
    plan: Plan
    classes: int | None
    memory_budget: int
    rows: Mapping[str, Rows] = field(default_factory=dict)
    prefix: int | None = None
    shares: bool = False  # whether a sum of losses gathers embeddings once for all members
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors of a member, in the call
    gathered: set[str] = field(default_factory=set)  # tensors, by their names in the call
    sent: list[Message] = field(default_factory=list)
    flop: Number = 0
    kept: Number = 0  # bytes, until the backward pass
    cache: Number = 0  # bytes, until a sum of losses is computed
    peak: Number = 0
    backward_peak: Number = 0  # above what is kept

    # ------------------------------------------------------------------------------------------------------ the sizes

    @property
    def ranks(self) -> int:
        return 1 if self.plan.work != "own anchors" else self.situation.world_size

    @property
    def ring(self) -> bool:
        return self.plan.movement == "ring"

    def shards(self, names: Names | Stored) -> Shards:
        """Return the split of embeddings, those of a rank one tensor after the other."""
        if isinstance(names, Stored):
            rank = next(iter(self.rows.values())).shards.rank if self.ranks > 1 else 0
            return Shards(tuple((names.total + r) // self.ranks for r in reversed(range(self.ranks))), rank)
        first, *more = (self.rows[name] for name in names)
        split = first.shards.times(max(1, first.embeddings))
        for x in more:
            split = split.plus(x.shards.times(max(1, x.embeddings)))
        return split if self.ranks > 1 else Shards((split.total,))

    def sizes(
        self, anchors: Names, candidates: Names | Stored = (), *, half: bool = False, width: int | None = None
    ) -> _Sizes:
        of, rows, columns = candidates or anchors, self.shards(anchors), self.shards(candidates or anchors)
        first = self.rows[anchors[0]] if isinstance(of, Stored) else self.rows[of[0]]
        d = width or min(first.width, self.prefix or first.width)
        blocks = schedule(rows, columns, half=half)[1:] if self.ranks > 1 else []
        return _Sizes(rows, columns, d, first.itemsize, max(FLOAT, first.itemsize), blocks)

    # --------------------------------------------------------------------------------------------------- the messages

    def send(self, name: str, size: int, *, backward: bool = False, count: int = 1) -> None:
        if self.ranks > 1:
            self.sent.append(Message(name, size, backward, count))

    def to_all(self, name: str, size: int, *, backward: bool = False) -> None:
        self.send(name, (self.ranks - 1) * size, backward=backward)

    def sum(self, name: str, size: int, *, backward: bool = False) -> None:
        """Note an all-reduce: small ones are gathered and added up in rank order; a ring sends 2 (W − 1) / W of others."""
        ranks = self.ranks
        is_small = size * ranks <= (SMALL_MESSAGE if ranks <= FEW_RANKS else SMALL_MESSAGE_OF_MANY)
        directly = is_small and self.situation.on_cpu
        self.send(name, (ranks - 1) * size if directly else 2 * (ranks - 1) * size // ranks, backward=backward)

    def bring(
        self, names: Names | Stored, of: _Sizes, item: int, *, made: bool = False, backward: bool = False
    ) -> None:
        """Note that candidates come here: all at once, or from rank to rank."""
        if self.ring:
            rows = sum(max(1, _length(x.sent)) for x in of.blocks)
            size, count = rows * of.width * item, len(of.blocks)
            if count:
                self.send("candidates, rank by rank", size, backward=backward, count=count)
        elif backward:
            return
        elif self.shares and not made and not isinstance(names, Stored):
            for name in names:
                self.gather_once("gather of candidates", name, self.rows[name].bytes)
        else:
            self.to_all("gather of candidates", max(of.candidates.sizes) * of.width * item)

    def gather_once(self, name: str, tensor: str, size: int) -> None:
        """Note a gather of a tensor, unless the sum of losses has it already."""
        shards, in_call = self.rows[tensor].shards, self.names.get(tensor, tensor)
        if not (self.shares and in_call in self.gathered):
            self.to_all(name, max(shards.sizes) * size)
            self.cache += shards.total * size if self.shares else 0
        self.gathered.add(in_call)

    def give_back(self, name: str, of: _Sizes, row: int, *, ring: bool = False, backward: bool = False) -> None:
        """Note that what was computed for other ranks' candidates returns to them."""
        counts = [_length(x.columns) for x in of.blocks]
        if not ring:
            self.send(name, sum(counts) * row, backward=backward)
        elif counts:
            self.send(name, sum(max(1, n) for n in counts) * row, backward=backward, count=len(counts))

    def gather_together(self) -> None:
        """Note the gather of all tensors: those of equal split share a message."""
        by_split: dict[Shards, int] = {}
        for x in self.situation.rows.values():
            by_split[x.shards] = by_split.get(x.shards, 0) + x.bytes
        for split, row in by_split.items():
            size = max(split.sizes) * row
            self.sent.append(Message("gather of all tensors", (self.situation.world_size - 1) * size))
            self.at_once(self.situation.world_size * size + split.size * row + split.total * row)
            self.keep(split.total * row)

    # ----------------------------------------------------------------------------------------------------- the memory

    def keep(self, size: Number) -> None:
        """Note what is held until the backward pass."""
        self.kept += size
        self.at_once(0)

    def at_once(self, size: Number) -> None:
        """Note what the forward pass holds for a moment."""
        self.peak = max(self.peak, self.kept + self.cache + size)

    def at_once_later(self, size: Number) -> None:
        """Note what the backward pass holds for a moment."""
        self.backward_peak = max(self.backward_peak, size)

    def keep_gathered(self, of: _Sizes, item: int) -> None:
        """Note gathered candidates."""
        if self.ranks > 1 and not self.ring:
            total = of.candidates.total * of.width * item
            self.at_once(2 * total if self.shares else self.arriving(of, item))
            self.keep(total)

    def arriving(self, of: _Sizes, item: int) -> int:
        """Return the bytes of candidates while they are gathered: of uneven shards the padded ones are joined."""
        if self.ranks == 1 or self.ring:
            return 0
        padded, total = max(of.candidates.sizes) * len(of.candidates.sizes), of.candidates.total
        return (padded if padded == total else padded + total) * of.width * item

    def passing(self, of: _Sizes) -> int:
        """Return the bytes of a ring's candidates and gradients on their way."""
        rows = max((_length(x.columns) for x in of.blocks), default=0)
        return rows * (4 * of.row + 3 * of.width * of.sent + 2 * of.row * (of.sent < FLOAT))

    # ---------------------------------------------------------------------------------------------------- the engines

    def pairs(self, entry: Pairs) -> None:
        one_tower, names = not entry.candidates, entry.candidates or entry.anchors
        of = self.sizes(entry.anchors, entry.candidates, half=one_tower)
        item = of.sent if entry.narrow else of.wide
        tensors = len(entry.anchors) if one_tower else 1
        self.prepare(of, tensors, unit_norm=entry.unit_norm, one_tower=one_tower)
        if self.plan.arithmetic in ("plain", "one operator"):
            self.whole(entry, of)
            return
        kernel = self.plan.arithmetic == "kernel"
        numbers = 2 if kernel else 1
        self.bring(names, of, item)
        self.keep_gathered(of, item)
        for size in self.bounds(entry, of.wide):
            self.sum("bound of logits", size)
        if entry.columnwise:
            self.give_back("sums of columns", of, numbers * of.wide)
            self.to_all("statistics of columns", max(of.candidates.sizes) * (numbers + 1) * of.wide, backward=True)
        self.bring(names, of, item, backward=True)
        learns = not isinstance(names, Stored)
        if learns:
            self.give_back("gradients of candidates", of, of.row, ring=self.ring, backward=True)
        self.sweep(of, one_tower=one_tower, kernel=kernel, learns=learns)

    def sweep(self, of: _Sizes, *, one_tower: bool, kernel: bool, learns: bool) -> None:
        """Note the tiles of a softmax: each is multiplied once, and again in the backward pass if it was not kept."""
        n, product = of.anchors.size, 2 * of.width
        height, width = tile_size(of.wide, on_cpu=self.situation.on_cpu)
        diagonal = n // height * height**2 + (n % height) ** 2 if one_tower else 0
        others = (n * n - diagonal) // 2 if one_tower else n * of.candidates.size
        others += of.pairs - n * of.candidates.size
        cached = 0 if kernel else min(self.memory_budget, (diagonal + others) * of.wide)
        again = (diagonal + others) - cached // of.wide
        self.flop += product * (2 * diagonal + (2 + learns) * others + again)
        self.keep(cached)
        scratch = 0 if kernel else min(height, n) * min(width, max(of.candidates.sizes)) * of.wide
        gradients = n * of.row + (0 if one_tower else of.local)
        self.at_once(scratch)
        if of.sent < FLOAT:  # their factors in float32
            gradients += n * of.row + of.local
        if self.ring:
            self.at_once_later(gradients + self.passing(of) + 2 * scratch)
        else:
            leaving = sum(_length(x.columns) for x in of.blocks) * of.row
            self.at_once_later(
                gradients + max(of.returned + of.local, leaving + 2 * scratch + (of.local if leaving else 0))
            )

    def whole(self, entry: Pairs, of: _Sizes) -> None:
        """Note a small batch, whose matrices are held whole."""
        n, product = of.anchors.size, 2 * of.width
        size = n * of.candidates.size
        one_tower = not entry.candidates
        if self.plan.arithmetic == "one operator":
            share = self.own_share(entry.anchors)
            self.flop += product * size * (1 + (1 if one_tower else 2) * share)
            self.keep((n if one_tower else n + of.candidates.size) * of.row)
            self.at_once((2 + (entry.scale is None and share < 1)) * size * of.wide)
            return
        both = entry.columnwise and not one_tower  # a matrix for either direction
        self.flop += product * size * (6 if both else 3)
        self.keep((4.5 if both else 2.5) * size * of.wide)
        self.at_once_later(2 * size * of.wide + n * of.row + (0 if one_tower else of.local))

    def own_share(self, names: Names) -> Number:
        """Return the share of this rank's embeddings in those of all ranks, whose gradients it needs."""
        split = self.rows[names[0]].shards
        return split.size / max(1, split.total) if self.situation.world_size > 1 else 1

    def bounds(self, entry: Pairs, wide: int) -> Iterable[int]:
        """Yield the bytes of the messages by which ranks on a CPU bound logits, and ask if a sum lost precision."""
        if not self.situation.on_cpu or self.plan.arithmetic == "kernel":
            return
        if not entry.unit_norm:
            yield 2 * wide
        window, _ = shift_window(torch.float64 if wide > FLOAT else torch.float32)
        if not entry.unit_norm or entry.scale is None or entry.scale > window:
            yield FLOAT

    def prepare(self, of: _Sizes, tensors: int, *, unit_norm: bool, one_tower: bool) -> None:
        """Note embeddings in at least float32, of unit length, and those of several views one after the other."""
        copies = unit_norm + (of.sent < FLOAT) + (tensors > 1) * (1 + (of.sent < FLOAT) / 2)
        self.keep(copies * (of.anchors.size * of.row + (0 if one_tower else of.local)))

    def signs(self, entry: Signs) -> None:
        names = entry.candidates or entry.anchors
        of = self.sizes(entry.anchors, entry.candidates)
        self.prepare(of, 1, unit_norm=True, one_tower=not entry.candidates)
        if not entry.candidates:
            self.to_all("gather of labels", max(of.candidates.sizes) * SUM)
        if self.plan.arithmetic == "one operator":
            size, share = of.pairs, self.own_share(entry.anchors)
            self.flop += 2 * of.width * size * (1 + 2 * share)
            self.keep((of.anchors.size + of.candidates.size) * of.row)
            self.at_once(3 * size * of.wide)
            return
        for backward in (False,) if entry.reduced else (False, True):
            learns = entry.reduced or backward
            if backward and not self.ring:
                self.to_all("gather of candidates", max(of.candidates.sizes) * of.width * of.sent, backward=True)
            self.bring(names, of, of.sent, backward=backward)
            if learns:
                self.give_back("gradients of candidates", of, of.row, ring=self.ring, backward=backward)
                self.sum("gradients of scale and bias", 2 * of.wide, backward=backward)
            self.flop += 2 * of.width * of.pairs * (3 if learns else 1)
        if entry.reduced:
            self.sum("sum of losses", SUM)
        height, width = tile_size(of.wide, on_cpu=self.situation.on_cpu)
        scratch = 2 * min(height, of.anchors.size) * width * of.wide
        gradients = of.anchors.size * of.row + of.local
        moving = self.passing(of) if self.ring else of.returned + of.local
        self.at_once(self.arriving(of, of.sent) + scratch + of.anchors.size * of.row + gradients + moving)
        self.keep(gradients)
        self.at_once_later(2 * gradients)

    def sum_over_blocks(self, entry: Blocks) -> None:
        names, one_tower = entry.candidates or entry.anchors, not entry.candidates
        of = self.sizes(entry.anchors, entry.candidates, width=entry.width)
        if entry.ids:
            self.gather_once("gather of labels", entry.ids, self.rows[entry.ids].bytes if self.shares else SUM)
        else:
            self.to_all("gather of indices", max(of.candidates.sizes) * SUM)
        for x in entry.companions:
            if isinstance(x, str):
                self.gather_once("gather of what comes with candidates", x, self.rows[x].bytes)
            else:
                self.to_all("gather of what comes with candidates", max(of.candidates.sizes) * x)
        self.bring(names, of, of.wide, made=entry.width is not None)
        self.give_back("gradients of candidates", of, of.row, backward=entry.later)
        for size in entry.parameters:
            self.sum("gradient of a setting", size, backward=entry.later)
        if entry.reduction != "none":
            self.sum("sums and counts", (3 if entry.watched else 2) * entry.terms * SUM)
        elif entry.watched:
            self.sum("whether the loss has drawn random numbers", FLOAT)
        self.flop += 2 * of.width * of.pairs * (entry.matmuls + entry.later)
        tensors = 1 if isinstance(names, Stored) or not one_tower else len(names)
        self.prepare(of, tensors, unit_norm=True, one_tower=one_tower)
        if entry.width is not None:
            self.keep(of.anchors.size * of.row + of.local)
        self.blocks(of, later=entry.later, made=entry.width is not None)

    def blocks(self, of: _Sizes, *, later: bool, made: bool) -> None:
        """Note a sweep over blocks: gradients by all candidates, those of a block, and then what returns to their ranks."""
        n, total = of.anchors.size, of.candidates.total * of.row
        gathered = total if self.ranks > 1 else 0
        matrix = min(n, self.height(of)) * of.candidates.total * of.wide
        arriving = self.ranks * of.local + of.local if self.ranks > 1 else 0
        gradients = n * of.row + of.local
        sweep = n * of.row + total + max(total + _MATRICES * matrix, (2 + made) * total, arriving)
        if later:
            self.keep(gathered)
            self.at_once(_MATRICES * matrix)
            self.at_once_later(sweep)
        else:
            self.at_once(gathered + sweep)
            self.keep(gradients)
            self.at_once_later(gradients)

    def height(self, of: _Sizes) -> int:
        """Return how many anchors are compared at a time."""
        return block_height(of.candidates.total * of.wide, self.memory_budget, on_cpu=self.situation.on_cpu)

    def tokens(self, entry: Tokens) -> None:
        of = self.sizes([entry.queries], [entry.documents])
        documents = self.rows[entry.documents.removeprefix("tokens of ")].shards
        self.to_all("gather of lengths", max(documents.sizes) * SUM)
        self.prepare(of, 1, unit_norm=True, one_tower=False)
        self.bring([entry.documents], of, of.sent)
        self.keep_gathered(of, of.sent)
        self.bring([entry.documents], of, of.sent, backward=True)
        self.give_back("gradients of documents", of, of.row, ring=self.ring, backward=True)
        self.flop += 2 * of.width * of.pairs
        scores = of.pairs / max(1, entry.mean_length)
        self.keep(min(self.memory_budget, scores) + of.anchors.size * of.row / 16)
        self.at_once(2 * tile_bytes_of(self.situation))
        gradients = of.anchors.size * of.row + of.local
        moving = self.passing(of) if self.ring else of.returned + of.local
        self.at_once_later(gradients + max(moving, 3 * tile_bytes_of(self.situation)))

    def member(self, entry: Member) -> None:
        outer = self.rows, self.names, self.prefix, self.plan
        self.rows = {name: self.rows[merged] for name, merged in entry.names.items()}
        self.names = {name: self.names.get(merged, merged) for name, merged in entry.names.items()}
        if entry.member is not None:
            self.plan = self.plan.members[entry.member]
            self.shares = self.ranks > 1 and not self.ring
        self.prefix = entry.width if self.prefix is None else min(self.prefix, entry.width or self.prefix)
        for of_member in entry.entries:
            self.note(of_member)
        self.rows, self.names, self.prefix, self.plan = outer

    def note(self, entry: Entry) -> None:
        match entry:
            case Pairs():
                self.pairs(entry)
            case Signs():
                self.signs(entry)
            case Blocks():
                self.sum_over_blocks(entry)
            case Tokens():
                self.tokens(entry)
            case Member():
                self.member(entry)
            case Gathered():
                self.gather(entry)
            case Summed():
                self.add(entry)
            case Shared():
                self.sum("gradient of a parameter", entry.bytes, backward=True)
            case Classes():
                self.compare_classes(entry)
            case UserCode():
                self.user_code(entry)
            case Local():
                count = self.shards(entry.rows).size if entry.rows else 1
                self.flop += count * entry.flop
                self.keep(count * entry.bytes)

    def gather(self, entry: Gathered) -> None:
        first, shards = self.rows[entry.rows[0]], self.shards(entry.rows)
        if first.embeddings == 0:
            self.gather_once("gather", entry.rows[0], entry.bytes)
        else:
            self.to_all("gather", max(shards.sizes) * entry.bytes)
        self.at_once(shards.total * entry.bytes if self.ranks > 1 else 0)

    def compare_classes(self, entry: Classes) -> None:
        of, count = self.sizes(entry.rows), self.shards(entry.rows).size
        height = max(1, BLOCK_BYTES // max(1, 4 * entry.centers * of.wide))
        self.flop += 2 * of.width * count * entry.centers * (3 if count <= height else 4)
        matrix, weights = min(height, count) * entry.centers * of.wide, entry.centers * of.row
        self.keep(2 * weights + count * of.row + (3 * matrix if count <= height else 0))
        self.at_once_later(2 * weights + 2 * count * of.row + (4 if count <= height else 7) * matrix)

    def user_code(self, entry: UserCode) -> None:
        if self.plan.work == "all on every rank":
            rank, others = next(iter(self.rows.values())).shards.rank, self.situation.world_size - 1
            copies = 0 if rank else others.bit_length()  # along a tree
            self.sent.append(Message("random numbers of rank 0", copies * state_bytes()))
            if entry.has_state:
                self.sent.append(Message("whether the loss failed", others * SUM))

    def add(self, entry: Summed) -> None:
        first = next(iter(self.rows.values()))
        samples, total = first.shards.total, first.shards.total * max(1, first.embeddings)
        classes = total if not self.situation.on_cpu else self.classes or max(1, samples // 2)
        size = entry.more + entry.bytes * {"class": classes, "sample": samples, "": 1}[entry.each]
        self.sum("sum", size)
        self.at_once(2 * size)
        if entry.partial:
            self.sum("sum of gradients", size, backward=True)


_MATRICES = 8  # as large as a block's similarities, of most losses


def tile_bytes_of(situation: Situation) -> int:
    return TILE_BYTES if situation.on_cpu else 32 * TILE_BYTES


def _length(x: slice) -> int:
    return x.stop - x.start


def assumptions(plan: Plan, situation: Situation, entries: Sequence[Entry], classes: int | None) -> list[str]:
    """Return what a cost depends on and the arguments do not say, in words."""
    calls = [*_flat(entries)]
    result = []
    if (
        situation.on_cpu
        and plan.work == "own anchors"
        and any(isinstance(x, Summed) and x.each == "class" for x in calls)
    ):
        total = next(iter(situation.rows.values())).shards.total
        of = "as these labels have, on every rank the same" if classes else "of two samples each"
        result.append(f"{classes or max(1, total // 2):,} classes, {of}")
    if any(isinstance(getattr(x, "candidates", None), Stored) for x in calls):
        result.append("a memory that is full")
    if any(isinstance(x, UserCode) for x in calls):
        result.append("code from elsewhere holds and multiplies nothing")
    return result


def _flat(entries: Sequence[Entry]) -> Iterator[Entry]:
    for x in entries:
        yield from _flat(x.entries) if isinstance(x, Member) else [x]


def cost_of(plan: Plan, situation: Situation, entries: Sequence[Entry], *, classes: int | None = None) -> Cost:
    """Return what a step costs a rank, forward and backward.

    Args:
        plan: the path of the step.
        situation: the tensors of the call and their split; the rank is that of the shards.
        entries: what the loss calls, as its method ``entries`` says.
        classes: the number of classes of all ranks' labels; None: each has two samples.
    """
    ledger = _Ledger(situation, plan, classes, budget(), situation.rows)
    others = situation.world_size - 1
    if others:
        payload = situation.payload_bytes if plan.movement == "with the handshake" else 0
        ledger.sent.append(Message("handshake", others * (HEADER_BYTES + payload)))
        ledger.at_once(situation.world_size * (HEADER_BYTES + payload))
        if payload:
            ledger.keep(sum(x.shards.total * x.bytes for x in situation.rows.values()) + situation.world_size * payload)
    if plan.work == "all on every rank" and plan.movement == "gather":
        ledger.gather_together()
    for entry in entries:
        ledger.note(entry)
    sent = ledger.sent
    first = next((index for index, x in enumerate(sent) if x.backward), None)
    if first is not None:  # ranks meet before the first message of a backward pass
        sent.insert(first, Message("header of the backward pass", others * HEADER_BYTES, True))
    return Cost(sent, round(ledger.flop), round(max(ledger.peak, ledger.kept + ledger.backward_peak)))
