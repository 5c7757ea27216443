"""Feature statistics, clusters and teachers: numbers by hand, state."""

from typing import Any

import pytest
import torch

import contrastive_zoo as cz


def close(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_dino_moves_its_centre_while_training() -> None:
    teacher = torch.tensor([[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]])
    loss = cz.DINO(2, centre_momentum=0.75)
    loss(torch.zeros(2, 3, 2), teacher)
    close(loss.centre, torch.tensor([1.0, 1.25]))
    loss.eval()(torch.zeros(2, 2), teacher[:, 0])
    close(loss.centre, torch.tensor([1.0, 1.25]))
    other = cz.DINO(2)
    other.load_state_dict(loss.state_dict())
    close(other.centre, loss.centre)


@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "dense"])
def test_koleo_keeps_the_digits_of_near_neighbours(dense: bool) -> None:
    """Of neighbours 1e-4 apart a matmul in float32 keeps no digit of the distance."""
    generator = torch.Generator().manual_seed(0)
    far = torch.randn(6, 5, generator=generator)
    rows = torch.cat([far, far + 1e-4 * torch.randn(6, 5, generator=generator)])
    single, double = rows.clone().requires_grad_(), rows.double().requires_grad_()
    with cz.engine.plain_formulas() if dense else torch.enable_grad():
        for z in (single, double):
            cz.KoLeo(normalize=False).double()(z).backward()
    assert single.grad is not None
    torch.testing.assert_close(single.grad.double(), double.grad, rtol=1e-5, atol=0.0)


def test_a_number_of_prototypes_in_a_tensor_has_16_bits() -> None:
    """Eight bits do not hold 4,096, the number of prototypes that are drawn at a time."""
    assert cz.SwAV(torch.tensor(39, dtype=torch.int32), 3).prototypes.shape == (39, 3)
