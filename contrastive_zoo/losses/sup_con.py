"""SupCon: every other row of an anchor's class is its positive, the rest of the global batch its candidates."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import all_gather, sum_over_ranks
from contrastive_zoo.engine import reduce_anchors
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.losses.base import Loss, begin, labelled_problem, logit_scale, prepared
from contrastive_zoo.losses.panelwise import Panelwise, log_sum_exp_where
from contrastive_zoo.world import ALONE, World


def sup_con(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    variant: Literal["out", "in"] = "out",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Supervised contrastive loss, positives outside the logarithm (or inside).

    With z the unit rows of all ranks and P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t

    averaged over the anchors that have a positive. Dense: ``-(log_softmax((z @ z.T / t).fill_diagonal_(-inf), 1) *
    positive).sum(1) / positive.sum(1)``. Positives need no mask: their sum is one dot product with the class's.

    The variant ``"in"``, which the paper finds the worse one, averages probabilities, not their logarithms: its last
    term is log mean_{p∈P(i)} exp(z_i·z_p / t).

    Args:
        embeddings: [n, d], n may differ between ranks. Several views of a sample are several rows.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnt.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        normalize: put rows on the unit sphere first.
        reduction: ``"mean"`` over all ranks' anchors with a positive, ``"sum"``, or ``"none"`` for my rows, 0 where an
            anchor has no positive.
        world: who else holds rows.

    Returns:
        Nats per anchor, the same on every rank; 0 if no anchor has a positive; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not integers or not one per row, a temperature that is not positive, an
            unknown variant, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> sup_con(z, torch.tensor([0, 0, 1]), temperature=1.0)   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362
    """
    named = {"embeddings": embeddings} | ({} if labels is None else {"labels": labels})
    problem = labelled_problem(embeddings, labels)
    if variant not in ("out", "in"):
        problem = f"variant is 'out' or 'in', got {variant!r}. The paper recommends 'out'."
    shards, *_ = begin(
        "SupCon", named, problem=problem, temperature=temperature, reduction=reduction, normalize=normalize,
        variant=variant, world=world,
    )  # fmt: skip
    z = prepared(embeddings, normalize=normalize)
    assert labels is not None  # begin has refused it
    if variant == "in":
        loss = Panelwise(_inside, temperature=temperature)
        return sum_over_anchors(loss, z, labels, shards=shards, reduction=reduction, world=world)
    scale = logit_scale(temperature, world)

    classes, of_row, members = torch.unique(
        all_gather(labels, shards=shards, process_group=world), return_inverse=True, return_counts=True
    )
    mine = of_row[shards.mine]
    class_sums = sum_over_ranks(
        z.new_zeros(len(classes), z.shape[1]).index_add(0, mine, z), gradient="partial", world=world
    )
    positives = members[mine] - 1
    positive = scale * (z * (class_sums[mine] - z)).sum(-1) / positives.clamp(min=1)
    candidates = self_log_sum_exp(z, scale=scale, shards=shards, world=world)
    return reduce_anchors(candidates - positive, positives > 0, reduction=reduction, world=world)


class SupCon(Loss):
    """:func:`sup_con` with its settings kept."""

    function = staticmethod(sup_con)


def _inside(panel: Panel, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = panel.anchors @ panel.columns.T / temperature
    positives = panel.positive.sum(1, dtype=logits.dtype)
    candidates = log_sum_exp_where(logits, panel.positive | panel.negative)
    return candidates - log_sum_exp_where(logits, panel.positive) + positives.clamp(min=1).log(), positives > 0
