"""Classify every pair of an anchor and a candidate as positive or negative: the core of SigLIP.

With A the anchors and B the candidates of all ranks, z_ij = 1 for i = j and −1 otherwise,

    X = scale · A Bᵀ + bias          L_i = Σ_j softplus(−z_ij X_ij)          G_ij = ∂L_i/∂X_ij = −z_ij σ(−z_ij X_ij)
    dA = scale · G B          dB = scale · Gᵀ A          dscale = Σ_i ⟨A_i, (G B)_i⟩          dbias = Σ_ij G_ij

The gradient of a pair depends on no other pair, so one sweep computes the loss and all gradients.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Reduction
from contrastive_zoo.engine.exchange import GatherExchange, Operand, RankBlock, Ring, Sweep, lengths
from contrastive_zoo.engine.plan import Arithmetic
from contrastive_zoo.engine.precision import MIN_NORM, matmul_rounding, sum_dtype, without_autocast
from contrastive_zoo.engine.tiling import tile_of, tile_scratch, tiles
from contrastive_zoo.ranks.adjoints import all_reduced
from contrastive_zoo.ranks.compat import softplus
from contrastive_zoo.ranks.compiling import Function, differentiable_once
from contrastive_zoo.ranks.world import Shards, World

_LINEAR_FROM = 40.0  # softplus(x) = x from here on, in float64 too


def sum_over_sigmoid_pairs(
    anchors: Float[Tensor, "n d"],
    candidates: Float[Tensor, "n d"],
    *,
    scale: float | Tensor,
    bias: float | Tensor,
    unit_norm: bool,
    factors: Sequence[Tensor] | None,
    reduction: Reduction,
    shards: Shards,
    world: World,
    arithmetic: Arithmetic,
    gathered: Tensor | None,
) -> Float[Tensor, "..."]:
    """Return ``-logsigmoid(z * (scale * A @ B.T + bias)).sum(1)``, reduced over the anchors of all ranks.

    Row i of the local candidates is the positive of anchor i. Other arguments are those of
    :func:`contrastive_zoo.engine.softmax.log_sum_exps`.
    """
    of_both = None if factors is None else (factors[0], factors[-1])
    sweep = _Sweep(
        row_shards=shards, column_shards=shards, world=world, factors=of_both, unit_norm=unit_norm,
        on_kernel=arithmetic == "kernel", reduction=reduction,
    )  # fmt: skip
    numbers = (x.to(anchors) if isinstance(x, Tensor) else anchors.new_full((), x) for x in (scale, bias))
    return _SigmoidPairs.apply(sweep, gathered, anchors, candidates, *numbers)


class _SigmoidPairs(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        sweep: "_Sweep",
        gathered: Tensor | None,
        anchors: Tensor,
        candidates: Tensor,
        scale: Tensor,
        bias: Tensor,
    ) -> Tensor:
        learns = sweep.learns and any(ctx.needs_input_grad) and sweep.reduction != "none"
        losses, gradients = sweep(anchors, candidates, scale, bias, learns=learns, gathered=gathered)
        ctx.sweep = sweep
        ctx.save_for_backward(anchors, candidates, scale, bias, *gradients)
        if sweep.reduction == "none":
            return losses
        total = all_reduced(losses.sum(dtype=sum_dtype(losses)), "sum", "complete", sweep.world)
        ctx.count = max(1, sweep.row_shards.total) if sweep.reduction == "mean" else 1
        return (total / ctx.count).to(anchors.dtype)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        anchors, candidates, scale, bias, *gradients = ctx.saved_tensors
        if ctx.sweep.reduction == "none":
            with torch.no_grad():
                _, gradients = ctx.sweep(anchors, candidates, scale, bias, learns=True, weights=grad_output)
        else:
            weight = (grad_output / ctx.count).to(anchors.dtype)
            gradients = [weight * x for x in gradients]
        return None, None, *(differentiable_once(x, anchors, candidates, scale, bias) for x in gradients)


@dataclass(frozen=True, kw_only=True)
class _Sweep(Sweep):
    """Compute losses of the local anchors, and gradients of their weighted sum, tile by tile."""

    on_kernel: bool
    reduction: Reduction

    def __call__(
        self,
        anchors: Tensor,
        candidates: Tensor,
        scale: Tensor,
        bias: Tensor,
        *,
        learns: bool,
        weights: Tensor | None = None,
        gathered: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return losses, and the gradients by anchors, candidates, scale and bias of their weighted sum if asked."""
        left, exchange = self.row_factors(anchors), self.exchange(candidates, gathered)
        with matmul_rounding(self.dtype, anchors.device.type):
            block: Any
            if self.on_kernel:
                from contrastive_zoo.engine.kernels.sigmoid import KernelBlock  # imported here: Triton is optional

                min_norm = MIN_NORM if self.normalizes else None
                block = KernelBlock(left, scale, bias, learns, min_norm, self.dtype or left.dtype)
            else:
                block = _Block(self.operand(left), max(self.column_shards.sizes), scale, bias, learns, weights)
            parts = self._parts(block, exchange)
            # a kernel returns one tensor for all ranks, all of which a view would keep until the backward pass
            dcandidates = next(parts).clone() if self.on_kernel else next(parts)
            self.complete(exchange, dcandidates if learns else None, parts)
        danchors = block.danchors
        if self.on_kernel:  # kernels would round the weights of positives, the largest, to 16 bits
            of_pairs = torch.linalg.vecdot(anchors, candidates)
            x = of_pairs * scale + bias
            g = -(-x).sigmoid()
            block.losses += softplus(-x, threshold=_LINEAR_FROM).sum()
            if learns:
                block.finish()
                danchors.addcmul_(candidates, g[:, None])
                dcandidates.addcmul_(anchors, g[:, None])
                block.products += torch.dot(g, of_pairs)
                block.dbias += g.sum()
        if not learns:
            return block.losses, []
        products = block.products if self.on_kernel else torch.dot(anchors.flatten(), danchors.flatten())
        sums = torch.stack([products, block.dbias])
        dscale, dbias = all_reduced(sums, "sum", "partial", self.world).unbind()
        return block.losses, [danchors.mul_(scale), dcandidates.mul_(scale), dscale, dbias]

    def _parts(self, block: Any, exchange: GatherExchange | Ring) -> Iterator[Tensor]:
        """Add all pairs to the block; yield the gradients with respect to candidates, of the local ones first."""
        windows: Iterable[tuple[Sequence[RankBlock], Any]]
        if self.on_kernel:
            windows = exchange.windows(block.dtype)
        else:
            windows = (([of], self.operand(x)) for of, x in zip(exchange.blocks, exchange, strict=True))
        for index, (blocks_here, candidates) in enumerate(windows):
            total = block.add(candidates, local=index == 0)
            yield from total.split(lengths(blocks_here)) if block.learns else [total]


@dataclass
class _Block:
    """Totals of the pairs of the local anchors with candidates seen so far, computed with torch, tile by tile."""

    anchors: Operand
    most_columns: int  # of any rank
    scale: Tensor
    bias: Tensor
    learns: bool  # whether gradients are computed
    weights: Tensor | None

    def __post_init__(self) -> None:
        rows, inverse = self.anchors.rows, self.anchors.inverse
        self.losses, self.dbias = rows.new_zeros(len(rows)), rows.new_zeros(())
        self.danchors = torch.zeros_like(rows) if self.learns else rows[:0]
        # the scale is a factor of the smaller of the two
        self.scaled = Operand(self.scale * rows, None) if inverse is None else Operand(rows, self.scale * inverse)
        self.scratch = [tile_scratch(rows, self.most_columns) for _ in range(2)]

    def add(self, candidates: Operand, *, local: bool) -> Tensor:
        """Add pairs with candidates, whose gradients it returns; positives are local ones of the anchors' own index."""
        rows = self.anchors.rows
        dcandidates = torch.zeros_like(candidates.rows) if self.learns else candidates.rows[:0]
        for i, j in tiles(len(rows), len(candidates.rows), rows):
            x, other = (tile_of(scratch, i, j) for scratch in self.scratch)
            a, b, anchors = self.scaled[i], candidates[j], self.anchors[i]
            torch.mm(a.rows, b.rows.t(), out=x)
            a.normalize(x, b).add_(self.bias)
            diagonal = x.diagonal(i.start - j.start) if local and i.start < j.stop and j.start < i.stop else x[:0, 0]
            diagonal.neg_()  # a pair's loss is softplus(x) of a negative, softplus(−x) of a positive
            self.losses[i] += softplus(x, threshold=_LINEAR_FROM, out=other).sum(1)
            if not self.learns:
                continue
            g = x.sigmoid_()
            diagonal.neg_()
            if self.weights is not None:
                g.mul_(self.weights[i, None])
            self.dbias += g.sum()
            self.danchors[i].addmm_(g if b.inverse is None else torch.mul(g, b.inverse, out=other), b.rows)
            if anchors.inverse is not None:
                g.mul_(anchors.inverse[:, None])
            dcandidates[j].addmm_(g.t(), anchors.rows)
        return dcandidates
