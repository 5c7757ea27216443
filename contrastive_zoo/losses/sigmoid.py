"""Sigmoid over all pairs of images and texts: a binary classification of each."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry
from contrastive_zoo.engine.pairs import TowerPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.loss_base.families import ImageTextLoss
from contrastive_zoo.loss_base.loss import NO_RING, CallInputs, Inputs
from contrastive_zoo.loss_base.settings import Learnable, Temperature, field
from contrastive_zoo.loss_base.temperature import LearnableTemperature, LogitScale
from contrastive_zoo.ranks.row_checks import described

_unbounded_temperature = partial(LearnableTemperature, 0.1, max_scale=math.inf)


def _negative_bias() -> nn.Parameter:
    """Return SigLIP's learnable bias, −10, which matches the many negatives: as [1], since FSDP shards no []."""
    return nn.Parameter(torch.tensor([-10.0]))


class SigLIP(ImageTextLoss, LogitScale, engine="sigmoid", has_kernel=True):
    r"""Compute the binary cross-entropy of all pairs, summed over texts and averaged over images.

    Called as ``loss(images, texts)``, [n, d] each, or with several positives as ``loss(images, texts, ids, text_ids)``:

    - texts: [m, d]; m may differ from n.
    - ids, text_ids: [n] and [m] integers; a text is positive of the images of all ranks with its id. Without text_ids row i
      of texts belongs to row i of images.

    With x, y the unit embeddings of all ranks, z_ij = 1 for i = j, or equal ids, and −1 otherwise,

        loss = −1/N · Σ_i Σ_j log σ( z_ij · (x_i·y_j / t + b) )

    Dense: ``-logsigmoid((2 * eye(N) - 1) * (x @ y.T / t + b)).sum() / N``. Equal to open_clip's ``SigLipLoss`` on one
    process, whose parameters are ``loss.logit_scale``, log(1/t) without a bound, and ``loss.logit_bias``.

    Args:
        temperature: t; ``LearnableTemperature(0.1, max_scale=math.inf)`` by default.
        logit_bias: b; a parameter that begins at −10 by default. A number is constant.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> SigLIP(temperature=1.0, logit_bias=0.0)(torch.eye(2), torch.eye(2))   # log(1 + e⁻¹) + log 2
        tensor(1.0064)

    Source: Zhai et al. 2023, §3.2 and algorithm 1, https://arxiv.org/abs/2303.15343
    """

    temperature: Temperature = field(factory=_unbounded_temperature)
    logit_bias: Learnable = field(factory=_negative_bias)

    def inputs(
        self,
        images: Float[Tensor, "n d"],
        texts: Float[Tensor, "m d"],
        ids: Int[Tensor, " n"] | None = None,
        text_ids: Int[Tensor, " m"] | None = None,
    ) -> Inputs:
        problem = None
        if text_ids is None and len(images) != len(texts):
            got = f"images {described(images)} do not pair with texts {described(texts)}"
            problem = f"{got}. Pass ids and text_ids, or the same samples, in the same order, in both."
        if ids is None and text_ids is not None:
            problem = "text_ids are compared with ids: pass both."
        return Inputs.of({"images": images, "texts": texts, "ids": ids, "text_ids": text_ids}, problem)

    def needs(self, inputs: Inputs) -> Needs:
        needs = super().needs(inputs)
        if "ids" in inputs.rows:
            return needs._replace(engine="rows", no_ring=NO_RING["rows"], no_kernel="computes SigLIP without ids")
        no_kernel = "computes SigLIP with reduction='mean' or 'sum'" if self.reduction == "none" else None
        return needs._replace(no_kernel=no_kernel)

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        return self.normalize and self.is_reduced

    def entries(self, stated: CallInputs) -> list[Entry]:
        ids = [name for name in stated.inputs.rows if name.endswith("ids")]
        if not ids:
            return super().entries(stated)
        learnt = stated.learnt("temperature", "logit_bias")
        return [Blocks(["images"], ["texts"], ids[-1], parameters=learnt, reduction=self.reduction, matrices=6.5)]

    def compute(self, batch: Batch) -> Tensor:
        pairs = TowerPairs(batch, batch.settings.temperature, self.normalize)
        ids, text_ids = batch.rows.get("ids"), batch.rows.get("text_ids")
        return pairs.binary_cross_entropy(self.reduction, batch.settings.logit_bias, ids, text_ids)
