"""Steps of losses by kernels beside the dense formula in float32, how near each is to float64, and faults of kernels."""

import math
import os
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
from contrastive_zoo.engine.kernels import blocks, sigmoid, softmax
from contrastive_zoo.engine.kernels.blocks import NO_PARTNER
from contrastive_zoo.engine.kernels.sigmoid import KernelBlock
from contrastive_zoo.engine.kernels.softmax import SoftmaxPairs
from contrastive_zoo.engine.softmax_kernels import ExponentSums, KernelSweep
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep
from contrastive_zoo.testing.interventions import splitting
from tests import zoo
from tests.helpers import learnt
from tests.simulated import READS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Sizes = Sequence[Sequence[int]]


def _errors(found: Tensor, dense: Tensor, truth: Tensor, norm: float) -> tuple[float, float]:
    x, y = (float((x.double().reshape(truth.shape) - truth).norm()) / max(norm, 1e-30) for x in (found, dense))
    return x, y


def local(x: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    return x.split([n * len(x) // sum(sizes) for n in sizes])[rank]


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


@dataclass(frozen=True)
class Case:
    loss: str
    dtype: str = "float32"
    temperature: float = 0.07
    rows: str = "gaussian"
    reduction: str = "mean"
    ring: bool = False
    width: int = 24
    cosine: float = 0.0  # with rows "alike", of any two samples in the mean
    large: int = 0  # the side of a block of a batch that is launched as a large one

    @property
    def bound(self) -> float:
        """What the dense formula's error is multiplied by: 2.1 where gradients are as precise as rounded weights."""
        return 2.1 if self.dtype == "float16" else 1.5

    def shards(self, world: int, index: int) -> Sizes:
        if not self.large:
            return SIZES[world][index % 2]
        return [[n if DEVICE == "cpu" else 13 * n for n in sizes] for sizes in LARGE_SIZES[world]]

    def launched_as_large(self, patch: pytest.MonkeyPatch) -> None:
        if DEVICE == "cpu":
            patch.setattr(blocks, "_capability", lambda device: 90)
            patch.setattr(blocks, "SINGLE_LAUNCH_PAIRS", 0)
            patch.setattr(blocks, "MIN_PROGRAMS", 8)  # several tiles a program
            patch.setattr(blocks, "WEIGHT_BYTES", 2 * self.large**2)
            patch.setattr(softmax, "PARTIAL_BYTES", 8 * self.large**2 // 128)
            patch.setattr(sigmoid, "UNWEIGHTED_SIDE", self.large)

    @property
    def normalize(self) -> bool:
        return self.rows not in ("strided", "shifted")

    def inputs(self, sizes: Sequence[int], step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        counts = [sum(sizes), sum(sizes), 2 * sum(sizes)][: LOSSES[self.loss][2]]
        rows = [torch.randn(n, self.width, generator=generator) for n in counts]
        if self.rows == "clustered":  # about two centres: most similarities are near ±1
            rows = [x * 0.05 + torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None] for x in rows]
        if self.rows == "solved":
            rows[1] = rows[0] + 0.01 * rows[1]
        if self.rows == "duplicates":
            rows = [x[torch.arange(len(x)) // 3] for x in rows]
        if self.rows == "nearly solved":  # single negatives dominate
            rows[1] = rows[0] + 0.2 * rows[1]
        if self.rows == "one":  # all products are equal, near 1: their weights are rounded alike
            rows = [rows[0][:1].expand_as(rows[0]), (rows[0][:1] + 0.2 * rows[1][:1]).expand_as(rows[1])]
        if self.rows == "alike":  # unit rows that were rounded to 16 bits would lose digits of their differences
            center, *base = (F.normalize(torch.randn(n, self.width, generator=generator), dim=1) for n in (1, *counts))
            rows = [F.normalize(base[0] + 0.5 * F.normalize(x, dim=1), dim=1) for x in rows]
            rows = [math.sqrt(self.cosine) * center + math.sqrt(1 - self.cosine) * x for x in rows]
            rows = [x * torch.randn(len(x), 1, generator=generator).exp() for x in rows]
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

    def anchors(self, sizes: Sequence[int]) -> int:
        return sum(sizes) * (2 if self.loss == "NTXent" else 1)

    def found(self, rank: int, sizes: Sequence[int], step: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        settings = {"normalize": self.normalize, "reduction": self.reduction}
        wrapped = cz.DistributedLoss(LOSSES[self.loss][0](**learnt(self.temperature), **settings), ring=self.ring)
        wrapped = wrapped.to(DEVICE)
        parameters = [x for _, x in sorted(wrapped.named_parameters(), reverse=True)]  # the temperature first
        given = [self.laid_out(local(x, sizes, rank).clone()) for x in self.inputs(sizes, step)]
        rows = [x.requires_grad_() for x in given if x.is_floating_point()]
        with splitting(always=True), cz.engine.use_implementation("triton"):
            value = wrapped(*given)
            part = value.sum() / self.anchors(sizes) if self.reduction == "none" else value
            gradients = torch.autograd.grad(part, [*rows, *parameters])
        total = part.detach().clone()
        if self.reduction == "none":
            dist.all_reduce(total)
        return total, [*gradients[: len(rows)]], [*gradients[len(rows) :]]

    def laid_out(self, x: Tensor) -> Tensor:
        if self.rows == "shifted":  # no row begins where a copy of a tile may
            return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
        if self.rows == "strided":  # columns of a wider matrix
            return x.new_empty(len(x), x.shape[1] + 12)[:, 4:-8].copy_(x)
        return x

    def expected(self, sizes: Sequence[int], step: int, dtype: torch.dtype) -> list[Tensor]:
        given = self.inputs(sizes, step)
        rows = [x.to(dtype, copy=True).requires_grad_() for x in given if x.is_floating_point()]
        log_scale = torch.tensor(1 / self.temperature, device=DEVICE).log().to(dtype).requires_grad_()
        numbers = [log_scale]
        if self.loss == "SigLIP":
            numbers.append(torch.tensor(-10.0, device=DEVICE, dtype=dtype, requires_grad=True))
        unit, labels = (F.normalize(x, dim=1) if self.normalize else x for x in rows), given[len(rows) :]
        value = LOSSES[self.loss][1](*unit, *labels, 1 / (-log_scale).exp(), *numbers[1:])
        value = value * self.anchors(sizes) if self.reduction == "sum" else value
        return [value.detach(), *torch.autograd.grad(value, [*rows, *numbers])]

    def errors(self, world: int, rank: int, shards: Sizes) -> list[tuple[float, float]]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # what fills new memory must not matter
        steps = [self.found(rank, sizes, step) for step, sizes in enumerate(shards)]
        torch.use_deterministic_algorithms(False)
        errors = []
        for step, ((value, rows, numbers), sizes) in enumerate(zip(steps, shards, strict=True)):
            truth, dense = (self.expected(sizes, step, dtype) for dtype in (torch.float64, torch.float32))
            errors.append(_errors(value, dense[0], truth[0], max(float(truth[0].norm()), self.smallest_value)))
            for x, *others in zip(rows, dense[1:], truth[1:], strict=False):
                y, z = (local(of, sizes, rank) for of in others)
                # of a rank's few embeddings the gradient may be small by chance: relative to as many of the batch
                norm = max(float(z.norm()), float(others[1].norm()) * (len(z) / len(others[1])) ** 0.5)
                # as an encoder gets it, and as the factor of a trainer that divides by W rounds it
                rounded = (world * y.to(x.dtype)).double() / world
                errors.append(_errors(x.double() / world, rounded, z, norm))
            for x, y, z in zip(numbers, dense[1 + len(rows) :], truth[1 + len(rows) :], strict=True):
                errors.append(_errors(x, y, z, max(float(z.norm()), self.smallest_norm)))
        return errors

    @property
    def smallest_value(self) -> float:
        """What the value's error is at least relative to: a tenth of the largest logit, which float32 rounds."""
        return 0.1 / self.temperature if self.rows == "nearly solved" else 0.0

    @property
    def smallest_norm(self) -> float:
        """What a parameter's error is at least relative to: the size of the summands; those of one product do not cancel."""
        return 0.0 if self.rows == "one" else 1.0 / self.temperature


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
    *(Case(loss, temperature=0.02, width=9, rows="clustered") for loss in ("NTXent", "InfoNCE", "Clip", "SigLIP")),
    *(Case("Clip", width=20, rows=rows) for rows in ("strided", "shifted")),
]
LARGE_CASES = [
    Case("InfoNCE, negatives", "bfloat16", large=4096),  # of which most are far from the positives
    *(Case(loss, "float16", ring=True, large=256) for loss in ("NTXent", "Clip", "SigLIP")),
    *(Case(loss, "bfloat16", large=4096) for loss in ("NTXent", "Clip", "SigLIP")),
]
_ALIKE = [
    ("Clip", "bfloat16", 0.9, 0.07, True),
    ("NTXent", "bfloat16", 0.98, 0.07, True),
    ("SupCon", "bfloat16", 0.9, 0.07, True),
    ("SigLIP", "bfloat16", 0.9, 0.2, False),
    ("NTXent", "float16", 0.9, 0.05, False),
    ("Clip", "float16", 0.98, 0.07, False),
    ("SupCon", "float16", 0.98, 0.1, False),
    ("InfoNCE", "bfloat16", 0.0, 0.5, False),
]
ALIKE = [Case(*x, t, "alike", ring=ring, width=32, cosine=cosine) for *x, cosine, t, ring in _ALIKE]
SOLVED = Case("Clip", "bfloat16", 0.03, "nearly solved", width=6)
EQUAL = Case("SigLIP", "bfloat16", 0.1, "one")


def chosen(world: int, first: int, step: int) -> list[Case]:
    """Return the cases, or those from the first on by a step, a large one, and what bounds the errors of 16 bits."""
    if DEVICE == "cuda" or os.environ.get("ALL_DTYPES"):
        return [*CASES, *LARGE_CASES, *ALIKE, SOLVED, EQUAL]
    return [*CASES[first::step], LARGE_CASES[world - 1], *ALIKE[world - 1 :: 2], SOLVED, EQUAL]


Mutant = Callable[[pytest.MonkeyPatch], None]


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"the host reads a value: {func}"
        return func(*args, **(kwargs or {}))


def without_reads(patch: pytest.MonkeyPatch) -> None:
    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with NoReads():
                return function(*args, **options)

        return run

    def checked_parts(function: Callable[..., Iterator[Tensor]]) -> Callable[..., Iterator[Tensor]]:
        def run(*args: Any) -> Iterator[Tensor]:
            following = checked(lambda parts: next(parts, None))
            parts = function(*args)
            while (part := following(parts)) is not None:
                yield part

        return run

    of_kernels: list[tuple[type, str]] = [(KernelSweep, "sums"), (KernelBlock, "add"), (KernelBlock, "finish")]
    for kind, name in of_kernels:
        patch.setattr(kind, name, checked(getattr(kind, name)))
    patch.setattr(KernelSweep, "gradients", checked_parts(KernelSweep.gradients))


def reading(patch: pytest.MonkeyPatch) -> None:
    without_reads(patch)
    add = SoftmaxPairs.add_precise_sums

    def wrong(*given: Any) -> None:
        add(*given)
        bool(given[-1].sum() > 0)

    patch.setattr(SoftmaxPairs, "add_precise_sums", wrong)


def with_pairs(patch: pytest.MonkeyPatch, **fields: Any) -> None:
    pairs = KernelSweep._pairs
    patch.setattr(KernelSweep, "_pairs", lambda *given: replace(pairs(*given), **fields))


def partners_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    with_pairs(patch, partner=0, local=NO_PARTNER)
    add = KernelBlock._add_pairs
    patch.setattr(KernelBlock, "_add_pairs", lambda block, columns, total, ahead: add(block, columns, total, 0))


def partners_among_all_columns(patch: pytest.MonkeyPatch) -> None:
    """Take a column of another rank for a view of the same sample, by its offset in the matrix."""
    with_pairs(patch, local=NO_PARTNER)


def shared_blocks_twice(patch: pytest.MonkeyPatch) -> None:
    with_pairs(patch, corner=(NO_PARTNER, NO_PARTNER))


def mantissas_only(patch: pytest.MonkeyPatch) -> None:
    def wrong_merge(self: ExponentSums, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([parts[0][:, 0], sum(x[:, 1] for x in parts)], 1)

    patch.setattr(ExponentSums, "merge", wrong_merge)


def never_recomputed(patch: pytest.MonkeyPatch) -> None:
    def never(pairs: SoftmaxPairs, *given: Any) -> None:
        pairs.add_sums(*given, torch.zeros((), dtype=torch.int32, device=DEVICE))

    patch.setattr(SoftmaxPairs, "add_precise_sums", never)


def not_transposed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SoftmaxPairs, "_excluded_rows", lambda self: self.excluded)


def products_of_rounded_weights(patch: pytest.MonkeyPatch) -> None:
    """Take the gradient of the scale from those of the embeddings, whose weights are rounded to 16 bits."""
    patch.setattr(KernelSweep, "dscale", SoftmaxSweep.dscale)
    finish = KernelBlock.finish

    def wrong_finish(block: KernelBlock) -> None:
        finish(block)
        unit = block.anchors.rows.float() * block.anchors.factors[:, None]
        block.products.copy_((block.danchors * unit).sum())

    patch.setattr(KernelBlock, "finish", wrong_finish)


def rounded_unit_rows(patch: pytest.MonkeyPatch) -> None:
    plain = blocks.Operand.of

    def of(x: Tensor, *, min_norm: float | None = None) -> blocks.Operand:
        return plain(x if min_norm is None else F.normalize(x.float(), dim=1).to(x.dtype))

    patch.setattr(blocks.Operand, "of", of)


def weights_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    of = blocks.Weights.of
    patch.setattr(blocks.Weights, "of", lambda a, b: replace(of(a, b), buffer=of(a, b).buffer.bfloat16(), bits=0))


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
    """Compute launches without masks wrong, which no small batch has."""
    for module, name in ((softmax, "log_sum_exps"), (softmax, "softmax_weights"), (sigmoid, "sigmoid_pairs")):
        patch.setattr(module, name, _Inner(getattr(module, name)))


MUTANTS: list[tuple[Mutant, Case]] = [
    *((products_of_rounded_weights, case) for case in (*ALIKE[:2], EQUAL)),
    *((rounded_unit_rows, case) for case in ALIKE[:4]),
    (weights_in_bfloat16, SOLVED),
    *((inner_logits_too_large, Case(loss, "bfloat16", large=4096)) for loss in ("Clip", "SigLIP")),
    (partners_on_every_rank, Case("Clip", ring=True)),
    (partners_on_every_rank, Case("SigLIP", ring=True)),
    (partners_among_all_columns, Case("NTXent")),
    (shared_blocks_twice, Case("NTXent")),
    (mantissas_only, Case("Clip")),
    (never_recomputed, Case("Clip", temperature=0.01, width=8, rows="opposite")),
    (not_transposed, Case("SupCon", temperature=0.01, width=8, rows="opposite")),
    (reading, Case("Clip")),  # last, as it ends in the middle of a step
]
