"""Softmax over classes with a margin on the angle: fixed, by an embedding's norm, or with weights of hard negatives."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Summed
from contrastive_zoo.engine.precision import sum_dtype
from contrastive_zoo.loss_base.class_loss import ShardableClassLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.settings import Bounds, Momentum, Number, Positive, field

Angle = Annotated[float, Bounds("margins are angles 0 … π in radians", low=0, high=math.pi, constant=True)]


class ArcFace(ShardableClassLoss):
    r"""Compute the additive angular margin loss; with k centres per class, sub-center ArcFace.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d].
    With z the unit embeddings, w the unit weights, y the labels and θ the angle between z_i and w_{y_i},

        loss_i = −log σ( s cos(θ + m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    For θ > π − m, where cos(θ + m) increases again, cos θ − m sin m replaces it, as in the authors' code.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        margin: m, 0 … π, in radians; pytorch-metric-learning takes degrees: its 28.6 is ``math.radians(28.6)``.
        scale: s > 0, dimensionless.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        sub_centers: weight vectors for each class, of which the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: r, the share of the classes that a training step draws; 1 is all.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = ArcFace(2, 2, margin=torch.pi / 3, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e^(2 cos 60°) + 1) − 1
        tensor(0.3133)

    Source: Deng et al. 2019, eq. 3, https://arxiv.org/abs/1801.07698; sub-centers: Deng et al. 2020, §3,
    https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123560715.pdf
    """

    margin: Angle = 0.5
    scale: Positive = 64.0

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.shared_settings
        losses = self.pairs(batch).cross_entropies(settings.scale, lambda s: _with_margin(s, settings.margin))
        return self.result(batch, losses)


def _with_margin(cosine: Tensor, margin: float | Tensor) -> Tensor:
    """Return cos(θ + m); where that increases again cos θ − m sin m."""
    m = torch.as_tensor(margin, dtype=cosine.dtype)
    return _cosine_of_sum(cosine, m).where(cosine >= -m.cos(), cosine - m * m.sin())


def _cosine_of_sum(cosine: Tensor, m: Tensor) -> Tensor:
    square, eps = 1 - cosine**2, torch.finfo(cosine.dtype).eps
    sine_at_pole = square.detach().clamp(min=0).sqrt()  # the derivative is infinite at θ = 0 and π
    sine = square.clamp(min=eps).sqrt().where(square > eps, sine_at_pole)
    return cosine * m.cos() - sine * m.sin()


class CurricularFace(ShardableClassLoss):
    r"""Compute ArcFace with more weight on hard negatives as training proceeds.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d].
    With z the unit embeddings, w the unit weights, y the labels, s_ij = z_i·w_j, θ the angle between z_i and w_{y_i},

        loss_i = −log σ( s cos(θ + m)  −  log Σ_{j≠y_i} exp(s N_ij) )
        N_ij   = s_ij (t + s_ij)   if s_ij > cos(θ + m), otherwise s_ij
        t      = μ T + (1 − μ) mean_i s_{i y_i}

    without gradient through t. T is the buffer ``mean_cosine``, at first 0, in which each call in training mode stores t.
    For several calls use :func:`contrastive_zoo.one_step`. For θ > π − m, cos θ − m sin m replaces the first cos(θ + m).

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        margin: m, 0 … π, in radians.
        scale: s > 0, dimensionless.
        momentum: μ, 0 … 1.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        sub_centers: weight vectors for each class, of which the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: the share of classes that training compares with.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = CurricularFace(2, 2, margin=0.0, scale=1.0, momentum=0.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2), "mean_cosine": torch.tensor(0.0)})
        >>> loss(torch.tensor([[0.6, 0.8]]), torch.tensor([0])).detach()   # log(1 + exp(0.8 · (0.6 + 0.8) − 0.6))
        tensor(0.9866)

    Source: Huang et al. 2020, eqs. 9-12, https://arxiv.org/abs/2004.00288
    """

    margin: Angle = 0.5
    scale: Positive = 64.0
    momentum: Momentum = 0.99

    mean_cosine: Tensor = field(init=False)

    has_limits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean_cosine = nn.Buffer(torch.zeros(()))

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), Summed(8)]

    def compute(self, batch: Batch) -> Tensor:
        settings, pairs = batch.shared_settings, self.pairs(batch)
        cosines, momentum = pairs.target_similarities(), settings.momentum
        total = batch.sum(cosines.sum(dtype=sum_dtype(cosines)), gradient="complete")
        sums = torch.stack([total, torch.full_like(total, batch.total)])
        (t,) = self.moved(momentum, sums)
        margin = torch.as_tensor(settings.margin, dtype=cosines.dtype)
        harder = _cosine_of_sum(cosines, margin), t.to(cosines)
        losses = pairs.cross_entropies(settings.scale, lambda s: _with_margin(s, margin), harder=harder)
        return self.result(batch, losses, momentum, sums)

    def averages(self, sums: Tensor) -> dict[str, Tensor]:
        return {"mean_cosine": sums[0] / sums[1]}


class MagFace(ShardableClassLoss):
    r"""Compute ArcFace with a margin that grows with the norm of an embedding, and a reward of large norms.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; embeddings must not be normalised before.
    :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d]. With a the norm of embedding x_i, at least l and at most
    u, z the unit embeddings, w the unit weights, y the labels and θ the angle between z_i and w_{y_i},

        m      = m_l + (m_u − m_l) (a − l) / (u − l)
        loss_i = −log σ( s cos(θ + m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )  +  λ (a / u² + 1 / a)

    For θ > π − m, cos θ − m sin m replaces cos(θ + m), as in :class:`ArcFace`. The authors' code has cos θ for θ > π/2.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        low_norm: l > 0.
        high_norm: u > l.
        low_margin: m_l, 0 … π, in radians.
        high_margin: m_u, 0 … π, in radians.
        scale: s > 0, dimensionless.
        norm_weight: λ.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for this rank's.
        sub_centers: weight vectors for each class; the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: the share of classes that training compares with.
        check_finite: refuse NaN and infinite embeddings.

    Raises:
        ValueError: high_norm that is not above low_norm.

    Examples:
        >>> loss = MagFace(2, 2, low_norm=1.0, high_norm=2.0, low_margin=torch.pi / 3, scale=2.0, norm_weight=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(1 + e^(0 − 2 cos 60°)) + 1/4 + 1
        tensor(1.5633)

    Source: Meng et al. 2021, eqs. 3-5, https://arxiv.org/abs/2103.06256
    """

    low_norm: Positive = 10.0
    high_norm: Positive = 110.0
    low_margin: Angle = 0.45
    high_margin: Angle = 0.8
    scale: Positive = 64.0
    norm_weight: Number = 35.0

    def settings_problem(self) -> str | None:
        low, high = self.low_norm, self.high_norm
        ordered = not isinstance(low, (int, float)) or not isinstance(high, (int, float)) or low < high
        empty = None if ordered else f"norms lie between low_norm < high_norm, got {low} and {high}."
        return super().settings_problem() or empty

    def compute(self, batch: Batch) -> Tensor:
        settings, pairs = batch.shared_settings, self.pairs(batch)
        low, high = settings.low_norm, settings.high_norm
        norms = vector_norm(batch.prepared(batch.first, normalize=False), dim=1).clamp(min=low).clamp(max=high)
        steepness = (settings.high_margin - settings.low_margin) / (high - low)
        margin = settings.low_margin + steepness * (norms - low)
        losses = pairs.cross_entropies(settings.scale, lambda s: _with_margin(s, margin))
        losses = losses + settings.norm_weight * (norms / high**2 + 1 / norms)
        return self.result(batch, losses)


class AdaFace(ShardableClassLoss):
    r"""Compute a margin loss that asks more of embeddings with larger norms, of better images.

    Called as ``loss(embeddings, labels)``, [n, d] and [n]; pass embeddings unnormalised.
    :class:`ClassLoss` documents ``weights``, [C, d] or [C, k, d]. With a the norm of embedding x_i, at most 100, z the unit
    embeddings, w the unit weights, θ the angle between z_i and w_{y_i}, and ε = 0.001,

        q      = h (a − M) / (S + ε), in [−1, 1]
        loss_i = −log σ( s (cos(θ − m q) − m q − m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    without gradient through q. θ and θ − m q stay ε away from 0 and π. M and S average mean and standard deviation of all
    ranks' norms over steps: M = μ ``mean_norm`` + (1 − μ) mean_i a_i. In training mode each call stores them in the buffers
    ``mean_norm`` and ``std_norm``, equal on every rank, at first 20 and 100, or once a :func:`contrastive_zoo.one_step`.

    Args:
        num_classes: the number of classes, C.
        embedding_size: the width of embeddings, d.
        margin: m.
        concentration: h > 0.
        scale: s > 0, dimensionless.
        momentum: μ, 0 … 1, the authors' ``1 - t_alpha``.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all classes.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for this rank's.
        sub_centers: weight vectors per class; the nearest counts.
        shard_over: the ranks that share the classes; None keeps all weights on each.
        sample_rate: the share of classes that training compares with.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = AdaFace(2, 2, margin=0.5, scale=2.0, momentum=0.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)}, strict=False)
        >>> loss(torch.tensor([[0.6, 0.8]]), torch.tensor([1])).detach()   # q = 0: log(1 + e^(1.2 − 0.6))
        tensor(1.0375)

    Source: Kim et al. 2022, eqs. 8-15, https://arxiv.org/abs/2204.00964
    """

    margin: Number = 0.4
    concentration: Positive = 0.333
    scale: Positive = 64.0
    momentum: Momentum = 0.99

    mean_norm: Tensor = field(init=False)
    std_norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean_norm, self.std_norm = nn.Buffer(torch.tensor(20.0)), nn.Buffer(torch.tensor(100.0))

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), Summed(3 * 8)]

    def compute(self, batch: Batch) -> Tensor:
        settings, pairs = batch.shared_settings, self.pairs(batch)
        norms = vector_norm(batch.prepared(batch.first.detach(), normalize=False), dim=1).clamp(_EPS, _LARGEST_NORM)
        wide = norms.to(sum_dtype(norms))
        sums = batch.sum(torch.stack([torch.ones_like(wide), wide, wide.square()]).sum(1), gradient="complete")
        mean, deviation = (x.to(norms) for x in self.moved(settings.momentum, sums))
        quality = (settings.concentration * (norms - mean) / (deviation + _EPS)).clamp(-1, 1)
        shift = settings.margin * quality

        def adapted(s: Tensor) -> Tensor:
            angle = s.clamp(_EPS - 1, 1 - _EPS).acos() - shift
            return angle.clamp(_EPS, math.pi - _EPS).cos() - shift - settings.margin

        losses = pairs.cross_entropies(settings.scale, adapted)
        return self.result(batch, losses, settings.momentum, sums)

    def averages(self, sums: Tensor) -> dict[str, Tensor]:
        count, total, squares = sums
        mean = total / count
        variance = (squares - total * mean) / (count - 1).clamp(min=1)
        return {"mean_norm": mean, "std_norm": variance.clamp(min=0).sqrt()}


_EPS, _LARGEST_NORM = 1e-3, 100.0  # of the authors' code
