"""The session of one step: what all ranks have agreed on, passed from the wrapper to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from contrastive_zoo.ranks.devices import ValueCheck
from contrastive_zoo.ranks.differences import copies_difference
from contrastive_zoo.ranks.fingerprint import equal_arguments, fingerprint
from contrastive_zoo.ranks.handshake import Agreed, Statement, shake_hands
from contrastive_zoo.ranks.row_checks import first_non_finite, in_one_line, row_kind, tensor_problem, tolerance
from contrastive_zoo.ranks.world import World


@dataclass
class Findings:
    """What turns out while a step is computed."""

    later: list[ValueCheck] | None = None  # checks that the wrapper reads in the next call; None without any
    draws: bool = False  # whether a user's loss has drawn random numbers or changed a buffer, computed in parts
    # a user's row loss of this rank's last "anchor", and of the next rank's, the "other anchor"; None if not compared
    anchors: dict[str, Tensor] | None = None
    labels: Tensor | None = None  # of all ranks, if a loss compares one embedding of each sample by them


@dataclass(frozen=True, eq=False)
class Session(World):
    """A world and what its ranks have agreed on in one step."""

    check_finite: bool = True  # whether NaN and infinite rows are refused
    ring: bool = False  # whether candidates pass from rank to rank, one shard at a time, rather than being gathered
    sharded_factor: float = 1.0  # of the gradient of sharded parameters, of which each rank holds another part
    findings: Findings = field(default_factory=Findings, repr=False)

    @classmethod
    def of(cls, world: World, **options: Any) -> Session:  # type: ignore[override]  # of a world, with options
        """``world`` if it is a session, otherwise a new one of its ranks with these options."""
        ranks = world.rank, world.size, world.group
        return world if isinstance(world, Session) else cls(*ranks, caller=world.caller, **options)


def agree(
    caller: str,
    rows: Mapping[str, Tensor],
    *,
    world: World,
    problem: str | None = None,
    settings: Mapping[str, object] | None = None,
    distinct: Tensor | None = None,  # embeddings to search in, which may not be equal on two ranks
    **stated: Any,
) -> Agreed:
    """Agree with all ranks on rows, settings, and what else a :class:`Statement` says, or raise the same on all of them."""
    if problem is not None:  # what is no tensor has no size
        rows = {name: x for name, x in rows.items() if tensor_problem(name, x) is None}
    elif Session.of(world).check_finite:
        problem = first_non_finite(rows, optional=isinstance(world, Session))  # those with the option open a session
    # losses of embeddings on an accelerator choose other sums than on a CPU
    compared = {name: row_kind(x, device=x.is_floating_point()) for name, x in rows.items()}
    compared |= {name: in_one_line(value) for name, value in (settings or {}).items()}
    sizes = [len(x) if x.ndim else 1 for x in rows.values()]
    searched = {} if distinct is None or problem is not None else {"embeddings": distinct}
    digests = [fingerprint(None, searched)().digests.get(name, 0) for name in searched]
    stated |= {"tolerance": tolerance(rows.values()), "digests": digests}
    agreed = shake_hands(Statement(caller, compared, sizes, problem, **stated), world)
    if agreed.digests and (copies := equal_arguments(searched, agreed.digests)[1]):
        alone = "process_group=cz.World() searches in this rank's embeddings alone."
        raise ValueError(f"{caller}: {copies_difference(copies, world.size)} {alone}")
    return agreed


def refuse(caller: str, problem: str, *, world: World) -> NoReturn:
    """Take part in the other ranks' :func:`agree` with a problem, so that every rank raises it."""
    agree(caller, {}, world=world, problem=problem)
    raise AssertionError("unreachable")
