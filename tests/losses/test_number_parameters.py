"""Parameters that are one number are kept as [1], which FSDP shards; they behave, and load, as those of shape []."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, drawn, learnt, local_shard, numbers
from tests.zoo import BatchHard

D = 4
LABELS = torch.arange(6) % 3
MAKE: dict[str, tuple[Callable[[], Any], bool]] = {
    "NTXent": (lambda: cz.NTXent(temperature=cz.LearnableTemperature(0.5)), False),
    "InfoNCE": (lambda: cz.InfoNCE(temperature=cz.LearnableTemperature(0.5), symmetric=True), False),
    "NCA": (lambda: cz.NCA(temperature=cz.LearnableTemperature(0.5)), True),
    "Clip": (lambda: cz.Clip(**learnt(0.5)), False),
    "SigLIP": (lambda: cz.SigLIP(**learnt(0.5)), False),
    "SupSigmoid": (lambda: cz.SupSigmoid(**learnt(0.5)), True),
    "Margin": (lambda: cz.Margin(nu=0.1, beta=0.8), True),
    "WeightedSum": (lambda: cz.WeightedSum([cz.Margin(nu=0.1), cz.SupSigmoid()]), True),
    "CrossBatchMemory": (lambda: cz.CrossBatchMemory(cz.SupSigmoid(**learnt(0.5)), 8, D).double(), True),
}
"""Losses with such parameters, and whether they take labels."""


def rows_of(labelled: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    views = [numbers(6, D, seed=seed).to(dtype) for seed in (1, 2)]
    return [views[0], LABELS] if labelled else views


@pytest.mark.parametrize(("name", "dense", "elements"), drawn(MAKE, [False, True], [-1, 2**16], one_in=2))
def test_values_and_gradients_have_their_shapes(name: str, dense: bool, elements: int, monkeypatch) -> None:
    monkeypatch.setattr("contrastive_zoo.engine.plan.SMALL_MATRIX", elements)
    make, labelled = MAKE[name]
    for dtype in (torch.float32, torch.float64):
        loss = make()
        if name != "CrossBatchMemory":
            loss = loss.double()  # a number of 64 bits does not raise embeddings of 32
        with torch.enable_grad(), cz.engine.plain_formulas() if dense else torch.enable_grad():
            value = loss(*rows_of(labelled, dtype))
        assert value.shape == ()
        assert value.dtype == dtype
        value.backward()
        parameters = list(loss.parameters())
        assert parameters
        assert all(x.shape == x.grad.shape == (1,) and x.grad.abs() > 0 for x in parameters)


def test_a_temperature_is_a_number() -> None:
    t = cz.LearnableTemperature(0.5)
    assert t().shape == ()
    t().backward()
    close(t.log_scale.grad, torch.tensor([-0.5]))
    t.log_scale.data.fill_(9.0)
    assert t().item() == pytest.approx(0.01)
    assert t.log_scale.item() == pytest.approx(4.6051702)


@pytest.mark.parametrize("name", MAKE)
def test_states_of_either_shape_are_loaded(name: str) -> None:
    make = MAKE[name][0]
    saved = make()
    for x in saved.parameters():
        x.data.add_(0.125)
    new = saved.state_dict()
    numbers_of = dict(saved.named_parameters())
    old = {key: x.reshape(()) if key in numbers_of else x for key, x in new.items()}
    for state in (new, old):
        kept = dict(state)
        loss = make()
        loss.load_state_dict(state)
        assert all(torch.equal(x, numbers_of[key]) for key, x in loss.named_parameters())
        assert all(state[key] is x for key, x in kept.items()), "the user's own dict is left"
        inside = nn.ModuleDict({"loss": make()})
        inside.load_state_dict({f"loss.{key}": x for key, x in state.items()}, assign=True)
        assert all(x.shape == (1,) for x in inside.parameters())
    again = pickle.loads(pickle.dumps(copy.deepcopy(saved)))
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), saved.parameters(), strict=True))


def test_users_own_parameters_keep_their_shape() -> None:
    loss = BatchHard()
    other = BatchHard()
    other.load_state_dict({"margin": torch.tensor(0.5)})
    assert loss.margin.shape == other.margin.shape == ()
    assert other.margin.item() == 0.5
    loss(numbers(6, D, seed=1).float(), LABELS).backward()
    assert loss.margin.grad.shape == ()


@pytest.mark.parametrize("fsdp2", [True, False], ids=["FSDP2", "FSDP1"])
@pytest.mark.parametrize("name", ["NTXent", "Clip", "SigLIP", "SupSigmoid", "Margin"])
def test_fsdp_shards_them(name: str, fsdp2: bool, worlds: Worlds) -> None:
    """Two ranks hold one number: one of them its only element, the other none."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    make, labelled = MAKE[name]
    shards = (4, 2)

    def job() -> dict[str, Tensor]:
        from torch.distributed.device_mesh import init_device_mesh

        loss = cz.DistributedLoss(make().double(), grad_reduction="sum")
        rows = [local_shard(x, shards) for x in rows_of(labelled)]
        if fsdp2:
            fsdp.fully_shard(loss, mesh=init_device_mesh("cpu", (2,)))
            loss.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
            loss.set_gradient_divide_factor(1.0)
            loss(*rows).backward()
            return {key: x.grad.full_tensor() for key, x in loss.named_parameters()}
        wrapped = fsdp.FullyShardedDataParallel(loss, device_id=torch.device("cpu"))
        wrapped(*rows)
        with fsdp.FullyShardedDataParallel.summon_full_params(wrapped):
            return {key: x.detach().clone() for key, x in loss.named_parameters()}

    loss = make().double()
    loss(*rows_of(labelled)).backward()
    for found in worlds.run(2, job):
        assert len(found) == len(list(loss.parameters()))
        for key, x in loss.named_parameters():
            assert x.grad is not None
            close(found[f"loss.{key}"], x.grad if fsdp2 else x.detach())
