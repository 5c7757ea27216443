"""Nonsense as arguments of every public callable: a result or an error in words, never an internal error."""

import functools
import inspect
import linecache
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *WHOLE, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (8,), (9,), (8, 4), (0, 4), (8, 0), (1, 4), (4, 8), (9, 4), (8, 1), (8, 2, 4), (8, 4, 1, 1)]
VALUES = ["ordinary", "zero", "huge", "tiny", "nan", "inf", "negative"]


class Other:
    """An object of no use."""


OTHERS: list[Any] = [
    None, True, 0, 1, -1, 3, 2**62, 2**70, -(2**63), np.int64(2**62), 0.0, -0.5, 0.3, 1e-300, 1e308, float("nan"),
    float("inf"), "", "mean", "ρ", b"x", 1j, [], (), {}, [[1.0, 2.0, 3.0]] * 4, [0, 1, 0, 1], range(4), {"a": 1},
    object(), Other, Other(), len, np.float32(0.5), np.array([0, 1, 0, 1]), np.array(["a", "b"]), torch.float32,
    torch.device("cpu"), nn.Linear(2, 2), iter([1]), slice(1), Ellipsis, NotImplemented,
]  # fmt: skip

LAYOUTS: dict[str, tuple[Callable[[Tensor], bool], Callable[[Tensor], Any]]] = {
    "transposed": (lambda x: x.ndim == 2, lambda x: x.T.contiguous().T),
    "expanded": (lambda x: x.ndim > 0 and len(x) > 0, lambda x: x[:1].expand(x.shape)),
    "strided": (lambda x: x.ndim > 0, lambda x: x.repeat_interleave(2, 0)[::2]),
    "sparse": (lambda x: x.dtype is not torch.float8_e4m3fn, lambda x: x.to_sparse()),
    "csr": (lambda x: x.ndim == 2 and x.dtype in (torch.float32, torch.float64), lambda x: x.to_sparse_csr()),
    "quantised": (
        lambda x: x.dtype is torch.float32 and x.isfinite().all().item(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ),
    "meta": (lambda x: True, lambda x: x.to("meta")),
    "learnt": (lambda x: x.dtype not in WHOLE, lambda x: x.requires_grad_()),
    "numpy": (lambda x: x.dtype not in (torch.bfloat16, torch.float8_e4m3fn), lambda x: x.numpy()),
    "plain": (lambda x: False, lambda x: x),
}
"""Which tensors can be laid out so, and how."""


def tensor(shape: tuple[int, ...], dtype: torch.dtype, values: str, layout: str, seed: int) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    largest = {torch.float16: 6e4, torch.bfloat16: 3e38, torch.float32: 3e38}
    big = largest.get(dtype, 9e18 if dtype.itemsize == 8 else 1e2)
    scale = {"zero": 0.0, "huge": big, "tiny": 1e-30}.get(values, 3.0 if dtype in WHOLE else 1.0)
    x = x.clamp(-1, 1) * scale if values == "huge" else x * scale
    x = -x.abs() if values == "negative" else x
    if values in ("nan", "inf") and x.numel():
        x.view(-1)[0] = float(values)
    x = (x.nan_to_num() if dtype in WHOLE else x).to(dtype)
    applies, laid_out = LAYOUTS[layout]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layouts that are still in beta
        return laid_out(x) if applies(x) else x


def nonsense() -> st.SearchStrategy[Any]:
    of = st.sampled_from
    tensors = st.builds(tensor, of(SHAPES), of(DTYPES), of(VALUES), of([*LAYOUTS, "plain"]), st.integers(0, 3))
    return st.one_of(tensors, tensors, of(OTHERS))


class Target(NamedTuple):
    """A callable with valid arguments, of which those that are None may be nonsense, too."""

    run: Callable[..., Any]
    arguments: Mapping[str, Any]


SKIPPED = {"world", "process_group", "sharded", "check_finite", "shards", "shard_over"}
"""Arguments that choose other ranks, or whose meaning is no test of one call."""


def of(function: Callable[..., Any], *positional: str, **arguments: Any) -> Target:
    """Return a target of these arguments and of the defaults of all others; the ``positional`` have no name."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {x.name: x.default for x in parameters if x.default is not x.empty and x.name not in SKIPPED}

    def run(**named: Any) -> Any:
        return function(*[named.pop(name) for name in positional if name in named], **named)

    return Target(run, {**defaults, **arguments})


def of_loss(entry: Entry) -> Target:
    case, cls = of_entry(entry), entry.loss
    rows = {name: torch.from_numpy(x) for name, x in case.arguments().items()}
    rows = {name: x.float() if x.is_floating_point() else x for name, x in rows.items()}
    parameters = call_form(cls).signature.parameters.values()
    rows |= {x.name: None for x in parameters if x.default is None and x.name not in (*rows, *SKIPPED)}
    fields = {name: x.default for name, x in cls.fields.items() if x.init and name not in SKIPPED}
    settings = {name: x for name, x in (fields | case.settings).items() if name not in rows}

    def run(**named: Any) -> Any:
        loss = cls(**{name: named.pop(name) for name in settings if name in named})
        return loss(*[named[name] for name in rows if name in named])

    return Target(run, {**settings, **rows})


def labelled(make: Callable[..., Any], **settings: Any) -> Target:
    return Target(lambda rows, labels, **named: make(**named)(rows, labels), {"rows": Z, "labels": LABELS, **settings})


def sampler(name: str, **arguments: Any) -> Target:
    make = getattr(cz.data, name)
    return Target(lambda **named: list(make(**named)), {**arguments, "seed": 0, "rank_weights": None})


def _queue(rows: Any, labels: Any, enqueue_mask: Any = None, **settings: Any) -> Any:
    return cz.MemoryQueue(**settings).enqueue(rows, labels, enqueue_mask=enqueue_mask)


def _metrics(queries: Any, labels: Any, **settings: Any) -> Any:
    metrics = cz.metrics.RetrievalMetrics(**settings)
    metrics.update(queries, labels=labels)
    return metrics.compute()


def _in_one_step(module: Any) -> Callable[..., Any]:
    def called(rows: Any, labels: Any) -> Any:
        with cz.one_step(module) as step:
            module(rows, labels)
            with step.again():
                return module(rows, labels)

    return called


def _views(loss_fn: Any, rows: Any, labels: Any, **named: Any) -> Any:
    return cz.explain(loss_fn, rows, labels, **named)


def _updated(updated: Any, **named: Any) -> None:
    cz.MomentumEncoder(**named).update(updated)


Z = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
LABELS, IDS, SHARES = torch.arange(SAMPLES) % 2, torch.arange(SAMPLES), torch.linspace(0, 1, SAMPLES)
LINEAR, FLAGS, ROWS = (
    nn.Linear(WIDTH, 2),
    dict.fromkeys(("ring", "prefer_native"), False),
    {"queries": Z, "gallery": None},
)


def by_hand() -> dict[str, Target]:
    data, metrics = cz.data, cz.metrics
    return {
        **{x: of(getattr(cz.collectives, x), "x", x=Z) for x in ("all_reduce", "broadcast", "reduce", "replicated")},
        **{x: of(getattr(cz.collectives, x), "rows", rows=Z) for x in ("all_gather", "gather", "reduce_scatter", "scatter")},
        "pair_masks": of(cz.engine.pair_masks, ids=IDS),
        "global_sample_ids": of(cz.engine.global_sample_ids, n=4),
        "CrossBatchMemory": labelled(cz.CrossBatchMemory, loss=cz.SupCon(), size=8, embedding_size=WIDTH),
        "DistributedLoss": labelled(cz.DistributedLoss, loss=cz.SupCon(), miner=None, grad_reduction="mean", **FLAGS),
        "DistributedMiner": labelled(data.DistributedMiner, miner=lambda rows, labels: (labels, labels, labels)),
        "WeightedSum": labelled(cz.WeightedSum, losses=[cz.SupCon(), cz.Triplet()], weights=None),
        "Matryoshka": labelled(cz.Matryoshka, loss=cz.SupCon(), dims=[1, 3]),
        "one_step": labelled(_in_one_step, module=cz.CrossBatchMemory(cz.SupCon(), 8, WIDTH)),
        "explain": of(_views, loss_fn=cz.SupCon(), rows=Z, labels=LABELS, world_size=2, device="cpu", dtype=torch.float32),
        "MemoryQueue": of(_queue, size=8, embedding_size=WIDTH, dtype=None, rows=Z, labels=LABELS, enqueue_mask=None),
        "RetrievalMetrics": of(_metrics, metrics="map", ties="pessimistic", normalize=True, queries=Z, labels=LABELS),
        "GlobalBatchSampler": sampler("GlobalBatchSampler", num_samples=8, batch_size=4, shuffle=True),
        "MPerClassBatchSampler": sampler(
            "MPerClassBatchSampler", labels=LABELS, m=2, classes_per_batch=2, singletons="raise"
        ),
        "NoDuplicatesBatchSampler": Target(
            lambda column, **named: list(data.NoDuplicatesBatchSampler(column, **named)),
            {"column": LABELS, "batch_size": 2, "seed": 0, "rank_weights": None},
        ),
        "HardNegativeBatchSampler": sampler(
            "HardNegativeBatchSampler", neighbours=torch.tensor([[1], [0], [3], [2]]), batch_size=2, group_size=2
        ),
        "TokenBatchSampler": sampler("TokenBatchSampler", lengths=LABELS + 1, chunk_tokens=9, chunks_per_batch=2),
        "OneDatasetBatchSampler": sampler(
            "OneDatasetBatchSampler",
            samplers=[data.GlobalBatchSampler(4, batch_size=2)], sizes=[4], temperature=2.0, exhausted="last",
        ),
        "CollateEmptyBatches": Target(
            lambda **named: data.CollateEmptyBatches(**named)([]),
            {"example": (Z[0], 1), "collate_fn": torch.utils.data.default_collate},
        ),
        "mine_hard_negatives": of(
            data.mine_hard_negatives, queries=Z, corpus=Z.flip(0), positives=IDS, num_negatives=1
        ),
        "token_chunks": of(data.token_chunks, lengths=LABELS + 1, chunk_tokens=9),
        "GradCache": Target(
            lambda x, **named: cz.GradCache(**named)(x), {"model": LINEAR, "chunk_size": 2, "x": Z}
        ),
        "cached_step": of(cz.cached_step, model=LINEAR, chunks=[Z[:2], Z[2:]], loss_fn=lambda z: z.sum()),
        "MomentumEncoder": Target(_updated, {"encoder": LINEAR, "momentum": 0.9, "buffers": "own", "updated": LINEAR}),
        "average_gradients": of(cz.average_gradients, module=LINEAR),
        "parameter_groups": of(cz.parameter_groups, "module", module=LINEAR, weight_decay=0.1),
        "LearnableTemperature": Target(
            lambda **named: cz.LearnableTemperature(**named)(), {"initial": 0.07, "max_scale": 100.0}
        ),
        "ApproximateIndex": Target(metrics.ApproximateIndex, {"factory": "Flat", "parameters": ""}),
        "evaluate": of(metrics.evaluate, **ROWS, labels=LABELS),
        "hit_rate_at_k": of(metrics.hit_rate_at_k, **ROWS, k=1, labels=LABELS),
        "top_k": of(metrics.top_k, **ROWS, k=1),
        "cross_modal_recall": of(metrics.cross_modal_recall, first=Z, second=Z.flip(0), k=[1]),
        "paired_bootstrap": of(metrics.paired_bootstrap, first=SHARES, second=SHARES, resamples=9),
        "World": Target(cz.World.of, {"process_group": None}),
    }  # fmt: skip


TARGETS: dict[str, Callable[[], Target]] = {
    **{entry.name: functools.partial(of_loss, entry) for entry in CATALOGUE.values()},
    **{name: functools.partial(lambda name: by_hand()[name], name) for name in by_hand()},
}
NO_TARGETS = {
    "ONE_PROCESS", "ClassLoss", "CommunicationError", "BaseBatchSampler", "Monitor", "Neighbors", "Difference", "RowLoss",
    "use_implementation", "keep_freed_memory", "__version__", "plain_formulas", "memory_budget",
}  # fmt: skip
"""Base classes, context managers, and what only they or faiss would be tested by."""


def base(target: Target) -> dict[str, Any]:
    return {name: x for name, x in target.arguments.items() if x is not None}


@st.composite
def calls(draw: st.DrawFn, target: Target) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(target.arguments)), min_size=1, max_size=2, unique=True))
    return base(target) | {name: draw(nonsense()) for name in names}


def internal_error(target: Target, arguments: Mapping[str, Any]) -> str | None:
    """Call the target; return what is wrong with how it answers. None for a result, and for an error in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.run(**arguments)
        except Exception as error:
            if type(error).__name__ == "TypeCheckError" or _is_of_the_caller(error):  # of the test run's import hook
                return None
            in_words = isinstance(error, (ValueError, TypeError)) and _is_in_words(error)
            return None if in_words else _described(error)
    if mismatch := _mismatch(target, arguments):
        return f"silent broadcast: {mismatch}"
    return None


def _is_in_words(error: Exception) -> bool:
    """Whether the library raised it on purpose, or Python refused the call itself."""
    *frames, (last, line) = _walk(error)
    if not any(x.f_code.co_filename.startswith(PACKAGE) for x, _ in [*frames, (last, line)]):
        return True  # a call that Python refuses before it begins
    return last.f_code.co_filename.startswith(PACKAGE) and (
        "raise" in linecache.getline(last.f_code.co_filename, line)
        or ("argument" in str(error)[:60] and "()" in str(error))
    )


def _is_of_the_caller(error: Exception) -> bool:
    """Whether a callable that was passed as an argument raised it: the wrapper's errors are those of the wrapped."""
    refused = "forward()" in str(error)  # the module's signature
    files = [frame.f_code.co_filename for frame, _ in _walk(error)]
    of_torch = any(x.endswith(("modules/linear.py", "_utils/collate.py")) for x in files)
    return refused or files[-1] == __file__ or of_torch


def _walk(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _described(error: Exception) -> str:
    of_package = ((x.f_code.co_filename, line) for x, line in _walk(error) if x.f_code.co_filename.startswith(PACKAGE))
    places = [f"{Path(file).relative_to(PACKAGE)}:{line}" for file, line in of_package]
    return f"{type(error).__name__} at {places[-1] if places else '?'}: {' '.join(str(error).split())[:140]}"


def _mismatch(target: Target, arguments: Mapping[str, Any]) -> str | None:
    """Which tensors of a call that returned do not fit: dimensions that have n samples, or the width, differ now."""
    sizes: dict[int, tuple[str, int]] = {}
    for name, x in arguments.items():
        valid = target.arguments.get(name)
        if not isinstance(x, Tensor) or not isinstance(valid, Tensor) or x.ndim != valid.ndim:
            continue
        for before, size in zip(valid.shape, x.shape, strict=True):
            other, known = sizes.setdefault(before, (name, size))
            if size != known and before in (SAMPLES, WIDTH):
                return f"{name} {list(x.shape)} beside {other}, where {before} is {known}"
    return None


EXAMPLES = {} if os.environ.get("HYPOTHESIS_PROFILE") == "long" else {"max_examples": 4, "derandomize": True}


def test_every_public_callable_is_called() -> None:
    rooms = (cz, cz.collectives, cz.data, cz.engine, cz.metrics)
    public = {name: getattr(room, name) for room in rooms for name in room.__all__}
    names = {name for name, x in public.items() if not inspect.ismodule(x)} - NO_TARGETS
    assert names - TARGETS.keys() - {entry.cls for entry in CATALOGUE.values()} == set()


@pytest.mark.parametrize("name", sorted(TARGETS))
@settings(**EXAMPLES, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_nonsense_is_answered_in_words(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]()
    target.run(**base(target))
    assert internal_error(target, data.draw(calls(target))) is None


def test_an_internal_error_is_noticed() -> None:
    target = Target(lambda x: cz.World.of(cz.World()).shards(x), {"x": 1})
    assert (internal_error(target, {"x": object()}) or "").startswith("TypeError at ranks/world.py")


def test_a_silent_broadcast_is_noticed() -> None:
    target = Target(lambda rows, labels: rows + labels[:, None], {"rows": Z, "labels": LABELS})
    assert (internal_error(target, {"rows": Z, "labels": torch.ones(1)}) or "").startswith("silent broadcast")
