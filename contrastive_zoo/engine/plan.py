"""Which path a step takes: :func:`choose` is the only function that decides it, from what all ranks have agreed on."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from contrastive_zoo.engine.implementation import LARGEST_MATRIX, NO_KERNELS, Kernels
from contrastive_zoo.ranks.world import Shards

Engine = Literal["softmax", "sigmoid", "rows", "classes", "tokens", "statistics", "slices", "sum", "other"]
"""What computes a loss. A ``"sum"`` is a sum of losses, each with an engine of its own."""

Work = Literal["alone", "all on every rank", "own anchors"]
Movement = Literal["none", "with the handshake", "gather", "ring"]
Arithmetic = Literal["plain", "one operator", "tiles", "blocks", "kernel"]

SMALL_BATCH = 2**28
"""Multiplications up to which every rank computes the whole loss: on gloo they take as long as the messages saved."""

PER_SIMILARITY = 64  # multiplications that take as long as one similarity's exponential, sums and weights

SMALL_MATRIX = 2**19
"""Similarities up to which one operator on the whole matrix is quicker than tiles on a CPU at every temperature. At 2**20
it takes 0.8 of the time of tiles at temperature 0.07, but up to 1.8 times as long at 0.01."""

SMALL_PLAIN = 2**15
"""Similarities up to which the plain formula is quicker than tiles on a CPU: 0.8 of the time at 64², 1.4 to 2.3 at 500²."""

SMALL_ON_ACCELERATORS = LARGEST_MATRIX**2
"""The same on an accelerator, where Triton kernels are quicker from here on."""


class Needs(NamedTuple):
    """What a loss says of one call before ranks agree, the same on every rank; the reasons are clauses, or None."""

    engine: Engine = "other"
    anchors: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    whole: str | None = None  # why every rank computes all of the loss
    split: str | None = None  # why no rank can compute all of the loss
    no_ring: str | None = None  # why candidates cannot pass from rank to rank
    no_kernel: str | None = "has no kernel for this loss"  # why no Triton kernel computes the call
    one_operator: bool = False  # whether one operator computes value and gradients of a small batch
    members: tuple["Needs", ...] = ()  # of a sum of losses

    def __hash__(self) -> int:
        return hash(self[3:8])  # all but names, of which a user may pass lists


NO_NEEDS = Needs()


class Rows(NamedTuple):
    """One tensor of a call: its split over the ranks, the bytes of a row, and how many embeddings it holds; 0 for labels."""

    shards: Shards
    bytes: int = 0
    embeddings: int = 0
    width: int = 0
    itemsize: int = 0

    @classmethod
    def of(cls, shards: Shards, row: torch.Size, dtype: torch.dtype) -> "Rows":
        """Return those of a tensor, given the shape of a row."""
        size = row.numel() * dtype.itemsize
        is_embedding = row and dtype.is_floating_point
        return cls(shards, size, row[:-1].numel(), row[-1], dtype.itemsize) if is_embedding else cls(shards, size)


class Situation(NamedTuple):
    """What all ranks know of a call when its path is chosen."""

    world_size: int = 1
    rows: Mapping[str, Rows] = {}
    on_cpu: bool = True
    plain: bool = False  # whether plain_formulas() is in force
    ring: bool = False  # whether the user asks for a ring
    random: bool = False  # whether some rank knows that the loss draws random numbers or changes its buffers
    payload: bool = False  # whether the tensors of every rank came with the handshake
    kernels: Kernels = NO_KERNELS

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of the largest shard's tensors."""
        ranks = range(self.world_size)
        return max(sum(x.shards.sizes[rank] * x.bytes for x in self.rows.values()) for rank in ranks)

    def count(self, names: Sequence[str]) -> int:
        """Return the number of embeddings of all ranks in some of the tensors."""
        return sum(x.shards.total * x.embeddings for x in map(self.rows.__getitem__, names))

    @property
    def multiplications(self) -> int:
        """Return what the loss of all ranks costs one of them, in multiplications."""
        total = width = 0
        for x in self.rows.values():
            if x.embeddings:
                total, width = total + x.shards.total, max(width, x.embeddings * x.width)
        return total**2 * (width + PER_SIMILARITY)


class Plan(NamedTuple):
    """The path of a step: who computes what, how embeddings get there, and by which arithmetic; and why."""

    work: Work = "alone"
    movement: Movement = "none"
    arithmetic: Arithmetic = "plain"
    because: tuple[str, str, str] = ("", "", "")
    members: Sequence["Plan"] = ()
    warning: str | None = None  # what would make the step quicker

    @property
    def is_plain(self) -> bool:
        return self.arithmetic == "plain"


ALONE = Plan()
"""The definition of a loss, on one process."""


Tensors = tuple[tuple[str, Shards, torch.Size, torch.dtype], ...]
"""The tensors of a call: name, split over ranks, the shape of a row and the dtype."""


def planned(caller: str, needs: Needs, tensors: Tensors, **known: Any) -> Plan:
    """Return what :func:`choose` returns, which is computed once for the same call; ``known`` are of a situation."""
    return _planned(caller, needs, tensors, (SMALL_BATCH, SMALL_MATRIX, SMALL_PLAIN, SMALL_ON_ACCELERATORS), **known)


@functools.lru_cache(maxsize=256)
def _planned(caller: str, needs: Needs, tensors: Tensors, sizes: tuple[int, ...], **known: Any) -> Plan:
    rows = {name: Rows.of(split, row, dtype) for name, split, row, dtype in tensors}
    return choose(caller, needs, Situation(rows=rows, **known))


def choose(caller: str, needs: Needs, situation: Situation) -> Plan:
    """Return the path of a step, the same on every rank; ValueError for Triton or a ring that cannot compute this call."""
    if situation.ring and needs.no_ring is not None:
        raise ValueError(
            f"{caller}: with ring=True candidates pass from rank to rank, and this call needs all at once: "
            f"{needs.no_ring}. Leave ring out."
        )
    work, why_work = _work(needs, situation)
    movement, why_movement = _movement(work, needs, situation)
    return _with_arithmetic(caller, needs, situation, Plan(work, movement, because=(why_work, why_movement, "")))


def _with_arithmetic(caller: str, needs: Needs, situation: Situation, plan: Plan) -> Plan:
    """Return the plan with its arithmetic and the plans of a sum's members, whose embeddings move with the sum's."""
    arithmetic, why, warning = _arithmetic(caller, needs, situation, plan.work)
    members = tuple(_with_arithmetic(caller, of, situation, plan) for of in needs.members)
    return plan._replace(arithmetic=arithmetic, because=(*plan.because[:2], why), members=members, warning=warning)


def _work(needs: Needs, situation: Situation) -> tuple[Work, str]:
    if situation.world_size == 1:
        return "alone", "one process holds all samples"
    if needs.split is not None:
        return "own anchors", needs.split
    if situation.plain:
        return "own anchors", "under plain_formulas() gradients can be differentiated again"
    if needs.whole is not None:
        return "all on every rank", needs.whole
    if situation.random:
        return "all on every rank", "the loss draws random numbers or changes its buffers, and ranks share both"
    cost = situation.multiplications
    of = f"2^{math.log2(max(1, cost)):.1f} multiplications"
    if cost <= SMALL_BATCH:
        return "all on every rank", f"{of} (at most 2^28) take less time than the messages that would split them"
    return "own anchors", f"{of} (more than 2^28) are split over {situation.world_size:,} ranks"


def _movement(work: Work, needs: Needs, situation: Situation) -> tuple[Movement, str]:
    if work == "alone":
        return "none", "no other process has embeddings"
    if work == "all on every rank":
        if situation.payload:
            return "with the handshake", "they fit behind the header of the handshake"
        return "gather", "they did not come with the handshake"
    if needs.engine in ("statistics", "slices", "classes"):
        return "none", "ranks add up statistics"
    if needs.engine == "other":
        return "gather", "the loss gathers what it needs"
    if situation.ring and not situation.plain:
        return "ring", "ring=True"
    return "gather", "each rank receives those of all other ranks"


def _arithmetic(caller: str, needs: Needs, situation: Situation, work: Work) -> tuple[Arithmetic, str, str | None]:
    """Return the arithmetic, the reason, and a warning about what would be quicker."""
    kernels = situation.kernels
    if kernels.always and needs.engine != "sum" and (problem := needs.no_kernel or kernels.problem) is not None:
        raise ValueError(f"{caller}: implementation 'triton' {problem}. Choose use_implementation('auto').")
    if situation.plain:
        return "plain", "plain_formulas() is in force", None
    if needs.engine not in ("softmax", "sigmoid"):
        return _BY_ENGINE[needs.engine]
    anchors, candidates = situation.count(needs.anchors), situation.count(needs.candidates)
    pairs, of = anchors * candidates, f"{anchors:,} × {candidates:,} similarities"
    warning = None
    if needs.no_kernel is None and (kernels.always or pairs > SMALL_ON_ACCELERATORS):
        if kernels.apply:
            why = "use_implementation('triton')" if kernels.always else f"{of} (more than {LARGEST_MATRIX:,}²)"
            return "kernel", why, kernels.warning
        warning = kernels.warning
    arithmetic: Arithmetic = "one operator" if needs.one_operator else "plain"
    small_on_cpu = SMALL_MATRIX if needs.one_operator else SMALL_PLAIN
    largest = small_on_cpu if situation.on_cpu else SMALL_ON_ACCELERATORS
    if work != "own anchors" and pairs <= largest and (needs.one_operator or needs.engine == "softmax"):
        return arithmetic, f"{of} (at most {math.isqrt(max(0, largest)):,}²) are held whole", warning
    return "tiles", f"{of} are computed tile by tile", warning


_BY_ENGINE: Mapping[Engine, tuple[Arithmetic, str, None]] = {
    "rows": ("blocks", "a sum over anchors is computed for some anchors at a time", None),
    "classes": ("blocks", "embeddings are compared with class weights, some embeddings at a time", None),
    "tokens": ("tiles", "tokens of queries are compared with those of some documents at a time", None),
    "statistics": ("plain", "no pairs of samples are compared", None),
    "slices": ("blocks", "projections of all samples are computed some at a time", None),
    "sum": ("plain", "each loss of the sum has its own", None),
    "other": ("plain", "the loss computes as it is written", None),
}
