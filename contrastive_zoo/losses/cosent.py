"""CoSENT and AnglE: pairs of sentences in the order of their annotated similarity."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.softmax_arithmetic import log_sum_of_inversions
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Temperature
from contrastive_zoo.ranks.row_checks import described, towers_problem

PairSimilarity = Literal["cosine", "angle"]


class CoSENT(Loss):
    r"""Compute the log-sum-exp over all pairs of pairs that the similarity may put in the wrong order.

    With s_i the similarity of pair i and y_i its annotated score, over the pairs of all ranks,

        loss = log(1 + Σ_{i, j: y_i < y_j} exp((s_i − s_j) / t))

    Pairs with equal scores are not compared. ``"cosine"`` is CoSENT: s_i = q_i·k_i of unit rows. ``"angle"`` is the angle
    term of AnglE: with rows of width d = 2m read as m complex numbers, real parts first, and divided by their norms,
    s_i = |Re⟨q_i, k_i⟩ + Im⟨q_i, k_i⟩|; an odd width is padded by a 0. Every rank sorts the N similarities of all ranks:
    O(N log N) time and N numbers of memory instead of N². Equal to sentence-transformers' CoSENTLoss(scale=1/t) and
    AnglELoss(scale=1/t).

    Called as ``loss(queries, keys, scores)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d], row i forms a pair with row i of queries.
    - scores: y, [n] numbers of any scale; only their order matters.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        similarity: ``"cosine"`` or ``"angle"``.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: scores that are not one number per pair, an unknown similarity, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> CoSENT(temperature=1.0)(q, k, torch.tensor([0.2, 0.9]))   # log(1 + e^(1 − 0))
        tensor(1.3133)

    Source: Su 2022, https://kexue.fm/archives/8847; AnglE: Li & Li 2023, https://arxiv.org/abs/2309.12871
    """

    temperature: Temperature = 0.05
    similarity: PairSimilarity = "cosine"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], scores: Shaped[Tensor, " n"]) -> Inputs:
        return Inputs({"queries": queries, "keys": keys, "scores": scores}, _problem(queries, keys, scores))

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.prepared(batch.rows[name], normalize=True) for name in ("queries", "keys"))
        s = batch.scale(batch.settings.temperature) * _pair_similarities(q, k, self.similarity)
        # every rank computes the same loss from the gathered similarities
        s, ordered = batch.all_rows(s), batch.gathered(batch.rows["scores"])
        # torch cannot search among bools
        return log_sum_of_inversions(s, ordered.to(torch.uint8) if ordered.dtype == torch.bool else ordered)


class AnglE(CoSENT):
    r"""Compute the angle term of AnglE: :class:`CoSENT` that compares complex angles, ``similarity="angle"``, by default.

    AnglE's paper adds this loss to CoSENT and to InfoNCE, each with a weight.

    Called as ``loss(queries, keys, scores)``, as :class:`CoSENT`.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        similarity: ``"cosine"`` or ``"angle"``.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: as :class:`CoSENT`.

    Examples:
        >>> q, k, y = torch.eye(2), torch.ones(2, 2), torch.tensor([0.2, 0.9])
        >>> AnglE()(q, k, y).equal(CoSENT(similarity="angle")(q, k, y))
        True

    Source: Li & Li 2023, https://arxiv.org/abs/2309.12871
    """

    similarity: PairSimilarity = "angle"


@without_autocast
def _pair_similarities(q: Tensor, k: Tensor, similarity: PairSimilarity) -> Tensor:
    cosine = (q * k).sum(1)
    if similarity == "cosine":
        return cosine
    (q_real, q_imaginary), (k_real, k_imaginary) = (
        torch.nn.functional.pad(x, (0, x.shape[1] % 2)).chunk(2, 1) for x in (q, k)
    )
    return (cosine + (q_imaginary * k_real - q_real * k_imaginary).sum(1)).abs()


def _problem(queries: Tensor, keys: Tensor, scores: Tensor) -> str | None:
    result = towers_problem("row i is one pair", "Pass as many keys as queries.", queries=queries, keys=keys)
    if result is None and (scores.shape != queries.shape[:1] or scores.is_complex()):
        return f"scores are one number per pair, got {described(scores)} for queries {described(queries)}."
    return result
