"""The session of one step: what all ranks have agreed on, passed from the wrapper through the loss to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from torch import Tensor

from contrastive_zoo.ranks.devices import ValueCheck
from contrastive_zoo.ranks.gather_cache import Derivations, GatherCache
from contrastive_zoo.ranks.handshake import Statement, shake_hands
from contrastive_zoo.ranks.row_checks import first_non_finite, in_one_line, row_kind, tensor_problem, tolerance
from contrastive_zoo.ranks.world import Machines, Shards, World


@dataclass(frozen=True)
class Options:
    """Options of a step, equal on every rank.

    Args:
        check_finite: whether NaN and infinite rows are refused.
        ring: whether candidates pass from rank to rank, one shard at a time, rather than being gathered; or the ranks
            of each machine, so that shards pass first inside a machine and then between machines.
        sharded_factor: the factor of the gradient of sharded parameters, of which each rank holds another part.
    """

    check_finite: bool = True
    ring: bool | Machines = False
    sharded_factor: float = 1.0


UNCHECKED = Options(check_finite=False)
"""Of a loss whose arguments have been checked on every rank."""


@dataclass
class Findings:
    """What turns out while a step is computed.

    Args:
        later: checks of values on an accelerator, which the wrapper reads in the next call; None where values are checked at
            once, or not at all.
        draws: whether a user's loss has drawn random numbers or changed a buffer while ranks computed it in parts.
    """

    later: list[ValueCheck] | None = None
    draws: bool = False


@dataclass(frozen=True, eq=False)
class Session(World):
    """A world and what its ranks have agreed on in one step.

    Examples:
        >>> Session.of(World(), check_finite=False).options
        Options(check_finite=False, ring=False, sharded_factor=1.0)
    """

    options: Options = field(default_factory=Options)
    cache: GatherCache | None = field(default=None, repr=False)
    """The rows gathered in this step; None where no rows are gathered twice."""
    derivations: Derivations = field(default_factory=Derivations, repr=False)
    findings: Findings = field(default_factory=Findings, repr=False)

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

    def agree_on_shards(
        self, caller: str, rows: Mapping[str, Tensor], problem: str | None, settings: Mapping[str, object]
    ) -> list[Shards]:
        """:func:`agree_on_shards` within this session.

        Raises:
            ValueError: what :func:`agree_on_shards` raises.
        """
        if problem is not None:  # what is no tensor has no size
            rows = {name: x for name, x in rows.items() if tensor_problem(name, x) is None}
        elif self.options.check_finite:
            problem = first_non_finite(rows)
        # losses of embeddings on an accelerator choose other sums than on a CPU
        compared = {name: row_kind(x, device=x.is_floating_point()) for name, x in rows.items()}
        compared |= {name: in_one_line(value) for name, value in settings.items()}
        sizes = [len(x) if x.ndim else 1 for x in rows.values()]
        return shake_hands(Statement(caller, compared, sizes, problem, tolerance=tolerance(rows.values())), self).shards


def agree_on_shards(
    caller: str,
    rows: Mapping[str, Tensor],
    *,
    world: World,
    problem: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[Shards]:
    """Agree with all ranks on rows and settings, and return how many rows each rank holds.

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
        >>> agree_on_shards("Loss", {"embeddings": torch.ones(3, 2)}, world=World())
        [Shards(sizes=(3,), rank=0)]
    """
    return Session.of(world).agree_on_shards(caller, rows, problem, settings or {})


def refuse(caller: str, problem: str, *, world: World) -> NoReturn:
    """Take part in the other ranks' :func:`agree_on_shards` with a problem, so that every rank raises it.

    Raises:
        ValueError: always, on every rank.

    Examples:
        >>> refuse("Loss", "labels are missing.", world=World())
        Traceback (most recent call last):
        ...
        ValueError: Loss: labels are missing.
    """
    agree_on_shards(caller, {}, world=world, problem=problem)
    raise AssertionError("a problem was met without an error")
