"""Hypothesis strategies of global batches and shard sizes."""

from collections.abc import Sequence
from typing import get_args

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("contrastive_zoo.testing needs hypothesis: pip install 'contrastive_zoo[testing]'") from error

from contrastive_zoo.testing.batch import GlobalBatch, Labels, SampleKind

ORDINARY: tuple[SampleKind, ...] = ("gaussian", "clustered")
"""Kinds of samples at which every loss is smooth, with probability one."""

ADVERSARIAL: tuple[SampleKind, ...] = ("duplicates", "collinear", "zeros", "huge", "tiny")
"""Kinds of samples with ties, kinks and extreme norms."""


@st.composite
def splits(
    draw: st.DrawFn, world_sizes: Sequence[int] = (1, 2, 3, 4), *, min_samples: int = 1, max_per_rank: int = 6
) -> tuple[int, ...]:
    """Draw shard sizes: even, uneven, and with empty ranks; ``min_samples`` to ``W · max_per_rank`` in total."""
    world_size = draw(st.sampled_from(sorted(world_sizes)))
    if draw(st.booleans()):
        sizes = [draw(st.integers(0, max_per_rank)) for _ in range(world_size)]
    else:
        sizes = [draw(st.integers(-(-min_samples // world_size), max_per_rank))] * world_size
    sizes[-1] += max(0, min_samples - sum(sizes))
    return tuple(sizes)


def global_batches(
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    *,
    min_samples: int = 2,
    max_per_rank: int = 6,
    kinds: Sequence[SampleKind] = ORDINARY,
    labels: Sequence[Labels] = get_args(Labels),
    width: int | None = None,
) -> st.SearchStrategy[GlobalBatch]:
    """Draw global batches of ``min_samples`` to ``W · max_per_rank`` samples; without ``width`` their width is drawn too.

    Examples:
        >>> from hypothesis import given
        >>> @given(global_batches((2,), max_per_rank=3))
        ... def two_ranks_hold_two_to_six_samples(batch):
        ...     assert len(batch.shards) == 2 and 2 <= batch.total <= 6
        >>> two_ranks_hold_two_to_six_samples()
    """
    return st.builds(
        GlobalBatch,
        splits(world_sizes, min_samples=min_samples, max_per_rank=max_per_rank),
        d=st.integers(1, 6) if width is None else st.just(width),
        labels=st.sampled_from(list(labels)),
        kind=st.sampled_from(list(kinds)),
        seed=st.integers(0, 999),
    )
