"""Decompositions of symmetric matrices: their derivatives of two orders, and matrices that have none."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from contrastive_zoo.engine.statistics import eigenvalues, inverse_cholesky
from tests.helpers import close, numbers


def symmetric(x: Tensor) -> Tensor:
    """A positive definite matrix, or several, of any square matrices."""
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def test_the_inverse_of_choleskys_factor_has_two_derivatives() -> None:
    x = numbers(4, 4, seed=0).requires_grad_()
    close(inverse_cholesky(symmetric(x)), torch.linalg.cholesky(symmetric(x)).inverse())
    assert gradcheck(lambda x: inverse_cholesky(symmetric(x)), x)
    assert gradgradcheck(lambda x: inverse_cholesky(symmetric(x)), x)


@pytest.mark.parametrize("shape", [(4, 4), (3, 2, 2)])
def test_eigenvalues_have_two_derivatives(shape: tuple[int, ...]) -> None:
    x = numbers(*shape, seed=1).requires_grad_()
    close(eigenvalues(symmetric(x)), torch.linalg.eigvalsh(symmetric(x)))
    assert gradcheck(lambda x: eigenvalues(symmetric(x)), x)
    assert gradgradcheck(lambda x: eigenvalues(symmetric(x)), x)


def test_a_matrix_that_is_not_positive_definite_has_no_factor() -> None:
    assert inverse_cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]])).isnan().all()
