"""The session of one step: what all ranks have agreed on and gathered, passed from the wrapper to the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from contrastive_zoo.ranks.devices import ValueCheck
from contrastive_zoo.ranks.handshake import Agreed, Statement, shake_hands
from contrastive_zoo.ranks.row_checks import first_non_finite, in_one_line, row_kind, tensor_problem, tolerance
from contrastive_zoo.ranks.world import Machines, Shards, World

Function = Callable[..., Tensor]
"""Computes rows from one or several tensors of rows of equal length, row by row, or concatenates them."""


Fetch = Callable[[Tensor, Shards], Tensor]
"""Gathers: from this rank's rows and their shard sizes to the rows of all ranks."""


@dataclass
class Derivations:
    """From what tensors were derived, as long as they exist; a cache also holds the rows that were gathered.

    Its keys are the ids of this rank's tensors: equal tensors are not the same entry, and a comparison would cost a pass
    over them. Each entry holds its tensor, so that no other tensor gets its id.
    """

    sources: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    gathered: dict[int, tuple[Tensor, Tensor]] | None = None  # None where no rows are gathered twice

    def derive(self, function: Function, *rows: Tensor) -> Tensor:
        """Return ``function(*rows)``, and record it unless it is one of ``rows``."""
        result = function(*rows)
        if all(result is not x for x in rows):
            self.sources[result] = function, rows
        return result

    def narrowest(self, rows: Tensor) -> tuple[Tensor, Function]:
        """Return the rows of 16 bits that ``rows`` were derived from, and the function; ``rows`` if there are none.

        Sources that were concatenated are concatenated here, too. The function holds no tensor.
        """
        if rows not in self.sources:
            return rows, unchanged
        function, sources = self.sources[rows]
        narrow, functions = zip(*map(self.narrowest, sources), strict=True)
        if any(x.dtype.itemsize != 2 for x in narrow):
            return rows, unchanged

        def restore(received: Tensor) -> Tensor:
            count = len(received) // len(functions)
            parts = (received[i * count : (i + 1) * count] for i in range(len(functions)))
            return function(*(of_source(x) for of_source, x in zip(functions, parts, strict=True)))

        return (narrow[0] if len(narrow) == 1 else torch.cat(narrow)), restore

    def gather(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        """Return the rows of all ranks: stored, derived from stored rows, or fetched. Do not write to them."""
        if self.gathered is None:
            return fetch(rows, shards)
        if id(rows) not in self.gathered:
            if rows in self.sources:
                function, sources = self.sources[rows]
                of_source = Shards(tuple(size // len(sources) for size in shards.sizes), shards.rank)
                parts = (self.gather(x, of_source, fetch).split(list(of_source.sizes)) for x in sources)
                with torch.no_grad():
                    result = torch.cat([function(*of_rank) for of_rank in zip(*parts, strict=True)])
            else:
                result = fetch(rows, shards)
            self.gathered[id(rows)] = rows, result
        return self.gathered[id(rows)][1]


def unchanged(rows: Tensor) -> Tensor:
    """Return ``rows``, which were derived from no others."""
    return rows


@dataclass
class Findings:
    """What turns out while a step is computed."""

    # checks of values on an accelerator, which the wrapper reads in the next call; None where values are checked at
    # once, or not at all
    later: list[ValueCheck] | None = None
    # whether a user's loss has drawn random numbers or changed a buffer while ranks computed it in parts
    draws: bool = False


@dataclass(frozen=True, eq=False)
class Session(World):
    """A world and what its ranks have agreed on in one step."""

    check_finite: bool = True  # whether NaN and infinite rows are refused
    # whether candidates pass from rank to rank, one shard at a time, rather than being gathered; or the ranks of each
    # machine, so that shards pass first inside a machine and then between machines
    ring: bool | Machines = False
    # the factor of the gradient of sharded parameters, of which each rank holds another part
    sharded_factor: float = 1.0
    derivations: Derivations = field(default_factory=Derivations, repr=False)
    findings: Findings = field(default_factory=Findings, repr=False)

    @classmethod
    def of(cls, world: World, **options: Any) -> Session:  # type: ignore[override]  # of a world, with options
        """``world`` if it is a session, otherwise a new one of its ranks with these options."""
        if isinstance(world, Session):
            return world
        return cls(world.rank, world.size, world.group, caller=world.caller, **options)

    def with_cache(self) -> Session:
        """The same session with a cache: rows that several losses compare are gathered once."""
        if self.derivations.gathered is not None or self.size == 1:
            return self
        return replace(self, derivations=Derivations(self.derivations.sources, {}))


def agree(
    caller: str,
    rows: Mapping[str, Tensor],
    *,
    world: World,
    problem: str | None = None,
    settings: Mapping[str, object] | None = None,
    **stated: Any,
) -> Agreed:
    """Agree with all ranks on rows, settings, and what else a :class:`Statement` says.

    Raises:
        ValueError: on every rank alike, if any rank has a problem, brings NaN or infinite rows (unless the session's
            ``check_finite`` is off), or if ranks bring different kinds of rows or settings.
    """
    if problem is not None:  # what is no tensor has no size
        rows = {name: x for name, x in rows.items() if tensor_problem(name, x) is None}
    elif Session.of(world).check_finite:
        problem = first_non_finite(rows)
    # losses of embeddings on an accelerator choose other sums than on a CPU
    compared = {name: row_kind(x, device=x.is_floating_point()) for name, x in rows.items()}
    compared |= {name: in_one_line(value) for name, value in (settings or {}).items()}
    sizes = [len(x) if x.ndim else 1 for x in rows.values()]
    precision = tolerance(rows.values())
    return shake_hands(Statement(caller, compared, sizes, problem, tolerance=precision, **stated), world)


def agree_on_shards(caller: str, rows: Mapping[str, Tensor], *, world: World, **stated: Any) -> list[Shards]:
    """Return how many rows each rank holds, after :func:`agree`, which takes the same arguments."""
    return agree(caller, rows, world=world, **stated).shards


def refuse(caller: str, problem: str, *, world: World) -> NoReturn:
    """Take part in the other ranks' :func:`agree_on_shards` with a problem, so that every rank raises it."""
    agree_on_shards(caller, {}, world=world, problem=problem)
    raise AssertionError("a problem was met without an error")
