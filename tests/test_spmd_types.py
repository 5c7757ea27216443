"""The types that the collectives declare to the checker of spmd_types: what is equal on all ranks, and what is summed.

R(eplicated) and I(nvariant) are equal on all ranks, V(arying) are not, and P(artial) are terms of a sum. The gradient of R
is P and the reverse; those of I and V are of the same type.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks import adjoints
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import need, numbers
from tools.peer_losses import packages

pytestmark = pytest.mark.peers

COLLECTIVES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "all_reduce": ("P → R", cz.collectives.all_reduce),
    "all_reduce, mean, complete": ("P → I", lambda x: cz.collectives.all_reduce(x, "mean", gradient="complete")),
    "broadcast": ("V → R", cz.collectives.broadcast),
    "all_gather": ("V → R", cz.collectives.all_gather),
    "all_gather, complete": ("V → I", lambda x: cz.collectives.all_gather(x, gradient="complete")),
    "reduce_scatter": ("P → V", cz.collectives.reduce_scatter),
    "replicated": ("I → R", cz.collectives.replicated),
}


@pytest.fixture(scope="module")
def checked_worlds() -> Iterator[Worlds]:
    """Ranks whose process imports spmd_types, which no other test does."""
    need("spmd-types")
    with Worlds(timeout=300.0) as worlds:
        yield worlds


def library(kind: str) -> tuple[Any, Any, dict[object, object]]:
    """Return spmd_types, its checker, and the type that the group of all ranks has by this kind."""
    sys.path.append(str(packages.FOLDER))
    import spmd_types
    from spmd_types import checker

    return spmd_types, checker, {dist.group.WORLD: getattr(spmd_types, kind)}


def checked(collective: Callable[[Tensor], Tensor], source: str) -> tuple[str, list[str]]:
    """Return the type of the result of a source, and the types of the collective and of its adjoint; or the error."""
    spmd_types, checker, before = library(source)
    declared, linear = [], adjoints._linear

    def recorded(x: Tensor, types: str, *of_map: object) -> Tensor:
        declared.append(types)
        return linear(x, types, *of_map)

    with checker.typecheck(), patch.object(adjoints, "_linear", recorded):
        x = torch.ones(4, 2, requires_grad=True)
        spmd_types.assert_type(x, before)
        try:
            y = collective(x)
        except spmd_types.SpmdTypeError:
            return "refused", declared
        (after,) = spmd_types.get_local_type(y).values()
        y.backward(torch.ones_like(y))
    return after.name, declared


OF_GRADIENT = {"R": "P", "P": "R", "I": "I", "V": "V"}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_spmd_types_accepts_a_collective_and_its_adjoint(name: str, checked_worlds: Worlds) -> None:
    types, collective = COLLECTIVES[name]
    source, result = types.split(" → ")
    backward = f"{OF_GRADIENT[result]} → {OF_GRADIENT[source]}"
    for after, (forward, first, *_) in checked_worlds.run(2, checked, collective, source):
        assert (after, forward, first) == (result, types, backward)
    terms_of_a_sum = {"P", "V"}
    for other in OF_GRADIENT.keys() - (terms_of_a_sum if source == "P" else {source}):
        assert {after for after, _ in checked_worlds.run(2, checked, collective, other)} == {"refused"}


def value_of_a_loss() -> str:
    """Return the type of a loss's value that is computed unchecked, as the page says."""
    spmd_types, checker, invariant = library("I")
    loss_fn = cz.DistributedLoss(cz.NTXent())
    with checker.typecheck():
        views = [numbers(3, 2, seed=2 * dist.get_rank() + i).requires_grad_() for i in range(2)]
        with spmd_types.no_typecheck():
            value = loss_fn(*views)
        spmd_types.assert_type(value, invariant)
        (3 * value).backward()
    return "" if all(x.grad is not None for x in views) else "no gradient"


def test_a_loss_runs_unchecked_within_a_checked_training(checked_worlds: Worlds) -> None:
    assert checked_worlds.run(2, value_of_a_loss) == ["", ""]
