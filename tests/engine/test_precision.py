"""Products of 16-bit embeddings: what is rounded, and that the process's settings are left as they were."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from contrastive_zoo.engine.precision import matmul_rounding

MATMUL = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize(("device", "expected"), [("cpu", "bf16"), ("cuda", "tf32")])
def test_the_setting_is_that_of_the_device_and_comes_back(device: str, before: str, expected: str) -> None:
    matmul, other = MATMUL[device], MATMUL["cpu" if device == "cuda" else "cuda"]
    at_first, untouched = matmul.fp32_precision, other.fp32_precision
    matmul.fp32_precision = before
    try:
        with contextlib.suppress(KeyError), matmul_rounding(torch.bfloat16, device):
            assert (matmul.fp32_precision, other.fp32_precision) == (expected, untouched)
            raise KeyError
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = at_first


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (None, "cuda"), (torch.float16, "cpu")])
def test_nothing_is_set_where_nothing_would_be_won(dtype: torch.dtype | None, device: str) -> None:
    before = {name: matmul.fp32_precision for name, matmul in MATMUL.items()}
    with matmul_rounding(dtype, device):
        assert {name: matmul.fp32_precision for name, matmul in MATMUL.items()} == before


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
