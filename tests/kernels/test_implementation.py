"""The choice between torch and Triton: where a kernel is used, how often, what is refused; no rank is left waiting."""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import contrastive_zoo as cz
from contrastive_zoo.engine import implementation as chosen
from contrastive_zoo.engine import kernels, plan
from contrastive_zoo.engine.exchange import GatherExchange
from contrastive_zoo.engine.implementation import LARGEST_MATRIX as LARGEST
from contrastive_zoo.engine.implementation import Kernels, choose_kernels
from contrastive_zoo.engine.plan import Needs, Plan, Rows, Situation, choose
from contrastive_zoo.loss_base import loss as loss_base
from contrastive_zoo.ranks import suggestions
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import step
from tests.counted import counted
from tests.helpers import drawn, refused

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu_suite.crossover import H100, largest_matrix  # beside the benchmark that measures the table

pytestmark = pytest.mark.path("users")

PROBE = kernels.installation_problem.__wrapped__
LOSSES: list[Callable[[], Callable[..., Tensor]]] = [cz.NTXent, cz.InfoNCE, cz.Clip, cz.SigLIP]


def on_a_gpu(n: int = LARGEST + 1, d: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty(n, d, dtype=dtype, device="cuda") for _ in range(2)]


def used(rows: list[Tensor], sizes: Sequence[int] = (), no_kernel: str | None = None) -> bool:
    """Return whether a kernel computes a softmax over pairs of so many embeddings, those of the rows by default."""
    split = [Rows(Shards((n,)), 32, 1, 8) for n in sizes or map(len, rows)]
    situation = Situation(1, dict(zip("ab", split, strict=True)), on_cpu=False, kernels=choose_kernels(rows))
    found = choose("Loss", Needs("softmax", ("a",), ("b",), no_kernel=no_kernel), situation)
    if found.warning is not None:
        suggestions.warn_once(found.warning)
    return found.arithmetic == "kernel"


@pytest.fixture
def suitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "device_problem", lambda device: None)
    monkeypatch.setattr(kernels, "installation_problem", lambda device: None)
    monkeypatch.setattr(suggestions, "ASKED", set())  # nothing was warned of


@pytest.mark.usefixtures("suitable")
def test_auto_uses_kernels_where_they_apply() -> None:
    rows = on_a_gpu()
    assert used(rows)
    assert used(on_a_gpu(dtype=torch.bfloat16))
    assert not used([torch.randn(LARGEST + 1, 8)] * 2)  # on a CPU
    assert not used(on_a_gpu(n=LARGEST))
    assert used(rows, sizes=(LARGEST, LARGEST + 2))
    assert not used(on_a_gpu(d=4097))
    assert not used(on_a_gpu(dtype=torch.float64))
    assert not used(rows, no_kernel="compares two views, got 3")
    with cz.engine.plain_formulas():
        assert not used(rows)
    with cz.engine.use_implementation("torch"):
        assert not used(rows)


def test_a_table_of_times_decides_where_kernels_start() -> None:
    """Between sizes that are measured, times are straight on logarithmic axes; the loss whose kernels win first decides."""
    early, late = {1024: (2.0, 1.0), 4096: (1.0, 2.0)}, {1024: (2.0, 1.0), 4096: (1.0, 8.0)}
    assert largest_matrix({"CLIP": early}) == 2048
    assert largest_matrix({"CLIP": early, "SigLIP": late}) == 1024 * 2**0.5 // 1
    assert largest_matrix({"CLIP": {1024: (1.0, 2.0)}}) == 0
    assert largest_matrix({"CLIP": {1024: (2.0, 1.0)}}) == 1024
    assert largest_matrix(H100) == LARGEST
    assert 2048 < LARGEST < 16_384  # at either of which all times of the table agree
    page = (Path(__file__).parents[2] / "docs" / "pages" / "measurements.md").read_text(encoding="utf-8")
    for loss, times in H100.items():
        cells = [f"{kernels:.2f} / {matrix:.2f}" for kernels, matrix in times.values()]
        assert f"| {loss} | {' | '.join([*cells[:2], 'not measured', 'not measured', *cells[2:]])} |" in page


@pytest.mark.parametrize("module", ["triton", "triton.tools.tensor_descriptor"])
@pytest.mark.usefixtures("suitable")
def test_one_warning_where_triton_is_missing_or_too_old(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torch 2.6 and 2.7 is, which has no tensor descriptors."""
    for name in [x for x in sys.modules if x.startswith("contrastive_zoo.engine.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("blocks", "softmax", "sigmoid"):  # as Python takes them from the package
        monkeypatch.delattr(kernels, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(kernels, "installation_problem", PROBE)
    assert not used(on_a_gpu(n=10))  # without a warning
    with pytest.warns(UserWarning, match=f"more slowly than Triton, which cannot run here.*{module}"):
        assert not used(on_a_gpu(n=10**4))
    assert not used(on_a_gpu(n=10**4))
    with cz.engine.use_implementation("triton"), pytest.raises(ValueError, match=r"contrastive_zoo\[triton\]"):
        cz.Clip()(torch.eye(2), torch.eye(2))


@pytest.mark.usefixtures("suitable")
def test_kernels_that_do_not_compile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch fails where there is no C compiler, or no interpreter, as here; it is tried once."""
    blocks, tried = pytest.importorskip("contrastive_zoo.engine.kernels.blocks"), []

    def fail(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler.\nset CC")

    monkeypatch.setattr(blocks, "launch_smallest", fail)
    monkeypatch.setattr(kernels, "installation_problem", cache(PROBE))
    for _ in range(2):
        found = choose_kernels(on_a_gpu())
        assert found.warning
        assert "(RuntimeError: Failed to find C compiler.)" in str(found.problem)
    assert len(tried) == 1


EYE = torch.eye(2)
REFUSED: list[tuple[Callable[..., Any], list[Tensor], str]] = [
    *((make, [torch.eye(2).double()] * 2, r"got torch\.float64") for make in LOSSES),
    *((make, [torch.ones(2, 4097)] * 2, "1 to 4096 features") for make in LOSSES),
    (cz.NTXent, [EYE] * 3, "compares two views, got 3"),
    (cz.InfoNCE, [EYE, EYE, torch.ones(2, 3, 2)], "negatives of all queries"),
    (partial(cz.InfoNCE, in_batch_negatives=False), [EYE] * 3, "in_batch_negatives"),
    (partial(cz.SigLIP, reduction="none"), [EYE] * 2, "reduction='mean' or 'sum'"),
    (partial(cz.SupCon, variant="in"), [EYE, torch.arange(2)], "variant='out'"),
    (partial(cz.MNRL, hardness_mode="all_negatives"), [EYE] * 2, "without hardness_mode"),
]


@pytest.mark.parametrize(("make", "rows", "text"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_triton_refuses_what_it_cannot_compute(make: Any, rows: list[Tensor], text: str, suitable: None) -> None:
    with cz.engine.use_implementation("triton"):
        with pytest.raises(ValueError, match=text):
            make()(*rows)
        with pytest.raises(ValueError, match=f"{text}|plain_formulas"), cz.engine.plain_formulas():
            make()(*rows)


def test_triton_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refusal = pytest.raises(ValueError, match=r"got embeddings on cpu\. Choose use_implementation")
    with cz.engine.use_implementation("triton"), refusal:
        cz.NTXent()(torch.eye(2), torch.eye(2))


RANKS_DIFFER = {
    "choice": "rank 0 has torch, or triton above 3 … embeddings, rank 1 has triton",
    "probe": "rank 0 has triton, rank 1 has triton, which is",
    "table": "rank 0 has torch, or triton above 3000 embeddings, rank 1 has torch, or triton above 3001",
}
"""What one rank has that others lack, and the error of all."""


@pytest.mark.parametrize(("make", "small"), drawn([*LOSSES, cz.MNRL], [0, 1], one_in=2))
@pytest.mark.parametrize(("differs", "text"), RANKS_DIFFER.items())
def test_what_one_rank_chooses_or_lacks_is_refused_on_all(make, small, differs, text, worlds: Worlds) -> None:
    def bad() -> None:
        rank, lacks = dist.get_rank(), differs == "probe"
        with pytest.MonkeyPatch.context() as patch, splitting(not small):
            if differs == "table":
                patch.setattr(step, "CHOOSES_KERNELS", f"torch, or triton above {3000 + rank} embeddings")
            patch.setattr(kernels, "device_problem", lambda device: None)
            patch.setattr(kernels, "installation_problem", lambda device: "is too old" if lacks and rank else None)
            with cz.engine.use_implementation("triton" if lacks or (rank and differs == "choice") else "torch"):
                cz.DistributedLoss(make())(torch.eye(3) + rank, torch.eye(3))

    refused(worlds, 2, bad, text)


@pytest.mark.usefixtures("suitable")
def test_float32_under_autocast_warns_once_where_kernels_have_no_tensor_cores() -> None:
    """torch.autocast itself is off on a device that is not there."""
    assert used(on_a_gpu())
    torch.set_autocast_enabled("cuda", True)
    try:
        assert used(on_a_gpu(dtype=torch.bfloat16))
        assert not used(on_a_gpu(n=10))
        torch.set_float32_matmul_precision("high")
        assert used(on_a_gpu())
        torch.set_float32_matmul_precision("highest")
        with pytest.warns(UserWarning, match=r"float32 under autocast.*embeddings\.bfloat16"):
            assert used(on_a_gpu())
        assert used(on_a_gpu())
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_autocast_enabled("cuda", False)


FORMS: list[tuple[Callable[..., Any], bool]] = [
    (cz.NTXent(temperature=0.2), True),
    (cz.WeightedSum([cz.Clip(temperature=0.3)]), True),
    (cz.InfoNCE(temperature=0.3), False),
]
"""A loss, and whether it is wrapped or called with the world of all ranks."""


@pytest.mark.parametrize(("loss", "wrapped"), FORMS, ids=["NTXent", "a sum", "bare"])
def test_ranks_of_which_one_lacks_kernels_all_do_without(loss: Any, wrapped: bool, worlds: Worlds) -> None:
    """Kernels apply on both ranks; one rank's probe says no from step 2 on."""

    def job(mutant: bool) -> Any:
        rank, applied = dist.get_rank(), []
        call = cz.DistributedLoss(loss) if wrapped else partial(loss, world=World.of())

        def kernels_of(embeddings: Any) -> Kernels:
            return chosen._without_kernels("is too old") if rank and applied else Kernels(True)

        def without_kernel(caller: str, needs: Needs, situation: Situation) -> Plan:
            found = choose(caller, needs, situation)
            parts = [x._replace(arithmetic="tiles") for x in found.members or [found]]
            applied.append("kernel" in [x.arithmetic for x in found.members or [found]])
            return found._replace(members=parts) if found.members else parts[0]

        with pytest.MonkeyPatch.context() as patch, splitting(True), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            patch.setattr(suggestions, "ASKED", set())
            patch.setattr(loss_base, "implementation", lambda: "triton")  # else a CPU asks for no kernel
            patch.setattr(loss_base, "choose_kernels", kernels_of)
            patch.setattr(plan, "choose", without_kernel)
            patch.setattr(plan, "_planned", plan._planned.__wrapped__)  # which remembers nothing
            patch.setattr(plan, "SMALL_ON_ACCELERATORS", -1)
            if mutant:
                patch.setattr(Kernels, "on_ranks", lambda kernels, *_: kernels)
            for _ in range(3):
                call(*torch.randn(2, 3 + rank, 4, requires_grad=True)).backward()
            return applied, [str(x.message) for x in said]

    for applied, said in worlds.run(2, job, False):
        assert applied == [True, False, False]
        assert [bool(re.search("is too old|does not run on rank 1", text)) for text in said] == [True]
    (first, _), (second, _) = worlds.run(2, job, True)
    assert first != second  # a rank that heeds its own answer only


def test_precision_follows_either_setting_of_torch() -> None:
    blocks = pytest.importorskip("contrastive_zoo.engine.kernels.blocks")
    x, matmuls = torch.ones(1), torch.backends.cuda.matmul
    assert blocks.precision_of(x) == "ieee"
    torch.set_float32_matmul_precision("high")
    assert blocks.precision_of(x) == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert blocks.precision_of(x) == "ieee"
    matmuls.fp32_precision = "tf32"  # torch refuses to read the older setting from here on
    try:
        assert blocks.precision_of(x) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


ROWS, WIDTH, MOST = 600, 8, 12


@pytest.fixture
def launches(suitable: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Count launches of large batches, whose tiles with masks have a launch of their own."""
    modules = ("blocks", "softmax", "sigmoid")
    blocks, softmax, sigmoid = (pytest.importorskip(f"contrastive_zoo.engine.kernels.{x}") for x in modules)
    kernel = MagicMock()
    for name in ("log_sum_exps", "merge", "softmax_weights"):
        monkeypatch.setattr(softmax, name, kernel)
    monkeypatch.setattr(sigmoid, "sigmoid_pairs", kernel)
    monkeypatch.setattr(blocks, "_capability", lambda device: 90)
    monkeypatch.setattr(blocks, "SINGLE_LAUNCH_PAIRS", 0)
    return kernel.__getitem__.return_value


def most(make: Callable[[], Any], launches: Any, ranks: int) -> int:
    """Return how many launches a rank has at most; what a launch does is not run here."""
    counts = []
    for rank in {0, ranks // 2, ranks - 1}:
        launches.reset_mock()
        rows = [torch.randn(ROWS, WIDTH).bfloat16().requires_grad_() for _ in range(2)]
        with splitting(always=True), cz.engine.use_implementation("triton"):
            counted(cz.DistributedLoss(make(), check_distinct=False), rows, [ROWS] * ranks, rank)
        counts.append(launches.call_count)
    return max(counts)


@pytest.mark.parametrize("make", [cz.Clip, cz.NTXent, cz.SigLIP])
def test_no_more_launches_on_more_ranks(make: Callable[[], Any], launches: Any) -> None:
    for ranks in (1, 3, 8):
        assert 0 < most(make, launches, ranks) <= MOST, ranks


def test_launches_for_each_rank_would_be_counted(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(self: GatherExchange, dtype: torch.dtype) -> Any:
        return (([block], x.to(dtype)) for block, x in zip(self.blocks, self, strict=True))

    monkeypatch.setattr(GatherExchange, "windows", by_rank)
    assert most(cz.Clip, launches, 8) > 5 * MOST
