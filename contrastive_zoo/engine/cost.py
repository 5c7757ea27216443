"""What a plan costs a rank: messages, bytes, multiplications and memory, by formulas that tests compare with counted ones.

A loss says which entries of the engines its ``compute`` calls, and each notes its cost in a :class:`Ledger`. Messages that
depend on values are not counted, such as those of a sweep that runs again because a sum lost precision.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from contrastive_zoo.engine.ledger import FLOAT, SUM, Cost, Ledger, Message, Names, Number, Stored
from contrastive_zoo.engine.plan import Plan, Situation
from contrastive_zoo.engine.tiling import BLOCK_BYTES, USUAL_MATRICES, block_height, budget, tile_bytes, tile_size
from contrastive_zoo.ranks.randomness import random_states
from contrastive_zoo.ranks.world import HEADER_BYTES


@runtime_checkable
class Entry(Protocol):
    """A function of an engine as a loss calls it."""

    def note(self, to: Ledger) -> None:
        """Add what it costs a rank."""


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
        to.bound(self.scale, of.wide, unit_norm=self.unit_norm)
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
        cached = 0 if kernel else to.cached((diagonal + others) * of.wide)
        again = diagonal + others - cached // of.wide
        to.flop += 2 * of.width * (2 * diagonal + (2 + learns) * others + again)
        factors = (n + of.candidates.size) * of.row if of.item < FLOAT else 0  # in float32
        to.hold(cached, scratch, of.both + factors + to.moving(of) + 2 * scratch)


class Signs(NamedTuple):
    """A sigmoid of every pair; gradients are computed in the forward pass if the losses are reduced."""

    anchors: Names
    candidates: Names
    reduced: bool = True

    def note(self, to: Ledger) -> None:
        of = to.prepare(self.anchors, self.candidates)
        if to.plan.arithmetic == "one operator":
            to.one_operator(of, self.anchors, 3)
            return
        for backward in (False,) if self.reduced else (False, True):
            learns = self.reduced or backward
            if backward and not to.ring:
                to.to_all("gather of candidates", of.largest * of.width * of.item, backward=True)
            to.bring(self.candidates, of, of.item, backward=backward)
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
    columns: int = 0  # what each rank compares its anchors with beside the candidates, such as class weights
    matrices: float = USUAL_MATRICES  # as large as a block's similarities that the loss makes

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
        compared = of.candidates.total + self.columns
        to.flop += 2 * of.width * (of.pairs + of.anchors * self.columns) * (self.matmuls + later)
        local, total = (of.anchors + of.candidates.size) * of.row, compared * of.row
        height = block_height(compared * of.wide, budget(), on_cpu=to.situation.on_cpu)
        matrices = min(of.anchors, height) * compared * self.matrices * of.wide
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
    by_class: bool = False  # whether there are so many bytes for each class
    of: str = ""  # the tensor whose embeddings are added up

    def note(self, to: Ledger) -> None:
        size = self.bytes * (self._classes(to) if self.by_class else 1)
        to.sum("sum", size)
        to.hold(forward=2 * size)
        if self.partial:
            to.sum("sum of gradients", size, backward=True)

    def _classes(self, to: Ledger) -> int:
        first = next(iter(to.rows.values()))
        if not to.situation.on_cpu:  # their number would have to be read
            return first.shards.total * max(1, first.embeddings)
        classes = to.classes or max(1, first.shards.total // 2)
        if to.ranks > 1:
            of = "as these labels have, on every rank the same" if to.classes else "of two samples each"
            to.assumed[f"{classes:,} classes, {of}"] = None
        return classes


class Shared(NamedTuple):
    """A parameter that each rank uses for its own embeddings: its gradients are added up."""

    bytes: int
    rows: Names = ()  # if there are any, ``bytes`` are those of one of their embeddings, and all ranks' count

    def note(self, to: Ledger) -> None:
        size = self.bytes * (to.shards(self.rows).total if self.rows else 1)
        to.sum("gradient of a parameter", size, backward=True)


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
    """Late interaction: the best token of each document for each query token, and a loss of the scores."""

    queries: str
    documents: Names
    matrices: float  # as large as the scores that the loss holds at its peak
    searched: bool = False  # whether the best of all documents' tokens are found first

    def note(self, to: Ledger) -> None:
        queries, *documents = (to.shards([x.removeprefix("tokens of ")]) for x in (self.queries, *self.documents))
        wide = max(FLOAT, to.rows[self.queries].itemsize)
        height, width = tile_size(wide, on_cpu=to.situation.on_cpu)
        scores = queries.size * sum(x.total for x in documents) * wide
        for name, sets in zip(self.documents, documents, strict=True):
            of = to.prepare([self.queries], [name])
            to.hold(to.arrived(of, of.item))
            to.to_all("gather of lengths", max(sets.sizes) * SUM)
            for backward in (False, True):
                to.bring([name], of, of.item, backward=backward)
            to.give_back("gradients of documents", of, of.row, ring=to.ring, backward=True)
            to.flop += 2 * of.width * of.pairs * (1 + self.searched)
            positions = to.cached(of.anchors * sets.total) + of.anchors * of.row / 16
            _, scratch = to.tile(of)
            at_once = min(max(sets.sizes), width * sets.total / max(1, of.candidates.total))  # documents of a block
            selected = min(height * width, of.anchors * at_once) * (5 * SUM + 2 * wide)  # keys, their order, weights
            to.hold(positions, scores + 2 * scratch, of.both + scores + max(to.moving(of), 3 * scratch, selected))
        to.hold(backward=self.matrices * scores)


class Products(NamedTuple):
    """Dot products of local embeddings, the first whose name ends so, and those of all ranks, held as a matrix."""

    kind: str

    def note(self, to: Ledger) -> None:
        first, *others = (name for name in to.rows if name.endswith(self.kind))
        for name in others:
            of = to.prepare([first], [name])
            to.to_all("gather of candidates", of.largest * of.row)
            to.give_back("gradients of candidates", of, of.row, backward=True)
            to.flop += 6 * of.width * of.pairs
            to.hold(to.arrived(of, of.wide) + of.pairs * of.wide, backward=of.both + of.pairs * of.wide)


class Slices(NamedTuple):
    """Projections of the embeddings of all ranks on random directions, of which each rank takes a part."""

    rows: Names
    directions: int
    targets: bool = False  # whether as many drawn embeddings as samples are projected, too

    def note(self, to: Ledger) -> None:
        of = to.prepare(self.rows)
        to.to_all("gather of embeddings", of.largest * of.row)
        to.sum("sum of distances", of.wide)
        to.give_back("gradients of embeddings", of, of.row, backward=True)
        local, total = len(range(of.candidates.rank, self.directions, to.ranks)), of.candidates.total
        targets = self.targets * to.shards(self.rows[:1]).total
        tile = tile_bytes(on_cpu=to.situation.on_cpu)
        again = local > max(1, tile // (6 * max(1, total) * of.wide))  # blocks, which the backward pass computes again
        to.flop += local * of.width * 2 * ((2 + again) * total + (1 + again) * targets)
        drawn = (self.directions + targets) * of.row
        to.hold(to.arrived(of, of.wide) + drawn, drawn + tile / 2, 2 * total * of.row + tile)


class Classes(NamedTuple):
    """A comparison of this rank's embeddings with the weights of all classes, some embeddings at a time.

    Of sharded weights, one of the embeddings of all ranks with the weights of this rank.
    """

    rows: Names
    classes: int
    each: int = 1  # weight vectors of a class
    matrices: float = 4.2  # as large as a block's similarities that the loss makes, of which three are kept
    drawn: int | None = None  # how many of the classes a step draws, or those of all samples if these are more
    # of sharded weights: how many numbers of an embedding ranks add up, and whether each has a limit, which is gathered
    sums: int = 1
    limits: bool = False

    def note(self, to: Ledger) -> None:
        of, shards = to.prepare(self.rows), to.rows["class weights"].shards if "class weights" in to.rows else None
        centers = self.each * (self.classes if self.drawn is None else self._most_drawn(self.drawn, to))
        anchors, total = of.anchors, of.candidates.total
        if shards is None:
            to.sum("gradient of a parameter", centers * of.row, backward=True)
        else:
            anchors, centers = total, centers * shards.size // max(1, shards.total)
            to.to_all("gather of candidates", of.largest * of.row)
            to.to_all("gather of labels", of.largest * SUM)
            if self.limits:
                to.sum("similarities to classes", total * of.wide)
                to.to_all("gather of limits", of.largest * of.wide)
            to.sum("largest logits", total * of.wide)
            for backward, size in itertools.product((False, True), (self.sums, 1)):
                to.sum("sums over classes", total * size * of.wide, backward=backward)
            to.give_back("gradients of candidates", of, of.row, backward=True)
            to.hold(to.arrived(of, of.wide))
        rows, weights = anchors * of.row, centers * of.row
        height = max(1, BLOCK_BYTES // max(1, 4 * centers * of.wide))
        at_once = anchors <= height
        matrix = min(height, anchors) * centers * of.wide
        to.flop += 2 * of.width * anchors * centers * (3 if at_once else 4)
        kept = 3 if at_once else 0
        local = self.classes if shards is None else shards.size
        of_all = 0 if self.drawn is None else local * self.each * of.row  # weights, and their gradient
        held = 2 * rows + (self.matrices - kept) * matrix
        to.hold(of_all + 2 * weights + kept * matrix, backward=2 * weights + max(of_all, held))

    def _most_drawn(self, drawn: int, to: Ledger) -> int:
        labels, bound = to.rows["labels"], max(drawn, min(self.classes, to.rows["labels"].shards.total))
        to.assumed[f"{'at most ' if bound > drawn else ''}{bound:,} of {self.classes:,} classes are drawn"] = None
        to.gather_once("gather of labels", "labels", labels.bytes)
        to.hold(forward=_KEYS * SUM * self.classes)
        return bound


class Local(NamedTuple):
    """Matrix products and memory of this rank alone, for each of its embeddings in some tensors, or altogether."""

    rows: Names = ()
    flop: Number = 0
    bytes: float = 0  # held until the backward pass
    blocks: int = 0  # matrices of these bytes, or of a tile if it is larger, that the backward pass makes

    def note(self, to: Ledger) -> None:
        count = to.shards(self.rows).size if self.rows else 1
        to.flop += count * self.flop
        tile = tile_bytes(on_cpu=to.situation.on_cpu)
        to.hold(count * self.bytes, backward=self.blocks * max(tile, count * self.bytes))


class UserCode(NamedTuple):
    """A loss from elsewhere, which draws rank 0's random numbers where every rank computes all of it."""

    has_state: bool = False  # whether buffers move on all ranks or on none

    def note(self, to: Ledger) -> None:
        to.assumed["code from elsewhere holds and multiplies nothing"] = None
        if to.plan.work == "all on every rank":
            rank, others = next(iter(to.rows.values())).shards.rank, to.situation.world_size - 1
            copies = 0 if rank else others.bit_length()  # along a tree
            state_bytes = sum(state.nbytes for state in random_states())
            to.sent.append(Message("random numbers of rank 0", copies * state_bytes))
            if self.has_state:
                to.sent.append(Message("whether the loss failed", others * SUM))


class Member(NamedTuple):
    """What a loss inside another one calls, ``names`` being the outer loss's names of its tensors."""

    member: int | None  # among the members of a sum; None of a loss with the outer one's plan
    names: Mapping[str, str]
    entries: Sequence[Entry]
    width: int | None = None  # features of the embeddings' prefix
    whole: Collection[str] = ()  # tensors of which no prefix is taken

    def note(self, to: Ledger) -> None:
        outer = to.rows, to.names, to.plan
        to.rows = {name: to.rows[merged] for name, merged in self.names.items()}
        if self.width is not None:
            cut = {name: x._replace(width=min(x.width, self.width)) for name, x in to.rows.items()}
            to.rows = {name: x if name in self.whole else cut[name] for name, x in to.rows.items()}
        to.names = {name: to.names.get(merged, merged) for name, merged in self.names.items()}
        if self.member is not None:
            to.plan = to.plan.members[self.member]
        for entry in self.entries:
            entry.note(to)
        to.rows, to.names, to.plan = outer


_KEYS = 5  # tensors of random numbers, one for each class, while they are computed


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
