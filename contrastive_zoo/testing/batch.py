"""A global batch, described by a few numbers that can be drawn, shrunk and pasted into a test."""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Labels = Literal["mixed", "singletons", "same", "distinct"]
SampleKind = Literal["gaussian", "clustered", "duplicates", "collinear", "zeros", "huge", "tiny"]

FEATURES = 3
"""Features of a sample, the input of the encoder."""


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
        """Return the arguments after the shards that are not the default."""
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
