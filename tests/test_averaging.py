"""average_gradients leaves behind what DDP leaves behind."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import averaging
from tests.helpers import close, common_error, groups, numbers

Gradients = dict[str, Tensor | None]


class Mixed(nn.Module):
    """Several layers, two dtypes, a layer that some ranks skip and one that all skip, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4).double()
        self.second = nn.Linear(4, 5)
        self.sometimes = nn.Linear(5, 5)
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1).double()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        hidden = self.second(self.first(x).tanh().float()).tanh()
        hidden = self.frozen(hidden if skip else self.sometimes(hidden).tanh())
        return self.scale * self.last(hidden.double()).square().mean()


def gradients(module: nn.Module) -> Gradients:
    return {name: x.grad for name, x in module.named_parameters()}


def by_ddp(model: nn.Module) -> Callable[..., Tensor]:
    return DistributedDataParallel(model, find_unused_parameters=True)


def steps(run: Callable[..., Tensor], skippers: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    run(numbers(4 + rank, 3, seed=rank), rank in skippers).backward()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 25 * 2**20])
@pytest.mark.parametrize("skippers", [(), (1,), (0, 1, 2)], ids=lambda skippers: f"skipped by {len(skippers)}")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_those_of_ddp(world_size: int, skippers, bucket_bytes: int, worlds: Worlds) -> None:
    def job() -> tuple[Gradients, Gradients]:
        theirs, ours = Mixed(), Mixed()
        steps(by_ddp(theirs), skippers)
        steps(ours, skippers)
        with patch.object(averaging, "BUCKET_BYTES", bucket_bytes):
            cz.average_gradients(ours)
        return gradients(ours), gradients(theirs)

    for ours, theirs in worlds.run(world_size, job):
        unused = {name for name, gradient in ours.items() if gradient is None}
        assert unused == {name for name, gradient in theirs.items() if gradient is None}
        assert {"never.weight", "frozen.weight"} <= unused
        assert ("sometimes.weight" in unused) == (len(skippers) == 3 or (world_size == 1 and 0 in skippers))
        for name in theirs.keys() - unused:
            close(ours[name], theirs[name], 1e-12 if ours[name].dtype == torch.float64 else 1e-7)


def test_gradients_of_any_layout_are_averaged(worlds: Worlds) -> None:
    def job() -> Tensor:
        model = nn.Linear(3, 4).double()
        model.weight.grad = numbers(3, 4, seed=dist.get_rank()).T
        cz.average_gradients(model)
        return model.weight.grad

    expected = (numbers(3, 4, seed=0) + numbers(3, 4, seed=1)).T / 2
    for found in worlds.run(2, job):
        close(found, expected)


def test_a_group_averages_among_itself(worlds: Worlds) -> None:
    def job() -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), float(dist.get_rank()))
        with groups([0, 2], [1, 3]) as group:
            cz.average_gradients(model, group)
        return model.weight.grad.item()

    assert worlds.run(4, job) == [1.0, 2.0, 1.0, 2.0]


def test_a_module_without_parameters_has_nothing_to_average(worlds: Worlds) -> None:
    worlds.run(2, lambda: cz.average_gradients(nn.ReLU()))


def good() -> float:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), float(dist.get_rank()))
    cz.average_gradients(model)
    return model.weight.grad.item()


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], tuple[str, ...]]] = {
    "width": (lambda rank: nn.Linear(2, 3 + rank), ("weight", "[3, 2]", "[4, 2]", "the same on every rank")),
    "number": (lambda rank: nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]), ("1.weight", "brought none")),
    "frozen": (lambda rank: nn.Linear(2, 2).requires_grad_(rank == 0), ("weight", "rank 1 brought none")),
    "dtype": (lambda rank: nn.Linear(2, 2).to(torch.float64 if rank else torch.float32), ("float32", "float64")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_modules_that_differ_are_refused_on_every_rank(what: str, worlds: Worlds) -> None:
    make, words = DIFFERENT[what]

    def bad() -> None:
        model = make(dist.get_rank())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        cz.average_gradients(model)

    text, after = common_error(worlds, 2, bad, good)
    assert text.startswith("average_gradients: ranks disagree on")
    assert all(word in text for word in ("rank 0", "rank 1", *words)), text
    assert after == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_mean_fits_where_the_sum_does_not(dtype: torch.dtype, worlds: Worlds) -> None:
    def job() -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Linear(2, 1, bias=False).to(dtype)
        model.weight.grad = torch.full((1, 2), 40_000.0, dtype=dtype)
        cz.average_gradients(model)
        rows = torch.full((3, 2), 40_000.0, dtype=dtype, requires_grad=True)
        mean = cz.collectives.reduce_scatter(rows, op="mean")
        (gradient,) = torch.autograd.grad(mean, rows, torch.full_like(mean, 40_000.0))
        return model.weight.grad, mean.detach(), gradient

    for world_size in (2, 3):
        for found in worlds.run(world_size, job):
            for x, scale in zip(found, (1, 1, world_size), strict=True):
                torch.testing.assert_close(x, torch.full_like(x, 40_000.0 / scale))


NOT_MODULES: dict[str, tuple[Callable[[], object], str]] = {
    "generator": (lambda: nn.Linear(2, 2).parameters(), "got generator. Pass the model itself"),
    "list": (lambda: list(nn.Linear(2, 2).parameters()), "got list"),
}


@pytest.mark.parametrize("what", NOT_MODULES)
@pytest.mark.parametrize("which", ["every rank", "one rank"])
def test_what_is_no_module_is_refused_on_every_rank(what: str, which: str, worlds: Worlds) -> None:
    make, words = NOT_MODULES[what]

    def bad() -> None:
        cz.average_gradients(make() if which == "every rank" or dist.get_rank() == 1 else nn.Linear(2, 2))

    text, after = common_error(worlds, 2, bad, good)
    assert words in text
    assert after == [0.5, 0.5]
    with pytest.raises(ValueError, match=words.split(".")[0]):
        cz.average_gradients(make())


def test_distributed_tensors_are_refused_on_every_rank(worlds: Worlds) -> None:
    def bad() -> None:
        from torch.distributed.fsdp import fully_shard

        model = nn.Linear(2, 4)
        fully_shard(model)
        cz.average_gradients(model)

    text, after = common_error(worlds, 2, bad, good)
    assert "are DTensors (weight)" in text
    assert "leave average_gradients out" in text
    assert after == [0.5, 0.5]
