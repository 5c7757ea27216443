"""Begin a step of a loss: check inputs, compare them between ranks, and prepare embeddings."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_zoo.collectives import derived
from contrastive_zoo.devices import device_problem
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.precision import at_least_float32, rounded
from contrastive_zoo.engine.unit_rows import unit_rows
from contrastive_zoo.handshake import refuse_empty
from contrastive_zoo.loss_base.checks import labelled_problem, shared_problem, views_problem
from contrastive_zoo.session import Session, meet
from contrastive_zoo.step_state import Replicate
from contrastive_zoo.world import Shards, World


def begin(
    caller: str,
    rows: Mapping[str, Tensor | None],
    *,
    world: World,
    problem: str | None = None,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    **settings: object,
) -> list[Shards]:
    """Check inputs and settings, compare them between ranks, and return the shard sizes of each input.

    Inputs that are None are left out. Settings that are tensors are learnable and are not compared.

    Raises:
        ValueError: on every rank: a temperature that is not positive, an unknown reduction, ``problem``, no rows on any
            rank, or a difference that :func:`contrastive_zoo.session.meet` finds.

    Examples:
        >>> from contrastive_zoo.world import ALONE
        >>> begin("NTXent", {"views": torch.ones(2, 3)}, temperature=0.0, world=ALONE)
        Traceback (most recent call last):
        ...
        ValueError: NTXent: temperature must be positive and finite, got 0.0. For a logit scale s pass temperature=1/s.
    """
    given_rows = {name: x for name, x in rows.items() if x is not None}
    problem = problem or shared_problem(temperature, reduction) or device_problem(given_rows)
    settings = {"reduction": reduction, "temperature": temperature, **settings}
    fixed = {name: x for name, x in settings.items() if not isinstance(x, Tensor)}
    shards = meet(caller, given_rows, world=world, problem=problem, settings=fixed)
    refuse_empty(caller, shards[0])
    return shards


class Begun(NamedTuple):
    """What a loss that has begun is computed from.

    Args:
        rows: those of this rank, or of all ranks where every rank computes all of a small batch's loss; None stays None.
        shards: the split of each of ``rows`` that is not None over ``world``.
        world: the ranks that compute the loss together.
        own: which of the first of ``rows`` are this rank's, if others are, too; those need no gradient.
    """

    rows: Sequence[Any]
    shards: list[Shards]
    world: World
    own: slice | None


def begin_once(caller: str, rows: Mapping[str, Tensor | None], *, world: World, **settings: Any) -> Begun:
    """:func:`begin` for a loss that meets the other ranks once, and uses its arguments only as this returns them.

    A loss that is declared with ``begins_once=True`` runs once in a step of ``DistributedLoss``. Any other runs twice: up to
    where it meets the other ranks, and then, with the arguments that they have agreed on, to its end.

    Examples:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_once("Loss", {"views": torch.ones(2, 3), "negatives": None}, world=ALONE)[1:]
        ([Shards(sizes=(2,), rank=0)], World(rank=0, size=1, group=None), None)
    """
    if not (isinstance(world, Session) and world.runs_once):
        return Begun([*rows.values()], begin(caller, rows, world=world, **settings), world, None)
    shards = None
    with suppress(Replicate):
        shards = begin(caller, rows, world=world, **settings)
    given, computing, own = world.go_on({name: x for name, x in rows.items() if x is not None})
    shards = shards or [Shards((len(x),)) for x in given.values()]
    return Begun([given.get(name) for name in rows], shards, computing, own)


def begin_labelled(
    caller: str,
    embeddings: Tensor | None,
    labels: Tensor | None,
    *,
    normalize: bool = True,
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> tuple[Tensor, Tensor, Shards]:
    """Begin with labelled embeddings; return them prepared by :func:`prepare_rows`, their labels, and shard sizes.

    Examples:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_labelled("Loss", torch.eye(2), torch.tensor([0, 7]), world=ALONE)[1:]
        (tensor([0, 7]), Shards(sizes=(2,), rank=0))
    """
    problem = labelled_problem(embeddings, labels) or problem
    named = {"embeddings": embeddings, "labels": labels}
    shards, *_ = begin(caller, named, problem=problem, normalize=normalize, world=world, **settings)
    assert embeddings is not None  # begin raises otherwise
    assert labels is not None
    return prepare_rows(embeddings, normalize=normalize, world=world), labels_as_int64(labels, world), shards


def agree_on_views(
    caller: str, views: Sequence[Tensor], *, problem: str | None = None, world: World, **settings: Any
) -> Shards:
    """Begin with views of the same samples; return the shard sizes of the samples.

    Examples:
        >>> from contrastive_zoo.world import ALONE
        >>> agree_on_views("Loss", [torch.ones(2, 1), torch.ones(2, 1)], world=ALONE)
        Shards(sizes=(2,), rank=0)
    """
    named = {f"view {index}": view for index, view in enumerate(views)}
    return begin(caller, named, problem=views_problem(views) or problem, world=world, **settings)[0]


def begin_views(
    caller: str, views: Sequence[Tensor], *, normalize: bool = True, world: World, **settings: Any
) -> tuple[list[Tensor], Shards]:
    """Begin with views of the same samples; return them prepared by :func:`prepare_rows`, and shard sizes.

    Examples:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_views("Loss", [torch.ones(2, 1), 3 * torch.ones(2, 1)], world=ALONE)[0][1].tolist()
        [[1.0], [1.0]]
    """
    shards = agree_on_views(caller, views, normalize=normalize, world=world, **settings)
    return [prepare_rows(view, normalize=normalize, world=world) for view in views], shards


def prepare_rows(rows: Tensor, *, normalize: bool, world: World) -> Tensor:
    """Return rows in at least float32, normalised to unit length if asked; a zero row stays zero.

    Examples:
        >>> prepare_rows(torch.tensor([[3.0, 4.0]]), normalize=True, world=World())
        tensor([[0.6000, 0.8000]])
    """
    return derived(lambda x: unit_rows(at_least_float32(x)) if normalize else at_least_float32(x), rows, world=world)


def labels_as_int64(labels: Tensor, world: World) -> Tensor:
    """Return labels as int64: bool cannot be sorted, and indexing treats uint8 as a mask.

    Examples:
        >>> labels_as_int64(torch.tensor([True, False]), World())
        tensor([1, 0])
    """
    return labels if labels.dtype == torch.int64 else derived(lambda x: x.long(), labels, world=world)


def round_to_input_dtype(rows: Tensor, like: Tensor, world: World) -> Tensor:
    """Return prepared rows, rounded to the dtype of ``like`` if that has 16 bits: 16-bit matmuls then lose nothing.

    Examples:
        >>> round_to_input_dtype(torch.tensor([[1.001]]), torch.tensor([[2.0]], dtype=torch.bfloat16), World())
        tensor([[1.]])
    """
    return rows if is_dense() else derived(lambda x: rounded(x, like.dtype), rows, world=world)


def concat_views(rows: Sequence[Tensor], world: World) -> Tensor:
    """Return views concatenated.

    Examples:
        >>> concat_views([torch.zeros(1, 2), torch.ones(1, 2)], World())
        tensor([[0., 0.],
                [1., 1.]])
    """
    return derived(lambda *x: torch.cat(x), *rows, world=world)


def sample_indices(shards: Shards, like: Tensor, *, views: int = 1) -> Tensor:
    """Return the indices of local samples in the global batch, view after view.

    Examples:
        >>> sample_indices(Shards((1, 2), rank=1), torch.ones(2, 3), views=2)
        tensor([1, 2, 1, 2])
    """
    return torch.arange(shards.start, shards.start + shards.size, device=like.device).repeat(views)
