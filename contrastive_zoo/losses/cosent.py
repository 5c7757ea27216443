"""CoSENT and AnglE: pairs of sentences in the order of their annotated similarity."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.collectives import all_gather, gather_rows
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import towers_problem, word_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World

PairSimilarity = Literal["cosine", "angle"]


@checked
def cosent(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    scores: Shaped[Tensor, " n"],
    *,
    temperature: float | Tensor = 0.05,
    similarity: PairSimilarity = "cosine",
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the log-sum-exp over all pairs of pairs that the similarity may put in the wrong order.

    With s_i the similarity of pair i and y_i its annotated score, over the pairs of all ranks,

        loss = log(1 + Σ_{i, j: y_i < y_j} exp((s_i − s_j) / t))

    Pairs with equal scores are not compared. ``"cosine"`` is CoSENT: s_i = q_i·k_i of unit rows. ``"angle"`` is the angle
    term of AnglE: with rows of width d = 2m read as m complex numbers, real parts first, and divided by their norms,
    s_i = |Re⟨q_i, k_i⟩ + Im⟨q_i, k_i⟩|; an odd width is padded by a 0. Every rank sorts the N similarities of all ranks:
    O(N log N) time and N numbers of memory instead of N². Equal to sentence-transformers' CoSENTLoss(scale=1/t) and
    AnglELoss(scale=1/t).

    Args:
        queries: [n, d], n may differ between ranks.
        keys: [n, d], row i forms a pair with row i of queries.
        scores: y, [n] numbers of any scale; only their order matters.
        temperature: t > 0, dimensionless; a tensor is learnable.
        similarity: ``"cosine"`` or ``"angle"``.
        world: the ranks that share the batch.

    Raises:
        ValueError: scores that are not one number per pair, an unknown similarity, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> cosent(q, k, torch.tensor([0.2, 0.9]), temperature=1.0)   # log(1 + e^(1 − 0))
        tensor(1.3133)

    Source: Su 2022, https://kexue.fm/archives/8847; AnglE: Li & Li 2023, https://arxiv.org/abs/2309.12871
    """
    problem = _problem(queries, keys, scores) or _settings_problem(similarity)
    named = {"queries": queries, "keys": keys, "scores": scores}
    shards, *_ = begin("CoSENT", named, problem=problem, temperature=temperature, similarity=similarity, world=world)
    q, k = (prepare_rows(rows, normalize=True, world=world) for rows in (queries, keys))
    s = logit_scale(temperature, world) * _pair_similarities(q, k, similarity)
    # every rank computes the same loss from the gathered similarities
    s = all_gather(s, shards=shards, gradient="complete", process_group=world)
    ordered = gather_rows(scores, shards, world)  # torch cannot search among bools
    return _log_sum_of_inversions(s, ordered.to(torch.uint8) if ordered.dtype == torch.bool else ordered)


def _settings_problem(similarity: str) -> str | None:
    return word_problem("similarity", similarity, PairSimilarity)


class CoSENT(Loss, function=cosent, check=_settings_problem): ...


class AnglE(CoSENT, function=cosent, check=_settings_problem):
    """This class compares complex angles by default: it is :class:`CoSENT` with ``similarity="angle"``.

    AnglE's paper adds this loss to CoSENT and to InfoNCE, each with a weight.

    Examples:
        >>> q, k, y = torch.eye(2), torch.ones(2, 2), torch.tensor([0.2, 0.9])
        >>> AnglE()(q, k, y).equal(CoSENT(similarity="angle")(q, k, y))
        True
    """

    def __init__(self, *, similarity: PairSimilarity = "angle", **settings: Any) -> None:
        super().__init__(similarity=similarity, **settings)


@without_autocast
def _pair_similarities(q: Tensor, k: Tensor, similarity: PairSimilarity) -> Tensor:
    cosine = (q * k).sum(1)
    if similarity == "cosine":
        return cosine
    (q_real, q_imaginary), (k_real, k_imaginary) = (
        torch.nn.functional.pad(x, (0, x.shape[1] % 2)).chunk(2, 1) for x in (q, k)
    )
    return (cosine + (q_imaginary * k_real - q_real * k_imaginary).sum(1)).abs()


def _log_sum_of_inversions(s: Float[Tensor, " N"], y: Shaped[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return log(1 + Σ_{i, j: y_i < y_j} exp(s_i − s_j))."""
    if is_dense():
        terms = (s[:, None] - s).masked_fill(y[:, None] >= y, -torch.inf).flatten()
    else:
        y, order = y.sort(stable=True)
        s = s[order]
        sums = torch.cat([(-s.flip(0)).logcumsumexp(0).flip(0), s.new_full((1,), -torch.inf)])
        terms = s + sums[torch.searchsorted(y, y, right=True)]  # over the pairs with a strictly larger score
    return torch.cat([s.new_zeros(1), terms]).logsumexp(0)


def _problem(queries: Tensor, keys: Tensor, scores: Tensor) -> str | None:
    found = towers_problem("row i is one pair", "Pass as many keys as queries.", queries=queries, keys=keys)
    if found is None and (scores.shape != queries.shape[:1] or scores.is_complex()):
        return f"scores are one number per pair, got {kind(scores)} for queries {kind(queries)}."
    return found
