"""Memory is linear in the batch: no N × N matrix is stored."""

import sys
import textwrap

import pytest

from tests.interpreter import python

ROWS, BUDGET, LIMIT = 4_096, 8 * 2**20, 60 * 2**20
"""Their similarity matrix has 64 MiB in float32; the budget allows an eighth of it."""

MEASURE = """
import gc, re, sys
import torch
import contrastive_zoo as cz

torch.set_num_threads(2)

def loss(n):
    torch.manual_seed(0)
    z = torch.randn(n, 128, requires_grad=True)
    {call}.backward()
    assert z.grad is not None and torch.isfinite(z.grad).all()

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

loss(64)  # lazy imports, thread pools
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts from here
before = status("VmRSS")
with cz.engine.memory_budget({budget}):
    loss({rows})
print(status("VmHWM") - before)
"""

CALLS = {"InfoNCE": "cz.InfoNCE(symmetric=True)(z, z.flip(0))", "dense": "(z @ z.T).logsumexp(1).sum()"}


def peak(name: str) -> int:
    """Return the peak of additional bytes."""
    script = textwrap.dedent(MEASURE).format(call=CALLS[name], rows=ROWS, budget=BUDGET)
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells a process its peak memory")
def test_forward_and_backward_stay_linear_in_the_rows_unlike_a_dense_matrix() -> None:
    assert peak("InfoNCE") < LIMIT < peak("dense") / 3
