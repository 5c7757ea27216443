"""One rule in every loss: a number is constant; a tensor, or a module that returns one, is learnable, or refused."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import plan, tiling
from contrastive_zoo.loss_base.settings import Bounds, is_number
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, close, split
from tests.losses.test_settings import CASES, LABELLED, SUBJECTS, Checkpointed, kind_of, said_by

STEP = 1e-5
STARTS = [("Margin", "beta"), ("Margin, by class", "beta")]
"""Where the number is the first value of the loss's own parameter."""


class Shifted(nn.Module):
    """A number that a module computes from a parameter [1], as LearnableTemperature does."""

    def __init__(self, x: float) -> None:
        super().__init__()
        self.below = nn.Parameter(torch.tensor([x - 1], dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.below + 1


FORMS: dict[str, Callable[[float], Any]] = {
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True),
    "parameter": lambda x: nn.Parameter(torch.tensor([x], dtype=torch.float64)),
    "module": Shifted,
}


def bounds_of(name: str, setting: str) -> Bounds | None:
    check = SUBJECTS[name]()._checks.get(setting)
    return None if check is None or check.bounds is None or check.bounds.whole else check.bounds


REAL = [case for case in CASES if bounds_of(*case) is not None and case not in STARTS]
LEARNABLE = [case for case in REAL if not bounds_of(*case).constant]  # type: ignore[union-attr]  # not None, as above
CONSTANT = [case for case in REAL if case not in LEARNABLE]


def start(name: str, setting: str) -> float:
    """Near the default, where the loss is differentiable, and away from the bounds."""
    loss, bounds = SUBJECTS[name](), bounds_of(name, setting)
    held = getattr(loss, setting)
    value = 1.05 * held if is_number(held) and not isinstance(held, Tensor) and abs(held) > 1e-3 else 0.13
    most = min((x for x in (bounds.high, bounds.below) if x is not None), default=value + 1)  # type: ignore[union-attr]  # as above
    return min(value, 0.9 * most)


def loss_of(name: str, setting: str | None, value: Any) -> Any:
    torch.manual_seed(0)
    return SUBJECTS[name](**({setting: value} if setting else {})).double()


def leaf_of(value: Any) -> Tensor:
    return value.below if isinstance(value, Shifted) else value


def test_most_numbers_are_learnable() -> None:
    assert len(LEARNABLE) > 90
    assert {("SmoothAP", "temperature"), ("Triplet", "margin")} <= set(LEARNABLE)


@pytest.mark.parametrize(("name", "setting"), LEARNABLE)
def test_a_tensor_is_learnt_by_the_derivative_of_the_number(name: str, setting: str, monkeypatch) -> None:
    """The last forms in several blocks."""
    rows, x = SUBJECTS[name].rows, start(name, setting)
    value = loss_of(name, setting, x)(*rows).detach()
    above, below = (loss_of(name, setting, x + sign * STEP * x)(*rows).detach() for sign in (1, -1))
    derivative = (above - below) / (2 * STEP * x)
    found, first = [], LEARNABLE.index((name, setting))
    for make in [form for index, form in enumerate(FORMS.values()) if EVERY_CASE or index != first % len(FORMS)]:
        given = make(x)
        learnt = loss_of(name, setting, given)(*rows)
        close(learnt.detach(), value)
        found.append(torch.autograd.grad(learnt, leaf_of(given))[0].reshape(()))
        close(found[0], found[-1])
        monkeypatch.setattr(tiling, "BLOCK_BYTES", 500)
    close(found[0], derivative.reshape(()), tolerance=1e-5)  # of the difference quotient


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_backward_pass_computes_with_the_settings_of_its_call(name: str, reduction: str) -> None:
    """Also of numbers in tensors, which are set in place."""
    found, given = [], {"reduction": reduction} if "reduction" in SUBJECTS[name]().fields else {}
    for is_set_later in (False, True):
        torch.manual_seed(0)
        tensors = {x: torch.tensor(start(name, x), dtype=torch.float64) for of, x in LEARNABLE if of == name}
        loss = SUBJECTS[name](**given, **(tensors if reduction == "none" else {})).double()
        rows = [x.clone().requires_grad_() if x.is_floating_point() else x for x in SUBJECTS[name].rows]
        value = loss(*rows)
        if is_set_later:
            for x in tensors.values():
                x.fill_(torch.nan)
            for setting in loss.fields.keys() & vars(loss).keys():
                setattr(loss, setting, None)
        value.sum().backward()
        found.append(torch.cat([x.grad.flatten() for x in rows if x.grad is not None]))
    close(*found)


@pytest.mark.parametrize("form", ["parameter", "module"])
def test_a_checkpoint_computes_again_with_the_value_of_a_setting(form: str) -> None:
    """In 32 bits, which a number of 64 bits leaves and a tensor [1] does not."""
    gradients = []
    for margin in (0.3, FORMS[form](0.3)):
        z, labels = LABELLED[0].float().requires_grad_(), LABELLED[1]
        gradients += torch.autograd.grad(Checkpointed(margin=margin)(z, labels), z)
    close(*gradients, tolerance=1e-5)


@pytest.mark.parametrize(("name", "setting"), CONSTANT)
def test_what_has_no_derivative_is_refused_as_a_learnable_number(name: str, setting: str) -> None:
    x = start(name, setting)
    said = f"{kind_of(name)}: {setting} is a constant, got a tensor that requires a gradient. Pass {setting}.detach()."
    for form in ("tensor", "parameter"):
        assert said_by(lambda form=form: loss_of(name, setting, FORMS[form](x))) == said  # type: ignore[misc]  # a default
    loss = loss_of(name, setting, Shifted(x))  # a schedule may be a module
    assert said_by(lambda: loss(*SUBJECTS[name].rows)) == said
    value = loss_of(name, setting, x)(*SUBJECTS[name].rows)
    close(loss_of(name, setting, Shifted(x).requires_grad_(False))(*SUBJECTS[name].rows), value)


SHARDS = ((3, 5), (8, 0), (0, 8))


PATHS: dict[str, Callable[[], Any]] = {
    "shared": lambda: patch.object(plan, "SMALL_BATCH", -1),  # each rank its own anchors
    "small": contextlib.nullcontext,  # every rank all of it
    "plain": cz.engine.plain_formulas,
}


def steps(cases: list[tuple[str, str | None]], form: str, path: str, alone: bool = False) -> list[list[Tensor]]:
    result = []
    for name, setting in cases:
        given = FORMS[form](start(name, setting)) if setting else None
        loss, leaf = loss_of(name, setting, given), [leaf_of(given)] if setting else []
        loss_fn = loss if alone else cz.DistributedLoss(loss)
        for shards in SHARDS:
            rows = [(x if alone else split(x, shards)[dist.get_rank()]).detach().clone() for x in SUBJECTS[name].rows]
            learns = [x.requires_grad_() for x in rows if x.is_floating_point()]
            with PATHS[path]():
                value = loss_fn(*rows)
                gradients = torch.autograd.grad(value, [*leaf, *learns], allow_unused=True, materialize_grads=True)
            average = 1 if alone else dist.get_world_size()
            of_rows = [x / average for x in gradients[len(leaf) :]]
            result.append([value.detach(), gradients[0].reshape(()) if leaf else value.detach(), *of_rows])
    return result


def compare(worlds: Worlds, cases: list[Any], form: str, path: str) -> None:
    ranks = worlds.run(2, steps, cases, form, path)
    for index, (value, of_number, *rows) in enumerate(steps(cases, form, path, alone=True)):
        case = cases[index // len(SHARDS)], SHARDS[index % len(SHARDS)]
        for rank in ranks:
            close(rank[index][0], value)
            assert torch.allclose(rank[index][1], of_number, rtol=1e-10, atol=1e-10), case
        for place, of_rows in enumerate(rows):
            close(torch.cat([rank[index][2 + place] for rank in ranks]), of_rows)


@pytest.mark.parametrize("path", ["shared", "small"])
@pytest.mark.parametrize("form", FORMS)
def test_learnable_numbers_are_the_same_on_two_ranks(form: str, path: str, worlds: Worlds) -> None:
    """Value, gradient of the embeddings and of the number, on uneven and empty shards, step after step."""
    first, one_in = list(FORMS).index(form), {"shared": 3, "small": 12}[path]
    compare(worlds, [x for index, x in enumerate(LEARNABLE) if EVERY_CASE or index % one_in == first], form, path)


@pytest.mark.parametrize("part", range(2))
def test_the_plain_definition_is_that_of_one_process(part: int, worlds: Worlds) -> None:
    """Of every loss, on two ranks, of which one may have no samples."""
    compare(worlds, [(name, None) for name in list(SUBJECTS)[part :: 2 if EVERY_CASE else 8]], "tensor", "plain")
