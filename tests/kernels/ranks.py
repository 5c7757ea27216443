"""Kernels on one or several ranks against the dense formula in float64: a program for each rank; rank 0 prints JSON."""

import json
import math
import os
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kernels.cases import DEVICE, MUTANTS, SIZES, Case, Mutant, chosen, without_reads


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


def errors_of(case: Case, mutant: Mutant | None, index: int) -> list[tuple[float, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = case.shards(world, index)
    if mutant and not case.large:
        shards = [SIZES[world][0][0], SIZES[world][1][1]]
    elif mutant:
        shards = shards[:1]
    with pytest.MonkeyPatch.context() as patch:
        (mutant or without_reads)(patch)
        if case.large:
            case.launched_as_large(patch)
        try:
            return case.errors(world, rank, shards)
        except AssertionError:  # of a read
            return [(math.inf, 0.0)]


def computed(cases: list[tuple[Mutant | None, Case]]) -> list[dict[str, Any]]:
    results = []
    for index, (mutant, case) in enumerate(cases):
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, errors_of(case, mutant, index))
        errors = [x for of_rank in of_ranks for x in of_rank]
        results.append({"case": str(case), "mutant": mutant and mutant.__name__, "bound": case.bound, "errors": errors})
    return results


def main() -> None:
    """Compute the cases that the arguments choose, the first and the step, and mutants if a third asks for them."""
    warnings.simplefilter("ignore")  # numpy's, about log2(0) in the interpreter
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE == "cpu":
        interpret_bfloat16()
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    first, step, *mutants = sys.argv[1:]
    cases: list[Case] = chosen(world, int(first), int(step))
    results = computed([*((None, case) for case in cases), *(MUTANTS if mutants else [])])
    if rank == 0:
        json.dump(results, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
