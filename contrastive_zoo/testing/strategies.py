"""Hypothesis strategies: global batches, as small descriptions."""

from collections.abc import Sequence
from typing import get_args

import torch
from hypothesis import strategies as st

from contrastive_zoo.testing.batch import GlobalBatch, Labels, Rows

ORDINARY: tuple[Rows, ...] = ("gaussian", "clustered")
"""Rows at which every loss is smooth, with probability one."""

ADVERSARIAL: tuple[Rows, ...] = ("duplicates", "collinear", "zeros", "huge", "tiny")
"""Rows with ties, kinks and extreme norms."""


@st.composite
def splits(
    draw: st.DrawFn, world_sizes: Sequence[int] = (1, 2, 3, 4), *, least: int = 1, most: int = 6
) -> tuple[int, ...]:
    """Samples per rank: even, uneven, and with empty ranks; ``least`` to ``W · most`` in all.

    Example:
        >>> from hypothesis import given
        >>> @given(splits((2, 3), most=4))
        ... def somebody_has_something(shards):
        ...     assert len(shards) in (2, 3) and 1 <= sum(shards) <= 12
        >>> somebody_has_something()
    """
    world_size = draw(st.sampled_from(sorted(world_sizes)))
    if draw(st.booleans()):
        sizes = [draw(st.integers(0, most)) for _ in range(world_size)]
    else:
        sizes = [draw(st.integers(-(-least // world_size), most))] * world_size
    sizes[-1] += max(0, least - sum(sizes))
    return tuple(sizes)


def global_batches(
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    *,
    least: int = 2,
    most: int = 6,
    rows: Sequence[Rows] = ORDINARY,
    labels: Sequence[Labels] = get_args(Labels),
    width: int | None = None,
) -> st.SearchStrategy[GlobalBatch]:
    """Global batches of ``least`` to ``W · most`` samples.

    Args:
        world_sizes: the W to draw from.
        least: samples of all ranks together, at least.
        most: samples of one rank, at most.
        rows: kinds of rows to draw from; adversarial ones have ties and kinks, where gradients are not defined.
        labels: kinds of labels to draw from.
        width: of the embeddings; None draws it.

    Example:
        >>> from hypothesis import given
        >>> @given(global_batches((2,), most=3))
        ... def two_ranks_hold_two_to_six_samples(batch):
        ...     assert len(batch.shards) == 2 and 2 <= batch.total <= 6
        >>> two_ranks_hold_two_to_six_samples()
    """
    return st.builds(
        GlobalBatch,
        splits(world_sizes, least=least, most=most),
        d=st.integers(1, 6) if width is None else st.just(width),
        labels=st.sampled_from(list(labels)),
        rows=st.sampled_from(list(rows)),
        seed=st.integers(0, 999),
    )


def temperatures() -> st.SearchStrategy[float]:
    """From 1 down to 0.01, where exponentials underflow unless their maximum is taken out.

    Example:
        >>> from hypothesis import find
        >>> find(temperatures(), lambda t: t < 0.1)
        0.05
    """
    return st.sampled_from([1.0, 0.5, 0.1, 0.05, 0.01])


def views(most: int = 4) -> st.SearchStrategy[int]:
    """How many views a sample has: two to ``most``.

    Example:
        >>> from hypothesis import find
        >>> find(views(), lambda number: True)
        2
    """
    return st.integers(2, most)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """What embeddings come in, the widest first.

    Example:
        >>> from hypothesis import find
        >>> find(dtypes(), lambda dtype: dtype.itemsize == 2)
        torch.bfloat16
    """
    return st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
