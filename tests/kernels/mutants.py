"""Faults of kernels, each as a change of what computes them, with a case that catches it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contrastive_zoo.engine.kernels import blocks, sigmoid, softmax
from contrastive_zoo.engine.kernels.blocks import NO_PARTNER
from contrastive_zoo.engine.kernels.sigmoid import KernelBlock
from contrastive_zoo.engine.kernels.softmax import SoftmaxPairs
from contrastive_zoo.engine.softmax_kernels import ExponentSums, KernelSweep
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep
from tests.kernels.cases import ALIKE, DEVICE, EQUAL, SOLVED, Case
from tests.simulated import READS

Mutant = Callable[[pytest.MonkeyPatch], None]


class NoReads(TorchDispatchMode):
    """Refuse operations for whose result the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"the host reads a value: {func}"
        return func(*args, **(kwargs or {}))


def without_reads(patch: pytest.MonkeyPatch) -> None:
    """Run what kernels do of a step within :class:`NoReads`."""

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
    """Ask whether a sum lost precision."""
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
    """Take rows of equal index on other ranks for positives."""
    with_pairs(patch, partner=0, local=NO_PARTNER)
    add = KernelBlock._add_pairs
    patch.setattr(KernelBlock, "_add_pairs", lambda block, columns, total, ahead: add(block, columns, total, 0))


def partners_among_all_columns(patch: pytest.MonkeyPatch) -> None:
    """Take a column of another rank for a view of the same sample, by its offset in the matrix."""
    with_pairs(patch, local=NO_PARTNER)


def shared_blocks_twice(patch: pytest.MonkeyPatch) -> None:
    """Compute all sums of a block on both ranks that share it."""
    with_pairs(patch, corner=(NO_PARTNER, NO_PARTNER))


def mantissas_only(patch: pytest.MonkeyPatch) -> None:
    """Add sums as if their exponents were equal."""

    def wrong_merge(self: ExponentSums, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([parts[0][:, 0], sum(x[:, 1] for x in parts)], 1)

    patch.setattr(ExponentSums, "merge", wrong_merge)


def never_recomputed(patch: pytest.MonkeyPatch) -> None:
    """Keep sums of columns that lost their precision."""

    def never(pairs: SoftmaxPairs, *given: Any) -> None:
        pairs.add_sums(*given, torch.zeros((), dtype=torch.int32, device=DEVICE))

    patch.setattr(SoftmaxPairs, "add_precise_sums", never)


def not_transposed(patch: pytest.MonkeyPatch) -> None:
    """Take the excluded columns of rows for the excluded rows of columns."""
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
    """Multiply unit rows, rounded to 16 bits."""
    plain = blocks.Operand.of

    def of(x: Tensor, *, min_norm: float | None = None) -> blocks.Operand:
        return plain(x if min_norm is None else F.normalize(x.float(), dim=1).to(x.dtype))

    patch.setattr(blocks.Operand, "of", of)


def weights_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Store weights in 8 bits of mantissa."""
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
