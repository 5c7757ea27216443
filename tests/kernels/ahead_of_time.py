"""Compile kernels for chips that are not there: a program that prints what each takes of the chip."""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from contrastive_zoo.engine.kernels.blocks import MAX_TILES, tiles
from contrastive_zoo.engine.kernels.sigmoid_tiles import sigmoid_pairs
from contrastive_zoo.engine.kernels.softmax_tiles import log_sum_exps, softmax_weights

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BINARIES = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")

_TWO_TOWERS = {"ONE_TOWER": False, "COLUMNS": True, "EXCLUDED": False}
_SUP_CON = {"ONE_TOWER": True, "COLUMNS": True, "EXCLUDED": True}

KERNELS = {
    "log_sum_exps": (log_sum_exps, {"SIDE": 0, "IF_LOST": False, **_TWO_TOWERS}),
    "softmax_weights": (softmax_weights, {"UNIT": 0, **_TWO_TOWERS}),
    "sigmoid_pairs": (sigmoid_pairs, {"GRADIENT": True, "UNIT": 0}),
    "log_sum_exps, SupCon": (log_sum_exps, {"SIDE": 1, "IF_LOST": False, **_SUP_CON}),
    "softmax_weights, SupCon": (softmax_weights, {"UNIT": 0, **_SUP_CON}),
}
"""As two towers launch it, or SupCon, whose tiles all have masks."""

NUMBERS = {"n", "m", "d", "ahead", "partner", "local", "corner_row", "corner_column", "chunk"}
NUMBERS |= {"rows_stride", "columns_stride"}
INT32_POINTERS = ("precision_lost", "excluded")

Launch = tuple[str, Any, dict[str, Any], dict[str, tuple[int, int]]]
"""A name, a kernel, its constants and options, and the tiles that it copies."""


def launches(capability: int, dtype: torch.dtype, precision: str, *, inner: bool = False) -> Iterator[Launch]:
    for index, name in itertools.product(range(1 if inner else 2), KERNELS):
        plain, edges = tiles(dtype, precision, capability, name.split(",")[0])
        of_kernel = [(2, edges)] if plain == edges else [(0, plain), (1, edges)]
        if index < len(of_kernel) and ("SupCon" not in name or of_kernel[index][0] != 0):
            edge, tile = of_kernel[index]
            (kernel, constants), of_all = KERNELS[name], {"MAX_ROWS": MAX_TILES * tile.rows, **tile.options}
            given = {**constants, **of_all, "EDGE": 2 if "SupCon" in name else edge}
            copied = {"a": (tile.rows, tile.depth), "b": (tile.columns, tile.depth)}
            yield name, kernel, given, {**copied, "weights": (tile.rows, tile.columns // 2)}


def compiled(kernel: Any, given: dict[str, Any], copied: dict[str, Any], dtype: str, capability: int) -> Any:
    constants = {x: value for x, value in given.items() if x in kernel.arg_names}
    types = dict.fromkeys(INT32_POINTERS, "*i32") | dict.fromkeys(NUMBERS, "i32")
    types |= {x: f"tensordesc<{dtype}[{height},{width}]>" for x, (height, width) in copied.items()}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {x: types.get(x, "*fp32") for x in kernel.arg_names}
    places = {x: (kernel.arg_names.index(x),) for x in signature}
    source = ASTSource(kernel, signature, {places[x]: value for x, value in constants.items()}, {})
    options = {x: given[x] for x in ("num_warps", "num_stages")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(binary: bytes) -> dict[str, int]:
    """Spills (instructions on local memory), and matrix instructions of Hopper and of Ampere."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [os.path.join(BINARIES, "nvdisasm"), file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {x: len(re.findall(rf"\b{x}\b", code)) for x in ("STL", "LDL", "HGMMA", "HMMA")}
    return {"spills": counts["STL"] + counts["LDL"], "wgmma": counts["HGMMA"], "mma": counts["HMMA"]}


def rows(capability: int, dtype: torch.dtype, precision: str, *, inner: bool = False) -> list[dict[str, Any]]:
    found = []
    for name, kernel, given, copied in launches(capability, dtype, precision, inner=inner):
        built = compiled(kernel, {**given, "PRECISION": precision}, copied, NAMES[dtype], capability)
        found.append({"kernel": name, **resources(built.asm["cubin"]), "shared": built.metadata.shared})
    return found


if __name__ == "__main__":
    chip, dtype, precision, *inner = sys.argv[1:]
    json.dump(rows(int(chip), getattr(torch, dtype), precision, inner=bool(inner)), sys.stdout)
