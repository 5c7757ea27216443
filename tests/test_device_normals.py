"""Normal random numbers that are computed on a device: their bits, their distribution, and that nothing is read."""

import numpy as np
import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks import random_keys as device_normals
from contrastive_zoo.ranks.random_keys import device_keys, normal_numbers, random_keys
from tests.simulated import device, put_by


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3])
def test_the_bits_are_those_of_the_library_s_random_keys(seed: int) -> None:
    expected = random_keys(seed, np.arange(1000)).view(np.int64)
    assert device_keys(torch.tensor(seed), 1000).tolist() == expected.tolist()


def wrong_moments(x: torch.Tensor) -> list[int]:
    """Return which of the first six moments are more than five standard errors from a normal distribution's."""
    expected = {1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 15}
    variance = {1: 1, 2: 2, 3: 15, 4: 96, 5: 945, 6: 10170}
    x = x.double().flatten()
    return [k for k in expected if abs((x**k).mean() - expected[k]) > 5 * (variance[k] / len(x)) ** 0.5]


def test_the_numbers_are_normal() -> None:
    x = normal_numbers(torch.tensor(7), 1000, 400)
    assert wrong_moments(x) == []
    assert x.unique().numel() > 0.9 * 2**19 * (1 - np.exp(-400_000 / 2**19)), "distinct values of 23 bits"
    assert np.abs(np.corrcoef(x.T.double().numpy()) - np.eye(400)).max() < 6 / 1000**0.5
    steps = torch.stack([normal_numbers(torch.tensor(seed), 400) for seed in range(1000)], 1)
    assert np.abs(np.corrcoef(steps.double().numpy()) - np.eye(400)).max() < 6 / 1000**0.5
    assert wrong_moments(steps) == []


def test_no_number_is_infinite() -> None:
    """The largest and the smallest of the uniform numbers."""
    for least_bits in (0, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                device_normals, "device_keys", lambda seed, count, bits=least_bits: torch.full((count,), bits)
            )
            assert 5 < abs(normal_numbers(torch.tensor(0), 1)) < 5.4


def test_each_step_draws_other_directions_without_reading_it() -> None:
    with device() as mode:
        loss = cz.DistributedLoss(put_by(mode)(cz.SIGReg(3, num_slices=4)))
        drawn = []
        for _ in range(2):
            drawn.append(loss.loss.directions())
            loss(mode.put(torch.randn(5, 3)))
        assert not mode.reads
        assert not mode.uploads
        assert not torch.equal(*(x.cpu() for x in drawn))


def test_a_loss_whose_step_was_not_moved_is_refused() -> None:
    with device() as mode, pytest.raises(ValueError, match="SIGReg: directions are on cpu and embeddings on ipu:0"):
        cz.SIGReg(3)(mode.put(torch.ones(5, 3)))


def test_a_resumed_training_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda x: False)
    z, loss, resumed = torch.randn(5, 3), cz.SIGReg(3), cz.SIGReg(3)
    first = [loss(z) for _ in range(3)]
    resumed(z)
    resumed.load_state_dict(loss.state_dict() | {"step": torch.tensor(1)})
    assert [resumed(z) for _ in range(2)] == first[1:]
