"""Sweep over the local anchors with a compiled block function, whose passes over a block become a few fused kernels.

Compiled code also computes which candidates are positives and negatives, from ids, and calls the plain formulas of
:mod:`contrastive_zoo.engine.masked` and :mod:`contrastive_zoo.engine.pairwise`, of which the compiler derives gradients.
Its arguments are tensors whose sizes are symbols, so that a graph takes blocks and batches of every size. Between blocks
nothing changes: the messages are those of the uncompiled sweep.
"""

import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock, BlockFunction, RowwiseSweep
from contrastive_zoo.engine.row_statistics import complete
from contrastive_zoo.ranks.compat import every_size_a_symbol

BACKEND = "inductor"
OPTIONS: dict[str, dict[str, Any]] = {"inductor": {"fallback_random": True}}  # random numbers of uncompiled code
_compiled: WeakKeyDictionary[Any, Callable[..., tuple[Tensor, Tensor]] | None] = WeakKeyDictionary()
"""By kind of loss: :func:`block_losses`, compiled; None where compilation failed."""


class CompiledSweep(RowwiseSweep):
    """Call a compiled block function on all local anchors, block by block; uncompiled, with a warning, if that fails."""

    def _block_losses(self, rows: slice, anchors: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        loss, kind = owner_and_kind(self.on_block)
        function = compiled_for(kind)
        if function is None:
            return super()._block_losses(rows, anchors, candidates)
        layout = self.layout
        copies = None if layout.own_candidates is None else layout.own_candidates[rows]
        of_rows = layout.ids[rows], layout.candidate_ids, copies, layout.companions_of(rows)
        with every_size_a_symbol():
            return function(loss, self.terms, anchors, candidates, *of_rows)

    def losses(self) -> tuple[Tensor, Tensor]:
        return self._or_uncompiled(super().losses)

    def local_gradients(self, weights: Tensor | None) -> list[Tensor]:
        return self._or_uncompiled(lambda: RowwiseSweep.local_gradients(self, weights))

    def _or_uncompiled(self, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` returns. If it fails, and uncompiled it does not, compilation failed: warn once.

        No message is sent in between, so other ranks do not notice.
        """
        _, kind = owner_and_kind(self.on_block)
        if compiled_for(kind) is None:
            return compute()
        try:
            return compute()
        except Exception as error:  # a compiler's errors have no common class
            function, _compiled[kind] = _compiled[kind], None
            try:
                result = compute()
            except BaseException:
                _compiled[kind] = function  # the loss itself raises
                raise
            inner = getattr(error, "inner_exception", error)
            reason = f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
            warnings.warn(
                f"torch.compile cannot compile {_name(kind)}, which is computed uncompiled. Choose "
                f"use_implementation('auto'), or see what the compiler says: {reason}",
                stacklevel=2,
            )
            return result


def block_losses(
    loss: Any,
    terms: int,
    anchors: Tensor,
    candidates: Tensor,
    ids: Tensor,
    candidate_ids: Tensor,
    copies: Tensor | None,
    companions: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return losses and counts of a block's anchors, [c, terms]; losses that do not count are zero.

    ``loss`` is a module whose method ``on_block`` is the block function, or the function, and adds so many ``terms``.
    ``copies`` are the candidates that are a copy of each anchor, −1 for none; None if no anchor has one.
    """
    same = ids[:, None] == candidate_ids
    index = torch.arange(len(candidate_ids), device=ids.device)
    positive = same if copies is None else same & (copies[:, None] != index)
    block = AnchorBlock(anchors, candidates, positive, ~same, ids, candidate_ids, tuple(companions))
    losses, counts = complete(getattr(loss, "on_block", loss)(block))
    losses, counts = losses.reshape(-1, terms), counts.reshape(-1, terms)
    return losses.where(counts > 0, 0), counts


def owner_and_kind(on_block: BlockFunction) -> tuple[Any, Any]:
    """Return the module whose method is the block function, and what losses with one graph share: class or code."""
    loss = getattr(on_block, "__self__", on_block)
    return loss, getattr(loss, "graph_kind", type(loss))


def compiled_for(kind: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return :func:`block_losses` compiled for one kind, with a code object of its own: each may have eight graphs."""
    if kind not in _compiled:
        code = block_losses.__code__.replace(co_name=f"block_losses_of_{_name(kind)}")
        function = FunctionType(code, block_losses.__globals__)
        _compiled[kind] = torch.compile(function, dynamic=True, backend=BACKEND, options=OPTIONS.get(BACKEND))
    return _compiled[kind]


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or kind.co_name
