"""The state of one step: what a rank states, what has been agreed on, and how a loss that only declares itself stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from contrastive_zoo.handshake import Agreed, Statement
from contrastive_zoo.later import ValueCheck
from contrastive_zoo.world import Machines, Shards, World


@dataclass(frozen=True)
class Options:
    """Options of a step, equal on every rank.

    Args:
        check_finite: whether NaN and infinite rows are refused.
        ring: whether candidates pass from rank to rank, one shard at a time, rather than being gathered; or the ranks
            of each machine, so that shards pass first inside a machine and then between machines.
        sharded_factor: the factor of the gradient of sharded parameters, of which each rank holds another part.
        reads_values: whether checks wait for the values of labels, weights and the like that are on an accelerator; a
            wrapper reads them in the next call instead.
    """

    check_finite: bool = True
    ring: bool | Machines = False
    sharded_factor: float = 1.0
    reads_values: bool = True


UNCHECKED = Options(check_finite=False, reads_values=False)
"""Of a loss whose arguments have been checked on every rank."""


@dataclass
class Declaration:
    """What one loss states before it computes: its rows, its settings, and the problem that it finds in them."""

    caller: str
    rows: Mapping[str, str]
    """The kind of one row, by name."""
    sizes: list[int]
    settings: Mapping[str, str]
    problem: str | None
    tolerance: float
    shards: list[Shards] = field(default_factory=list)
    """The split of each of the rows over the ranks, once all ranks have agreed."""

    def compared(self, prefix: str) -> dict[str, str]:
        """The text that must be equal on every rank, by name."""
        return {prefix + name: value for name, value in {**self.rows, **self.settings}.items()}


@dataclass
class Opening:
    """The part of a step's first handshake that is not a declaration of a loss.

    Args:
        statement: the arguments, the class tree and the options; the declarations are added to it.
        agreed: what ranks have agreed on for the arguments; None before the handshake.
    """

    statement: Statement
    agreed: Agreed | None = None


class Replicate(BaseException):
    """Raised in a loss when all ranks have agreed to compute it from the gathered rows: it stops on this rank's rows."""


class Declared(BaseException):
    """Raised in a loss that has declared itself: it stops before it computes."""


class ComputedFrom(NamedTuple):
    """What a loss that runs once is computed from.

    Args:
        rows: this rank's, whose gradients come out W times as large; or those of all ranks.
        world: the ranks that compute it together.
        own: which of the first of ``rows`` are this rank's, if others are, too; those need no gradient.
    """

    rows: Mapping[str, Tensor]
    world: World
    own: slice | None


@dataclass
class Progress:
    """The state of a step."""

    opening: Opening | None = None
    declaring: list[Declaration] | None = None
    """The declarations so far, while losses only declare themselves; otherwise None."""
    agreed: list[Declaration] = field(default_factory=list)
    """Declarations of losses that are still to be computed, in order."""
    settings: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """By the id of a loss that is still to be computed, the settings with which it has declared itself."""
    numbers: dict[tuple[int, ...], tuple[Any, Any]] = field(default_factory=dict)
    """By the ids of tensors: the tensors, so that ids stay theirs, and what the host has read of them."""
    changes: Callable[[], bool] | None = None
    """Tells whether the loss has drawn random numbers or changed a buffer; None for a loss that cannot."""
    go_on: Callable[[Mapping[str, Tensor]], ComputedFrom] | None = None
    """For a loss that runs once: what it is computed from after the handshake, given the rows with which it has begun."""
    later: list[ValueCheck] | None = None
    """The checks of values on an accelerator, which the wrapper reads in the next call; None where no values are checked."""
