"""Which candidates are negatives, and which of them are taken: functions of one query's candidates."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import described, is_integer

Sampling = Literal["top", "random"]

_INTEGERS = (("num_negatives", 1, 10**6), ("range_min", 0, 2**62), ("range_max", 0, 2**62), ("seed", 0, math.inf))
"""The settings that are integers, and their bounds. The result has ``num_negatives`` columns."""


def _is_score(x: object) -> bool:
    """Return whether scores can be compared with x: an integer of 64 bits, or another number that is not NaN."""
    if isinstance(x, int):
        return not isinstance(x, bool) and abs(x) < 2**63
    return isinstance(x, (float, np.integer, np.floating)) and not math.isnan(x)


@dataclass(frozen=True)
class Selection:
    """How negatives are chosen among the candidates of a query, which are ordered by score.

    Arguments are those of :func:`contrastive_zoo.data.mine_hard_negatives`.
    """

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    guide_margin: float = 0.0
    sampling: Sampling = "top"
    seed: int = 0

    @property
    def problem(self) -> str | None:
        """Why these settings select nothing, in words; None if they are possible."""
        for name, at_least, at_most in _INTEGERS:
            value = getattr(self, name)
            if not (is_integer(value, at_least=at_least, at_most=at_most) or (name == "range_max" and value is None)):
                most = f", {at_least} … {at_most}" if at_most < math.inf else f" of at least {at_least}"
                return f"{name} is an integer{most}, got {described(value)}."
        if not isinstance(self.sampling, str) or self.sampling not in ("top", "random"):
            return f"sampling is 'top' or 'random', got {self.sampling!r}."
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            return (
                f"range_min={self.range_min} … range_max={self.range_max} has fewer candidates than "
                f"num_negatives={self.num_negatives}. Raise range_max."
            )
        arguments = [self.guide_margin, *(x for x in self.thresholds if x is not None)]
        if not all(map(_is_score, arguments)):
            return f"scores and margins are numbers, got {(*self.thresholds, self.guide_margin)}."
        return None

    @property
    def thresholds(self) -> tuple[float | None, ...]:
        """What scores are compared with."""
        return self.max_score, self.min_score, self.absolute_margin, self.relative_margin

    def depth(self, guided: bool) -> int:
        """Return how many candidates are looked at: ``range_max``, or ten per negative where some may be refused."""
        if self.range_max is not None:
            return self.range_max
        refused = guided or any(x is not None for x in self.thresholds)
        return self.range_min + self.num_negatives * (10 if refused or self.sampling == "random" else 1)

    def allowed(self, scores: Float[Tensor, "n k"], positive: Float[Tensor, " n"]) -> Bool[Tensor, "n k"]:
        """Return which candidates may be negatives by their scores; the lowest positive score is +∞ if there is none."""
        fine = scores > -torch.inf
        threshold = positive[:, None]
        if self.absolute_margin is not None:
            fine &= scores <= threshold - self.absolute_margin
        if self.relative_margin is not None:
            bound = threshold - threshold.abs() * self.relative_margin
            fine &= (scores <= bound) | threshold.isinf()
        if self.max_score is not None:
            fine &= scores <= self.max_score
        if self.min_score is not None:
            fine &= scores >= self.min_score
        return fine

    def chosen(
        self, allowed: Bool[Tensor, "n k"], candidates: Int[Tensor, "n k"], query: Int[Tensor, " n"]
    ) -> Int[Tensor, "n num"]:
        """Return the positions of the chosen candidates, best first; −1 where there are fewer.

        Random candidates are those with the smallest random numbers, which are functions of the seed, the query's global
        index and the candidate's.
        """
        ranks = torch.arange(allowed.shape[1]).expand(allowed.shape)
        if self.sampling == "random":
            keys = random_keys(self.seed, query[:, None].numpy(), candidates.numpy()) >> np.uint64(1)
            order = torch.from_numpy(keys.astype(np.int64)).masked_fill(~allowed, torch.iinfo(torch.int64).max)
            drawn = order.argsort(dim=1, stable=True)[:, : self.num_negatives]
            allowed = torch.zeros_like(allowed).scatter(1, drawn, True) & allowed
        best = ranks.masked_fill(~allowed, allowed.shape[1]).sort(1).values[:, : self.num_negatives]
        best = torch.nn.functional.pad(best, (0, self.num_negatives - best.shape[1]), value=allowed.shape[1])
        return best.masked_fill(best == allowed.shape[1], -1)
