"""Several modalities of a sample, aligned by the volume that their embeddings span."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.precision import unit_rows
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, blocks_of, reduce_towers
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.settings import Reduction, Smoothing, Temperature


class GRAM(ViewLoss, engine="rows"):
    r"""Compute the contrastive loss of volumes: the modalities of a sample should span a small one.

    Called as ``loss(anchors, modality1, modality2, …)``, two or more of [n, d], such as texts, videos and sounds.
    With a, m¹, m², … the unit embeddings of all ranks, and G_ij the matrix of dot products of a_i, m¹_j, m²_j, …,

        V_ij = √ det G_ij
        loss = ½ · cross_entropy(−V / t, arange(N))  +  ½ · cross_entropy(−Vᵀ / t, arange(N))

    A volume that rounding does not tell from 0, up to 1e-3 in float32, is 0 and has no gradient. Equal to the authors' code
    with ``label_smoothing=0.1``.

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
        entry = partial(blocks_of, BlockLoss.of(_volume_losses, stated.settings), reduction=self.reduction)
        return [entry([anchors], [other], width=others * stated.width), entry([other], [anchors], matmuls=3 * others)]

    def compute(self, batch: Batch) -> Tensor:
        name, *others = batch.rows
        anchors = batch.candidates(name, normalize=True)
        bases = _scaled_bases([batch.prepared(batch.rows[x], normalize=True) for x in others])
        loss = BlockLoss.of(_volume_losses, batch.settings)
        return reduce_towers(batch, loss, (anchors, bases), reduction=self.reduction)


_ROUNDING_UNITS = 16  # what rounding may leave of a difference of equal numbers near 1


def _scaled_bases(modalities: Sequence[Float[Tensor, "n d"]]) -> Float[Tensor, "n e"]:
    """Return Gram and Schmidt's basis of each sample's modalities, with vectors as long as their volume.

    The volume with an anchor is theirs, times the anchor's distance from their span: no N × N matrices are held.
    """
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


def _volume_losses(block: AnchorBlock, temperature: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    logits = -_volumes(block.anchors, block.candidates) / temperature
    partner = logits.where(block.positive, 0).sum(1)
    losses = cross_entropy(partner, masked_log_sum_exp(logits, block.negative))
    return losses + label_smoothing * (partner - logits.mean(1)), block.positive.any(1)


def _volumes(x: Float[Tensor, "n d"], bases: Float[Tensor, "m e"]) -> Float[Tensor, "n m"]:
    """Return √(|x|² v² − Σ_l (x·b_l)²), b_l being the vectors of a basis, of length v; bases may come first."""
    if x.shape[1] > bases.shape[1]:  # a basis of one vector is that vector: either may be first
        return _volumes(bases, x).T
    vectors = bases.split(x.shape[1], 1)
    largest = x.square().sum(1)[:, None] * vectors[0].square().sum(1)
    squares = largest - torch.stack([(x @ vector.T).square() for vector in vectors]).sum(0)
    positive = squares > _ROUNDING_UNITS * torch.finfo(x.dtype).eps * largest
    return squares.where(positive, 1).sqrt().where(positive, 0)
