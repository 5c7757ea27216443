"""Decompose symmetric matrices, with backward passes whose matmuls autocast does not reach.

Some trainers call ``backward()`` inside the autocast block. torch's derivatives of ``cholesky``, ``solve_triangular`` and
``eigvalsh`` multiply matrices, which autocast then casts to 16 bits.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.precision import matmul, without_autocast


@without_autocast
def inverse_cholesky(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Return L⁻¹ of ``matrix = L Lᵀ`` with L lower triangular; NaN if the matrix is not positive definite.

    Examples:
        >>> inverse_cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
        tensor([[ 0.5000,  0.0000],
                [-0.5000,  1.0000]])
        >>> inverse_cholesky(torch.zeros(1, 1))   # not positive definite
        tensor([[nan]])
    """
    inverse: Tensor = _InverseCholesky.apply(matrix)
    return inverse


class _InverseCholesky(Function):
    """Compute W = L⁻¹, and dA = sym(Wᵀ Φ(−dW Wᵀ) W), where Φ takes the lower triangle with half of the diagonal.

    From L = W⁻¹ follows dL = −Wᵀ dW Wᵀ, which in dA = sym(L⁻ᵀ Φ(Lᵀ dL) L⁻¹) (Murray 2016, eq. 10,
    https://arxiv.org/abs/1602.07527) leaves only W.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False).masked_fill(failed > 0, torch.nan)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        inner = matmul(-gradient, inverse.mT).tril()
        inner = inner - inner.diagonal().diag() / 2
        outer = matmul(matmul(inverse.mT, inner), inverse)
        return (outer + outer.mT) / 2


@without_autocast
def eigenvalues(matrix: Float[Tensor, "... d d"]) -> Float[Tensor, "... d"]:
    """Return the eigenvalues of symmetric matrices in ascending order.

    Examples:
        >>> eigenvalues(torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
        tensor([2., 3.])
    """
    found: Tensor = _Eigenvalues.apply(matrix)
    return found


class _Eigenvalues(Function):
    """Compute λ, and dA = V diag(dλ) Vᵀ."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        if not ctx.needs_input_grad[0]:
            return torch.linalg.eigvalsh(matrix)
        values, vectors = torch.linalg.eigh(matrix)
        ctx.save_for_backward(matrix, vectors)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        matrix, vectors = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a second derivative, in which vectors depend on the matrix
            vectors = torch.linalg.eigh(matrix).eigenvectors
        return matmul(vectors * gradient.unsqueeze(-2), vectors.mT)
