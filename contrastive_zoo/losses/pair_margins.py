"""Hinges on pairs: each positive within one margin, each negative beyond another."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.masked import masked_max
from contrastive_zoo.engine.pairwise import distances, row_sums
from contrastive_zoo.loss_base.loss import Inputs
from contrastive_zoo.loss_base.row_loss import CountedTerms, DissimilarityLoss, RowLoss
from contrastive_zoo.loss_base.settings import Bounds, NonNegative, Number, Share, Size
from contrastive_zoo.ranks.row_checks import range_rule, safe_index


class _PairHinges(RowLoss):
    """Hinges on the distances of an anchor to its positives and negatives."""

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    power: Annotated[float, Bounds(fix="Below 1 the gradient is infinite at the margin.", low=1)] = 1.0
    average: CountedTerms = "nonzero"

    terms = 2

    @property
    def sign(self) -> int:
        return 1

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        positive_term = (similarity - self.sign * self.pos_margin).relu().where(positive, 0)
        negative_term = (self.sign * self.neg_margin - similarity).relu().where(negative, 0)
        counted = (positive_term > 0, negative_term > 0) if self.average == "nonzero" else (positive, negative)
        return row_sums(positive_term.pow(self.power), negative_term.pow(self.power)), row_sums(*counted)


class Contrastive(DissimilarityLoss, _PairHinges):
    r"""Compute hinges on pairs: the mean over positive pairs plus the mean over negative pairs.

    With D_ij the distance of unit embeddings, over all ordered pairs of the embeddings of all ranks,

        loss = mean_{i, p∈P(i)} max(0, D_ip − pos_margin)^power  +  mean_{i, n∈N(i)} max(0, neg_margin − D_in)^power

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        pos_margin: distance up to which positives have no loss, or similarity from which on.
        neg_margin: distance from which on negatives have no loss, or similarity up to which.
        power: 1, or 2 as in the paper, which halves both terms and divides their sum by the number of all pairs.
        average: ``"nonzero"``, the mean over pairs with a loss, or ``"all"``, as pytorch-metric-learning's MeanReducer.
        metric: ``"distance"``, ``"squared distance"`` or ``"similarity"``; for the last set both margins, such as 1, 0.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> Contrastive()(z, torch.tensor([0, 0, 1]))   # √0.4; √2 and √0.8, of which one is below 1
        tensor(0.7380)

    Source: Hadsell et al. 2006, eq. 4, https://doi.org/10.1109/CVPR.2006.100
    """


class SignalToNoise(_PairHinges):
    r"""Compute hinges on pairs as :class:`Contrastive`, on the ratio of noise to the anchor's variance.

        D_ij = var(z_j − z_i) / var(z_i)

    with variances over the d features of unit embeddings. The paper adds a regulariser, ``λ * z.sum(1).abs().mean()``.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        pos_margin: ratio up to which positives have no loss.
        neg_margin: ratio from which on negatives have no loss.
        power: the power of the hinges.
        average: over the pairs with a loss (``"nonzero"``, as pytorch-metric-learning) or ``"all"``.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, -1.0], [2.0, -2.0], [-1.0, 1.0]])
        >>> SignalToNoise(normalize=False)(z, torch.tensor([0, 0, 1]))   # pairs 0, 1: 2/2 and 2/8; negatives: 4 and more
        tensor(0.6250)

    Source: Yuan et al. 2019, https://arxiv.org/abs/1904.02616
    """

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        a, b = (x - x.mean(1, keepdim=True) for x in (anchors, candidates))
        signal = a.square().sum(1, keepdim=True).clamp(min=torch.finfo(a.dtype).eps)
        return distances(a, b, squared=True) / signal


class ThresholdConsistentMargin(RowLoss, matrices=5.5):
    r"""Compute the mean violations of a least positive and a largest negative similarity; a regulariser of other losses.

        loss = λ⁺ mean_{s_ip ≤ m⁺} (m⁺ − s_ip)  +  λ⁻ mean_{s_in ≥ m⁻} (s_in − m⁻)

    over the ordered pairs of the embeddings of all ranks; an empty mean is 0.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        positive_margin: m⁺.
        negative_margin: m⁻.
        positive_weight: λ⁺.
        negative_weight: λ⁻.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> ThresholdConsistentMargin()(z, torch.tensor([0, 0, 1]))   # 0.9 − 0.6 and 0.8 − 0.5
        tensor(0.6000)

    Source: Zhang et al. 2024, https://arxiv.org/abs/2307.04047
    """

    positive_margin: Number = 0.9
    negative_margin: Number = 0.5
    positive_weight: Number = 1.0
    negative_weight: Number = 1.0

    terms = 2

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        low, high = positive & (similarity <= self.positive_margin), negative & (similarity >= self.negative_margin)
        positive_term = self.positive_weight * (self.positive_margin - similarity).where(low, 0)
        negative_term = self.negative_weight * (similarity - self.negative_margin).where(high, 0)
        return row_sums(positive_term, negative_term), row_sums(low, high)


class RankedList(RowLoss, matrices=9.5):
    r"""Compute weighted means of the hinges of positives and of negatives that violate their radius.

    With D_ij the distance of unit embeddings, over the pairs with D_ip > α − margin and D_in < α,

        loss_i = (1 − λ) Σ_p w_p (D_ip − α + margin) / Σ_p w_p  +  λ Σ_n w_n (α − D_in) / Σ_n w_n
        w_p = exp(T_p (D_ip − α + margin)),  w_n = exp(T_n (α − D_in))

    averaged over the anchors with any pair; an empty mean is 0. The weights have gradients, too.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        margin: difference of the two radii.
        alpha: α, the radius beyond which negatives have no loss.
        t_p: T_p >= 0; 0 weights positives equally.
        t_n: T_n >= 0.
        imbalance: λ in 0 … 1, the share of the negatives.
        epsilon: added to Σ w once per embedding of the batch. 0 is the paper's; pytorch-metric-learning's is 1e-5.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
        >>> RankedList(t_n=0)(z, torch.tensor([0, 0, 1]))   # ½ of √2 − 0.8 twice, 1.2 − √0.4, 1.2 − √0.8, their mean; thirds
        tensor(0.4230)

    Source: Wang et al. 2019, https://arxiv.org/abs/1903.03238
    """

    margin: Number = 0.4
    alpha: Number = 1.2
    t_p: NonNegative = 0.0
    t_n: NonNegative = 10.0
    imbalance: Share = 0.5
    epsilon: NonNegative = 0.0

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        return distances(anchors, candidates)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        epsilon = self.epsilon * similarity.shape[1]
        of_positives = _weighted_mean(similarity - self.alpha + self.margin, positive, self.t_p, epsilon)
        of_negatives = _weighted_mean(self.alpha - similarity, negative, self.t_n, epsilon)
        return (1 - self.imbalance) * of_positives + self.imbalance * of_negatives, positive.any(1) | negative.any(1)


def _weighted_mean(x: Tensor, where: Tensor, t: float, epsilon: float) -> Tensor:
    """Return Σ w x / (Σ w + ε) of each row's selected positive entries, with w = exp(t x)."""
    where = where & (x > 0)
    shift = t * masked_max(x.detach(), where).clamp(min=0)
    weights = (t * x - shift[:, None]).exp().where(where, 0)
    total = weights.sum(1) + epsilon * (-shift).exp()
    return (weights * x).sum(1) / total.where(total > 0, 1)


class Margin(RowLoss, matrices=6.5):
    r"""Compute two hinges around a boundary, which is one parameter or one per class.

    With D_ij the distance of unit embeddings, P and N an anchor's positives and negatives, active pairs those with a loss,

        loss = Σ_i [ |N(i)| Σ_{p∈P(i)} max(0, D_ip − β_i + margin) + |P(i)| Σ_{n∈N(i)} max(0, β_i − D_in + margin)
                     + ν |P(i)| |N(i)| β_i ]  /  Σ_i [ |N(i)| · active positives + |P(i)| · active negatives ]

    as in pytorch-metric-learning. With one β for all classes the last term is ν β; if β is not learnable, it is left out.
    The mean is 0 if no pair is active.

    Called as ``loss(embeddings, labels)``, [n, d] and [n] integers, or with views, [n, views, d].

    Args:
        margin: distance α between β and either side.
        beta: initial β; then the parameter, [1] or one number per class.
        num_classes: number of classes, each with its own β; labels are then 0 … num_classes − 1.
        learn_beta: whether β is a parameter; pytorch-metric-learning's default is False.
        nu: ν >= 0, the weight of β itself.
        reduction: ``"none"`` returns anchors' sums, without ν β.
        normalize: normalise embeddings to unit length first.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> Margin()(z, torch.tensor([0, 0, 1]))   # √2 − 1.2 + 0.2, twice; √2 and 2 are 1.4 or more apart
        tensor(0.4142, grad_fn=<...>)

    Source: Wu et al. 2017, §4, https://arxiv.org/abs/1706.07567
    """

    margin: Number = 0.2
    beta: Annotated[float | Tensor, Bounds(several=True)] = 1.2
    num_classes: Size | None = None
    learn_beta: bool = True
    nu: NonNegative = 0.0

    def __post_init__(self) -> None:
        arguments = self.beta.detach() if isinstance(self.beta, Tensor) else self.beta
        if problem := Bounds().problem("beta", arguments):
            raise ValueError(f"{type(self).__name__}: {problem}")
        initial = float(arguments)  # one number as [1]: FSDP shards no parameter of shape []
        betas = torch.full((self.num_classes or 1,), initial)
        self.beta = nn.Parameter(betas, requires_grad=self.learn_beta)

    def inputs(self, *args: Tensor, **named: Tensor) -> Inputs:  # type: ignore[override]  # views, too
        stated, classes = super().inputs(*args, **named), self.num_classes
        if classes is None:
            return stated
        labels = stated.rows.get("labels")
        if labels is None or labels.is_floating_point() or labels.is_complex():
            problem = "β of a class needs labels: call loss(embeddings, labels), or leave num_classes out."
            return replace(stated, problem=problem)
        return replace(stated, values=[range_rule(labels, 0, classes - 1, f"labels are 0 … {classes - 1}")])

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        return distances(anchors, candidates)

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        distance = block.with_equal_columns(self.similarity(block.anchors, block.candidates))
        assert isinstance(self.beta, Tensor)  # since __post_init__
        beta = self.beta.to(distance.dtype)
        beta = beta if self.num_classes is None else beta[safe_index(block.ids, self.num_classes), None]
        positive_term = (distance - beta + self.margin).relu().where(block.positive, 0)
        negative_term = (beta - distance + self.margin).relu().where(block.negative, 0)
        positives, negatives = block.positive.sum(1), block.negative.sum(1)
        losses = negatives * positive_term.sum(1) + positives * negative_term.sum(1)
        if self.num_classes is not None and self.learn_beta:
            losses = losses + self.nu * beta[:, 0] * positives * negatives
        active = negatives * (positive_term > 0).sum(1) + positives * (negative_term > 0).sum(1)
        # an anchor with triplets but no active pair does not count in the divisor, but its ν β is in the sum
        return losses, active + torch.finfo(losses.dtype).tiny * (positives * negatives > 0).to(losses.dtype)

    def compute(self, batch: Batch) -> Tensor:
        value = super().compute(batch)
        if self.num_classes is not None or self.reduction == "none" or not self.learn_beta:
            return value
        return value + batch.settings.nu * batch.settings.beta.to(value.dtype)
