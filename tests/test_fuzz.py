"""Nonsense as arguments of every public callable: a result or an error in words, never an internal error."""

import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.shapes import call_form
from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.vectors.cases import SAMPLES, WIDTH, of_entry

PACKAGE = str(Path(cz.__file__).parent)
WHOLE = torch.int64, torch.int32, torch.uint8, torch.bool
UNKNOWN_TO_NUMPY = torch.bfloat16, torch.float8_e4m3fn
DTYPES = [torch.float16, torch.float32, torch.float64, *UNKNOWN_TO_NUMPY, *WHOLE, torch.complex64]
SHAPES = [(), (0,), (1,), (8,), (9,), (8, 4), (0, 4), (8, 0), (1, 4), (4, 8), (9, 4), (8, 1), (8, 2, 4), (8, 4, 1, 1)]
VALUES = ["ordinary", "zero", "huge", "tiny", "nan", "inf", "negative"]
OTHERS: list[Any] = [
    None, True, 0, 1, -1, 3, 2**62, 2**70, 0.0, -0.5, 0.3, 1e-300, 1e308, float("nan"), float("inf"), "", "mean", "ρ",
    b"x", 1j, [], (), {}, [[1.0, 2.0, 3.0]] * 4, [0, 1, 0, 1], range(4), {"a": 1}, object(), object, len, np.int64(2**62),
    np.array([0, 1, 0, 1]), np.array(["a", "b"]), torch.float32, torch.device("cpu"), nn.Linear(2, 2), iter([1]),
]  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T if x.ndim == 2 else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.ndim > 0 and len(x) > 0 else x,
    "sparse": lambda x: x if x.dtype is torch.float8_e4m3fn else x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "learnt": lambda x: x if x.dtype in WHOLE else x.requires_grad_(),
    "numpy": lambda x: x if x.dtype in UNKNOWN_TO_NUMPY else x.numpy(),
}


def tensor(shape: tuple[int, ...], dtype: torch.dtype, values: str, layout: str, seed: int) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    largest = {torch.float16: 6e4, torch.bfloat16: 3e38, torch.float32: 3e38}
    huge = largest.get(dtype, 9e18 if dtype.itemsize == 8 else 1e2)
    x = x.clamp(-1, 1) * huge if values == "huge" else x * {"zero": 0.0, "tiny": 1e-30}.get(values, 3.0)
    x = -x.abs() if values == "negative" else x
    if values in ("nan", "inf") and x.numel():
        x.view(-1)[0] = float(values)
    return LAYOUTS[layout]((x.nan_to_num() if dtype in WHOLE else x).to(dtype))


one = st.sampled_from
TENSORS = st.builds(tensor, one(SHAPES), one(DTYPES), one(VALUES), one([*LAYOUTS, "plain"]), st.integers(0, 3))
NONSENSE = st.one_of(TENSORS, TENSORS.map(lambda x: x), one(OTHERS))
"""Two of three are tensors."""


Target = tuple[Callable[..., Any], Mapping[str, Any]]
"""A callable with valid arguments, of which those that are None may be nonsense, too."""
SKIPPED = {"world", "process_group", "sharded", "check_finite", "shards", "shard_over"}
"""Arguments that choose other ranks, or whose meaning is no test of one call."""

Z = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
LABELS, IDS = torch.arange(SAMPLES) % 2, torch.arange(SAMPLES)
LINEAR, SUP_CON = nn.Linear(WIDTH, 2), cz.SupCon()
VALID: dict[str, Any] = {
    "batch_size": 2, "chunk_tokens": 9, "chunks_per_batch": 2, "classes_per_batch": 2, "m": 2,
    "columns": [LABELS], "corpus": Z.flip(0), "dims": [1, 3], "embedding_size": WIDTH, "encoder": LINEAR, "model": LINEAR,
    "example": (Z[0], 1), "ids": IDS, "k": 1, "labels": LABELS, "n": 4,
    "lengths": LABELS + 1, "loss": SUP_CON, "loss_fn": SUP_CON, "losses": [SUP_CON, cz.Triplet()], "module": LINEAR,
    "miner": lambda rows, labels: (labels,) * 3, "modules": [LINEAR], "num_samples": 8,
    "options": {"seed": 0}, "positives": IDS, "queries": Z, "rows": Z, "x": Z,
    "samplers": [cz.data.GlobalBatchSampler(4, batch_size=2)], "size": 8, "sizes": [4], "targets": [],
    "tensors": [Z, LABELS], "weight_decay": 0.1,
}  # fmt: skip
"""Of required arguments, by their names."""
BESIDES = {"GradCache": {"chunk_size": 2}, "explain": {"world_size": 2}, "evaluate": {"labels": LABELS}}
LABELLED = "CrossBatchMemory", "DistributedLoss", "DistributedMiner", "Matryoshka", "WeightedSum", "MemoryQueue"
CALLED: dict[str, dict[str, Any]] = {"GradCache": {"rows": Z}, "LearnableTemperature": {}}
CALLED |= {name: {"rows": Z, "of rows": LABELS} for name in (*LABELLED, "RetrievalMetrics")}
"""Arguments of a call of what they return."""
METHODS = {"MemoryQueue": "enqueue", "RetrievalMetrics": "update"}


def of(function: Any, valid: Mapping[str, Any], called: Mapping[str, Any] | None, method: str = "__call__") -> Target:
    """Return a target of ``valid`` arguments, and of the defaults of all others; then what it returns is called."""
    arguments, positional = {}, []
    for x in inspect.signature(function).parameters.values():
        if x.kind is x.VAR_POSITIONAL:
            several = {f"{x.name}[{i}]": value for i, value in enumerate(VALID[x.name])}
            positional, arguments = [*arguments, *several], arguments | several
        elif x.kind is x.VAR_KEYWORD:
            arguments |= VALID.get(x.name, {})
        elif x.name not in {*SKIPPED, *(called or ())}:
            arguments[x.name] = valid.get(x.name, VALID.get(x.name) if x.default is x.empty else x.default)

    def run(**named: Any) -> Any:
        of_call = [named.pop(key) for key in called or () if key in named]
        made = function(*[named.pop(key) for key in positional if key in named], **named)
        if isinstance(made, cz.data.BaseBatchSampler):
            return list(made)
        return made if called is None else getattr(made, method)(*of_call)

    return run, {**arguments, **(called or {})}


def of_loss(entry: Entry) -> Target:
    case, cls = of_entry(entry), entry.loss
    rows = {name: torch.from_numpy(x) for name, x in case.arguments().items()}
    rows |= {name: x.float() for name, x in rows.items() if x.is_floating_point()}
    parameters = call_form(cls).signature.parameters.values()
    rows |= {x.name: None for x in parameters if x.default is None and x.name not in (*rows, *SKIPPED)}
    return of(cls, case.settings, rows)


NO_TARGETS = {
    "ONE_PROCESS", "ClassLoss", "CommunicationError", "BaseBatchSampler", "Monitor", "Neighbors", "RowLoss",
    "use_implementation", "__version__", "plain_formulas", "memory_budget", "keep_freed_memory",
    "one_step", "World",
}  # fmt: skip
"""Base classes, records, context managers, and what only they would be tested by."""
ROOMS = (cz, cz.collectives, cz.data, cz.engine, cz.metrics)
LOSSES = {entry.cls for entry in CATALOGUE.values()}
PUBLIC = {name: getattr(room, name) for room in ROOMS for name in room.__all__ if name not in NO_TARGETS | LOSSES}
TARGETS: dict[str, Callable[[], Target]] = {
    **{entry.name: functools.partial(of_loss, entry) for entry in CATALOGUE.values()},
    **{
        name: functools.partial(of, x, BESIDES.get(name, {}), CALLED.get(name), METHODS.get(name, "__call__"))
        for name, x in PUBLIC.items()
        if not inspect.ismodule(x)
    },
}


def internal_error(target: Target, arguments: Mapping[str, Any]) -> str | None:
    """Call the target; return what is wrong with how it answers. None for a result, and for an error in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target[0](**arguments)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if _is_in_words(error, frames):
                return None
            return f"{type(error).__name__} in {Path(frames[-1].filename).name}: {error}"
    sizes = _sizes(target[1], arguments)
    return f"silent broadcast: {sizes}" if len(sizes) > len(dict(sizes)) else None


def _is_in_words(error: Exception, frames: traceback.StackSummary) -> bool:
    """Whether the library raised it on purpose, Python refused the call, or an argument that is called raised it."""
    of_torch = any(x.filename.endswith(("modules/linear.py", "_utils/collate.py")) for x in frames)
    if "forward()" in str(error) or frames[-1].filename == __file__ or of_torch:
        return True
    of_package = [x for x in frames if x.filename.startswith(PACKAGE)]
    in_words = ("argument" in str(error)[:60] and "()" in str(error)) or "raise" in str(frames[-1].line)
    is_ours = not of_package or (frames[-1] is of_package[-1] and in_words)
    of_shapes = type(error).__name__ == "TypeCheckError"  # of the hook that checks them in this run
    return of_shapes or (isinstance(error, (ValueError, TypeError)) and is_ours)


def _sizes(valid: Mapping[str, Any], arguments: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Sizes of tensors' dimensions that have n samples, or the width, in a valid call, with those of this one."""
    pairs = [(valid.get(name), x) for name, x in arguments.items()]
    tensors = [of for of in pairs if all(isinstance(x, Tensor) for x in of) and of[0].ndim == of[1].ndim]
    return {of for x, y in tensors for of in zip(x.shape, y.shape, strict=True) if of[0] in (SAMPLES, WIDTH)}


@pytest.mark.parametrize("name", sorted(TARGETS))
@settings(phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_nonsense_is_answered_in_words(name: str, data: st.DataObject) -> None:
    run, possible = TARGETS[name]()
    valid = {name: x for name, x in possible.items() if x is not None}
    run(**valid)
    replaced = data.draw(st.lists(one(sorted(possible)), min_size=1, max_size=2, unique=True))
    assert internal_error((run, possible), valid | {name: data.draw(NONSENSE) for name in replaced}) is None


def test_an_internal_error_and_a_silent_broadcast_are_noticed() -> None:
    target: Target = (lambda x: cz.World.of(cz.World()).shards(x), {"x": 1})
    assert (internal_error(target, {"x": object()}) or "").startswith("TypeError in world.py")
    target = (lambda rows, labels: rows + labels[:, None], {"rows": Z, "labels": LABELS})
    assert (internal_error(target, {"rows": Z, "labels": torch.ones(1)}) or "").startswith("silent broadcast")
