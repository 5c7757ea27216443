"""average_gradients leaves behind what DDP does, and weight decay leaves learnt scales where the gradient wants them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import averaging
from tests.helpers import close, drawn, groups, numbers, refused


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


@pytest.mark.parametrize(
    ("bucket_bytes", "skippers", "world_size"), drawn((1, 100, 25 * 2**20), ((), (1,), (0, 1, 2)), (1, 2, 3), one_in=3)
)
def test_gradients_are_those_of_ddp(bucket_bytes: int, skippers, world_size: int, worlds: Worlds) -> None:
    def job() -> list[dict[str, Tensor | None]]:
        rank, theirs, ours = dist.get_rank(), Mixed(), Mixed()
        for run in (DistributedDataParallel(theirs, find_unused_parameters=True), ours):
            run(numbers(4 + rank, 3, seed=rank), rank in skippers).backward()
        with patch.object(averaging, "BUCKET_BYTES", bucket_bytes):
            cz.average_gradients(ours)
        return [{name: x.grad for name, x in module.named_parameters()} for module in (ours, theirs)]

    for ours, theirs in worlds.run(world_size, job):
        unused = {name for name, gradient in ours.items() if gradient is None}
        assert unused == {name for name, gradient in theirs.items() if gradient is None}
        assert {"never.weight", "frozen.weight"} <= unused
        assert ("sometimes.weight" in unused) == (len(skippers) == 3 or (world_size == 1 and 0 in skippers))
        for name in theirs.keys() - unused:
            close(ours[name], theirs[name], 1e-12 if ours[name].dtype == torch.float64 else 1e-7)


def test_a_group_averages_gradients_of_any_layout_among_itself(worlds: Worlds) -> None:
    """A module without parameters has none."""

    def job() -> Tensor:
        model = nn.Linear(3, 4).double()
        model.weight.grad = numbers(3, 4, seed=dist.get_rank()).T
        with groups([0, 2], [1, 3]) as group:
            cz.average_gradients(model, group)
            cz.average_gradients(nn.ReLU(), group)
        return model.weight.grad

    for rank, found in enumerate(worlds.run(4, job)):
        close(found, (numbers(3, 4, seed=rank % 2) + numbers(3, 4, seed=rank % 2 + 2)).T / 2)


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


def after_steps(loss: nn.Module, groups: Any, steps: int = 300) -> dict[str, Tensor]:
    """Return the parameters of a loss after steps of AdamW in which every gradient is 0."""
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)
    for x in loss.parameters():
        x.grad = torch.zeros_like(x)
    for _ in range(steps):
        optimizer.step()
    return {name: x.detach().clone() for name, x in loss.named_parameters()}


def test_a_learnt_scale_stays_and_one_that_decays_is_caught() -> None:
    loss = cz.DistributedLoss(cz.Clip(temperature=cz.LearnableTemperature(0.07)))
    kept = after_steps(loss, cz.parameter_groups(nn.Linear(2, 2), loss, weight_decay=0.2))
    assert kept["loss.temperature.log_scale"].exp().item() == pytest.approx(1 / 0.07)
    decayed = after_steps(loss, loss.parameters())
    assert decayed["loss.temperature.log_scale"].exp().item() == pytest.approx(4.30, abs=0.01)


@pytest.mark.parametrize("name", CATALOGUE)
def test_of_a_loss_class_weights_and_prototypes_decay_and_nothing_else_does(name: str) -> None:
    loss = CATALOGUE[name].make()
    if "temperature" in loss.fields:
        loss.temperature = cz.LearnableTemperature()
    before = {name: x.detach().clone() for name, x in loss.named_parameters()}
    assert all(x.ndim for x in before.values()), "FSDP1 refuses parameters without a dimension"
    if not before:
        return
    after = after_steps(loss, cz.parameter_groups(loss, weight_decay=0.2), steps=1)
    weights = {"weights", "prototypes"}
    assert {x for x in before if not torch.equal(before[x], after[x])} == before.keys() & weights


def test_each_trained_parameter_is_there_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    loss = cz.ArcFace(4, 3)
    groups = cz.parameter_groups(nn.ModuleDict({"model": model, "loss": loss}), loss, weight_decay=0.1)
    assert [[tuple(x.shape) for x in group["params"]] for group in groups] == [[(3, 2), (4, 3)], [(3,), (3,)]]


def averaged(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    cz.average_gradients(model)


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(2, 4))


def with_sparse_gradients() -> nn.Module:
    model = nn.Embedding(3, 2, sparse=dist.get_rank() > 0)
    model(torch.tensor([1])).sum().backward()
    return model


DISAGREE = "average_gradients: ranks disagree on … rank 0 … rank 1"
average: Any = cz.average_gradients
decay: Any = cz.parameter_groups
BAD: dict[str, Callable[[], Any]] = {
    f"{DISAGREE} … weight … [3, 2] … [4, 2] … the same on every": lambda: averaged(nn.Linear(2, 3 + dist.get_rank())),
    f"{DISAGREE} … none": lambda: averaged(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + dist.get_rank())])),
    "average_gradients: … got generator. Pass the model": lambda: average(nn.Linear(2, 2).parameters()),
    "are modules, got [1].": lambda: decay([1], weight_decay=0.1),
    "weight_decay must be at least 0": lambda: decay(nn.Linear(1, 1), weight_decay=-0.1),
    "no parameter requires a gradient": lambda: decay(cz.NTXent(), weight_decay=0.1),
    "are DTensors (weight) … leave average_gradients out": lambda: average(sharded()),
    "the gradient of weight is sparse. Pass nn.Embedding(sparse=False)": lambda: average(with_sparse_gradients()),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_models_are_refused_on_every_rank(words: str, worlds: Worlds) -> None:
    refused(worlds, 2, BAD[words], words)
