"""The session of one step: what all ranks have agreed on, passed from the wrapper through the loss to the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import Tensor

from contrastive_zoo.derivations import Derivations
from contrastive_zoo.gather_cache import GatherCache
from contrastive_zoo.handshake import Agreed, Statement, shake_hands
from contrastive_zoo.row_checks import first_non_finite, in_one_line, row_kind, tensor_problem, tolerance
from contrastive_zoo.step_state import (
    UNCHECKED,
    ComputedFrom,
    Declaration,
    Declared,
    Options,
    Progress,
    Replicate,
)
from contrastive_zoo.world import Machines, Shards, World


@dataclass(frozen=True, eq=False)
class Session(World):
    """A world and what its ranks have agreed on in one step.

    Examples:
        >>> Session.of(World(), check_finite=False).options
        Options(check_finite=False, ring=False, sharded_factor=1.0, reads_values=True)
    """

    options: Options = field(default_factory=Options)
    cache: GatherCache | None = field(default=None, repr=False)
    """The rows gathered in this step; None where no rows are gathered twice."""
    derivations: Derivations = field(default_factory=Derivations, repr=False)
    progress: Progress = field(default_factory=Progress, repr=False)

    @classmethod
    def of(cls, world: World, **options: bool | float | Machines) -> Session:  # type: ignore[override]  # of a world, with options
        """``world`` if it is a session, otherwise a new one of its ranks with these options."""
        if isinstance(world, Session):
            return world
        agreed = Options(**options)  # type: ignore[arg-type]  # by name
        return cls(world.rank, world.size, world.group, agreed, caller=world.caller)

    def with_cache(self) -> Session:
        """The same session with a cache: rows that several losses compare are gathered once."""
        if self.cache is not None or self.size == 1:
            return self
        return replace(self, cache=GatherCache(self.derivations))

    @property
    def opened(self) -> bool:
        """Whether the step's first handshake is over."""
        return self.progress.opening is None

    def meet(
        self, caller: str, rows: Mapping[str, Tensor], problem: str | None, settings: Mapping[str, object]
    ) -> list[Shards]:
        """:func:`meet` within this session.

        Raises:
            ValueError: what :func:`meet` raises.
            Declared: the session collects declarations, of which this was one.
        """
        if problem is not None:  # what is no tensor has no size
            rows = {name: x for name, x in rows.items() if tensor_problem(name, x) is None}
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
        # losses of embeddings on an accelerator choose other sums than on a CPU
        kinds = {name: row_kind(x, device=x.is_floating_point()) for name, x in rows.items()}
        words = {name: in_one_line(value) for name, value in settings.items()}
        declaration = Declaration(caller, kinds, sizes, words, problem, tolerance(rows.values()))
        if self.progress.declaring is not None:
            self.progress.declaring.append(declaration)
            raise Declared
        self._shake([declaration])
        return declaration.shards

    def declare(self, caller: str, losses: Iterable[Callable[[], object]]) -> None:
        """Collect the declarations of losses that are computed one after the other, and agree on all in one handshake.

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

    @property
    def runs_once(self) -> bool:
        """Whether the loss has not been declared, and goes on after the handshake with what :meth:`go_on` returns."""
        return self.progress.go_on is not None

    def go_on(self, rows: Mapping[str, Tensor]) -> ComputedFrom:
        """What the loss is computed from, given the rows with which it has begun.

        Raises:
            Replicate: every rank computes the loss from the rows of all ranks, but these are none of the step's arguments.
        """
        go_on, self.progress.go_on = self.progress.go_on, None
        assert go_on is not None
        return go_on(rows)

    def keep_settings(self, loss: object, settings: Mapping[str, Any]) -> None:
        """Keep the settings of a loss that declares itself: it is computed with the same.

        A setting may be a module that changes from call to call; it is called once a step, as on one process.
        """
        if self.progress.declaring is not None:
            self.progress.settings.setdefault(id(loss), []).append(settings)

    def read_once(self, tensors: Sequence[Tensor | None], read: Callable[[], Any]) -> Any:
        """What ``read`` returns of tensors, for which the host waits: once a step, though losses run to declare themselves.

        Examples:
            >>> import torch
            >>> session, x = Session.of(World()), torch.ones(1)
            >>> session.read_once([x], lambda: 1), session.read_once([x], lambda: 2)
            (1, 1)
        """
        key = tuple(map(id, tensors))
        if key not in self.progress.numbers:
            self.progress.numbers[key] = tensors, read()
        return self.progress.numbers[key][1]

    def declared_settings(self, loss: object) -> Mapping[str, Any] | None:
        """The settings with which a loss has declared itself, to be computed now; None if it has not."""
        of_loss = None if self.progress.declaring is not None else self.progress.settings.get(id(loss))
        return of_loss.pop(0) if of_loss else None

    def of_all_rows(self) -> Session:
        """The session of this process alone in which it computes, from all ranks' checked rows, what has been declared.

        Examples:
            >>> Session.of(World()).of_all_rows().options.check_finite
            False
        """
        progress = Progress(settings=self.progress.settings, later=self.progress.later)
        return Session(options=UNCHECKED, progress=progress)

    def open(self, caller: str, problem: str | None = None) -> None:
        """Hold the step's first handshake without a declaration, for a third-party loss."""
        self._shake([Declaration(caller, {}, [], {}, problem, 0.0)])

    def _shake(self, declarations: Sequence[Declaration]) -> None:
        """Hold one handshake for several declarations; the first one of a step also carries the opening."""
        opening, self.progress.opening = self.progress.opening, None
        bad = next((x for x in declarations if x.problem is not None), declarations[0])
        compared: dict[str, str] = {}
        for index, declaration in enumerate(declarations):
            compared |= declaration.compared(f"{declaration.caller} {index}: " if len(declarations) > 1 else "")
        sizes = [size for declaration in declarations for size in declaration.sizes]
        arguments = 0 if opening is None else len(opening.statement.sizes)
        if opening is None:
            agreed = shake_hands(Statement(bad.caller, compared, sizes, bad.problem), self)
        else:
            statement = opening.statement
            statement.caller = bad.caller
            statement.problem = bad.problem or statement.problem
            own = statement.compared
            first = {name: own[name] for name in ("the loss", "arguments") if name in own}
            statement.compared = {**first, **compared, **own}  # errors name the first difference
            statement.tolerance = max(statement.tolerance, *(x.tolerance for x in declarations))
            # the arguments' sizes come first, so that their number is known to whoever asks about them
            statement.sizes = [*statement.sizes, *sizes]
            agreed = shake_hands(statement, self)
            opening.agreed = Agreed(agreed.shards[:arguments], agreed.replicate, agreed.same, agreed.payload)
        found = iter(agreed.shards[arguments:])
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
    """Agree with all ranks on rows and settings, and return how many rows each rank holds.

    Within a step whose declarations have been agreed on already, no message is sent.

    Args:
        caller: name of the loss, first word of any error.
        rows: this rank's rows, by name; dimension 0 counts rows.
        world: the ranks.
        problem: an error in this rank's input.
        settings: values that must be equal on every rank.

    Returns:
        For each entry of ``rows``, its split over the ranks.

    Raises:
        ValueError: on every rank alike, if any rank has a problem, brings NaN or infinite rows (unless the session's
            ``check_finite`` is off), or if ranks bring different kinds of rows or settings.

    Examples:
        >>> import torch
        >>> meet("Loss", {"embeddings": torch.ones(3, 2)}, world=World())
        [Shards(sizes=(3,), rank=0)]
    """
    return Session.of(world).meet(caller, rows, problem, settings or {})


def refuse(caller: str, problem: str, *, world: World) -> NoReturn:
    """Take part in the other ranks' :func:`meet` with a problem, so that every rank raises it.

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
