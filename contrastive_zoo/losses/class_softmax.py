"""Losses with weights for each class: softmax over classes, with margins, and proxies as anchors."""

import math
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Classes, Entry, Local, Shared, Summed
from contrastive_zoo.engine.precision import MIN_NORM, at_least_float32, matmul
from contrastive_zoo.loss_base.class_loss import ClassLoss, ClassSoftmax, ShardableClassLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.settings import Bounds, NonNegative, Number, Positive, Reduction, Size, Temperature


class NormalizedSoftmax(ShardableClassLoss):
    r"""Compute the cross-entropy of an embedding's class over cosines; each class weight is the proxy of its class.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d].
    With z the unit embeddings, w the unit weights and y the labels, this is ``cross_entropy(z @ w.T / t, y)``:

        loss_i = log Σ_j exp(z_i·w_j / t)  −  z_i·w_{y_i} / t

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        temperature: t > 0; a tensor or module is learnable.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        sub_centers: weight vectors for each class, of which the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: r, the share of the classes that a training step draws; 1 is all.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = NormalizedSoftmax(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Zhai & Wu 2019, https://arxiv.org/abs/1811.12649
    """

    temperature: Temperature = 0.05

    def compute(self, batch: Batch) -> Tensor:
        losses = self.pairs(batch).cross_entropies(batch.scale(batch.settings.temperature))
        return self.result(batch, losses)


class ProxyNCA(ShardableClassLoss):
    r"""Compute −log of the probability of an embedding's own proxy among all proxies, by squared distances of unit vectors.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d].
    With z the unit embeddings, p the unit proxies and y the labels,

        loss_i = −log [ exp(−‖z_i − p_{y_i}‖² / t) / Σ_j exp(−‖z_i − p_j‖² / t) ]

    which is :class:`NormalizedSoftmax` at t/2. The original ProxyNCA has t = 1, without the own proxy in the sum.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        temperature: t > 0, in units of squared distance; 1/9 in ProxyNCA++, 1/softmax_scale in pytorch-metric-learning.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        sub_centers: weight vectors for each class, of which the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: r, the share of the classes that a training step draws; 1 is all.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = ProxyNCA(2, 2, temperature=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # −log(1 / (1 + e⁻¹))
        tensor(0.3133)

    Source: Teh et al. 2020, §3, https://arxiv.org/abs/2004.01113
    """

    temperature: Temperature = 1 / 9

    def compute(self, batch: Batch) -> Tensor:
        losses = self.pairs(batch).cross_entropies(2 * batch.scale(batch.settings.temperature))
        return self.result(batch, losses)


class CosFace(ShardableClassLoss):
    r"""Compute the large-margin cosine loss.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d].
    With z the unit embeddings, w the unit weights, y the labels, ``cross_entropy(s * (z @ w.T - m * one_hot(y)), y)``:

        loss_i = −log σ( s (z_i·w_{y_i} − m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        margin: m, in units of the cosine.
        scale: s > 0, dimensionless.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        sub_centers: weight vectors for each class, of which the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: r, the share of the classes that a training step draws; 1 is all.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = CosFace(2, 2, margin=0.5, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wang et al. 2018, eq. 4, https://arxiv.org/abs/1801.09414
    """

    margin: Number = 0.35
    scale: Positive = 64.0

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.shared_settings
        losses = self.pairs(batch).cross_entropies(settings.scale, lambda s: s - settings.margin)
        return self.result(batch, losses)


class SoftTriple(ClassSoftmax):
    r"""Compute the cross-entropy over classes whose similarity is the softmax-weighted mean over their centres.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; the centres are ``weights``, [C, K, d], or [C, d] if K is 1.
    With z the unit embeddings, w the unit centres and y the labels,

        S_ij   = Σ_k softmax_k(z_i·w_jk / γ) z_i·w_jk
        loss_i = −log σ( λ (S_{i y_i} − δ)  −  log Σ_{j≠y_i} exp(λ S_ij) )  +  τ R

    and R = Σ_j Σ_{k<l} ‖w_jk − w_jl‖ / (C K (K − 1)) over the K centres of each class, which merges redundant ones.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        la: λ > 0, dimensionless.
        gamma: γ > 0, the temperature of the softmax over centres.
        margin: δ, in units of the cosine.
        tau: τ ≥ 0; pytorch-metric-learning has no such term, ``tau=0``.
        sub_centers: K.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = SoftTriple(2, 2, sub_centers=1, la=1.0, margin=0.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Qian et al. 2019, §3, https://arxiv.org/abs/1909.05235
    """

    la: Positive = 20.0
    gamma: Positive = 0.1
    margin: Number = 0.01
    tau: NonNegative = 0.2
    sub_centers: Size = 10

    def entries(self, stated: CallInputs) -> list[Entry]:
        entries = super().entries(stated)
        if self.tau and self.weights.ndim == 3:
            between = 6 * self.weights.numel() * self.weights.shape[1]  # of the centres of a class
            entries += Shared(self.weights.nbytes), Local(flop=between)
        return entries

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.shared_settings
        losses = self.pairs(batch).cross_entropies(settings.la, lambda s: s - settings.margin, settings.gamma)
        if settings.tau and self.weights.ndim == 3:
            losses = losses + (settings.tau * _center_distances(batch.shared(self.weights))).to(losses.dtype)
        return batch.reduce(losses, reduction=self.reduction)


def _center_distances(centers: Tensor) -> Tensor:
    """Return R of :class:`SoftTriple`; 1e-5 keeps the gradient finite where centres are equal, as in the authors' code."""
    unit, (classes, k, _) = F.normalize(at_least_float32(centers), dim=2), centers.shape
    first, second = torch.triu_indices(k, k, 1)
    cosines = matmul(unit, unit.mT)[:, first, second]
    return (2 + 1e-5 - 2 * cosines).sqrt().sum() / max(1, classes * k * (k - 1))


class LargeMarginSoftmax(ClassSoftmax):
    r"""Compute the softmax over classes with the target logit ‖x‖ ‖w‖ ψ(θ); embeddings are not normalised.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; the norms of ``weights``, [C, d], count, too.
    With θ the angle between embedding x_i and the weights w of its class, and m the margin,

        ψ(θ) = (−1)^k cos(m θ) − 2k   for θ in [kπ/m, (k + 1)π/m]
        loss_i = −log σ( s ‖x_i‖ ‖w_{y_i}‖ ψ(θ_i)  −  log Σ_{j≠y_i} exp(s x_i·w_j) )

    Equal to pytorch-metric-learning's LargeMarginSoftmaxLoss and SphereFaceLoss. The papers anneal a share of cos θ to 0.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        margin: m, an integer of at least 1.
        scale: s > 0.
        normalize_weights: whether weights are normalised to unit length first, as in SphereFace (A-Softmax).
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = LargeMarginSoftmax(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()   # ψ(90°) = −1: log(1 + e^(1 + 1))
        tensor(2.1269)

    Source: Liu et al. 2016, eqs. 6-7, https://arxiv.org/abs/1612.02295; SphereFace: Liu et al. 2017,
    https://arxiv.org/abs/1704.08063
    """

    # the degree of a polynomial of the cosine, whose rounding errors grow with it; at most 4 in the papers
    margin: Annotated[int, Bounds(low=1, high=100, whole=True)] = 4
    scale: Positive = 1.0
    normalize_weights: bool = False

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), Shared(len(self.weights) * stated.wide)]

    def compute(self, batch: Batch) -> Tensor:
        pairs = self.pairs(batch, normalize=False, normalize_weights=self.normalize_weights)
        of_weights = batch.shared(vector_norm(pairs.centers, dim=2)[:, 0])
        norms = vector_norm(pairs.embeddings, dim=1) * of_weights.index_select(0, pairs.targets)

        def moved(similarity: Tensor) -> Tensor:
            return norms * _psi((similarity / norms.clamp(min=MIN_NORM)).clamp(-1, 1), batch.settings.margin)

        return batch.reduce(pairs.cross_entropies(batch.shared_settings.scale, moved), reduction=self.reduction)


def _psi(cosine: Tensor, margin: int) -> Tensor:
    """Return ψ(θ), with cos(m θ) as the Chebyshev polynomial of cos θ, whose gradient is finite at θ = 0 and π."""
    before, multiple = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, multiple = multiple, 2 * cosine * multiple - before
    k = (cosine.detach().acos() * (margin / math.pi)).floor().clamp(max=margin - 1)
    return (1 - 2 * (k % 2)) * multiple - 2 * k


class CenterLoss(ClassLoss, engine="statistics"):
    r"""Compute half the squared distance of an embedding from the centre of its class; nothing is normalised.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; the centres c are ``weights``, [C, d], of :class:`ClassLoss`.
    With x the embeddings and y the labels,

        loss_i = ½ ‖x_i − c_{y_i}‖²

    Centres are parameters, learnt by their gradient. The paper moves c_j by α Σ_{i: y_i = j} (x_i − c_j) / (1 + n_j), with
    n_j the number of its embeddings. Add the loss to a softmax over classes, which keeps centres apart:
    ``WeightedSum([NormalizedSoftmax(C, d), CenterLoss(C, d)], weights=[1.0, 0.003])``.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = CenterLoss(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.zeros(2, 2)})
        >>> loss(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.arange(2)).detach()   # (½ · 25 + ½ · 1) / 2
        tensor(6.5000)

    Source: Wen et al. 2016, eq. 2, https://doi.org/10.1007/978-3-319-46478-7_31
    """

    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        rows, weights = stated.inputs.rows["embeddings"].numel() * stated.wide, self.weights.nbytes
        return [Local(bytes=max(4 * rows + weights, 2 * rows + 3 * weights)), Shared(weights), *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        pairs = self.pairs(batch, normalize=False, normalize_weights=False)
        centers = batch.shared(pairs.centers).index_select(0, pairs.targets)[:, 0]
        return batch.reduce((pairs.embeddings - centers).square().sum(1) / 2, reduction=self.reduction)


class ProxyAnchor(ClassLoss):
    r"""Compute a loss whose anchors are proxies, and whose positives and negatives are the embeddings of the global batch.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; the proxies are ``weights``, [C, d], of :class:`ClassLoss`.
    With s the cosines of embeddings x and proxies p, X⁺(p) the embeddings of p's class and P⁺ the proxies that have some,

        loss = 1/|P⁺| Σ_{p∈P⁺} log(1 + Σ_{x∈X⁺(p)} exp(−α (s_xp − δ)))  +  1/C Σ_p log(1 + Σ_{x∉X⁺(p)} exp(α (s_xp + δ)))

    in nats per proxy.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        margin: δ, in units of the cosine.
        alpha: α > 0, dimensionless.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = ProxyAnchor(2, 2, margin=0.0, alpha=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(1 + 1/e) + log 2
        tensor(1.0064)

    Source: Kim et al. 2020, eq. 4, https://arxiv.org/abs/2003.13911
    """

    margin: Number = 0.1
    alpha: Positive = 32.0

    def entries(self, stated: CallInputs) -> list[Entry]:
        of_classes = len(self.weights) * stated.wide
        *others, compared = (x for x in super().entries(stated) if not isinstance(x, Summed))
        of_blocks = cast(Classes, compared)._replace(matrices=5.5)
        return [*others, of_blocks, *[Summed(of_classes)] * 4, Summed(8 * len(self.weights))]

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.shared_settings
        positive, negative, counts = self.pairs(batch).log1p_sum_exp_by_class(settings.margin, settings.alpha)
        return positive.sum() / (counts > 0).sum() + negative.mean()  # a proxy without such embeddings has 0
