"""Write which path a step takes into docs/pages/architecture.md: ``python -m tools.paths_page``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import contrastive_zoo as cz
from tools.pages import PAGES, fill, table

PAGE = PAGES / "architecture.md"


def _views(n: int, width: int) -> list[Tensor]:
    return [torch.empty(n, width, device="meta")] * 2


def _labelled(n: int, width: int) -> list[Tensor]:
    return [torch.empty(n, width, device="meta"), torch.empty(n, dtype=torch.int64, device="meta")]


def _tokens(n: int, width: int) -> list[Tensor]:
    return [torch.empty(n, 32, width, device="meta")] * 2


def spread(embeddings: Tensor, labels: Tensor) -> Tensor:
    return embeddings.var(0).sum() + 0 * labels.sum()


Arguments = Callable[[int, int], list[Tensor]]
Row = tuple[str, Callable[[], Any], Arguments, int, int, str]

_RING: dict[str, Any] = {"ring": True}

ROWS: tuple[Row, ...] = (
    ("NTXent", cz.NTXent, _views, 1, 64, "cpu"),
    ("NTXent", cz.NTXent, _views, 1, 4096, "cpu"),
    ("NTXent", cz.NTXent, _views, 1, 4096, "cuda"),
    ("NTXent", cz.NTXent, _views, 8, 16, "cpu"),
    ("NTXent", cz.NTXent, _views, 8, 4096, "cpu"),
    ("NTXent, `ring=True`", lambda: cz.DistributedLoss(cz.NTXent(), **_RING), _views, 8, 4096, "cpu"),
    ("NTXent", cz.NTXent, _views, 8, 4096, "cuda"),
    ("Clip", cz.Clip, _views, 8, 4096, "cpu"),
    ("SupCon", cz.SupCon, _labelled, 8, 4096, "cpu"),
    ("SigLIP", cz.SigLIP, _views, 8, 4096, "cpu"),
    ("Triplet", cz.Triplet, _labelled, 8, 16, "cpu"),
    ("Triplet", cz.Triplet, _labelled, 8, 4096, "cpu"),
    ("ProxyAnchor", lambda: cz.ProxyAnchor(1000, 128), _labelled, 8, 4096, "cpu"),
    ("VICReg", cz.VICReg, _views, 8, 4096, "cpu"),
    ("MaxSim", cz.MaxSim, _tokens, 8, 64, "cpu"),
    ("WeightedSum of NTXent and Clip", lambda: cz.WeightedSum([cz.NTXent(), cz.Clip()]), _views, 8, 4096, "cpu"),
    ("any other function", lambda: spread, _labelled, 8, 4096, "cpu"),
)
"""A loss, its arguments of 128 features, the numbers of ranks and of samples of each, and the device."""


def path_table() -> str:
    """Return the table: who computes what, how embeddings get there, by which arithmetic, and with how many messages."""
    lines = []
    for name, make, arguments, ranks, samples, device in ROWS:
        found = cz.explain(make(), *arguments(samples, 128), world_size=ranks, device=device)
        plans = found.plan.members or [found.plan]
        arithmetic = ", ".join(dict.fromkeys(x.arithmetic for x in plans))
        place = {"cpu": "CPU", "cuda": "CUDA"}[device]
        lines.append([name, f"{ranks} × {samples:,}, {place}", *found.plan[:2], arithmetic, found.messages])
    return table(["loss", "ranks × samples", "work", "embeddings", "arithmetic", "messages"], lines, texts=5)


if __name__ == "__main__":
    fill(PAGE, {"paths": path_table()})
