"""Mutants of the kernels of several ranks, and the check that they read no value of the device."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contrastive_zoo.engine.kernels.sigmoid import KernelBlock
from contrastive_zoo.engine.kernels.softmax import SoftmaxPairs
from contrastive_zoo.engine.kernels.softmax_sweep import ExponentSums, KernelSweep
from tests.simulated import READS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Mutant = Callable[[pytest.MonkeyPatch], None]


class NoReads(TorchDispatchMode):
    """Refuse operations for whose result the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS, f"the host reads a value: {func}"
        return func(*args, **(kwargs or {}))


def without_reads(patch: pytest.MonkeyPatch) -> None:
    """Run what kernels do of a step within :class:`NoReads`."""
    sums, gradients, add = KernelSweep.sums, KernelSweep.gradients, KernelBlock.add

    def checked_sums(*args: Any) -> Any:
        with NoReads():
            return sums(*args)

    def checked_gradients(*args: Any) -> Iterator[Tensor]:
        parts = gradients(*args)
        while True:
            with NoReads():
                part = next(parts, None)
            if part is None:
                return
            yield part

    def checked_add(*args: Any, **options: Any) -> None:
        with NoReads():
            add(*args, **options)

    patch.setattr(KernelSweep, "sums", checked_sums)
    patch.setattr(KernelSweep, "gradients", checked_gradients)
    patch.setattr(KernelBlock, "add", checked_add)


def reading(patch: pytest.MonkeyPatch) -> None:
    """The mutant that asks whether a sum lost precision."""
    without_reads(patch)
    add = SoftmaxPairs.add_precise_sums

    def wrong(*given: Any) -> None:
        add(*given)
        bool(given[-1].sum() > 0)

    patch.setattr(SoftmaxPairs, "add_precise_sums", wrong)


def partners_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """The mutant that takes rows of equal index on other ranks for positives."""
    pairs, add = KernelSweep._pairs, KernelBlock.add

    def wrong_pairs(self: KernelSweep, *block: Any) -> SoftmaxPairs | None:
        result = pairs(self, *block)
        return None if result is None else replace(result, partner=self.partners.offsets[0])

    patch.setattr(KernelSweep, "_pairs", wrong_pairs)
    patch.setattr(KernelBlock, "add", lambda self, *args, local: add(self, *args, local=True))


def mantissas_only(patch: pytest.MonkeyPatch) -> None:
    """The mutant that adds sums as if their exponents were equal."""

    def wrong_merge(self: ExponentSums, total: Tensor, part: Tensor) -> Tensor:
        return torch.stack([total[:, 0], total[:, 1] + part[:, 1]], 1)

    patch.setattr(ExponentSums, "merge", wrong_merge)


def never_recomputed(patch: pytest.MonkeyPatch) -> None:
    """The mutant that keeps sums of columns that lost their precision."""

    def never(pairs: SoftmaxPairs, *given: Any) -> None:
        pairs.add_sums(*given, torch.zeros((), dtype=torch.int32, device=DEVICE))

    patch.setattr(SoftmaxPairs, "add_precise_sums", never)


def not_transposed(patch: pytest.MonkeyPatch) -> None:
    """The mutant that takes the excluded columns of rows for the excluded rows of columns."""
    patch.setattr(SoftmaxPairs, "_excluded_rows", lambda self: self.excluded)
