"""Small batches as an accelerator computes them, on a GPU if there is one: near float64, at any temperature."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import implementation
from contrastive_zoo.loss_base.loss import Stated
from contrastive_zoo.ranks import devices
from tests.helpers import EVERY_CASE, called, close, drawn, numbers
from tests.test_operators import dense_siglip, dense_softmaxes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, D = 24, 6

LOSSES: dict[str, Callable[..., Tensor]] = {
    "InfoNCE": called(cz.InfoNCE),
    "CLIP": called(cz.Clip),
    "NTXent": called(cz.NTXent),
    "SigLIP": called(cz.SigLIP),
}


def tiny(x: Tensor) -> Tensor:
    return x * torch.where(torch.arange(len(x)) == 1, 0.5e-12 / x[1].norm(), 1.0)[:, None]


ROWS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "gaussian": lambda x, y: (x, y),
    "solved": lambda x, y: (x, x + 0.01 * y),
    "duplicates": lambda x, y: (x[torch.arange(N) // 3], y[torch.arange(N) // 3]),
    "all alike": lambda x, y: (x[:1].expand(N, D), x[:1].expand(N, D)),
    "opposite": lambda x, y: (x, -x),
    "with zeros": lambda x, y: (x * (torch.arange(N) != 2)[:, None], y * (torch.arange(N) > 2)[:, None]),
    "with a tiny one": lambda x, y: (tiny(x), y),
}
TEMPERATURES = [0.0005, 0.005, 0.01, 0.07, 10.0]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "SMALL_BATCH_ELEMENTS", 2**16)
    monkeypatch.setattr(devices, "on_cpu", lambda x: False)


def rows_of(kind: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    a, b = ROWS[kind](numbers(N, D, seed=1), numbers(N, D, seed=2))
    return [x.to(DEVICE, dtype) for x in (a, b)]


def dense(name: str, a: Tensor, b: Tensor, *, temperature: Tensor, **bias: Tensor) -> Tensor:
    """The dense formula."""
    if name == "SigLIP":
        return dense_siglip(a, b, 1 / temperature, bias["logit_bias"])
    return dense_softmaxes(name, a, b, 1 / temperature)


def value_and_gradients(compute: Callable[..., Tensor], name: str, rows: list[Tensor], t: float) -> list[Tensor]:
    """The value, then the gradients of both sides and of log t and the bias.

    Of embeddings all alike the derivative by t is zero as a difference of numbers of 1/t².
    """
    dtype = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    a, b = (x.detach().clone().requires_grad_() for x in rows)
    log_t = torch.tensor(t, dtype=dtype, device=DEVICE).log().requires_grad_()
    learnt = {}
    if name == "SigLIP":
        learnt["logit_bias"] = torch.tensor(-3.0, dtype=dtype, device=DEVICE, requires_grad=True)
    value = compute(a, b, temperature=log_t.exp(), **learnt)
    return [value.detach(), *torch.autograd.grad(value, [a, b, log_t, *learnt.values()])]


def errors(name: str, kind: str, t: float, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """The relative errors of the loss and of the dense formula in this dtype, against the dense formula in float64."""
    rows = rows_of(kind, dtype)
    exact = value_and_gradients(lambda *x, **y: dense(name, *x, **y), name, [x.double() for x in rows], t)
    ways: list[Callable[..., Tensor]] = [LOSSES[name], lambda *x, **y: dense(name, *x, **y)]
    found = (value_and_gradients(way, name, rows, t) for way in ways)
    ours, plain = ([((x.double() - y).norm() / y.norm()).item() for x, y in zip(z, exact, strict=True)] for z in found)
    return ours, plain


@pytest.mark.parametrize(("name", "kind", "t"), drawn(LOSSES, ROWS, TEMPERATURES, one_in=3))
def test_float64_is_the_dense_formula(name: str, kind: str, t: float) -> None:
    rows = rows_of(kind)
    found = value_and_gradients(LOSSES[name], name, rows, t)
    expected = value_and_gradients(lambda *x, **y: dense(name, *x, **y), name, rows, t)
    for x, y in zip(found, expected, strict=True):
        close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_other_precisions_are_as_near_to_float64_as_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    """The temperature's gradient is a small difference of large sums in the dense formula of 16 bits, too."""
    rounding = {torch.float32: 10 * 2.0**-23, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}[dtype]
    for kind, t in itertools.product(["gaussian", "duplicates"], TEMPERATURES[1:] if EVERY_CASE else [0.01, 10.0]):
        for ours, plain in zip(*errors(name, kind, t, dtype), strict=True):
            assert ours <= 1.5 * plain + rounding, (kind, t)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_finite_at_any_temperature(name: str) -> None:
    for kind, t in itertools.product(ROWS, [1e-4, 1e4]):
        assert all(x.isfinite().all() for x in value_and_gradients(LOSSES[name], name, rows_of(kind, torch.float32), t))


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_gets_its_own_gradient_and_all_of_the_parameters(name: str, accelerated: bool, monkeypatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda x: not accelerated and x.is_cpu)
    own, rows = slice(5, 11), rows_of("gaussian")
    expected = value_and_gradients(LOSSES[name], name, rows, 0.07)
    batch = Stated.batch
    monkeypatch.setattr(Stated, "batch", lambda *x: replace(batch(*x), local_slice=own))
    value, *gradients = value_and_gradients(LOSSES[name], name, rows, 0.07)
    close(value, expected[0])
    for x, y in zip(gradients[:2], expected[1:3], strict=True):
        close(x[own], y[own])
        assert x.count_nonzero() == x[own].numel()
    for x, y in zip(gradients[2:], expected[3:], strict=True):
        close(x, y)
