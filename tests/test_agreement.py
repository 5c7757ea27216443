"""What ranks agree on is complete: a step is that of one process, or refused on every rank in that very step."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, drawn, numbers, refused
from tests.one_rank import SHARDS, STATEFUL, STATEFUL_PAIRS, Outcome, alone, largest_error, on_ranks

Change = Callable[[Any], Any]
AT = 2


def require_exact(ranks: list[list[Outcome]], whole: list[Outcome]) -> None:
    for step, outcomes in enumerate(zip(*ranks, strict=True)):
        assert largest_error(outcomes, whole[step]) <= EXACT, f"step {step}"


@pytest.mark.parametrize(
    ("name", "splits"), drawn([*STATEFUL, *STATEFUL_PAIRS, "an empty bank"], (False, True), one_in=2)
)
def test_user_code_and_states_are_those_of_one_process(name: str, splits: bool, worlds: Worlds) -> None:
    """A setting that counts, a forward or hook of one's own: once a step, and of the embeddings of all ranks."""
    ranks = worlds.run(2, on_ranks, name, lambda loss: None, AT, splits=splits)
    assert [len(x) for x in ranks] == [len(SHARDS)] * 2, ranks[0][-1].refused
    require_exact(ranks, alone(name))


def first_parameter(loss: nn.Module) -> nn.Parameter:
    return next(loss.parameters())


def drifts(loss: nn.Module) -> None:
    with torch.no_grad():
        first_parameter(loss).mul_(1.1)


def forgets(loss: nn.Module) -> None:
    """One stored embedding differs."""
    next(x for x in loss.buffers() if x.is_floating_point() and x.ndim == 2)[0] *= 1.5


def patches(loss: nn.Module) -> None:
    forward = loss.forward
    loss.forward = lambda *args, **named: forward(*args, **named)


HOOKS = "with hooks or a forward of its own"
OF_MODULES: dict[str, tuple[Change, str]] = {
    "a parameter drifts": (drifts, "parameters, buffers or settings differ between ranks"),
    "a parameter is frozen": (lambda loss: first_parameter(loss).requires_grad_(False), ", learnt, rank 1 has float64"),
    "another dtype": (lambda loss: loss.float(), "rank 1 has float32"),
    "a hook": (lambda loss: loss.register_forward_hook(lambda module, args, value: value), HOOKS),
    "a pre-hook": (lambda loss: loss.register_forward_pre_hook(lambda module, args: None), HOOKS),
    "a backward hook": (lambda loss: loss.register_full_backward_hook(lambda module, inner, outer: None), HOOKS),
    "a patched forward": (patches, HOOKS),
    "evaluation": (lambda loss: loss.temperature.eval(), "training: rank 0 has True, rank 1 has False"),
    "evaluation of the loss alone": (
        lambda loss: setattr(loss, "training", False),
        "the loss's training: rank 0 has True, rank 1 has False",
    ),
    "no gradients": (lambda loss: torch.set_grad_enabled(False), "carry a gradient"),
}
CHANGES: dict[tuple[str, str], tuple[Change, str]] = {
    ("CrossBatchMemory", "a stored embedding"): (forgets, "ranks disagree on its content"),
    ("Held", "a list in a dict"): (lambda loss: loss.table["a"].__setitem__(0, 0.6), "rank 1"),
    ("an empty bank", "a hook"): OF_MODULES["a hook"],
    ("an empty bank", "a patched forward"): OF_MODULES["a patched forward"],
    ("WeightedSum", "a backward hook"): OF_MODULES["a backward hook"],
    **{("Clip", what): change for what, change in OF_MODULES.items()},
}
"""What one rank changes, with what all ranks say; tests/test_adversarial.py has the other changes of the other losses."""


@pytest.mark.parametrize(("name", "what"), CHANGES)
def test_a_change_on_one_rank_is_refused_in_that_step(name: str, what: str, worlds: Worlds) -> None:
    (change, words), splits = CHANGES[name, what], list(CHANGES).index((name, what)) % 2 == 0
    ranks = worlds.run(2, on_ranks, name, change, AT, splits=splits)
    texts = [x[-1].refused for x in ranks]
    assert [len(x) for x in ranks] == [AT + 1] * 2
    assert texts[0] == texts[1]
    assert texts[0].startswith("ValueError: "), texts
    assert words in texts[0]
    require_exact([x[:-1] for x in ranks], alone(name)[:AT])


def test_what_tells_ranks_apart_by_its_name_is_no_difference(worlds: Worlds) -> None:
    def job() -> tuple[float, float]:
        rank, z = dist.get_rank(), numbers(3, 2, seed=dist.get_rank())

        def of_closure(rows: Tensor) -> Tensor:
            return rows.square().sum() * (1 + 0 * rank)

        loss = cz.SupCon()
        loss.rank, loss.is_main_process = rank, rank == 0
        return cz.DistributedLoss(of_closure)(z).item(), cz.DistributedLoss(loss)(z, torch.tensor([0, 1, 0])).item()

    first, second = worlds.run(2, job)
    assert first == second


class Powered(nn.Module):
    """A loss whose attribute has the name of an option, and whose parameter has that of an argument."""

    def __init__(self, grad_reduction: str, scale: float) -> None:
        super().__init__()
        self.grad_reduction, self.scale = grad_reduction, nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, embeddings: Tensor, scale: Tensor) -> Tensor:
        return (scale * self.scale * embeddings).square().sum()


@pytest.mark.parametrize(
    ("difference", "words"), [({"grad_reduction": "b"}, "the loss's grad_reduction"), ({"scale": 3.0}, "parameters")]
)
def test_a_name_that_an_option_or_an_argument_has_hides_nothing(
    difference: dict[str, Any], words: str, worlds: Worlds
) -> None:
    def bad() -> None:
        rank = dist.get_rank()
        loss = Powered(**{"grad_reduction": "a", "scale": 2.0, **(difference if rank else {})})
        cz.DistributedLoss(loss)(numbers(3, 2, seed=rank), torch.tensor(0.5))

    refused(worlds, 2, bad, words)


def test_a_setting_that_draws_is_refused_in_words(worlds: Worlds) -> None:
    class Drawn(nn.Module):
        def forward(self) -> Tensor:
            return 0.1 + torch.rand((), dtype=torch.float64)

    def bad() -> None:
        torch.manual_seed(dist.get_rank())
        cz.DistributedLoss(cz.SupCon(temperature=Drawn()))(numbers(3, 2, seed=dist.get_rank()), torch.tensor([0, 1, 0]))

    words = "temperature has norm … A module that is a setting must return the same number on every rank"
    refused(worlds, 2, bad, words)


def rows_of(seed: int) -> Tensor:
    return numbers(4, 5, seed=10 * seed + dist.get_rank()).requires_grad_()


LABELS = torch.tensor([0, 1, 0, 1])


def ended(job: Callable[[], Any]) -> tuple[str, str]:
    try:
        job()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


def backward_in_another_order(group: Any) -> tuple[str, str]:
    with splitting(always=True):
        losses = [cz.DistributedLoss(cz.NTXent(temperature=t), process_group=group) for t in (0.1, 0.5)]
        values = [loss(rows_of(2 * i), rows_of(2 * i + 1)) for i, loss in enumerate(losses)]
        return ended(lambda: [x.backward() for x in in_own_order(values)])


def wrappers_in_another_order(group: Any, *, called: bool = False) -> tuple[str, str]:
    """Two of one class and of equal settings, before or after their first calls."""
    wrappers = [cz.DistributedLoss(cz.NTXent(), process_group=group) for _ in range(2)]
    for index, wrapper in enumerate(wrappers if called else ()):
        wrapper(rows_of(2 * index), rows_of(2 * index + 1))
    return ended(lambda: [x(rows_of(4), rows_of(5)) for x in in_own_order(wrappers)])


def in_own_order(x: list[Any]) -> list[Any]:
    return x if dist.get_rank() == 0 else x[::-1]


NUMBERED = "which is wrapper number"
ORDERS: dict[str, tuple[Callable[[Any], tuple[str, str]], str]] = {
    "backward passes": (
        backward_in_another_order,
        "rank 0 is in the backward pass of NTXent, call 1; rank 1 is in the backward pass of NTXent, call 1",
    ),
    "first calls": (wrappers_in_another_order, NUMBERED),
    "later calls": (functools.partial(wrappers_in_another_order, called=True), NUMBERED),
}


@pytest.mark.parametrize("name", ORDERS)
def test_another_order_is_named(name: str, worlds: Worlds) -> None:
    """In a group of their own, which is lost."""
    job, words = ORDERS[name]
    first, second = worlds.run(2, lambda: job(dist.new_group([0, 1])))
    assert first == second
    assert first[0] == "CommunicationError"
    assert words in first[1]
    assert words != NUMBERED or len({*re.findall(f"{NUMBERED} (\\d+) of this process", first[1])}) == 2


class Raises(cz.RowLoss):
    """Once, on the last rank, in the middle of a step."""

    error: Any = None

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        raise_once()
        return (similarity * negative).sum(1), negative.any(1)


def third_party(z: Tensor, labels: Tensor) -> Tensor:
    raise_once()
    return z.square().sum() + 0 * labels.sum()


armed: list[type[BaseException]] = []


def raise_once() -> None:
    if armed:
        raise armed.pop()("in the middle")


RAISING: dict[str, Callable[[], Any]] = {
    "RowLoss": Raises,
    "WeightedSum": lambda: cz.WeightedSum([cz.SupCon(), Raises()]),
    "CrossBatchMemory": lambda: cz.CrossBatchMemory(Raises(), 16, 5, dtype=torch.float64),
    "third-party": lambda: third_party,
}


def goes_on(name: str, splits: bool, kind: type[BaseException]) -> list[tuple[str, str]]:
    armed.clear()
    loss_fn, ends = cz.DistributedLoss(RAISING[name](), process_group=dist.new_group([0, 1])), []
    with splitting(always=splits):
        for step in range(4):
            if step == 1 and dist.get_rank() == 1:
                armed.append(kind)
            ends.append(ended(lambda step=step: loss_fn(rows_of(step), LABELS)))
    return ends


@pytest.mark.parametrize(("name", "splits"), drawn(list(RAISING), (False, True), one_in=1))
def test_a_rank_that_raises_and_goes_on_closes_the_group(name: str, splits: bool, worlds: Worlds) -> None:
    """Never an abort or a value of another step. A memory moves on all ranks or on none, so all of them hear it."""
    kind = KeyboardInterrupt if name == "RowLoss" else RuntimeError
    zero, one = worlds.run(2, goes_on, name, splits, kind)
    assert zero[0] == one[0] == ("", "")
    if name == "CrossBatchMemory" and not splits:
        assert zero == one
        assert zero[1] == ("ValueError", "CrossBatchMemory: rank 1: RuntimeError: in the middle.")
        assert zero[2:] == [("", "")] * 2
        return
    assert one[1][0] == kind.__name__
    for ends in (zero[2:], one[2:]):
        for how, text in ends:
            assert how == "CommunicationError"
            assert f"Rank 1 failed in {text.partition(',')[0]}, call 2: {kind.__name__}" in text
            assert "in the middle" in text


def test_the_order_of_names_does_not_matter(worlds: Worlds) -> None:
    def of_names(towers: dict[str, Tensor], **others: Any) -> Tensor:
        weight = others.pop("weight")
        return sum(i * x.square().sum() for i, (_, x) in enumerate(sorted((towers | others).items()), 1)) * weight

    def job() -> float:
        names = ["a", "b", "c", "d"][:: 1 if dist.get_rank() else -1]
        rows = {name: numbers(3, 2, seed=ord(name) + dist.get_rank()) for name in names}
        others = {name: rows.pop(name) for name in names if name in "bd"}
        named = {"weight": 2.0, **others} if dist.get_rank() else {**others, "weight": 2.0}
        return cz.DistributedLoss(of_names)(rows, **named).item()

    whole = [torch.cat([numbers(3, 2, seed=ord(x) + rank) for rank in range(2)]) for x in "abcd"]
    expected = 2 * sum(i * float(x.square().sum()) for i, x in enumerate(whole, 1))
    assert worlds.run(2, job) == [pytest.approx(expected, rel=1e-12)] * 2


def test_a_method_may_name_its_object_as_it_likes() -> None:
    class Renamed(cz.SupCon):
        def inputs(this, embeddings: Tensor, labels: Tensor) -> Any:  # noqa: N805 - the point of the test
            return cz.SupCon.inputs(this, embeddings, labels)

    z = numbers(4, 2, seed=0)
    assert torch.equal(Renamed()(z, LABELS), cz.SupCon()(z, LABELS))


def test_a_view_with_the_negative_bit(worlds: Worlds) -> None:
    def job() -> float:
        z = torch.view_as_complex(numbers(4, 3, 2, seed=dist.get_rank())).conj().imag
        assert z.is_neg()
        return cz.DistributedLoss(cz.SupCon())(z[: 4 * dist.get_rank()], LABELS[: 4 * dist.get_rank()]).item()

    z = torch.view_as_complex(numbers(4, 3, 2, seed=1)).conj().imag
    assert worlds.run(2, job) == [pytest.approx(cz.SupCon()(z, LABELS).item(), rel=1e-12)] * 2


def test_under_autocast_a_wrapper_that_one_rank_made_again_holds_the_same_numbers(worlds: Worlds) -> None:
    """Its first call looks closely, the other rank's does not; θ = 1.0039 is halfway between two numbers of bfloat16."""

    def job() -> list[float]:
        torch.manual_seed(dist.get_rank())
        loss = cz.NTXent(temperature=cz.LearnableTemperature(0.36645))
        wrapper = cz.DistributedLoss(loss)
        values = []
        for step in range(2):
            if step == 1 and dist.get_rank() == 1:
                wrapper = cz.DistributedLoss(loss)
            with torch.autocast("cpu", torch.bfloat16):
                values.append(float(wrapper(torch.randn(3, 4), torch.randn(3, 4))))
        return values

    first, second = worlds.run(2, job)
    assert first == second
