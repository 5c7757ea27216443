"""Blocks of local anchors: what a row-wise loss sees of the global batch, and the sweep over all of them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.pairwise import first_of_equals, share_across_blocks, with_equal_columns
from contrastive_zoo.engine.tiling import USUAL_MATRICES, budget
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.adjoints import all_reduced
from contrastive_zoo.ranks.compiling import inner_graph
from contrastive_zoo.ranks.transport import reduce_scatter_rows
from contrastive_zoo.ranks.world import Shards, World


def class_numbers(ids: Int[Tensor, " n"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " c"]]:
    """Return the class of each row, 0, 1, …, and each class's number of rows; on an accelerator as many as rows."""
    if devices.on_cpu(ids):
        _, classes, counts = ids.unique(return_inverse=True, return_counts=True)
        return classes, counts
    ordered, order = ids.sort()  # to count the classes, the host would have to wait for the device
    begins = torch.zeros_like(ids)
    begins[1:] = ordered[1:] != ordered[:-1]
    classes = torch.empty_like(ids).scatter_(0, order, begins.cumsum(0))
    return classes, torch.zeros_like(ids).index_add_(0, classes, torch.ones_like(ids))


def only_positives(classes: Int[Tensor, " n"], counts: Int[Tensor, " c"]) -> Int[Tensor, " n"] | None:
    """Return each row's one positive, or itself for none or several; None if it is known that none has any."""
    has_two = counts == 2
    if devices.on_cpu(counts) and not has_two.any():
        return None
    index = torch.arange(len(classes), device=classes.device)
    index_sums = counts.new_zeros(len(counts)).index_add_(0, classes, index)
    return (index_sums[classes] - index).where(has_two[classes], index)


def clear_excluded(tile: Shaped[Tensor, "h w"], excluded: Int[Tensor, " h"], value: float | bool) -> None:
    """Write a value over one entry of each row: that of the column ``excluded``, if it is one of the tile's."""
    if tile.shape[1] == 0:
        return
    column = excluded.clamp(0, tile.shape[1] - 1)
    entries = tile.gather(1, column[:, None])
    tile.scatter_(1, column[:, None], entries.masked_fill_((column == excluded)[:, None], value))


@dataclass(frozen=True)
class AnchorBlock:
    """Hold c of this rank's anchors, the N candidates of all ranks, and which candidates are positives and negatives."""

    anchors: Float[Tensor, "c d"]
    candidates: Float[Tensor, "N e"]  # of the anchors' width in most losses
    positive: Bool[Tensor, "c N"]  # whether the candidate has the anchor's id, and is not the anchor itself
    negative: Bool[Tensor, "c N"]  # whether the candidate has another id
    ids: Int[Tensor, " c"]  # the ids of the anchors
    candidate_ids: Int[Tensor, " N"]
    companions: tuple[tuple[Tensor, Tensor], ...] = ()
    """Further data without gradient, each for anchors and for candidates, such as a guide's embeddings."""
    first_of_equals: Int[Tensor, " N"] | None = None  # for each candidate the first one that equals it

    def with_equal_columns(self, matrix: Float[Tensor, "c N"]) -> Float[Tensor, "c N"]:
        """Return a matrix with equal numbers for equal candidates, however a matmul rounds them, before any are selected."""
        return with_equal_columns(matrix, self.first_of_equals)


class BlockLoss:
    """The loss of a block of anchors, ``function(block, **settings)``.

    The function returns the losses of the block's anchors, [c], and whether or how many times each of them counts, [c];
    row i depends on anchor i only. A loss that adds several means returns them as ``terms`` columns, [c, terms] both. A
    setting that is a tensor is learnable; ``module`` is the user's module that the function calls, if there is one. The
    function compares anchors with ``columns`` more than the candidates, such as class weights, and makes ``matrices`` as
    large as the similarities of the block, which ``explain`` counts. It runs within ``in_force(learnable)``, also where
    autograd runs a part of it again for a checkpoint.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        *,
        terms: int = 1,
        columns: int = 0,
        matrices: float = USUAL_MATRICES,
        module: nn.Module | None = None,
        in_force: Callable[[Mapping[str, Tensor]], AbstractContextManager[object]] = nullcontext,
        **settings: Any,
    ) -> None:
        self.function, self.settings, self.in_force = function, settings, in_force
        self.terms, self.columns, self.matrices, self.module = terms, columns, matrices, module

    @classmethod
    def of(cls, function: Callable[..., tuple[Tensor, Tensor]], settings: SimpleNamespace, **more: Any) -> "BlockLoss":
        """Return the loss with those settings of a step that the function takes, unless others are given."""
        taken = inspect.signature(function).parameters.keys() & vars(settings).keys() - more.keys()
        return cls(function, **{name: getattr(settings, name) for name in sorted(taken)}, **more)

    @property
    def learnable(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.settings.items() if isinstance(x, Tensor) and x.requires_grad}

    def on_block(self, block: AnchorBlock, learnable: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return losses and counts, [c] or [c, terms], with these tensors in place of the learnable settings."""
        return self.function(block, **{**self.settings, **learnable})


@dataclass(frozen=True)
class BatchLayout:
    """Hold the ids of local anchors and of all candidates, from which each block's positives and negatives follow."""

    ids: Tensor  # int64: bool cannot be sorted, and indexing treats uint8 as a mask
    candidate_ids: Tensor
    companions: tuple[tuple[Tensor, Tensor], ...]
    candidate_shards: Shards
    world: World
    own_candidates: Tensor | None
    """The candidate that is each local anchor or a copy of it, another number for none; None if no anchor has one."""

    @cached_property
    def _ids_as_floats(self) -> tuple[Tensor, Tensor]:
        """The ids of anchors and candidates, renumbered 0, 1, … so that floats represent them exactly."""
        numbers, _ = class_numbers(torch.cat([self.ids, self.candidate_ids]))
        exact = numbers.to(torch.float32 if len(numbers) < 2**24 else torch.float64)
        return exact[: len(self.ids)], exact[len(self.ids) :]

    def _same_id(self, rows: slice) -> Tensor:
        if not devices.on_cpu(self.ids):
            return self.ids[rows, None] == self.candidate_ids
        # a CPU vectorises comparisons of floats into floats, and compares into booleans element by element
        anchors, candidates = self._ids_as_floats[0][rows], self._ids_as_floats[1]
        return torch.eq(anchors[:, None], candidates, out=anchors.new_empty(len(anchors), len(candidates))).bool()

    def block(self, rows: slice, anchors: Tensor, candidates: Tensor, first: Tensor | None = None) -> AnchorBlock:
        """Return the block of some anchors; ``first`` are the candidates' :func:`first_of_equals`."""
        positive = self._same_id(rows)
        negative, ids = ~positive, (self.ids[rows], self.candidate_ids)
        if self.own_candidates is not None:
            clear_excluded(positive, self.own_candidates[rows], False)
        companions = tuple((of_anchors[rows], of_candidates) for of_anchors, of_candidates in self.companions)
        return AnchorBlock(anchors, candidates, positive, negative, *ids, companions, first)


def anchor_slices(anchors: Tensor, candidates: int) -> Iterator[slice]:
    """Yield slices of anchors whose similarities to so many candidates fit into the budget, with all that a loss makes."""
    row_bytes = max(1, candidates) * anchors.dtype.itemsize
    height = tiling.block_height(row_bytes, budget(), on_cpu=anchors.device.type == "cpu")
    return (slice(top, min(top + height, len(anchors))) for top in range(0, len(anchors), height))


class RowwiseSweep:
    """Compute a loss of all local anchors, block by block, and its gradients."""

    def __init__(
        self, loss: BlockLoss, layout: BatchLayout, anchors: Tensor, candidates: Tensor, learnable: Sequence[Tensor]
    ) -> None:
        self.loss, self.layout = loss, layout
        self.anchors, self.candidates = anchors.detach(), candidates.detach()
        self.first_of_equals, self.columns = first_of_equals(self.candidates), len(candidates) + loss.columns
        # leaves of the graph of each block, which ends at them
        self.learnable = {name: x.detach().requires_grad_() for name, x in zip(loss.learnable, learnable, strict=True)}

    def _block_losses(self, rows: slice, anchors: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and counts of a block's anchors, [c, terms]; losses that do not count are zero."""
        block = self.layout.block(rows, anchors, candidates, self.first_of_equals)
        result = self.loss.on_block(block, self.learnable)
        losses, counts = (x.reshape(-1, self.loss.terms) for x in result)
        return losses.where(counts > 0, 0), counts

    def losses(self) -> tuple[Tensor, Tensor]:
        losses, counts = self.anchors.new_zeros(2, len(self.anchors), self.loss.terms)
        with torch.no_grad(), self.loss.in_force(self.learnable):
            candidates = share_across_blocks(self.candidates)
            for rows in anchor_slices(self.anchors, self.columns):
                losses[rows], counts[rows] = self._block_losses(rows, self.anchors[rows], candidates)
        return losses, counts

    @torch.no_grad()
    def loss_of_next_rank(self) -> Tensor:
        """Return the loss of the last anchor of the next rank that has any; anchors are the candidates."""
        layout, sizes = self.layout, self.layout.candidate_shards.sizes
        ranks = (rank % len(sizes) for rank in range(layout.world.rank + 1, layout.world.rank + 1 + len(sizes)))
        owner = next(rank for rank in ranks if sizes[rank])
        last = torch.tensor([sum(sizes[: owner + 1]) - 1], device=self.candidates.device)
        of_one = replace(layout, ids=layout.candidate_ids[last], own_candidates=last, companions=())
        sweep = RowwiseSweep(self.loss, of_one, self.candidates[last], self.candidates, [*self.learnable.values()])
        return sweep.losses()[0].sum()

    def gradients(self, weights: Tensor | None = None) -> list[Tensor]:
        """Return losses, counts, and the weighted sum's complete gradients by anchors, candidates, learnable settings."""
        danchors, dcandidates = torch.zeros_like(self.anchors), torch.zeros_like(self.candidates)
        dlearnable = [torch.zeros_like(x) for x in self.learnable.values()]
        # allocated once, so that no small tensor stays allocated between blocks
        losses, counts = self.anchors.new_zeros(2, len(self.anchors), self.loss.terms)
        candidates = share_across_blocks(self.candidates)
        with self.loss.in_force(self.learnable):
            for rows in anchor_slices(self.anchors, self.columns):
                with inner_graph():
                    anchors = self.anchors[rows].requires_grad_()
                    block_losses, counts[rows] = self._block_losses(rows, anchors, candidates)
                losses[rows] = block_losses.detach()
                if not block_losses.requires_grad:
                    continue
                weight = torch.ones_like(block_losses) if weights is None else weights[rows].to(block_losses.dtype)
                inputs = anchors, candidates, *self.learnable.values()
                danchors[rows], by_candidates, *by_learnable = torch.autograd.grad(
                    block_losses, inputs, weight, allow_unused=True, materialize_grads=True
                )
                if by_candidates.is_sparse:
                    dcandidates.index_add_(0, by_candidates._indices()[0], by_candidates._values())
                else:
                    dcandidates += by_candidates
                for total, part in zip(dlearnable, by_learnable, strict=True):
                    total += part
        dcandidates = reduce_scatter_rows(dcandidates, self.layout.candidate_shards, self.layout.world)
        dlearnable = [all_reduced(x, "sum", "partial", self.layout.world) for x in dlearnable]
        return [losses, counts, danchors, dcandidates, *dlearnable]
