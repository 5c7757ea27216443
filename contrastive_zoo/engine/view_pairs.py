"""Softmax over views: each embedding against all others, with the other views of its sample as positives."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Reduction
from contrastive_zoo.engine.implementation import is_one_call
from contrastive_zoo.engine.small_batch import small_batch_info_nce, uses_small_batch_path
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy_of_several


@dataclass(frozen=True)
class ViewPairs:
    """Similarities z_i·z_k / t of all views of all samples; the positives of an anchor are the other views of its sample.

    Args:
        batch: views, [n, d] each.
        temperature: t.
        normalize: whether embeddings are normalised to unit length first.

    Examples:
        >>> from contrastive_zoo.ranks.world import Shards
        >>> views = {"view 0": torch.eye(2), "view 1": torch.eye(2)}
        >>> batch = Batch(views, dict.fromkeys(views, Shards((2,))))
        >>> ViewPairs(batch, 1.0, True).cross_entropy("mean")   # log(e + 2) − 1
        tensor(0.5514)
    """

    batch: Batch
    temperature: float | Tensor
    normalize: bool

    def cross_entropy(self, reduction: Reduction) -> Float[Tensor, "..."]:
        """Reduce ``logsumexp(others and positives) - mean(positives)`` over all anchors, in nats."""
        batch, views = self.batch, [*self.batch.rows.values()]
        first, rows = views[0], 2 * batch.total
        unsupported = None if len(views) == 2 else f"compares two views, got {len(views)}"
        on_kernel = batch.kernels.compute(batch.name, rows, rows, unsupported=unsupported)
        small = not on_kernel and len(views) == 2 and self.normalize
        if small and uses_small_batch_path(first, reduction, batch.world, views=True):
            return small_batch_info_nce(
                first, views[1], temperature=self.temperature, comparison="views", reduction=reduction, own=batch.own
            )
        if on_kernel and is_one_call(reduction, batch.world):
            from contrastive_zoo.engine.kernels import softmax  # imported here: Triton is optional

            a, b = (x.to(first.dtype) for x in self.rows)
            return softmax.nt_xent(a, b, batch.scale(self.temperature))
        others, positives = self.sums(on_kernel=on_kernel)
        losses = cross_entropy_of_several(positives, others)
        return batch.reduce(losses.to(self.rows[0].dtype), reduction=reduction)

    def sums(self, *, on_kernel: bool = False) -> tuple[Float[Tensor, " a"], Float[Tensor, "p a"]]:
        """Return the log-sum-exps over all but the anchor and its positives, view after view, and the positives' logits."""
        n, count = len(self.rows[0]), len(self.rows)
        others, logits = self_log_sum_exp(
            self.batch.concatenated(self.rows), scale=self.batch.scale(self.temperature), unit_norm=self.normalize,
            dtype=self.batch.first.dtype, partner_offsets=[n * step for step in range(1, count)],
            shards=self.batch.samples.times(count), world=self.batch.world, on_kernel=on_kernel,
        )  # fmt: skip
        # each pair counts for both of its views; logits[step - 1] are those of a view and the one ``step`` later
        by_step = [x.unflatten(0, (count - step, -1)) for step, x in enumerate(logits, 1)]
        of_view = [[by_step[abs(v - u) - 1][min(u, v)] for u in range(count) if u != v] for v in range(count)]
        return others, torch.stack([torch.stack(x) for x in of_view], 1).flatten(1)

    @cached_property
    def rows(self) -> list[Tensor]:
        """The views, prepared for matmuls."""
        views = self.batch.rows.values()
        return [self.batch.rounded(self.batch.prepared(x, normalize=self.normalize), x) for x in views]
