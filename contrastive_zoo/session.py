"""One step's session: what all ranks have agreed on, handed from the wrapper through the loss down to the engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor

from contrastive_zoo.gather_cache import GatherCache
from contrastive_zoo.handshake import Agreed, Statement, shake_hands
from contrastive_zoo.world import Shards, World

SMALL_BATCH, PER_SIMILARITY = 2**28, 64
"""Multiplications that take no longer than the messages of ranks that share them; and as how many of these a
similarity's exponential, sums and weights count."""


def is_small(rows: int, width: int) -> bool:
    """Whether a loss of so many rows of all ranks is sooner computed by every rank than shared.

    Examples:
        >>> is_small(1_000, 128), is_small(10_000, 128)
        (True, False)
    """
    return rows**2 * (width + PER_SIMILARITY) <= SMALL_BATCH


@contextmanager
def sharing(always: bool) -> Iterator[None]:
    """Within it ranks share the work of every batch if ``always``, or of large ones alone; for tests, on all ranks alike.

    Examples:
        >>> with sharing(always=True):
        ...     is_small(1, 1)
        False
    """
    global SMALL_BATCH
    before, SMALL_BATCH = SMALL_BATCH, -1 if always else 2**28
    try:
        yield
    finally:
        SMALL_BATCH = before


@dataclass(frozen=True)
class Options:
    """How a step is computed, the same on every rank.

    Args:
        check_finite: whether NaN and infinite rows are refused.
        ring: whether softmax losses pass candidates from rank to rank, one shard at a time, rather than gather them.
        sharded_factor: what the gradient of parameters that each rank holds for itself is multiplied by.
    """

    check_finite: bool = True
    ring: bool = False
    sharded_factor: float = 1.0


@dataclass
class Declaration:
    """What one loss says before it computes: its rows, its settings, and what it finds wrong with them."""

    caller: str
    rows: Mapping[str, str]
    """By name, the kind of one row."""
    sizes: list[int]
    settings: Mapping[str, str]
    problem: str | None
    tolerance: float
    shards: list[Shards] = field(default_factory=list)
    """Of the rows, once all ranks have agreed."""

    def compared(self, prefix: str) -> dict[str, str]:
        """By name, what must be the same on every rank."""
        return {prefix + name: value for name, value in {**self.rows, **self.settings}.items()}


@dataclass
class Opening:
    """What a step's first handshake brings besides the losses' declarations.

    Args:
        statement: of the arguments, the class tree and the options; the declarations are added to it.
        agreed: on the arguments, once it is known.
    """

    statement: Statement
    agreed: Agreed | None = None


class Replicate(BaseException):
    """All ranks have agreed that each computes the loss from all rows: leave what was begun on this rank's rows."""


class Declared(BaseException):
    """A loss has said what it needs: leave it before it computes."""


@dataclass
class _Progress:
    """Where a step stands."""

    opening: Opening | None = None
    declaring: list[Declaration] | None = None
    """Where losses leave their declarations, while they are only asked for these."""
    agreed: list[Declaration] = field(default_factory=list)
    """Declarations whose losses have not been computed yet."""
    changes: Callable[[], bool] | None = None
    """Whether the loss has drawn random numbers or changed a buffer; None where it cannot."""


@dataclass(frozen=True, eq=False)
class Session(World):
    """A world, and what its ranks agree on in one step.

    Examples:
        >>> Session.of(World(), check_finite=False).options
        Options(check_finite=False, ring=False, sharded_factor=1.0)
    """

    options: Options = Options()
    cache: GatherCache | None = field(default=None, repr=False)
    """Rows that have been gathered in this step; None where each is gathered once."""
    progress: _Progress = field(default_factory=_Progress, repr=False)

    @classmethod
    def of(cls, world: World, **options: bool | float) -> Session:  # type: ignore[override]
        """``world`` if it is a session, otherwise a new one of its ranks with these options."""
        if isinstance(world, Session):
            return world
        return cls(world.rank, world.size, world.group, Options(**options))  # type: ignore[arg-type]

    def with_cache(self) -> Session:
        """The same session, in which rows are gathered once however many losses compare them."""
        if self.cache is not None or self.size == 1:
            return self
        return Session(self.rank, self.size, self.group, self.options, GatherCache(), self.progress)

    @property
    def opened(self) -> bool:
        """Whether the step's first handshake is over."""
        return self.progress.opening is None

    def meet(
        self, caller: str, rows: Mapping[str, Tensor], problem: str | None, settings: Mapping[str, object]
    ) -> list[Shards]:
        """:func:`meet` within this session."""
        sizes = [len(tensor) if tensor.ndim else 1 for tensor in rows.values()]
        if self.progress.declaring is None and self.progress.agreed:
            agreed = self.progress.agreed.pop(0)
            assert (agreed.caller, agreed.sizes) == (caller, sizes), "a loss declared another call than this"
            return agreed.shards
        if problem is None and self.options.check_finite:
            problem = first_non_finite(rows)
        if self.size == 1:
            if problem is not None:
                raise ValueError(f"{caller}: {problem}")
            return [Shards((size,)) for size in sizes]
        kinds = {name: row_kind(tensor) for name, tensor in rows.items()}
        words = {name: in_one_line(value) for name, value in settings.items()}
        declaration = Declaration(caller, kinds, sizes, words, problem, tolerance(rows.values()))
        if self.progress.declaring is not None:
            self.progress.declaring.append(declaration)
            raise Declared
        self._shake([declaration])
        return declaration.shards

    def declare(self, caller: str, losses: Iterable[Callable[[], object]]) -> None:
        """Ask losses that will be computed one after the other for their declarations, and agree on all at once.

        Raises:
            ValueError: what :func:`meet` raises for any of them.
            Replicate: every rank computes the losses from the rows of all ranks.
        """
        progress, outer = self.progress, self.progress.declaring
        if self.size == 1 or progress.agreed:
            return
        progress.declaring = [] if outer is None else outer
        try:
            for loss in losses:
                with suppress(Declared):
                    loss()
            declarations = progress.declaring
        finally:
            progress.declaring = outer
        if outer is not None:
            raise Declared
        self._shake(declarations or [Declaration(caller, {}, [], {}, None, 0.0)])
        progress.agreed = list(declarations)

    def open(self, caller: str, problem: str | None = None) -> None:
        """The step's first handshake by itself, of arguments of which no loss of this library declares anything."""
        self._shake([Declaration(caller, {}, [], {}, problem, 0.0)])

    def _shake(self, declarations: Sequence[Declaration]) -> None:
        """One handshake for several declarations, which opens the step if nothing has."""
        opening, self.progress.opening = self.progress.opening, None
        bad = next((x for x in declarations if x.problem is not None), declarations[0])
        compared: dict[str, str] = {}
        for index, declaration in enumerate(declarations):
            compared |= declaration.compared(f"{declaration.caller} {index}: " if len(declarations) > 1 else "")
        sizes = [size for declaration in declarations for size in declaration.sizes]
        if opening is None:
            agreed = shake_hands(Statement(bad.caller, compared, sizes, bad.problem), self)
        else:
            statement = opening.statement
            statement.caller = bad.caller
            statement.problem = bad.problem or statement.problem
            first = {name: x for name, x in statement.compared.items() if name in ("the loss", "arguments")}
            statement.compared = first | compared | dict(statement.compared)  # errors name the first difference
            statement.tolerance = max(statement.tolerance, *(x.tolerance for x in declarations))
            # the arguments' sizes come first, so that their number is known to whoever asks about them
            arguments, statement.sizes = len(statement.sizes), [*statement.sizes, *sizes]
            agreed = shake_hands(statement, self)
            opening.agreed = replace(agreed, shards=agreed.shards[:arguments])
            agreed = replace(agreed, shards=agreed.shards[arguments:])
        found = iter(agreed.shards)
        for declaration in declarations:
            declaration.shards = [next(found) for _ in declaration.sizes]
        if opening is not None and agreed.replicate:
            raise Replicate


def meet(
    caller: str,
    rows: Mapping[str, Tensor],
    *,
    world: World,
    problem: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[Shards]:
    """Agree with all ranks on what is compared, and learn how many rows each of them holds.

    Within a step whose declarations have been agreed on already, no message is sent.

    Args:
        caller: name of the loss, first word of any error.
        rows: what this rank brings, by name; dimension 0 counts rows.
        world: who takes part.
        problem: what this rank knows to be wrong with its input.
        settings: numbers and words that must be the same everywhere.

    Returns:
        For each entry of ``rows``, its split over the ranks.

    Raises:
        ValueError: on every rank alike, if any rank has a problem, brings NaN or infinite rows (unless the session's
            ``check_finite`` is off), or if ranks bring different kinds of rows or settings.

    Examples:
        >>> meet("Loss", {"embeddings": torch.ones(3, 2)}, world=World())
        [Shards(sizes=(3,), rank=0)]
    """
    return Session.of(world).meet(caller, rows, problem, settings or {})


def refuse(caller: str, problem: str, *, world: World) -> NoReturn:
    """Take part in the others' :func:`meet` only to say why this rank cannot, so that all of them raise.

    Raises:
        ValueError: always, on every rank.

    Examples:
        >>> refuse("Loss", "labels are missing.", world=World())
        Traceback (most recent call last):
        ...
        ValueError: Loss: labels are missing.
    """
    meet(caller, {}, world=world, problem=problem)
    raise AssertionError("a problem was met without an error")


def row_kind(tensor: Tensor) -> str:
    """Dtype, shape of a row and whether it carries a gradient, as the handshake compares them.

    Examples:
        >>> row_kind(torch.ones(2, 3))
        'float32|[3]|'
    """
    gradient = " with gradient" if tensor.requires_grad and torch.is_grad_enabled() else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape[1:])}|{gradient}"


def in_one_line(value: object) -> str:
    """A setting as the handshake compares it.

    Examples:
        >>> in_one_line((1, "a|b"))
        "(1, 'a/b')"
    """
    return str(value).replace("|", "/").replace("\n", " ")


def tolerance(rows: Iterable[Tensor]) -> float:
    """The coarsest floating dtype's epsilon.

    Examples:
        >>> tolerance([torch.ones(1), torch.ones(1, dtype=torch.float64)]) == torch.finfo(torch.float32).eps
        True
    """
    precisions = [torch.finfo(x.dtype).eps for x in rows if x.is_floating_point()]
    return max(precisions, default=torch.finfo(torch.float32).eps)


def first_non_finite(rows: Mapping[str, Tensor]) -> str | None:
    """Which rows hold NaN or infinite values, in words; None if none do.

    Examples:
        >>> first_non_finite({"embeddings": torch.ones(2, 3)})
    """
    for name, tensor in rows.items():
        if tensor.is_floating_point() and not _all_finite(tensor.detach()):
            bad = (~torch.isfinite(tensor.detach().reshape(len(tensor), -1))).any(1).nonzero().flatten().tolist()
            some = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
            return (
                f"{name} hold NaN or infinite values in {len(bad)} of {len(tensor)} rows (row {some}). "
                "Look for a diverged encoder, a division by a zero norm or an overflow in half precision; "
                "check_finite=False lets them through."
            )
    return None


def _all_finite(x: Tensor) -> bool:
    """A sum is finite only if all its terms are; where it is not, it may have overflowed."""
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()
    return math.isfinite(total) or bool(x.isfinite().all())
