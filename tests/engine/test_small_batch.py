"""The small-batch path and the general path compute the same values and gradients."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import implementation, small_batch, softmax
from contrastive_zoo.engine.precision import MIN_NORM
from tests.helpers import called, close, numbers

LOSSES: dict[str, Callable[..., Tensor]] = {
    "nt-xent": called(cz.NTXent),
    "nt-xent, three views": lambda a, b, **settings: cz.NTXent(**settings)(a, b, a * b),
    "info-nce": called(cz.InfoNCE),
    "clip": called(cz.InfoNCE, symmetric=True),
    "sup-con": lambda a, b, **settings: cz.SupCon(**settings)(torch.cat([a, b]), torch.arange(2 * len(a)) % 3),
}
ROWS = {
    "gaussian": lambda n, seed: numbers(n, 4, seed=seed),
    "with a zero": lambda n, seed: numbers(n, 4, seed=seed) * (torch.arange(n) > 0)[:, None],
    "with a tiny one": lambda n, seed: numbers(n, 4, seed=seed) * 1e-14 ** (torch.arange(n) == 0)[:, None].double(),
    "all alike": lambda n, seed: torch.ones(n, 4, dtype=torch.float64),
}


def outcome(loss: Callable[..., Tensor], rows: str, n: int, temperature: float, reduction: str) -> list[Tensor]:
    a, b = (ROWS[rows](n, seed).requires_grad_() for seed in (1, 2))
    log_t = torch.tensor(temperature, dtype=torch.float64).log().requires_grad_()
    value = loss(a, b, temperature=log_t.exp(), reduction=reduction)
    weight = numbers(*value.shape, seed=3)
    # by log t: of embeddings all alike the derivative by t is zero as a difference of numbers of 1/t², which rounding shows
    return [value.detach(), *torch.autograd.grad((value * weight).sum(), (a, b, log_t))]


@pytest.mark.parametrize("name", LOSSES)
@given(
    rows=st.sampled_from(list(ROWS)),
    n=st.sampled_from([1, 2, 7]),
    temperature=st.sampled_from([0.5, 0.03, 1 / 40, 0.02, 1 / 400]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
@settings(max_examples=25)
def test_both_paths_agree(name: str, rows: str, n: int, temperature: float, reduction: str) -> None:
    """Down to and below the temperature at which one exponential no longer holds a logit."""
    assume(n == 7 or rows != "with a tiny one")  # gradients of 1e12 times nothing would be compared
    general = outcome(LOSSES[name], rows, n, temperature, reduction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
        small = outcome(LOSSES[name], rows, n, temperature, reduction)
    for found, expected in zip(small, general, strict=True):
        close(found, expected)


@pytest.mark.parametrize("name", ["nt-xent", "info-nce", "clip"])
def test_the_small_batch_path_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the small-batch path shows, so the comparison above compares two paths."""
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
    wrong = small_batch._SmallBatch.backward
    monkeypatch.setattr(small_batch._SmallBatch, "backward", staticmethod(lambda ctx, g: wrong(ctx, 2 * g)))
    found = outcome(LOSSES[name], "gaussian", 7, 0.5, "mean")
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", -1)
    expected = outcome(LOSSES[name], "gaussian", 7, 0.5, "mean")
    close(found[1], 2 * expected[1])


@pytest.mark.parametrize("bound", [1.0, 1 - 1e-6, 0.6, 0.45, 0.2, 0.101], ids="{} of the bound".format)
@pytest.mark.parametrize("rows", ["gaussian", "with a zero", "all alike"])
@pytest.mark.parametrize("name", ["nt-xent", "info-nce", "clip"])
def test_32_bits_hold_the_exponentials_of_a_small_batch(
    name: str, rows: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exp(1 / t) is finite down to t = 1/88 only: at 1/40 one exponential does, below it the engine has to."""
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
    t, found = bound / 40, []
    for dtype in (torch.float32, torch.float64):
        a, b = (ROWS[rows](7, seed).to(dtype).requires_grad_() for seed in (1, 2))
        value = LOSSES[name](a, b, temperature=t)
        found.append([value.detach().double(), *(x.double() for x in torch.autograd.grad(value, (a, b)))])
    for x, y in zip(*found, strict=True):
        assert x.isfinite().all()
        close(x, y, 1e-5)


def test_one_exponential_serves_temperatures_from_1_40_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
    scales = []
    monkeypatch.setattr(
        small_batch,
        "softmaxes_by_one_exponential",
        lambda x, **_: scales.append(x.amax()) or small_batch.softmaxes(x, "rows"),
    )
    for t in (1 / 40, 1 / 41):
        for temperature in (t, torch.tensor(t, dtype=torch.float64)):
            cz.InfoNCE(temperature=temperature)(torch.eye(3), torch.eye(3))
    assert scales == [40, 40]


@pytest.mark.parametrize("elements", [2**16, -1], ids=["small batch", "large batch"])
@pytest.mark.parametrize("other", [1, 0])
def test_the_smallest_norm_that_is_divided_by(other: float, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the norm is that of torch.nn.functional.normalize from there on."""
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", elements)
    a, b = torch.diag(torch.tensor([MIN_NORM, other, 2], dtype=torch.float64)), numbers(3, 3, seed=1)
    found, expected = a.clone().requires_grad_(), a.clone().requires_grad_()
    loss = cz.InfoNCE(temperature=0.5)
    loss(found, b).backward()
    with cz.engine.plain_formulas():
        loss(expected, b).backward()
    close(*(x.grad * a.norm(dim=1, keepdim=True) for x in (found, expected)))


def test_16_bits_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
    a, b = (numbers(6, 4, seed=seed).bfloat16() for seed in (1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = cz.NTXent()(a, b)
    assert found.dtype == torch.float32
    unit = [torch.nn.functional.normalize(x.double(), dim=1) for x in (a, b)]
    close(found.double(), cz.NTXent(normalize=False)(*unit), 1e-6)


@pytest.mark.parametrize("temperature", [0.5, 0.05])
@pytest.mark.parametrize("name", ["nt-xent", "info-nce", "clip"])
def test_rows_of_16_bits_are_the_same_on_either_path(name: str, temperature: float, monkeypatch) -> None:
    def found(elements: int) -> list[Tensor]:
        monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", elements)
        monkeypatch.setattr(softmax, "matmul_rounding", lambda *_: contextlib.nullcontext())
        a, b = (numbers(7, 4, seed=seed).bfloat16().requires_grad_() for seed in (1, 2))
        log_t = torch.tensor(temperature).log().requires_grad_()
        value = LOSSES[name](a, b, temperature=log_t.exp())
        return [x.detach().float() for x in (value, *torch.autograd.grad(value, (a, b, log_t)))]

    small, general = found(2**16), found(-1)
    for x, y, bound in zip(small, general, [1e-6, 0.01, 0.01, 1e-5], strict=True):  # embeddings' gradients have 16 bits
        close(x, y, bound)
