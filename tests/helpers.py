"""What several test files share: numbers, comparisons, and jobs that report an error instead of dying of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.testing.worlds import Worlds

EXACT = 1e-10
"""What float64 results may differ by, relative to the larger of 1 and what is compared with."""

R = TypeVar("R")


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on every rank for the same seed: small integers for dtypes that round, otherwise normal."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.float32, torch.float64):
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    """Equal in dtype and shape; in value up to the tolerance, relative to the whole tensor's scale."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert distance(found, expected) <= tolerance, (found, expected)


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the larger of 1 and the largest number expected."""
    if not found.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def split(x: Tensor, shards: Sequence[int]) -> list[Tensor]:
    """Rank by rank."""
    return list(x.split(list(shards)))


def mine(x: Tensor, shards: Sequence[int]) -> Tensor:
    """This rank's part, as a leaf of its own."""
    return split(x, shards)[dist.get_rank()].detach().clone()


def said(job: Callable[[], Any], kind: type[BaseException] = ValueError) -> str | None:
    """What ``job`` complained of, None if it did not: for use on a rank."""
    try:
        job()
    except kind as error:
        return str(error)
    return None


def complaint(worlds: Worlds, world_size: int, bad: Callable[[], Any], good: Callable[[], R]) -> tuple[str, list[R]]:
    """The one sentence that every rank raises for ``bad``, and what ``good`` returns in the same world afterwards.

    Both run on every rank; that they are one job shows that no collective was left half done.
    """
    found = worlds.run(world_size, lambda: (said(bad), good()), timeout=10.0)
    texts = [text for text, _ in found]
    assert None not in texts, f"some rank did not raise: {texts}"
    assert len(set(texts)) == 1, f"ranks say different things: {texts}"
    return texts[0] or "", [value for _, value in found]


@contextmanager
def groups(*of: Sequence[int]) -> Iterator[Any]:
    """New process groups, gone afterwards; yields the one of this rank."""
    made = [dist.new_group(list(ranks)) for ranks in of]
    own = next(group for ranks, group in zip(of, made, strict=True) if dist.get_rank() in ranks)
    yield own
    dist.barrier()  # not after an error: the others may never come
    dist.destroy_process_group(own)
