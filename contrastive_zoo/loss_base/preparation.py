"""How a step begins: checks, what ranks agree on, and rows of one kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.collectives import derived
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.precision import rounded, wide
from contrastive_zoo.engine.unit_rows import unit
from contrastive_zoo.handshake import refuse_empty
from contrastive_zoo.loss_base.checks import labelled_problem, shared_problem, views_problem
from contrastive_zoo.session import meet
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
    """Check what every loss checks, agree on it with all ranks, and learn how the rows lie over them.

    Rows that are None are not there; of a setting that is a tensor, which is learnt, nothing is compared.

    Raises:
        ValueError: on every rank alike: a temperature that is not positive, an unknown reduction, ``problem``, no rows
            at all, or whatever :func:`contrastive_zoo.session.meet` finds.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> begin("NTXent", {"views": torch.ones(2, 3)}, temperature=0.0, world=ALONE)
        Traceback (most recent call last):
        ...
        ValueError: NTXent: temperature must be positive and finite, got 0.0. For a logit scale s pass temperature=1/s.
    """
    problem = problem or shared_problem(temperature, reduction)
    given_rows = {name: x for name, x in rows.items() if x is not None}
    settings = {"reduction": reduction, "temperature": temperature, **settings}
    fixed = {name: x for name, x in settings.items() if not isinstance(x, Tensor)}
    shards = meet(caller, given_rows, world=world, problem=problem, settings=fixed)
    refuse_empty(caller, shards[0])
    return shards


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
    """:func:`begin` for labelled rows: these, :func:`prepared`, their labels, and how they lie over the ranks.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_labelled("Loss", torch.eye(2), torch.tensor([0, 7]), world=ALONE)[1:]
        (tensor([0, 7]), Shards(sizes=(2,), rank=0))
    """
    problem = labelled_problem(embeddings, labels) or problem
    named = {"embeddings": embeddings, "labels": labels}
    shards, *_ = begin(caller, named, problem=problem, normalize=normalize, world=world, **settings)
    assert embeddings is not None  # begin has refused it
    assert labels is not None
    return prepared(embeddings, normalize=normalize, world=world), whole_labels(labels, world), shards


def meet_views(
    caller: str, views: Sequence[Tensor], *, problem: str | None = None, world: World, **settings: Any
) -> Shards:
    """:func:`begin` for views of the same samples: how these lie over the ranks.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> meet_views("Loss", [torch.ones(2, 1), torch.ones(2, 1)], world=ALONE)
        Shards(sizes=(2,), rank=0)
    """
    named = {f"view {index}": view for index, view in enumerate(views)}
    return begin(caller, named, problem=views_problem(views) or problem, world=world, **settings)[0]


def begin_views(
    caller: str, views: Sequence[Tensor], *, normalize: bool = True, world: World, **settings: Any
) -> tuple[list[Tensor], Shards]:
    """:func:`meet_views`, and the views :func:`prepared`.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_views("Loss", [torch.ones(2, 1), 3 * torch.ones(2, 1)], world=ALONE)[0][1].tolist()
        [[1.0], [1.0]]
    """
    shards = meet_views(caller, views, normalize=normalize, world=world, **settings)
    return [prepared(view, normalize=normalize, world=world) for view in views], shards


def prepared(rows: Tensor, *, normalize: bool, world: World) -> Tensor:
    """Rows in at least 32 bits, on the unit sphere if asked; a zero row stays zero.

    Example:
        >>> prepared(torch.tensor([[3.0, 4.0]]), normalize=True, world=World())
        tensor([[0.6000, 0.8000]])
    """
    return derived(lambda x: unit(wide(x)) if normalize else wide(x), rows, world=world)


def whole_labels(labels: Tensor, world: World) -> Tensor:
    """Labels as int64: those of another dtype cannot be sorted (bool), or would be taken for masks (uint8).

    Example:
        >>> whole_labels(torch.tensor([True, False]), World())
        tensor([1, 0])
    """
    return labels if labels.dtype == torch.int64 else derived(lambda x: x.long(), labels, world=world)


def narrowed(rows: Tensor, like: Tensor, world: World) -> Tensor:
    """Prepared rows that are numbers of ``like``'s dtype if that has 16 bits, for products of such to take as they are.

    Example:
        >>> narrowed(torch.tensor([[1.001]]), torch.tensor([[2.0]], dtype=torch.bfloat16), World())
        tensor([[1.]])
    """
    return rows if is_dense() else derived(lambda x: rounded(x, like.dtype), rows, world=world)


def in_a_row(rows: Sequence[Tensor], world: World) -> Tensor:
    """Views one after the other.

    Example:
        >>> in_a_row([torch.zeros(1, 2), torch.ones(1, 2)], World())
        tensor([[0., 0.],
                [1., 1.]])
    """
    return derived(lambda *x: torch.cat(x), *rows, world=world)


def numbered(shards: Shards, like: Tensor, *, views: int = 1) -> Tensor:
    """Numbers of my samples in the global batch, view after view.

    Example:
        >>> numbered(Shards((1, 2), rank=1), torch.ones(2, 3), views=2)
        tensor([1, 2, 1, 2])
    """
    return torch.arange(shards.start, shards.start + shards.size, device=like.device).repeat(views)
