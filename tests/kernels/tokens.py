"""Cases of late interaction for ``ranks.py``: kernels against all products of tokens, in float64.

The error is that beside the dense formula in float32 of the same tokens, normalised in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.kernels import max_sim

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 64  # tokens of a document
LENGTHS = 19, 100, 5
"""Of the longest query, document and negative: a rank's query tokens are several tiles, and so are a document's."""

SHARDS = {1: [(5,), (1,)], 2: [(3, 2), (0, 4)], 3: [(2, 0, 3), (1, 4, 2)]}
"""The pairs of each rank at each step."""


def all_scores(queries: Tensor, documents: Tensor, query_mask: Tensor, document_mask: Tensor) -> Tensor:
    products = torch.einsum("iad,jbd->ijab", queries, documents)
    best = products.masked_fill(~document_mask[:, None], -torch.inf).max(3).values
    return torch.einsum("ija,ia->ij", best, query_mask.to(best))


@dataclass(frozen=True)
class TokenCase:
    dtype: str = "float32"
    temperature: float = 20.0
    cosine: float = 0.0  # of any two tokens, in the mean
    normalize: bool = True
    ring: bool = False
    width: int = 24
    budget: int = 2**20  # of selected tokens that the forward pass keeps
    query_norm: float = 1.0  # a mean
    large: int = 0

    def shards(self, world: int, index: int) -> Sequence[Sequence[int]]:
        return SHARDS[world][-1:] if self.large else SHARDS[world]

    def inputs(self, pairs: int, step: int) -> list[Tensor]:
        """Return queries, documents and negatives of all ranks, and their masks."""
        generator, rows, masks = torch.Generator().manual_seed(step), [], []
        center = self.cosine**0.5 * F.normalize(torch.randn(self.width, generator=generator), dim=0)
        for length in LENGTHS:
            x = F.normalize(torch.randn(pairs, length, self.width, generator=generator), dim=2)
            x = center + (1 - self.cosine) ** 0.5 * x
            x *= torch.randn(pairs, length, 1, generator=generator).exp()
            mask = torch.rand(pairs, length, generator=generator) < torch.rand(pairs, 1, generator=generator)
            mask[:, length // 2] = True
            x *= self.query_norm if not rows else 1.0
            rows.append(x.masked_fill(~mask[..., None], 100.0).to(DEVICE, getattr(torch, self.dtype)))
            masks.append(mask.to(DEVICE))
        return [*rows, *masks]

    def expected(self, rows: Sequence[Tensor], masks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in rows]
        queries, *others = (F.normalize(x, dim=2) if self.normalize else x for x in leaves)
        scores = [all_scores(queries, x, masks[0], mask) for x, mask in zip(others, masks[1:], strict=True)]
        own = torch.arange(len(queries), device=DEVICE)
        value = F.cross_entropy(torch.cat(scores, 1) / self.temperature, own)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    def errors(self, world: int, rank: int, shards: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        """Return the errors of value and gradients of kernels and of the dense formula, relative to those of all ranks."""
        loss = cz.MaxSim(temperature=self.temperature, normalize=self.normalize)
        wrapped, errors = cz.DistributedLoss(loss, ring=self.ring), []
        for step, sizes in enumerate(shards):
            given = self.inputs(sum(sizes), step)
            truth, dense = (self.expected(given[:3], given[3:], x) for x in (torch.float64, torch.float32))
            local = [x.split(list(sizes))[rank].detach().clone() for x in given]
            rows = [x.requires_grad_() for x in local[:3]]
            with cz.engine.memory_budget(self.budget), cz.engine.use_implementation("triton"):
                part = wrapped(rows[0], rows[1], local[3], local[4], rows[2], local[5])
                gradients = torch.autograd.grad(part, rows)
            errors.append(_errors(part.detach(), dense[0], truth[0], truth[0]))
            for x, *others in zip(gradients, dense[1:], truth[1:], strict=True):
                y, z = (of.split(list(sizes))[rank] for of in others)
                errors.append(_errors(x.double() / world, (world * y.to(x.dtype)).double() / world, z, others[1]))
        return errors


def _errors(found: Tensor, dense: Tensor, expected: Tensor, whole: Tensor) -> tuple[float, float]:
    x, y = (float((x.double() - expected).norm() / whole.norm()) for x in (found, dense))
    return x, y


TOKEN_CASES = [
    TokenCase(),
    TokenCase(ring=True, budget=0),
    TokenCase("bfloat16", 0.02, budget=0),
    TokenCase("float16", 1.0, ring=True, width=40, normalize=False),
    TokenCase("float16", 0.1, cosine=0.98, width=64),
    TokenCase("bfloat16", 1.0, cosine=0.9, width=16, ring=True),
    TokenCase("float16", 2.0**16, normalize=False, query_norm=2.0**11),
]
LARGE_TOKEN_CASES = [replace(x, large=1) for x in (TOKEN_CASES[0], TOKEN_CASES[5])]
"""Launched as a Hopper GPU does, with several documents a program, in blocks of few documents."""


# ------------------------------------------------------------------------------------------------------------ mutants


def launched_as_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("contrastive_zoo.engine.kernels.blocks._capability", lambda device: 90)
    patch.setattr(max_sim, "MIN_PROGRAMS", 1)
    patch.setattr("contrastive_zoo.engine.tiling.TILE_BYTES", 4 * 100 * 3)


def _changed(column: int, change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a mutant that changes a column of the tiles of documents."""

    def mutant(patch: pytest.MonkeyPatch) -> None:
        tiles = max_sim.Documents.tiles

        def wrong(self: Any) -> tuple[Tensor, Tensor]:
            table, first = tiles(self)
            table[:, column] = change(table[:, column])
            return table, first

        patch.setattr(max_sim.Documents, "tiles", wrong)

    return mutant


def not_scaled(patch: pytest.MonkeyPatch) -> None:
    """The mutant that stores small gradients of scores in float16 as they are."""
    patch.setattr(max_sim, "_unit", torch.ones_like)


def _one_more(left: Tensor) -> Tensor:
    """Return the counts with a token of the next document, if there is one and the tile has room."""
    more = (left < TILE).to(left.dtype)
    more[-1] = 0
    return left + more


next_document_counts, tiles_apart = _changed(3, _one_more), _changed(2, torch.zeros_like)
next_document_counts.__name__, tiles_apart.__name__ = "next_document_counts", "tiles_apart"

TOKEN_MUTANTS = [
    (next_document_counts, TokenCase()),
    (tiles_apart, TokenCase()),
    (not_scaled, TOKEN_CASES[6]),
]
