"""What the collectives check before they send anything: the tensor, the settings, and that ranks agree on them."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.collectives.transport import OPS
from contrastive_zoo.row_checks import described, tensor_problem
from contrastive_zoo.session import Session, meet, refuse
from contrastive_zoo.world import Shards, World

NO_ROWS = "rows have at least one dimension, got a single number. Pass x.reshape(1)."


def sent_problem(x: object) -> str | None:
    """What is wrong with a tensor that is sent as its bytes, in words; 8-bit floats can be.

    Examples:
        >>> sent_problem([1.0])
        'x must be a tensor, got list.'
    """
    is_short_float = isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize == 1 and not x.is_meta
    return None if is_short_float else tensor_problem("x", x)


def agree(name: str, x: Tensor, world: World, *, problem: str | None = None, **settings: object) -> None:
    """Check that shape, dtype and settings are valid and the same on every rank.

    Raises:
        ValueError: on every rank alike, they are not.

    Examples:
        >>> agree("all_reduce", torch.ones(()), World(), op="sum")
    """
    if wrong := sent_problem(x):
        refuse(name, wrong, world=world)
    agree_on_rows(name, x.reshape(1, *x.shape), world, problem=problem, **settings)


def agree_on_rows(name: str, rows: Tensor, world: World, *, problem: str | None = None, **settings: object) -> Shards:
    """Check that trailing shape, dtype and settings are valid and the same on every rank; return the shard sizes.

    Raises:
        ValueError: on every rank alike, they are not.

    Examples:
        >>> agree_on_rows("all_gather", torch.ones(2, 3), World())
        Shards(sizes=(2,), rank=0)
    """
    if wrong := sent_problem(rows):
        refuse(name, wrong, world=world)
    op, gradient = settings.get("op", "sum"), settings.get("gradient", "partial")
    if not (isinstance(op, str) and op in OPS):
        problem = f"op is one of {', '.join(OPS)}, got {described(op)}."
    if not (isinstance(gradient, str) and gradient in ("partial", "complete")):
        problem = f"gradient is 'partial' or 'complete', got {described(gradient)}."
    root = settings.get("src", settings.get("dst", 0))
    if not (isinstance(root, int) and 0 <= root < world.size):
        problem = f"rank {described(root)} is not one of the group's ranks 0 … {world.size - 1}."
    if rows.ndim == 0:
        problem = NO_ROWS
    unchecked = Session.of(world, check_finite=False)
    return meet(name, {"x": rows}, world=unchecked, problem=problem, settings=settings)[0]
