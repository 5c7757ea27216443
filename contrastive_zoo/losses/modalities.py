"""Several modalities of a sample, aligned by the volume that their embeddings span."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Candidates
from contrastive_zoo.engine.cost import Blocks, Entry
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.precision import unit_rows
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, smooths
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.settings import Reduction, Smoothing, Temperature


class GRAM(ViewLoss, engine="rows"):
    r"""Compute the contrastive loss of volumes: the modalities of a sample should span a small one.

    Called as ``loss(anchors, modality1, modality2, …)``, two or more of [n, d], such as texts, videos and sounds.
    With a, m¹, m², … the unit embeddings of all ranks, and G_ij the matrix of dot products of a_i, m¹_j, m²_j, …,

        V_ij = √ det G_ij
        loss = ½ · cross_entropy(−V / t, arange(N))  +  ½ · cross_entropy(−Vᵀ / t, arange(N))

    No matrix of N × N matrices is held: V_ij is the volume of sample j's modalities, times the distance of a_i from their
    span, of which Gram and Schmidt's basis is computed once. A volume that rounding does not tell from 0, up to 1e-3 in
    float32, is 0 and has no gradient. Equal to the authors' code with ``label_smoothing=0.1``.

    Args:
        temperature: t > 0; a tensor or module is learnable.
        label_smoothing: ε, 0 … 1, the share of each target that is spread evenly over all candidates.
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> x, y, z = torch.eye(3).unbind()
        >>> a, b, c = torch.stack([x, y]), torch.stack([x, z]), torch.stack([y, x])   # V = [[0, 0], [0, 1]]
        >>> GRAM(temperature=1.0)(a, b, c)   # ½ [log 2 + log(1 + e)]
        tensor(1.0032)

    Source: Cicchetti et al. 2024, https://arxiv.org/abs/2412.11959
    """

    temperature: Temperature = 0.07
    label_smoothing: Smoothing = 0.0
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        (anchors, other, *_), others = stated.inputs.rows, len(stated.inputs.rows) - 1
        how: Any = {"parameters": stated.learnt("temperature"), "reduction": self.reduction}
        to_bases = Blocks([anchors], [other], width=others * stated.width, **how)
        return [to_bases, Blocks([other], [anchors], matmuls=3 * others, **how)]

    def compute(self, batch: Batch) -> Tensor:
        anchors, *others = batch.rows
        a, ids = batch.candidates(anchors, normalize=True), batch.indices()
        bases = _scaled_bases([batch.prepared(batch.rows[name], normalize=True) for name in others])
        settings = batch.settings

        def direction(x: Tensor | Candidates, y: Tensor | Candidates) -> Tensor:
            loss = BlockLoss(
                _volume_losses, temperature=settings.temperature, label_smoothing=settings.label_smoothing,
                of_bases=x is bases,
            )  # fmt: skip
            return reduce_rows(batch, loss, x, ids, candidates=y, candidate_ids=ids, reduction=self.reduction)

        return (direction(a, bases) + direction(bases, a)) / 2


_ROUNDING_UNITS = 16  # what rounding may leave of a difference of equal numbers near 1


def _scaled_bases(modalities: Sequence[Float[Tensor, "n d"]]) -> Float[Tensor, "n e"]:
    """Return an orthogonal basis of the span of each sample's embeddings; each of its vectors is as long as their volume."""
    basis: list[Tensor] = []
    volume = torch.ones_like(modalities[0][:, :1])
    for x in modalities:
        for vector in basis:
            x = x - (x * vector).sum(1, keepdim=True) * vector
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        is_new = length > _ROUNDING_UNITS * torch.finfo(x.dtype).eps
        basis.append(unit_rows(x.where(is_new, 0)))
        volume = volume * length.where(is_new, 0)
    return torch.cat([volume * vector for vector in basis], 1)


def _volume_losses(
    block: AnchorBlock, temperature: Tensor, label_smoothing: float, of_bases: bool
) -> tuple[Tensor, Tensor]:
    volumes = _volumes(block.candidates, block.anchors).T if of_bases else _volumes(block.anchors, block.candidates)
    logits = -volumes / temperature
    partner = logits.where(block.positive, 0).sum(1)
    losses = cross_entropy(partner, masked_log_sum_exp(logits, block.negative))
    if smooths(label_smoothing):
        losses = losses + label_smoothing * (partner - logits.mean(1))
    return losses, block.positive.any(1)


def _volumes(x: Float[Tensor, "n d"], bases: Float[Tensor, "m e"]) -> Float[Tensor, "n m"]:
    """Return √(|x|² v² − Σ_l (x·b_l)²), b_l being the vectors of a basis, of length v."""
    vectors = bases.split(x.shape[1], 1)
    largest = x.square().sum(1)[:, None] * vectors[0].square().sum(1)
    squares = largest - torch.stack([(x @ vector.T).square() for vector in vectors]).sum(0)
    positive = squares > _ROUNDING_UNITS * torch.finfo(x.dtype).eps * largest
    return squares.where(positive, 1).sqrt().where(positive, 0)
