"""Weight decay leaves learnt temperatures, scales and biases where the gradient wants them."""

from typing import Any

import pytest
import torch
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing.catalogue import CATALOGUE


def after_steps(loss: nn.Module, groups: Any, steps: int = 300) -> dict[str, torch.Tensor]:
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


def test_bad_arguments_are_refused() -> None:
    for modules, decay, text in [
        (([1],), 0.1, "are modules, got .1."),
        ((nn.Linear(1, 1),), -0.1, "weight_decay must be at least 0"),
        ((cz.NTXent(),), 0.1, "no parameter requires a gradient"),
    ]:
        with pytest.raises(ValueError, match=text):
            cz.parameter_groups(*modules, weight_decay=decay)  # type: ignore[arg-type]  # the mistakes
