"""Small batches, as a CPU and as an accelerator compute them: value and gradients of the general path.

Then what rounds their products of 16 bits: a setting of the process, which is left as it was.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import plan, small_batch
from contrastive_zoo.engine.precision import MIN_NORM, matmul_rounding
from contrastive_zoo.engine.softmax_arithmetic import LOG2E
from contrastive_zoo.ranks import devices
from tests.helpers import EVERY_CASE, called, close, drawn, numbers
from tests.test_operators import dense_siglip, dense_softmaxes

GPU = torch.cuda.is_available()
BY_HAND: dict[str, Callable[..., Tensor]] = {
    "NTXent": called(cz.NTXent),
    "InfoNCE": called(cz.InfoNCE),
    "CLIP": called(cz.InfoNCE, symmetric=True),
    "SigLIP": called(cz.SigLIP),
}
"""Losses with a path for small batches; others are the plain formula there."""
LOSSES = BY_HAND | {
    "NTXent, three views": lambda a, b, **settings: cz.NTXent(**settings)(a, b, a * b),
    "SupCon": lambda a, b, **settings: cz.SupCon(**settings)(torch.cat([a, b]), torch.arange(2 * len(a)) % 3),
}


def first_times(x: Tensor, factor: float) -> Tensor:
    return x * torch.where(torch.arange(len(x)) == 0, factor, 1.0)[:, None]


ROWS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "gaussian": lambda x, y: (x, y),
    "solved": lambda x, y: (x, x + 0.01 * y),
    "duplicates": lambda x, y: (x[torch.arange(len(x)) // 3], y[torch.arange(len(x)) // 3]),
    "all alike": lambda x, y: (x[:1].expand_as(x), x[:1].expand_as(x)),
    "opposite": lambda x, y: (x, -x),
    "with a zero": lambda x, y: (first_times(x, 0.0), first_times(y, 0.0)),
    "with a tiny one": lambda x, y: (first_times(x, 0.5e-12 / x[0].norm().item()), y),
}


@contextlib.contextmanager
def path(name: str) -> Iterator[None]:
    most = -1 if name == "general" else 2**18
    on_cpu = (lambda x: False) if name == "accelerator" else devices.on_cpu
    limits = dict.fromkeys(("SMALL_MATRIX", "SMALL_PLAIN", "SMALL_ON_ACCELERATORS"), most)
    with patch.multiple(plan, **limits), patch.object(devices, "on_cpu", on_cpu):
        yield


def rows_of(kind: str, n: int, dtype: torch.dtype = torch.float64, place: str = "cpu") -> list[Tensor]:
    return [x.to(place, dtype).clone() for x in ROWS[kind](numbers(n, 6, seed=1), numbers(n, 6, seed=2))]


def outcome(loss: Callable[..., Tensor], rows: list[Tensor], temperature: float, **more: str) -> list[Tensor]:
    dtype = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    a, b = (x.detach().clone().requires_grad_() for x in rows)
    learnt = [torch.tensor(temperature, dtype=dtype, device=a.device).log().requires_grad_()]
    if loss in (BY_HAND["SigLIP"], dense["SigLIP"]):
        learnt.append(torch.tensor(-3.0, dtype=dtype, device=a.device, requires_grad=True))
    value = loss(a, b, temperature=learnt[0].exp(), **dict(zip(["logit_bias"], learnt[1:], strict=False)), **more)
    weight = numbers(*value.shape, seed=3).to(value)
    return [value.detach(), *torch.autograd.grad((value * weight).sum(), (a, b, *learnt))]


dense: dict[str, Callable[..., Tensor]] = {
    name: lambda a, b, *, temperature, name=name: dense_softmaxes(name, a, b, 1 / temperature) for name in BY_HAND
} | {"SigLIP": lambda a, b, *, temperature, logit_bias: dense_siglip(a, b, 1 / temperature, logit_bias)}


@pytest.mark.parametrize("name", LOSSES)
@given(
    where=st.sampled_from(["CPU", "accelerator"]),
    rows=st.sampled_from(list(ROWS)),
    n=st.sampled_from([1, 2, 7]),
    temperature=st.sampled_from([10.0, 0.5, 0.03, 1 / 40, 0.02, 1 / 400, 0.0005]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
@settings(max_examples=4 * settings().max_examples)
def test_all_paths_agree(name: str, where: str, rows: str, n: int, temperature: float, reduction: str) -> None:
    """Down to and below the temperature at which one exponential no longer holds a logit."""
    assume(n == 7 or rows != "with a tiny one")  # gradients of 1e12 times nothing would be compared
    with path("general"):
        expected = outcome(LOSSES[name], rows_of(rows, n), temperature, reduction=reduction)
    with path(where):
        found = outcome(LOSSES[name], rows_of(rows, n), temperature, reduction=reduction)
    compared = slice(None) if temperature >= 1 / 400 else slice(3)  # parameters' are a difference of numbers of 1/t
    for x, y in zip(found[compared], expected[compared], strict=True):
        close(x, y)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_small_batch_path_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the small-batch path shows, so the comparison above compares two paths."""
    with path("general"):
        expected = outcome(LOSSES[name], rows_of("gaussian", 7), 0.5)
    right = small_batch._SmallBatch.backward
    monkeypatch.setattr(small_batch._SmallBatch, "backward", staticmethod(lambda ctx, g: right(ctx, 2 * g)))
    with path("CPU"):
        close(outcome(LOSSES[name], rows_of("gaussian", 7), 0.5)[1], 2 * expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BY_HAND)
def test_other_precisions_are_as_near_to_float64_as_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    """The temperature's gradient is a small difference of large sums in the dense formula of 16 bits, too."""
    rounding = {torch.float32: 10 * 2.0**-23, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}[dtype]
    temperatures = [0.005, 0.01, 1 / 40, 0.07, 10.0] if EVERY_CASE else [0.01, 1 / 40, 10.0]
    for where, kind, t in drawn(["CPU", "accelerator"], ["gaussian", "duplicates"], temperatures, one_in=2):
        rows = rows_of(kind, 24, dtype, "cuda" if GPU and where == "accelerator" else "cpu")
        exact, plain = (outcome(dense[name], x, t) for x in ([x.double() for x in rows], rows))
        with path(where):
            found = outcome(LOSSES[name], rows, t)
        for x, y, z in zip(found, plain, exact, strict=True):
            ours, of_formula = (((of.double() - z).norm() / z.norm()).item() for of in (x, y))
            assert ours <= 1.5 * of_formula + rounding, (where, kind, t)


def test_one_exponential_serves_temperatures_from_1_40_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []

    def by_rows(x: Tensor, **_: float) -> Tensor:
        scales.append(x.amax() / LOG2E)
        return small_batch.softmaxes(x, "rows")

    monkeypatch.setattr(small_batch, "softmaxes_by_one_exponential", by_rows)
    with path("CPU"):
        for t in (1 / 40, 1 / 41):
            for temperature in (t, torch.tensor(t, dtype=torch.float64)):
                cz.InfoNCE(temperature=temperature)(torch.eye(3), torch.eye(3))
    torch.testing.assert_close(torch.stack(scales), torch.tensor([40.0, 40.0]))


@pytest.mark.parametrize("where", ["CPU", "general"])
@pytest.mark.parametrize("other", [1, 0])
@pytest.mark.parametrize("towards", [0, 1])
def test_the_smallest_norm_that_is_divided_by(towards: float, other: float, where: str) -> None:
    """Just below that norm and just above it, gradients are those of torch.nn.functional.normalize."""
    smallest = math.nextafter(MIN_NORM, towards)
    a, b = torch.diag(torch.tensor([smallest, other, 2], dtype=torch.float64)), numbers(3, 3, seed=1)
    found, expected = a.clone().requires_grad_(), a.clone().requires_grad_()
    loss = cz.InfoNCE(temperature=0.5)
    with path(where):
        loss(found, b).backward()
    with cz.engine.plain_formulas():
        loss(expected, b).backward()
    close(*(x.grad * a.norm(dim=1, keepdim=True) for x in (found, expected)))


def test_16_bits_under_autocast_are_multiplied_in_32() -> None:
    a, b = (x.bfloat16() for x in rows_of("gaussian", 6))
    with path("CPU"), torch.autocast("cpu", torch.bfloat16):
        found = cz.NTXent()(a, b)
    assert found.dtype == torch.float32
    unit = [torch.nn.functional.normalize(x.double(), dim=1) for x in (a, b)]
    close(found.double(), cz.NTXent(normalize=False)(*unit), 1e-6)


MATMUL = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}


ROUNDED = (torch.bfloat16, "cpu", "bf16"), (torch.bfloat16, "cuda", "tf32")
AS_THEY_ARE = (torch.float32, "cpu", None), (None, "cuda", None), (torch.float16, "cpu", None)  # nothing would be won


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize(("dtype", "device", "expected"), [*ROUNDED, *AS_THEY_ARE])
def test_the_setting_is_that_of_the_device_and_comes_back(dtype, device, before: str, expected: str | None) -> None:
    matmul, other = MATMUL[device], MATMUL["cpu" if device == "cuda" else "cuda"]
    at_first, untouched = matmul.fp32_precision, other.fp32_precision
    matmul.fp32_precision = before
    try:
        with contextlib.suppress(KeyError), matmul_rounding(dtype, device):
            assert (matmul.fp32_precision, other.fp32_precision) == (expected or before, untouched)
            raise KeyError
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = at_first


def test_threads_leave_the_setting_as_the_first_found_it() -> None:
    """Those that overlap: the one that came first goes first."""
    matmul = MATMUL["cpu"]
    at_first = matmul.fp32_precision
    both, first_has_left = threading.Barrier(2), threading.Event()

    def first() -> None:
        with matmul_rounding(torch.bfloat16, "cpu"):
            both.wait()
        first_has_left.set()

    def second() -> str:
        with matmul_rounding(torch.bfloat16, "cpu"):
            both.wait()
            first_has_left.wait()
            return matmul.fp32_precision

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(first), pool.submit(second)
        one.result()
        assert other.result() == "bf16"  # still rounded, while one is within
    assert matmul.fp32_precision == at_first
