"""Similarities, and means, whose bits do not depend on how rows are split into blocks and ranks.

A matmul's last bits depend on shapes and threads. Here each row is cut into two slices of b bits each, x = 2^e (high + low),
so few that every sum of d products has at most 53 bits, and is exact in float64 in any order (Ozaki et al. 2012,
https://doi.org/10.1007/s11075-011-9478-1).
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.metrics.ranking import Floats
from contrastive_zoo.ranks.world import World

_UNIT = 2**52
_HALF = 2**26
# Cosines of one direction differ by up to 2^-23: embeddings of other lengths are rounded to other float32 when normalised.
# Of float64 it is the rounding of :func:`similarities`. They stay different, by one step, where the boundary between two
# multiples is among them. This is not so near 1 and −1: embeddings of one direction tie among themselves.
TIE_BITS = {torch.float32: 21, torch.float64: 40}
_ELEMENTS = 2**18  # elements that are divided at once in float64, 2 MiB: they stay in the cache


def means_over_ranks(values: Mapping[str, Floats], world: World) -> dict[str, float]:
    """Return the mean of all ranks' numbers of each name, from 0 to 1; NaN does not count, and is the mean of none."""
    sums: list[int] = []  # of multiples of 2^-52
    for x in values.values():
        units = np.rint(x[~np.isnan(x)] * _UNIT).astype(np.int64)
        sums += int((units // _HALF).sum()), int((units % _HALF).sum()), len(units)
    totals = [sum(of_ranks) for of_ranks in zip(*world.exchange(sums), strict=True)]
    return {
        name: float(Fraction(high * _HALF + low, count * _UNIT)) if count else math.nan
        for name, high, low, count in zip(values, totals[0::3], totals[1::3], totals[2::3], strict=True)
    }


def _slices(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return high, low and scale of rows ``scale · (high + low)``: multiples of 2^−b and of 2^−2b, in float64."""
    bits = (53 - max(rows.shape[-1] - 1, 1).bit_length()) // 2
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True)
    exponent = torch.frexp(largest.double()).exponent.clamp(-1000, 1022)
    scaled = rows * _power_of_two(-exponent)
    high = rounded(scaled, bits)
    return high, rounded(scaled.sub_(high), 2 * bits), _power_of_two(exponent)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return x, from −2 to 2, to a multiple of 2^−bits: a number whose last bit that is leaves nothing smaller of x."""
    ruler = 1.5 * 2.0 ** (52 - bits)
    return (x + ruler).sub_(ruler)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2.0 ** exponent`` in float64, exactly and on any device, for −1022 ≤ exponent ≤ 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def similarities(queries: Float[Tensor, "... n d"], rows: Float[Tensor, "... m d"]) -> Float[Tensor, "... n m"]:
    """Return all dot products in float64, each a function of its two embeddings alone.

    For d up to 4,096 the error is below ``2^-40 d · max|x| · max|y|``; typically 1e-14 of the product of the norms.
    """
    if rows.shape[-2] == 0 or queries.shape[-2] == 0 or rows.shape[-1] == 0:
        return queries.new_zeros(*queries.shape[:-1], rows.shape[-2], dtype=torch.float64)
    (high, low, scale), (high_rows, low_rows, scale_rows) = map(_slices, (queries, rows))
    coarse = high @ high_rows.mT
    fine = high @ low_rows.mT
    fine += low @ high_rows.mT
    return coarse.add_(fine).mul_(scale).mul_(scale_rows.mT)


def scores_of(
    queries: Float[Tensor, "... n d"], rows: Float[Tensor, "... m d"], *, normalize: bool
) -> Float[Tensor, "... n m"]:
    """Return the scores of :func:`prepared` embeddings; cosines are rounded to multiples of ``2^-TIE_BITS``."""
    scores = similarities(queries, rows)
    return rounded(scores, TIE_BITS[queries.dtype]) if normalize else scores


def norms(rows: Float[Tensor, "... d"]) -> Float[Tensor, "... 1"]:
    """Return the Euclidean norms in float64, each a function of its embedding alone."""
    if rows.numel() == 0:
        return rows.new_zeros(*rows.shape[:-1], 1, dtype=torch.float64)
    high, low, scale = _slices(rows)
    coarse, fine = (high * high).sum(-1, keepdim=True), (high * low).sum(-1, keepdim=True)
    return torch.sqrt(coarse.add_(fine, alpha=2.0)).mul_(scale)


def prepared(
    rows: Float[Tensor, "n d"], *, normalize: bool, lengths: Float[Tensor, "n 1"] | None = None
) -> Float[Tensor, "n d"]:
    """Return embeddings on the CPU, in float64 if they have it, else float32; of unit length if ``normalize``."""
    rows = rows.detach().cpu()
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if not normalize:
        return rows.to(dtype).contiguous()
    lengths = norms(rows) if lengths is None else lengths
    divisors = lengths.masked_fill(lengths == 0, 1.0)
    unit = torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
    step = max(1, _ELEMENTS // max(1, rows.shape[-1]))
    for out, x, length in zip(unit.split(step), rows.split(step), divisors.split(step), strict=True):
        out.copy_(x / length)
    return unit
