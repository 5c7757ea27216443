"""GIST: a guide model masks false negatives of all ranks."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.pair_candidates import reduce_pairs, split_pairs
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Number, Reduction, Temperature
from contrastive_zoo.ranks.row_checks import described, rows_problem, towers_problem

Strategy = Literal["absolute", "relative"]


class GIST(Loss):
    r"""Compute InfoNCE over the candidates that a guide model does not find closer to the anchor than its positive.

    With a, p, x the unit rows of anchors, positives and negatives of all ranks, g(·,·) the guide's cosine and

        τ_i = g(a_i, p_i) − margin,   or, relative,   g(a_i, p_i) − margin · |g(a_i, p_i)|

    anchor i's logits are a_i·p_j / t; with ``contrast_anchors`` also a_i·a_j / t, j ≠ i; with ``contrast_positives``
    p_i·p_j / t, j ≠ i; and a_i·x / t. Pairs with g(·,·) > τ_i are masked, except a_i·p_i:

        loss = mean_i [ logsumexp of i's logits  −  a_i·p_i / t ]

    Equal to sentence-transformers' GISTEmbedLoss on one process, which masks a_i·a_i and p_i·p_i only if the guide finds
    them closer than τ_i, that is, if τ_i < 1. On several ranks it compares anchors only with anchors of the same rank.

    Called as ``loss(anchors, positives, guide_anchors, guide_positives, negatives, guide_negatives)``:

    - anchors: [n, d], n may differ between ranks.
    - positives: [n, d], row i belongs to row i of anchors.
    - guide_anchors: [n, e], the guide's embeddings of the same samples; without gradient.
    - guide_positives: [n, e].
    - negatives: [m, d], candidates of every anchor of every rank; m may differ between ranks.
    - guide_negatives: [m, e].

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        margin: the margin in τ; a larger margin masks more pairs.
        contrast_anchors: whether anchors are candidates of each other.
        contrast_positives: whether positives are candidates of each other.
        reduction: ``"mean"`` over all ranks' anchors (nats per anchor), ``"sum"``, or ``"none"`` for the local anchors, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: rows that do not pair or lack their guide's, an unknown strategy, a margin that is not finite,
            or what any :class:`Loss` refuses.

    Examples:
        >>> eye, equal = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> GIST(temperature=1.0)(eye, eye, eye, eye)   # log(e + 3) − 1
        tensor(0.7437)
        >>> GIST(temperature=1.0, margin=0.1)(eye, eye, equal, equal)   # all other pairs are masked
        tensor(0.)

    Source: Solatorio 2024, §3, https://arxiv.org/abs/2402.16829
    """

    temperature: Temperature = 0.01
    margin_strategy: Strategy = "absolute"
    margin: Number = 0.0
    contrast_anchors: bool = True
    contrast_positives: bool = True
    reduction: Reduction = "mean"

    ring_refusal = "its guide compares the pairs that anchors and candidates make together, so it needs all of them"

    def inputs(
        self,
        anchors: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        guide_anchors: Float[Tensor, "n e"],
        guide_positives: Float[Tensor, "n e"],
        negatives: Float[Tensor, "m d"] | None = None,
        guide_negatives: Float[Tensor, "m e"] | None = None,
    ) -> Inputs:
        rows = {"anchors": anchors, "positives": positives, "negatives": negatives}
        rows |= {"guide_anchors": guide_anchors, "guide_positives": guide_positives, "guide_negatives": guide_negatives}
        problem = _problem(anchors, positives, guide_anchors, guide_positives, negatives, guide_negatives)
        return Inputs.of(rows, problem)

    def compute(self, batch: Batch) -> Tensor:
        arguments = dict(batch.rows)
        arguments.setdefault("negatives", arguments["anchors"][:0])
        arguments.setdefault("guide_negatives", arguments["guide_anchors"][:0])
        names = ("anchors", "positives", "negatives")
        rows = [batch.prepared(arguments[name], normalize=True) for name in names]
        guides = [batch.prepared(arguments[f"guide_{name}"].detach(), normalize=True) for name in names]
        loss = BlockLoss(
            _guided, temperature=batch.settings.temperature, relative=self.margin_strategy == "relative",
            margin=batch.settings.margin, contrast_anchors=self.contrast_anchors,
            contrast_positives=self.contrast_positives,
        )  # fmt: skip
        return reduce_pairs(batch, loss, rows, [guides], reduction=self.reduction)


def _guided(
    block: AnchorBlock,
    temperature: Tensor,
    relative: bool,
    margin: float,
    contrast_anchors: bool,
    contrast_positives: bool,
) -> tuple[Tensor, Tensor]:
    (_, single), (guide_rows, guide_columns) = block.companions
    own = block.positive
    x, guide = (
        split_pairs(rows, columns, single)
        for rows, columns in ((block.anchors, block.candidates), (guide_rows, guide_columns))
    )
    similarity = (guide.first * guide.second).sum(1, keepdim=True)
    threshold = similarity - margin * (similarity.abs() if relative else 1)

    logits = x.first @ x.documents.T / temperature
    sums = [masked_log_sum_exp(logits, (guide.first @ guide.documents.T <= threshold) & ~own)]
    blocks = []
    if contrast_anchors:
        blocks.append((x.first, x.candidate_first, guide.first, guide.candidate_first))
    if contrast_positives:
        blocks.append((x.second, x.documents, guide.second, guide.documents))
    for rows, columns, guide_of_rows, guide_of_columns in blocks:
        mask = (guide_of_rows @ guide_of_columns.T <= threshold) & x.is_pair & ~own
        sums.append(masked_log_sum_exp(rows @ columns.T / temperature, mask))
    positive = logits.where(own & x.is_pair, 0).sum(1)
    return cross_entropy(positive, log_sum_exp(torch.stack(sums), 0)), torch.ones_like(block.ids, dtype=torch.bool)


def _problem(
    anchors: Tensor,
    positives: Tensor,
    guide_anchors: Tensor,
    guide_positives: Tensor,
    negatives: Tensor | None,
    guide_negatives: Tensor | None,
) -> str | None:
    rule = "row i is one pair everywhere"
    if problem := rows_problem("anchors", anchors) or rows_problem("guide_anchors", guide_anchors):
        return problem
    if len(guide_anchors) != len(anchors):
        return f"{rule}, got guide_anchors {described(guide_anchors)} and anchors {described(anchors)}."
    if (negatives is None) != (guide_negatives is None):
        return "negatives and guide_negatives come together, got one of them."
    if negatives is not None and guide_negatives is not None:
        fits = negatives.shape[1:] == anchors.shape[1:] and guide_negatives.shape[1:] == guide_anchors.shape[1:]
        fits = fits and negatives.ndim == guide_negatives.ndim == 2
        same = negatives.dtype == anchors.dtype and guide_negatives.dtype == guide_anchors.dtype
        if not (fits and same and len(negatives) == len(guide_negatives)):
            got = f"got negatives {described(negatives)} and guide_negatives {described(guide_negatives)}"
            return f"negatives are rows like anchors, one for each of guide_negatives, {got}."
    result = towers_problem(rule, anchors=anchors, positives=positives)
    return result or towers_problem(rule, guide_anchors=guide_anchors, guide_positives=guide_positives)
