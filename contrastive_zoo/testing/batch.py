"""A global batch, described by a few numbers that can be drawn, shrunk and pasted into a test."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

Labels = Literal["mixed", "singletons", "same", "distinct"]
SampleKind = Literal["gaussian", "clustered", "duplicates", "collinear", "zeros", "huge", "tiny"]
FEATURES = 3  # features of a sample, the input of the encoder


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of all ranks, and the shard sizes; labels are ``"mixed"`` in classes of about three samples.

    Examples:
        >>> batch = GlobalBatch((1, 2), d=1)
        >>> batch
        GlobalBatch((1, 2), d=1)
        >>> print(batch)
        W=2, shards [1, 2], d=1
    """

    shards: tuple[int, ...]
    d: int = 2
    labels: Labels = "mixed"
    kind: SampleKind = "gaussian"
    seed: int = 0

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in self._changed().items()]
        return f"GlobalBatch({', '.join([str(self.shards), *arguments])})"

    def __str__(self) -> str:
        arguments = [f"{name}={value}" for name, value in ({"d": self.d} | self._changed()).items()]
        return ", ".join([f"W={len(self.shards)}", f"shards {list(self.shards)}", *arguments])

    def _changed(self) -> dict[str, object]:
        return {x.name: value for x in fields(self)[1:] if (value := getattr(self, x.name)) != x.default}

    @property
    def total(self) -> int:
        return sum(self.shards)

    def samples(self, views: int = 1) -> list[Tensor]:
        """Return one float64 tensor [N, FEATURES] per view, the input of the encoder."""
        generator = torch.Generator().manual_seed(self.seed)
        n = self.total
        x = torch.randn(views, n, FEATURES, dtype=torch.float64, generator=generator)
        pick = torch.randint(max(n, 1), (n,), generator=generator)
        if self.kind == "clustered" and n:
            x = x[:, pick % 2] + 0.01 * x
        elif self.kind == "duplicates" and n:
            x = x[:, pick // 2]
        elif self.kind == "collinear":
            x = x[:, :1] * torch.linspace(1, 2, n, dtype=x.dtype)[:, None] + 1e-6 * x
        elif self.kind == "zeros":
            x = x * (pick % 2)[:, None]
        elif self.kind in ("huge", "tiny"):
            x = x * (1e12 if self.kind == "huge" else 1e-12)
        return list(x)

    def classes(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        n = self.total
        if self.labels == "same":
            return torch.zeros(n, dtype=torch.int64)
        if self.labels == "distinct":
            return torch.randperm(n, generator=generator)
        mixed = torch.randint(max(1, n // 3), (n,), generator=generator)
        if self.labels == "singletons":
            single = torch.rand(n, generator=generator) < 0.4
            mixed = mixed.where(~single, n + torch.arange(n))
        return mixed


ORDINARY: tuple[SampleKind, ...] = ("gaussian", "clustered")
"""Kinds of samples at which every loss is smooth, with probability one."""

ADVERSARIAL: tuple[SampleKind, ...] = ("duplicates", "collinear", "zeros", "huge", "tiny")
"""Kinds of samples with ties, kinks and extreme norms."""


@st.composite
def splits(draw: st.DrawFn, world_sizes: Sequence[int], *, min_samples: int, max_per_rank: int = 6) -> tuple[int, ...]:
    """Draw shard sizes: even, uneven, and with empty ranks; ``min_samples`` to ``W · max_per_rank`` in total."""
    world_size = draw(st.sampled_from(sorted(world_sizes)))
    if not draw(st.booleans()):
        return (draw(st.integers(-(-min_samples // world_size), max_per_rank)),) * world_size
    sizes: list[int] = []
    for later in reversed(range(world_size)):  # ranks, which can hold the rest of min_samples
        sizes.append(draw(st.integers(max(0, min_samples - sum(sizes) - max_per_rank * later), max_per_rank)))
    return tuple(sizes)


def global_batches(
    world_sizes: Sequence[int] = (1, 2, 3, 4), *, kinds: Sequence[SampleKind] = ORDINARY, width: int | None = None
) -> st.SearchStrategy[GlobalBatch]:
    """Draw global batches of 2 to 6 · W samples; without ``width`` their width is drawn too.

    Examples:
        >>> from hypothesis import given
        >>> @given(global_batches((2,), width=3))
        ... def two_ranks_hold_at_most_six_samples_each(batch):
        ...     assert len(batch.shards) == 2 and max(batch.shards) <= 6 and batch.total >= 2
        >>> two_ranks_hold_at_most_six_samples_each()
    """
    return st.builds(
        GlobalBatch,
        splits(world_sizes, min_samples=2),
        d=st.integers(1, 6) if width is None else st.just(width),
        labels=st.sampled_from(get_args(Labels)),
        kind=st.sampled_from(list(kinds)),
        seed=st.integers(0, 999),
    )


def uneven(size: int) -> tuple[int, ...]:
    """Return shard sizes 1, 2, 3, 4, 1, …"""
    return tuple(1 + rank % 4 for rank in range(size))


def training_of(batch: GlobalBatch) -> tuple[GlobalBatch, ...]:
    """Return five steps from a batch: unchanged, uneven, one sample on each rank, all on rank 0, unchanged again."""
    size = len(batch.shards)
    on_rank_0 = (batch.total, *[0] * (size - 1))
    splits = [batch.shards, uneven(size), (1,) * size, on_rank_0, batch.shards]
    return tuple(replace(batch, shards=x, seed=batch.seed + 100 * i) for i, x in enumerate(splits))
