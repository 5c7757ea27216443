"""Complex embeddings, as of a Fourier layer: their values and gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, local_shard, numbers, refused

SHARDS = (2, 3)


def embeddings() -> Tensor:
    return torch.view_as_complex(numbers(sum(SHARDS), 3, 2, seed=0))


def close_parts(found: Tensor, expected: Tensor) -> None:
    close(*(torch.view_as_real(x.resolve_conj()) for x in (found, expected)))


class Phases(nn.Module):
    """The product of every two rows, turned by a learnt complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([0.3 + 0.4j, 0.1j], dtype=torch.complex128))

    def forward(self, z: Tensor) -> Tensor:
        return ((z @ z.mH).mul(self.turn.sum()).real - 1).square().mean()


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("steps", [1, 3])  # at later steps rows come with the handshake
def test_a_third_party_loss(steps: int, conjugate: bool, worlds: Worlds) -> None:
    def job() -> tuple[Tensor, ...]:
        loss = cz.DistributedLoss(Phases())
        for _ in range(steps):
            z = local_shard(embeddings(), SHARDS).requires_grad_()
            loss.zero_grad()
            value = loss(z.conj() if conjugate else z)
            value.backward()
        assert z.grad is not None
        return value.detach(), z.grad / dist.get_world_size(), loss.loss.turn.grad

    z, alone = embeddings().requires_grad_(), Phases()
    expected = alone(z.conj() if conjugate else z)
    expected.backward()
    found = worlds.run(2, job)
    close_parts(torch.cat([dz for _, dz, _ in found]), z.grad)
    for value, _, of_turn in found:
        close(value, expected.detach())
        close_parts(of_turn, alone.turn.grad)


def test_a_learnt_complex_number_that_differs_is_refused(worlds: Worlds) -> None:
    def job() -> None:
        loss = Phases()
        loss.turn.data.imag += dist.get_rank()
        with pytest.raises(ValueError, match="turn has norm"):
            cz.DistributedLoss(loss)(local_shard(embeddings(), SHARDS))

    worlds.run(2, job)


def test_numbers_that_are_not_finite_are_refused(worlds: Worlds) -> None:
    def bad() -> None:
        cz.DistributedLoss(Phases())(local_shard(embeddings(), SHARDS) / torch.arange(3))

    refused(worlds, 2, bad, "z hold NaN or infinite values in 2 of 2 rows")


class Spectrum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(x))


def test_gradcache() -> None:
    torch.manual_seed(0)
    model, x = Spectrum(4, 3).double(), numbers(5, 4, seed=1)
    model(x).abs().square().sum().backward()
    expected = model.weight.grad
    model.zero_grad()
    cz.GradCache(model, 2)(x).abs().square().sum().backward()
    assert expected is not None
    assert model.weight.grad is not None
    close(model.weight.grad, expected)
