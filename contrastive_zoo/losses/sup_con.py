"""Softmax over labelled embeddings: SupCon and its relatives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from contrastive_zoo.engine.anchor_block import class_numbers
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Gathered, Local, Pairs, Summed
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.pairs import LabelledPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.rowwise import AnchorBlock, Average, BlockLoss, blocks_of, info_nce_per_positive
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.families import NO_LABELS
from contrastive_zoo.loss_base.loss import NO_RING, CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.row_loss import AnchorLoss, RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Constant, Temperature, Threshold, are_numbers
from contrastive_zoo.loss_base.shapes import candidates_problem
from contrastive_zoo.ranks.row_checks import BATCH_IN_BATCH, described, labels_problem, range_rule


class SupCon(AnchorLoss, engine="softmax", has_kernel=True):
    r"""Compute the supervised contrastive loss, with positives outside the logarithm (or inside).

    With z the unit embeddings of all ranks and P(i) the other embeddings with i's label,

        loss_i = log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t

    averaged over anchors with a positive. Dense: ``-(log_softmax((z @ z.T / t).fill_diagonal_(-inf), 1) *
    positive).sum(1) / positive.sum(1)``. The authors' code, ``temperature=0.07, base_temperature=0.07``, counts anchors
    without a positive. With labels [n, C] and J_ip = |labels of i and p| / |labels of i or p|

        loss_i = mean_{p∈P(i)} J_ip [ log Σ_{k≠i} exp(z_i·z_k / t)  −  z_i·z_p / t ]

    Called as ``loss(embeddings, labels, mask)``:

    - embeddings: [n, d]; or [n, v, d], v views of each sample.
    - labels: [n] integers, or [n, C], 1 for a sample's labels and else 0; None with views makes each sample a class.
    - mask: [n, N], in place of labels: whether each of the N samples of all ranks, in rank order, is a positive of a
      local one.

    Args:
        temperature: t > 0.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in, with a last term log mean_{p∈P(i)} exp(z_i·z_p / t).
        min_jaccard: the least J_ip > 0 of positives.
        base_temperature: t₀; the loss is multiplied by t / t₀, detached; None: by 1.
        reduction: ``"none"`` with views: sample by sample, [n · v].
        normalize: normalise embeddings first.
        check_finite: refuse NaN and infinite embeddings.

    Raises:
        ValueError: a mask with labels, or of another width.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = SupCon(temperature=1.0)
        >>> loss(z, torch.tensor([0, 0, 1]))   # log(e + 1) − 1
        tensor(0.3133)
        >>> loss(torch.eye(2)[:, None].repeat(1, 2, 1))   # two views: log(e + 2) − 1
        tensor(0.5514)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362; labels [n, C]:
    https://github.com/WolodjaZ/MultiSupContrast
    """

    compares = ("embeddings",), ("embeddings",)

    temperature: Temperature = 0.1
    variant: Literal["out", "in"] = "out"
    min_jaccard: Threshold = 0.0
    base_temperature: Constant | None = None
    normalize: bool = True

    def inputs(
        self,
        embeddings: Float[Tensor, "n d"] | Float[Tensor, "n v d"],
        labels: Int[Tensor, " n"] | Int[Tensor, "n C"] | None = None,
        mask: Shaped[Tensor, "n N"] | None = None,
    ) -> Inputs:
        rows = {"embeddings": embeddings, "labels": labels, "mask": mask}
        problem = _problem(embeddings, labels, mask)
        if labels is None or labels.ndim == 1:
            return Inputs.of(rows, problem)
        if problem is None and self.variant == "in":
            problem = "variant='in' takes one label of each sample, [n]: pass variant='out' for labels [n, C]."
        fix = BATCH_IN_BATCH if len(labels) == 1 else "Pass class numbers as [n]."
        values = [range_rule(labels, 0, 1, "labels [n, C] are 1 for each label of a sample and else 0", fix)]
        return Inputs.of(rows, problem, values=values)

    def needs(self, inputs: Inputs) -> Needs:
        needs = super().needs(inputs)
        by_rows = needs._replace(engine="rows", no_ring=NO_RING["rows"], no_kernel=_BY_ROWS)
        return by_rows if self._by_rows(inputs.rows) else needs

    def _by_rows(self, rows: Mapping[str, Tensor]) -> bool:
        """Return whether positives are no whole classes, or their logits are summed inside the logarithm."""
        return self.variant == "in" or "mask" in rows or ("labels" in rows and rows["labels"].ndim == 2)

    def entries(self, stated: CallInputs) -> list[Entry]:
        names = ["embeddings"]
        if not self._by_rows(stated.inputs.rows):
            scale, entries = self.scale_of(stated)
            self_sums = Local(names, bytes=stated.width * stated.wide)
            sums: list[Entry] = [Gathered(names, 8), Summed(stated.width * stated.wide, True, by_class=True)]
            return [*entries, *sums, Pairs(names, (), scale, self.normalize), self_sums, *self.reduced()]
        rows, loss = stated.inputs.rows, BlockLoss.of(_block_losses, stated.settings, matrices=5.5)
        companions = [8] if "mask" in rows else [*rows["labels"].shape[1:]] if "labels" in rows else []
        return [blocks_of(loss, names, companions=companions, reduction=self.reduction)]

    def compute(self, batch: Batch) -> Tensor:
        mask = batch.rows.get("mask")
        if mask is not None and mask.shape[1] != batch.total:  # equal on every rank
            rule = f"the mask has a column for each of the {batch.total} samples of all ranks"
            raise ValueError(f"{batch.name}: {rule}, got {described(mask)}.")
        pairs = LabelledPairs(batch, batch.settings.temperature, self.normalize, batch.rows.get("labels"))
        if self._by_rows(batch.rows):
            return pairs.reduce_rows(self.block_loss(batch), self.reduction, mask=mask)
        others, mean, count = pairs.sums()
        losses = _rescaled(_losses(others, mean, count), batch.settings.temperature, batch.settings.base_temperature)
        return batch.reduce(losses.to(pairs.candidates.local.dtype), count > 0, reduction=self.reduction)

    def ring_problem(self) -> str | None:
        return f"a ring {_BY_ROWS}" if self.variant == "in" else super().ring_problem()

    def block_loss(self, batch: Batch) -> BlockLoss:
        return BlockLoss.of(_block_losses, batch.settings)


_BY_ROWS = "computes SupCon with variant='out' and one label of each sample, without a mask"


def _block_losses(
    block: AnchorBlock,
    temperature: Tensor,
    variant: Literal["out", "in"],
    base_temperature: float | None = None,
    min_jaccard: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor]:
    logits = block.anchors @ block.candidates.T / temperature
    positive, candidates, weights = block.positive, block.positive | block.negative, None
    for mask, samples in block.companions:
        if samples.ndim == 2:  # labels of anchors and candidates
            x, y = mask.to(logits.dtype), samples.to(logits.dtype)
            shared = x @ y.T
            weights = shared / (x.sum(1)[:, None] + y.sum(1) - shared).clamp(min=1)  # 0 for samples without any label
            positive = (weights >= min_jaccard) & (weights > 0) & candidates
        else:
            positive = mask.index_select(1, samples) & candidates
    count = positive.sum(1, dtype=logits.dtype)
    divisor = count.clamp(min=1)
    left_out = positive if variant == "in" else positive & (count == 1)[:, None]
    others = masked_log_sum_exp(logits, candidates & ~left_out)
    if variant == "in":
        losses = cross_entropy(masked_log_sum_exp(logits, positive, empty=0.0), others) + divisor.log()
    elif weights is None:
        losses = _losses(others, logits.where(positive, 0).sum(1) / divisor, count)
    else:
        weights = weights.where(positive, 0)
        total = weights.sum(1)
        mean = (weights * logits).sum(1) / total.where(count > 0, 1)
        losses = total / divisor * _losses(others, mean, count)
    return _rescaled(losses, temperature, base_temperature), count > 0


def _losses(others: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Return L_out; log-sum-exps leave out an anchor's only positive, so that a solved batch keeps its digits."""
    return cross_entropy(mean, others).where(count == 1, others - mean)


def _rescaled(losses: Tensor, temperature: float | Tensor, base_temperature: float | None) -> Tensor:
    if base_temperature is None:
        return losses
    t = temperature.detach().to(losses.dtype) if isinstance(temperature, Tensor) else temperature
    return losses * (t / base_temperature)


def _problem(embeddings: Tensor, labels: Tensor | None, mask: Tensor | None) -> str | None:
    if mask is not None and labels is not None:
        return "positives are given by labels or by a mask, got both. Leave one out."
    if labels is not None and labels.ndim == 2 and labels.shape[1] < 2:
        return labels_problem("labels", labels, len(embeddings))
    if embeddings.ndim == 3:
        return candidates_problem("embeddings", embeddings, at_least=1)
    return NO_LABELS if mask is None and labels is None else None


class HMLC(Loss, engine="softmax", has_kernel=True):
    r"""Compute the hierarchical multi-label contrastive loss: the weighted mean of SupCon over the levels of a hierarchy.

    Called as ``loss(embeddings, labels)``, [n, d] or [n, v, d], v views of each sample, and [n, L] integers, the coarsest
    label first. Two samples are of one class at level l if they share their first l labels. With :class:`SupCon`, over the
    unit embeddings of all ranks, and its mean S_l at level l,

        loss = 1/L Σ_l λ_l L_l,       L_l = max(S_l, L_{l+1}), the hierarchical constraint, or S_l

    This is the paper's HiMulConE. HiMulCon has no constraint, HiConE weights of 1. The paper constrains the losses of pairs;
    the authors' code, and this loss, constrain means.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        level_weights: λ, a number for each level, the coarsest first; None: exp(1), exp(1/2), … from the finest on.
        constrained: whether a level has at least the loss of the next finer one.
        one_per_class: whether only one sample of each class of a finer level is compared at the coarser ones, as in the
            authors' code: the first by still finer labels, and then in rank order. False compares all, as in the paper.
        check_finite: refuse NaN and infinite embeddings.

    Raises:
        ValueError: other numbers of weights and of levels.

    Examples:
        >>> z, labels = torch.eye(3)[[0, 0, 1]], torch.tensor([[0, 0], [0, 0], [0, 1]])
        >>> HMLC(temperature=1.0, level_weights=[0.0, 1.0])(z, labels)   # (log(e + 1) − 1) / 2
        tensor(0.1566)

    Source: Zhang et al. 2022, eqs. 3-5, https://arxiv.org/abs/2204.13207
    """

    temperature: Temperature = 0.07
    level_weights: Sequence[float] | None = None
    constrained: bool = True
    one_per_class: bool = True

    def settings_problem(self) -> str | None:
        weights, rule = self.level_weights, "level_weights are a list of non-negative numbers, one for each level"
        problem = None if weights is None or are_numbers(weights, low=0) else f"{rule}, got {described(weights)}."
        return super().settings_problem() or problem

    def inputs(self, embeddings: Float[Tensor, "n d"] | Float[Tensor, "n v d"], labels: Int[Tensor, "n L"]) -> Inputs:
        levels = max(1, labels.shape[1] if self.level_weights is None else len(self.level_weights))
        problem = candidates_problem("embeddings", embeddings, at_least=1)
        if labels.shape[1] != levels:
            problem = f"labels are [n, {levels}], with level_weights={self.level_weights}, got {described(labels)}."
        return Inputs({"embeddings": embeddings, "labels": labels}, problem)

    def entries(self, stated: CallInputs) -> list[Entry]:
        """Return what it costs at most: how many samples a coarser level compares depends on the labels."""
        embeddings, labels = stated.inputs.rows.values()
        level = replace(stated, inputs=Inputs({"embeddings": embeddings, "labels": labels[:, 0]}))
        return [Gathered(["labels"], 8 * labels.shape[1]), *SupCon().entries(level) * labels.shape[1]]

    def compute(self, batch: Batch) -> Tensor:
        levels, losses = list[Tensor](), list[Tensor]()
        order, local = torch.arange(batch.total, device=batch.first.device), batch.samples.local
        compared: Tensor | None = None
        ids = torch.zeros_like(order)
        settings = SimpleNamespace(temperature=batch.settings.temperature, base_temperature=None)
        for column in batch.gather_detached(batch.rows["labels"].long()).unbind(1):
            ids = class_numbers(ids * batch.total + class_numbers(column)[0])[0]
            levels.append(ids)
        for ids in reversed(levels):
            rows, shards = {"embeddings": batch.first, "labels": ids[local]}, batch.samples
            if compared is not None:
                rows, shards = {name: x[compared[local]] for name, x in rows.items()}, shards.selected(compared)
            loss = SupCon().compute(replace(batch, rows=rows, shards=dict.fromkeys(rows, shards), settings=settings))
            losses.append(torch.maximum(loss, losses[-1]) if self.constrained and losses else loss)
            if self.one_per_class:
                places = order if compared is None else order.where(compared, batch.total)
                first = torch.full_like(places, batch.total).scatter_reduce(0, ids, places, "amin")
                compared, order = first[ids] == places, ids
        if batch.first.ndim == 2:  # without views only the coarsest classes may have positives
            batch.note_labels(levels[0])
        weights = self.level_weights or [math.exp(1 / (len(levels) - i)) for i in range(len(levels))]
        return torch.stack([weight * x for weight, x in zip(weights, losses[::-1], strict=True)]).mean()


class SINCERE(RowLoss, matrices=6.5):
    r"""Compute supervised InfoNCE revisited: the mean of the InfoNCE losses of an anchor's positives.

    With z the unit embeddings of all ranks, P(i) the other embeddings with i's label and N(i) those with another,

        loss_i = mean_{p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((z_i·z_n − z_i·z_p) / t) )

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        temperature: t > 0; a tensor or module is learnable.
        average: ``"anchors"``, equal weights of anchors with a positive, as in the authors' code; or ``"pairs"`` (i, p),
            which is pytorch-metric-learning's NTXentLoss on labelled embeddings, with memory linear in N.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> SINCERE(temperature=1.0)(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻¹); row 2 has none
        tensor(0.3133)

    Source: Feeney and Hughes 2023, https://arxiv.org/abs/2309.14277
    """

    temperature: Temperature = 0.1
    average: Average = "anchors"

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        logits = block.anchors @ block.candidates.T / self.temperature  # type: ignore[operator]  # a number or a tensor
        return info_nce_per_positive(logits, block, self.average)


class TupletMargin(RowLoss, matrices=12.75):
    r"""Compute a softmax loss over tuples of a positive and all negatives, on angles.

    With θ_ij the angle of embeddings i and j of all ranks, P(i) the others with i's label, N(i) those with another,

        loss = mean_{i, p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((cos θ_in − cos(θ_ip − β)) / t) )

    Equal to pytorch-metric-learning's TupletMarginLoss with ``scale=1/t``; where θ_ip = 0 the gradient is zero.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        temperature: t, the paper's 1/s.
        margin: β in degrees, 0 to 180; the paper's 0.1 rad by default.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # log(1 + exp(0 − cos 60°))
        >>> TupletMargin(temperature=1.0, margin=60.0)(z, torch.tensor([0, 0, 1]))
        tensor(0.4741)

    Source: Yu and Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

    temperature: Temperature = 1 / 64
    margin: Annotated[float, Bounds("margin is an angle of 0 to 180 degrees", low=0, high=180, constant=True)] = 5.73

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        cos, beta = block.anchors @ block.candidates.T, math.radians(self.margin)
        sine2 = 1 - cos.square()
        sine = sine2.clamp(min=torch.finfo(cos.dtype).tiny).sqrt().where(sine2 > torch.finfo(cos.dtype).eps, 0)
        slack = cos * math.cos(beta) + sine * math.sin(beta)  # cos(θ − β)
        logits, of_positives = (x / self.temperature for x in (cos, slack))  # type: ignore[operator]  # as above
        return info_nce_per_positive(logits, block, "pairs", positive_logits=of_positives)


class NCA(RowLoss, matrices=5.5):
    r"""Compute −log of the probability that a stochastic neighbour is of the anchor's class.

    With z the embeddings of all ranks, P(i) the other embeddings with i's label,

        loss_i = log Σ_{k≠i} exp(−‖z_i − z_k‖² / t)  −  log Σ_{p∈P(i)} exp(−‖z_i − z_p‖² / t)

    averaged over the anchors that have a positive. Equal to pytorch-metric-learning's NCALoss with ``softmax_scale=1/t``,
    which leaves out anchors whose probability underflows.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        temperature: t > 0, in units of squared distance.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> NCA()(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """

    temperature: Temperature = 1.0

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        nearness = 2 * block.anchors @ block.candidates.T - block.candidates.square().sum(1)  # ‖z_i‖² cancels
        logits = nearness / self.temperature  # type: ignore[operator]  # a number or a tensor
        of_positives = masked_log_sum_exp(logits, block.positive, empty=0.0)
        return cross_entropy(of_positives, masked_log_sum_exp(logits, block.negative)), block.positive.any(1)
