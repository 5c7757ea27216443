# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

PairSimilarity = Literal["cosine", "angle"]

def cosent(
    queries: Float[Tensor, "n d"],
    keys: Float[Tensor, "n d"],
    scores: Shaped[Tensor, " n"],
    *,
    temperature: float | Tensor = 0.05,
    similarity: PairSimilarity = "cosine",
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the log-sum-exp over all pairs of pairs that the similarity may put in the wrong order.

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

class CoSENT(Loss):
    """Compute the log-sum-exp over all pairs of pairs that the similarity may put in the wrong order.

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
        temperature: t > 0, dimensionless; a tensor is learnable.
        similarity: ``"cosine"`` or ``"angle"``.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: scores that are not one number per pair, an unknown similarity, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> CoSENT(temperature=1.0)(q, k, torch.tensor([0.2, 0.9]))   # log(1 + e^(1 − 0))
        tensor(1.3133)

    Source: Su 2022, https://kexue.fm/archives/8847; AnglE: Li & Li 2023, https://arxiv.org/abs/2309.12871
    """

    temperature: float | Tensor | nn.Module
    similarity: PairSimilarity
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.05,
        similarity: PairSimilarity = "cosine",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "n d"],
        scores: Shaped[Tensor, " n"],
        *,
        world: World | None = None,
    ) -> Tensor: ...

class AnglE(CoSENT):
    """Compute the log-sum-exp over all pairs of pairs that the similarity may put in the wrong order.

    With s_i the similarity of pair i and y_i its annotated score, over the pairs of all ranks,

        loss = log(1 + Σ_{i, j: y_i < y_j} exp((s_i − s_j) / t))

    Pairs with equal scores are not compared. ``"cosine"`` is CoSENT: s_i = q_i·k_i of unit rows. ``"angle"`` is the angle
    term of AnglE: with rows of width d = 2m read as m complex numbers, real parts first, and divided by their norms,
    s_i = |Re⟨q_i, k_i⟩ + Im⟨q_i, k_i⟩|; an odd width is padded by a 0. Every rank sorts the N similarities of all ranks:
    O(N log N) time and N numbers of memory instead of N². Equal to sentence-transformers' CoSENTLoss(scale=1/t) and
    AnglELoss(scale=1/t).

    This class compares complex angles by default: it is :class:`CoSENT` with ``similarity="angle"``.

    AnglE's paper adds this loss to CoSENT and to InfoNCE, each with a weight.

    Called as ``loss(queries, keys, scores)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d], row i forms a pair with row i of queries.
    - scores: y, [n] numbers of any scale; only their order matters.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        similarity: ``"cosine"`` or ``"angle"``.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: scores that are not one number per pair, an unknown similarity, or what any :class:`Loss` refuses.

    Examples:
        >>> q, k, y = torch.eye(2), torch.ones(2, 2), torch.tensor([0.2, 0.9])
        >>> AnglE()(q, k, y).equal(CoSENT(similarity="angle")(q, k, y))
        True

    Source: Su 2022, https://kexue.fm/archives/8847; AnglE: Li & Li 2023, https://arxiv.org/abs/2309.12871
    """

    temperature: float | Tensor | nn.Module
    similarity: PairSimilarity
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.05,
        similarity: PairSimilarity = "angle",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "n d"],
        scores: Shaped[Tensor, " n"],
        *,
        world: World | None = None,
    ) -> Tensor: ...
