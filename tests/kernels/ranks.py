"""Kernels on one or several ranks against the dense formula in float64: a program for each rank; rank 0 prints JSON.

A program, because Triton decides when it is imported whether its interpreter is on, for the whole process. Each case is
three steps of one loss, with shards of other sizes at each.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import contrastive_zoo as cz
from contrastive_zoo.engine.kernels import blocks, max_sim, sigmoid, softmax
from contrastive_zoo.engine.kernels.blocks import NO_PARTNER
from contrastive_zoo.engine.kernels.sigmoid import KernelBlock
from contrastive_zoo.engine.kernels.softmax import ExponentSums, KernelSweep, SoftmaxPairs
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep
from contrastive_zoo.wrapper.step import splitting
from tests import zoo
from tests.helpers import learnt
from tests.kernels.tokens import LARGE_TOKEN_CASES, TOKEN_CASES, TOKEN_MUTANTS, TokenCase, launched_as_many
from tests.simulated import READS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def of_negatives(queries: Tensor, keys: Tensor, negatives: Tensor, scale: Tensor) -> Tensor:
    return zoo.info_nce(queries, torch.cat([keys, negatives]), scale)


LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], int]] = {
    "NTXent": (cz.NTXent, zoo.nt_xent, 2),
    "InfoNCE": (cz.InfoNCE, zoo.info_nce, 2),
    "InfoNCE, negatives": (cz.InfoNCE, of_negatives, 3),
    "Clip": (cz.Clip, zoo.clip, 2),
    "MNRL": (cz.MNRL, of_negatives, 3),
    "SigLIP": (cz.SigLIP, zoo.siglip, 2),
    "SupCon": (cz.SupCon, zoo.sup_con, 1),
}
"""The loss, its dense formula, and the number of its embeddings; SupCon has labels, too."""

SIZES = {
    1: [((40,), (1,), (33,)), ((66,), (8,), (20,))],
    2: [((20, 13), (33, 0), (2, 30)), ((0, 9), (70, 1), (16, 16))],
    3: [((9, 0, 17), (5, 21, 1), (11, 11, 11)), ((0, 0, 12), (8, 9, 17), (30, 3, 0))],
}

LARGE_SIZES = {1: [(400,), (300,)], 2: [(400, 120), (0, 270)], 3: [(0, 400, 130), (300, 17, 0)]}
"""Of batches that are launched as large ones are, with tiles of 256 × 128 pairs; on a GPU they are large."""


def launched_as_large(patch: pytest.MonkeyPatch, side: int) -> None:
    """Launch as a Hopper GPU does above 3,000² pairs, tiles without masks apart, in blocks of ``side``² pairs."""
    patch.setattr(blocks, "_capability", lambda device: 90)
    patch.setattr(blocks, "SINGLE_LAUNCH_PAIRS", 0)
    patch.setattr(blocks, "MIN_PROGRAMS", 8)  # several tiles a program
    patch.setattr(blocks, "WEIGHT_BYTES", 2 * side**2)
    patch.setattr(softmax, "PARTIAL_BYTES", 8 * side**2 // 128)
    patch.setattr(sigmoid, "UNWEIGHTED_SIDE", side)


@dataclass(frozen=True)
class Case:
    """A loss, its embeddings, and how ranks exchange them."""

    loss: str
    dtype: str = "float32"
    temperature: float = 0.07
    rows: str = "gaussian"
    reduction: str = "mean"
    ring: bool = False
    width: int = 24
    large: int = 0  # the side of a block of a batch that is launched as a large one

    def shards(self, world: int, index: int) -> Sequence[Sequence[int]]:
        """Return the sizes of each step."""
        if not self.large:
            return SIZES[world][index % 2]
        return [[n if DEVICE == "cpu" else 13 * n for n in sizes] for sizes in LARGE_SIZES[world]]

    def inputs(self, sizes: Sequence[int], step: int) -> list[Tensor]:
        """Return the embeddings of all ranks."""
        generator = torch.Generator().manual_seed(step)
        counts = [sum(sizes), sum(sizes), 2 * sum(sizes)][: LOSSES[self.loss][2]]
        rows = [torch.randn(n, self.width, generator=generator) for n in counts]
        if self.rows == "clustered":  # about two centres: most similarities are near ±1
            rows = [x * 0.05 + torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None] for x in rows]
        if self.rows == "solved":
            rows[1] = rows[0] + 0.01 * rows[1]
        if self.rows == "duplicates":
            rows = [x[torch.arange(len(x)) // 3] for x in rows]
        if self.rows == "opposite" and self.loss == "SupCon":
            rows[0] = rows[0][:1] + 0.1 * rows[0]
            rows[0][24:].neg_()
        elif self.rows == "opposite":  # all others of a column are as far below its neighbours' as can be
            rows[1][: counts[1] // 2] = -rows[0][:1]
            rows[0] = rows[0][:1] + 0.01 * rows[0]
        if not self.normalize:
            rows = [F.normalize(x, dim=1) for x in rows]
        rows = [x.to(DEVICE, getattr(torch, self.dtype)) for x in rows]
        if self.loss == "SupCon":  # classes of one, two and three samples, on any ranks
            labels = torch.arange(sum(sizes)) * 4 // 9
            rows.append(labels[torch.randperm(sum(sizes), generator=generator)].to(DEVICE))
        return rows

    def found(self, world: int, rank: int, shards: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Return value and gradients of each step, of this rank's embeddings and of the parameters."""
        make = LOSSES[self.loss][0]
        loss = make(**learnt(self.temperature), normalize=self.normalize, reduction=self.reduction)
        wrapped, results = cz.DistributedLoss(loss, ring=self.ring).to(DEVICE), []
        parameters = [x for _, x in sorted(wrapped.named_parameters(), reverse=True)]  # the temperature first
        for step, sizes in enumerate(shards):
            given = [self.laid_out(x) for x in self.local(self.inputs(sizes, step), sizes, rank)]
            rows = [x.requires_grad_() for x in given if x.is_floating_point()]
            with splitting(always=True), cz.engine.use_implementation("triton"):
                value = wrapped(*rows, *given[len(rows) :])
                part = value.sum() / self.anchors(sizes) if self.reduction == "none" else value
                gradients = torch.autograd.grad(part, [*rows, *parameters])
            value = part.detach().clone()
            if self.reduction == "none":
                dist.all_reduce(value)
            results.append([value, *(x / world for x in gradients[: len(rows)]), *gradients[len(rows) :]])
        return results

    def laid_out(self, x: Tensor) -> Tensor:
        if self.rows == "shifted":  # no row begins where a copy of a tile may
            return F.pad(x, (1, 0))[:, 1:]
        return x.T.contiguous().T if self.rows == "strided" else x

    @property
    def normalize(self) -> bool:
        """Whether the loss normalises its embeddings; otherwise they reach the kernels as they are."""
        return self.rows not in ("strided", "shifted")

    def anchors(self, sizes: Sequence[int]) -> int:
        return sum(sizes) * (2 if self.loss == "NTXent" else 1)

    def expected(self, sizes: Sequence[int], step: int, dtype: torch.dtype) -> list[Tensor]:
        """Return what the dense formula gives in a dtype, of all embeddings and by the parameters log(1/t) and the bias."""
        given = self.inputs(sizes, step)
        rows = [x.to(dtype).requires_grad_() for x in given if x.is_floating_point()]
        log_scale = torch.tensor(1 / self.temperature, device=DEVICE).log().to(dtype).requires_grad_()
        numbers = [log_scale]
        if self.loss == "SigLIP":
            numbers.append(torch.tensor(-10.0, device=DEVICE, dtype=dtype, requires_grad=True))
        unit, labels = (F.normalize(x, dim=1) if self.normalize else x for x in rows), given[len(rows) :]
        value = LOSSES[self.loss][1](*unit, *labels, 1 / (-log_scale).exp(), *numbers[1:])
        value = value * self.anchors(sizes) if self.reduction == "sum" else value
        gradients = torch.autograd.grad(value, [*rows, *numbers])
        return [value.detach(), *gradients]

    def local(self, rows: Sequence[Tensor], sizes: Sequence[int], rank: int) -> list[Tensor]:
        return [x.split([n * len(x) // sum(sizes) for n in sizes])[rank].detach().clone() for x in rows]

    def errors(self, world: int, rank: int, shards: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        """Return, for each result of each step, the errors of kernels and of the dense formula relative to its largest."""
        errors = []
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # what fills new memory must not matter
        steps = self.found(world, rank, shards)
        torch.use_deterministic_algorithms(False)
        for step, (found, sizes) in enumerate(zip(steps, shards, strict=True)):
            truth, dense = (self.expected(sizes, step, dtype) for dtype in (torch.float64, getattr(torch, self.dtype)))
            of_rows, rest = slice(1, 1 + LOSSES[self.loss][2]), slice(1 + LOSSES[self.loss][2], None)
            errors.append(_errors(found[0], dense[0], truth[0], float(truth[0].norm())))
            local = (self.local(x[of_rows], sizes, rank) for x in (dense, truth))
            for x, y, z, whole in zip(found[of_rows], *local, truth[of_rows], strict=True):
                # of a rank's few embeddings the gradient may be small by chance: relative to as many of the batch
                norm = max(float(z.norm()), float(whole.norm()) * (len(z) / len(whole)) ** 0.5)
                errors.append(_errors(x, y, z, norm))
            for x, y, z in zip(found[rest], dense[rest], truth[rest], strict=True):
                # a parameter's gradient is a difference of numbers as large as the loss at t = 1
                errors.append(_errors(x, y, z, max(float(z.norm()), 1.0 / self.temperature)))
        return errors


@dataclass(frozen=True)
class Collapsed:
    """Embeddings of 16 bits, about one direction: unit rows that were rounded again would lose digits of their differences.

    The error is that beside the dense formula in float32 of the same embeddings, normalised in float32.
    """

    loss: str
    rows: str  # their dtype
    cosine: float  # of any two samples, in the mean
    temperature: float = 0.07
    spread: float = 1.0  # of the logarithms of norms
    dtype: str = "float32"  # of the sums
    large: int = 0

    def shards(self, world: int, index: int) -> Sequence[Sequence[int]]:
        return [[[96]], [[70, 26], [0, 96]], [[40, 0, 56]]][world - 1]

    def inputs(self, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        center, samples, lengths, *noise = (torch.randn(n, 32, generator=generator) for n in (1, *[count] * 4))
        views = [F.normalize(F.normalize(samples, dim=1) + 0.5 * F.normalize(x, dim=1), dim=1) for x in noise]
        alike = math.sqrt(self.cosine) * F.normalize(center, dim=1)
        rows = [(alike + math.sqrt(1 - self.cosine) * x) * (self.spread * lengths[:, :1]).exp() for x in views]
        return [x.to(DEVICE, getattr(torch, self.rows)) for x in rows]

    def expected(self, rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        log_scale = torch.tensor(1 / self.temperature, device=DEVICE).log().to(dtype).requires_grad_()
        given = [x.to(dtype) if dtype == torch.float64 else x for x in rows]
        given = [x.detach().requires_grad_() for x in given]
        unit = [F.normalize(x.to(dtype), dim=1) for x in given]
        bias = [torch.tensor(-10.0, device=DEVICE, dtype=dtype)] if self.loss == "SigLIP" else []
        value = LOSSES[self.loss][1](*unit, log_scale.exp(), *bias)
        return [value.detach(), *torch.autograd.grad(value, [*given, log_scale])]

    def errors(self, world: int, rank: int, shards: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        errors = []
        for sizes in shards:
            loss = cz.DistributedLoss(LOSSES[self.loss][0](**learnt(self.temperature))).to(DEVICE)
            rows = self.inputs(sum(sizes))
            own = [x.split([*sizes])[rank].clone().requires_grad_() for x in rows]
            with splitting(always=True), cz.engine.use_implementation("triton"):
                value = loss(*own)
            (scale,) = (x for name, x in loss.named_parameters() if "temperature" in name)
            *gradients, of_scale = torch.autograd.grad(value, [*own, scale])
            truth, dense = (self.expected(rows, dtype) for dtype in (torch.float64, torch.float32))
            errors.append(_errors(value.detach(), dense[0], truth[0], float(truth[0])))
            # relative to its summands, of which only those of SigLIP do not cancel
            norm = abs(float(truth[-1])) if self.loss == "SigLIP" else 1 / self.temperature
            errors.append(_errors(of_scale, dense[-1], truth[-1], norm))
            for x, *others in zip(gradients, dense[1:-1], truth[1:-1], strict=True):
                y, z = (of.split([*sizes])[rank] for of in others)
                errors.append(_errors(x / world, y.double(), z, float(z.norm())))
        return errors


def _errors(found: Tensor, dense: Tensor, truth: Tensor, norm: float) -> tuple[float, float]:
    """Return the errors of both, relative to a norm."""
    x, y = (float((x.double().reshape(truth.shape) - truth).norm()) / max(norm, 1e-30) for x in (found, dense))
    return x, y


_SUP_CON = [("float32", 0.07, False), ("float32", 0.01, True), ("bfloat16", 0.05, True), ("float16", 0.05, False)]

CASES = [
    *(Case(loss) for loss in LOSSES),
    *(Case(loss, "bfloat16") for loss in ("NTXent", "Clip", "SigLIP")),
    *(Case(loss, "float16", ring=True) for loss in ("NTXent", "Clip", "SigLIP", "InfoNCE, negatives")),
    *(Case(loss, temperature=0.01, ring=True, width=33) for loss in ("NTXent", "Clip", "MNRL", "SigLIP")),
    *(Case(loss, temperature=0.02, rows="solved") for loss in ("NTXent", "Clip", "SigLIP")),
    *(Case(loss, rows="duplicates", reduction="none") for loss in ("NTXent", "Clip", "InfoNCE")),
    *(Case(loss, reduction="sum") for loss in ("NTXent", "Clip", "SigLIP")),
    *(Case("SupCon", dtype, temperature, ring=ring) for dtype, temperature, ring in _SUP_CON),
    *(Case(loss, temperature=0.01, width=8, rows="opposite") for loss in ("SupCon", "Clip")),
    *(Case(loss, temperature=0.01, width=9, rows="clustered") for loss in ("NTXent", "InfoNCE", "Clip", "SigLIP")),
    *(Case("Clip", width=20, rows=rows) for rows in ("strided", "shifted")),
]
LARGE_CASES = [
    Case("InfoNCE, negatives", "bfloat16", large=4096),  # of which most are far from the positives
    *(Case(loss, "float16", ring=True, large=256) for loss in ("NTXent", "Clip", "SigLIP")),
    *(Case(loss, "bfloat16", large=4096) for loss in ("NTXent", "Clip", "SigLIP")),
]
COLLAPSED = [
    Collapsed("Clip", "bfloat16", 0.9),
    Collapsed("NTXent", "bfloat16", 0.98),
    Collapsed("SigLIP", "bfloat16", 0.9, 0.2),
    Collapsed("NTXent", "float16", 0.9, 0.02),
    Collapsed("Clip", "float16", 0.98),
    Collapsed("InfoNCE", "bfloat16", 0.0, 0.5),
    Collapsed("SigLIP", "bfloat16", 0.98, 0.5, spread=0.0),
]


# ----------------------------------------------------------------------------------------------------- mutants, and reads

Mutant = Callable[[pytest.MonkeyPatch], None]


class NoReads(TorchDispatchMode):
    """Refuse operations for whose result the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"the host reads a value: {func}"
        return func(*args, **(kwargs or {}))


def without_reads(patch: pytest.MonkeyPatch) -> None:
    """Run what kernels do of a step within :class:`NoReads`."""
    gradients, parts = KernelSweep.gradients, KernelBlock.parts

    def checked_parts(function: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
        def run(*args: Any) -> Iterator[Tensor]:
            results = function(*args)
            while True:
                with NoReads():
                    part = next(results, None)
                if part is None:
                    return
                yield part

        return run

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with NoReads():
                return function(*args, **options)

        return run

    functions = [(KernelSweep, "sums")]
    functions += [(max_sim.KernelSweep, name) for name in ("block_scores", "add_gradients")]
    for of, name in functions:
        patch.setattr(of, name, checked(getattr(of, name)))
    patch.setattr(KernelSweep, "gradients", checked_parts(gradients))
    patch.setattr(KernelBlock, "parts", checked_parts(parts))


def reading(patch: pytest.MonkeyPatch) -> None:
    """The mutant that asks whether a sum lost precision."""
    without_reads(patch)
    add = SoftmaxPairs.add_precise_sums

    def wrong(*given: Any) -> None:
        add(*given)
        bool(given[-1].sum() > 0)

    patch.setattr(SoftmaxPairs, "add_precise_sums", wrong)


def with_pairs(patch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Change what is known of the pairs of a matrix."""
    pairs = KernelSweep._pairs
    patch.setattr(KernelSweep, "_pairs", lambda *given: replace(pairs(*given), **fields))


def partners_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """The mutant that takes rows of equal index on other ranks for positives."""
    with_pairs(patch, partner=0, local=NO_PARTNER)
    add = sigmoid.add_pairs
    patch.setattr(sigmoid, "add_pairs", lambda *args, ahead: add(*args))


def partners_among_all_columns(patch: pytest.MonkeyPatch) -> None:
    """The mutant that takes a column of another rank for a view of the same sample, by its offset in the matrix."""
    with_pairs(patch, local=NO_PARTNER)


def shared_blocks_twice(patch: pytest.MonkeyPatch) -> None:
    """The mutant whose ranks both compute all sums of a block that they share."""
    with_pairs(patch, corner=(NO_PARTNER, NO_PARTNER))


def mantissas_only(patch: pytest.MonkeyPatch) -> None:
    """The mutant that adds sums as if their exponents were equal."""

    def wrong_merge(self: ExponentSums, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([parts[0][:, 0], sum(x[:, 1] for x in parts)], 1)

    patch.setattr(ExponentSums, "merge", wrong_merge)


def never_recomputed(patch: pytest.MonkeyPatch) -> None:
    """The mutant that keeps sums of columns that lost their precision."""

    def never(pairs: SoftmaxPairs, *given: Any) -> None:
        pairs.add_sums(*given, torch.zeros((), dtype=torch.int32, device=DEVICE))

    patch.setattr(SoftmaxPairs, "add_precise_sums", never)


def not_transposed(patch: pytest.MonkeyPatch) -> None:
    """The mutant that takes the excluded columns of rows for the excluded rows of columns."""
    patch.setattr(SoftmaxPairs, "_excluded_rows", lambda self: self.excluded)


def products_of_rounded_weights(patch: pytest.MonkeyPatch) -> None:
    """The mutant that takes the gradient of the scale from those of the embeddings, whose weights are rounded to 16 bits."""
    patch.setattr(KernelSweep, "dscale", SoftmaxSweep.dscale)


def rounded_unit_rows(patch: pytest.MonkeyPatch) -> None:
    """The mutant that multiplies unit rows, rounded to 16 bits."""
    plain = blocks.Operand.of

    def of(x: Tensor, precision: str, *, unit_norm: bool = False) -> blocks.Operand:
        return plain(F.normalize(x.float(), dim=1).to(x.dtype) if unit_norm else x, precision)

    patch.setattr(blocks.Operand, "of", of)


class _Inner:
    """A kernel whose launches without masks see logits that are half as large again."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.place = kernel, kernel.arg_names.index("scale")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            given = list(arguments)
            given[self.place] = given[self.place] * (1.5 if options["EDGE"] == 0 else 1.0)
            self.kernel[grid](*given, **options)

        return launch


def inner_logits_too_large(patch: pytest.MonkeyPatch) -> None:
    """The mutant whose launches without masks are wrong, which no small batch has."""
    for module, name in ((softmax, "log_sum_exps"), (softmax, "softmax_weights"), (sigmoid, "sigmoid_pairs")):
        patch.setattr(module, name, _Inner(getattr(module, name)))


MUTANTS: list[tuple[Mutant, Case | Collapsed | TokenCase]] = [
    *((products_of_rounded_weights, case) for case in COLLAPSED[:2]),
    *((rounded_unit_rows, case) for case in (*COLLAPSED[:-1], *TOKEN_CASES[4:6])),
    *((inner_logits_too_large, Case(loss, "bfloat16", large=4096)) for loss in ("Clip", "SigLIP")),
    (partners_on_every_rank, Case("Clip", ring=True)),
    (partners_on_every_rank, Case("SigLIP", ring=True)),
    (partners_among_all_columns, Case("NTXent")),
    (shared_blocks_twice, Case("NTXent")),
    (mantissas_only, Case("Clip")),
    (never_recomputed, Case("Clip", temperature=0.01, width=8, rows="opposite")),
    (not_transposed, Case("SupCon", temperature=0.01, width=8, rows="opposite")),
    *TOKEN_MUTANTS,
    (reading, Case("Clip")),  # last, as it ends in the middle of a step
]
"""Each with a case that catches it."""


def interpret_bfloat16() -> None:
    """Teach the interpreter products of bfloat16, of which it multiplies the bits, and to round to it, not to truncate."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):  # type: ignore[no-untyped-def]  # Triton's own has no types
        return plain(self, widened(a), widened(b), *rest)

    convert = interpreter._convert_float

    def rounded(x, of, to, *rest):  # type: ignore[no-untyped-def]  # Triton's own has no types
        if of == tl.float32 and to == tl.bfloat16:
            return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return convert(x, of, to, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = rounded


def selected() -> list[tuple[Mutant | None, Case | Collapsed | TokenCase]]:
    """Return cases that the arguments choose, the first and the step, a large one, and mutants if a third asks for them."""
    first, step, *mutants = sys.argv[1:]
    every = DEVICE == "cuda" or os.environ.get("ALL_DTYPES")
    world = int(os.environ["WORLD_SIZE"])
    cases: list[Case | Collapsed | TokenCase] = [*CASES, *LARGE_CASES, *TOKEN_CASES, *LARGE_TOKEN_CASES]
    if not every:
        cases = [*CASES[int(first) :: int(step)], LARGE_CASES[world - 1]]
        cases += [*TOKEN_CASES[world::2][:2], LARGE_TOKEN_CASES[world - 1]]
    return [*((None, case) for case in [*cases, *COLLAPSED]), *(MUTANTS if mutants else [])]


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, about log2(0) in the interpreter
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE == "cpu":
        interpret_bfloat16()
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    results: list[Any] = []
    for index, (mutant, case) in enumerate(selected()):
        found: list[Any] = [None] * world
        with pytest.MonkeyPatch.context() as patch:
            (mutant or without_reads)(patch)
            shards = case.shards(world, index)
            if mutant and (case.large or isinstance(case, TokenCase)):
                shards = shards[:1]
            elif mutant and isinstance(case, Case):
                shards = [SIZES[world][0][0], SIZES[world][1][1]]
            if case.large and isinstance(case, TokenCase):
                launched_as_many(patch)
            elif case.large and DEVICE == "cpu":
                launched_as_large(patch, case.large)
            try:
                errors = case.errors(world, rank, shards)
            except AssertionError:  # of a read
                errors = [(math.inf, 0.0)]
            dist.all_gather_object(found, errors)
        results.append(
            {
                "case": str(case),
                "mutant": mutant and mutant.__name__,
                "dtype": "float32" if isinstance(case, TokenCase) else case.dtype,
                "errors": [x for of_rank in found for x in of_rank],
            }
        )
    if rank == 0:
        json.dump(results, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
