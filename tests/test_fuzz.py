"""Nonsense as arguments of every public callable: a result or an error in words, never an internal error."""

import functools
import inspect
import linecache
import os
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.row_loss import AnchorLoss

PACKAGE = str(Path(cz.__file__).parent)

SIZES = {
    "n": 4, "N": 4, "d": 3, "m": 4, "C": 4, "k": 2, "v": 2, "g": 2, "e": 3, "K": 5, "p": 1, "a": 2, "b": 3, "c": 2,
    "L": 2, "M": 4, "D": 3, "bins": 8,
}  # fmt: skip
"""Sizes of valid arguments by the names of their dimensions."""

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (4,), (5,), (4, 3), (0, 3), (4, 0), (1, 3), (3, 4), (5, 3), (4, 1), (4, 2, 3), (4, 3, 1, 1)]
VALUES = ["ordinary", "zero", "huge", "tiny", "nan", "inf", "negative"]


class Other:
    """An object of no use."""


OTHERS: list[Any] = [
    None, True, 0, 1, -1, 3, 2**62, 2**70, -(2**63), np.int64(2**62), 0.0, -0.5, 0.3, 1e-300, 1e308, float("nan"),
    float("inf"), "", "mean", "ρ", b"x", 1j, [], (), {}, [[1.0, 2.0, 3.0]] * 4, [0, 1, 0, 1], range(4), {"a": 1},
    object(), Other, Other(), len, np.float32(0.5), np.array([0, 1, 0, 1]), np.array(["a", "b"]), torch.float32,
    torch.device("cpu"), nn.Linear(2, 2), iter([1]), slice(1), Ellipsis, NotImplemented,
]  # fmt: skip


WHOLE = torch.int64, torch.int32, torch.uint8, torch.bool
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
    big = {torch.float16: 6e4, torch.bfloat16: 3e38, torch.float32: 3e38}.get(
        dtype, 9e18 if dtype.itemsize == 8 else 1e2
    )
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
    tensors = st.builds(
        tensor,
        st.sampled_from(SHAPES),
        st.sampled_from(DTYPES),
        st.sampled_from(VALUES),
        st.sampled_from([*LAYOUTS, "plain"]),
        st.integers(0, 3),
    )
    return st.one_of(tensors, tensors, st.sampled_from(OTHERS))


@dataclass(frozen=True)
class Target:
    run: Callable[..., Any]
    arguments: Mapping[str, Any]
    dimensions: Mapping[str, str]
    optional: tuple[str, ...] = ()


def annotation_of(parameter: inspect.Parameter) -> Any:
    found = parameter.annotation
    options = get_args(found) if get_origin(found) is not None or isinstance(found, types.UnionType) else (found,)
    return next((x for x in options if hasattr(x, "dim_str")), found)


def valid(name: str, annotation: Any) -> Any:
    shape = [SIZES[x] for x in annotation.dim_str.split() if x != "..."]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    dtypes = annotation.dtypes if isinstance(annotation.dtypes, list | tuple) else ["float32"]
    if "int64" in dtypes and "float32" not in dtypes:
        return torch.arange(shape[0]) % 2 if shape else torch.tensor(2)
    if list(dtypes) == ["bool"]:
        return torch.ones(shape, dtype=torch.bool)
    return torch.randn(shape, generator=generator)


SKIPPED = {"world", "process_group", "mask", "sharded", "check_finite", "shards", "shard_over"}
"""Arguments that choose other ranks, or whose meaning the annotation does not tell."""

MADE = {
    "num_classes": 4, "embedding_size": 3, "size": 8, "out_dim": 2, "num_prototypes": 5, "chunk_size": 2, "k": 1,
    "num_slices": 4, "num_bins": 8, "num_samples": 8, "batch_size": 4, "group_size": 2, "m": 2, "classes_per_batch": 2,
    "views": 1,
}  # fmt: skip
"""Valid numbers by name; ``n`` is a number of samples in :func:`contrastive_zoo.engine.global_sample_ids`."""


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function, eval_str=True).parameters.values()
    except TypeError:  # "A" | None is no type
        found = inspect.signature(function).parameters.values()
    return [x for x in found if x.name not in SKIPPED and x.kind is not x.VAR_KEYWORD]


def filled(parameters: list[inspect.Parameter], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    arguments, dimensions = {}, {}
    for x in parameters:
        annotation = annotation_of(x)
        names = [x.name[:-1] + str(i) for i in (1, 2)] if x.kind is x.VAR_POSITIONAL else [x.name]
        for name in names:
            if hasattr(annotation, "dim_str"):
                dimensions[name] = annotation.dim_str
                arguments[name] = valid(name, annotation)
            elif annotation is Tensor and x.default is x.empty:
                arguments[name] = torch.ones(4, 3)
            elif x.default is not x.empty:
                arguments[name] = x.default
        if x.name in given and x.kind is not x.VAR_POSITIONAL:
            arguments[x.name] = given[x.name]
    return arguments, dimensions


def of_function(function: Callable[..., Any], given: Mapping[str, Any] = MADE) -> Target:
    parameters = parameters_of(function)
    arguments, dimensions = filled(parameters, given)
    views = next((x.name for x in parameters if x.kind is x.VAR_POSITIONAL), None)

    def run(**named: Any) -> Any:
        named.pop(views or "", None)
        rows = [named.pop(f"{views[:-1]}{i}") for i in (1, 2) if f"{views[:-1]}{i}" in named] if views else []
        positional = [named.pop(x.name) for x in parameters if x.kind is x.POSITIONAL_ONLY and x.name in named]
        return function(*positional, *rows, **named)

    return Target(run, arguments, dimensions, tuple(x.name for x in parameters if x.default is None))


def call_parameters(cls: type[Loss]) -> list[inspect.Parameter]:
    inputs = AnchorLoss.inputs if issubclass(cls, cz.RowLoss) else cls.inputs
    return [x for x in parameters_of(inputs) if x.name != "self"]


def of_loss(cls: type[Loss]) -> Target:
    defaults = {name: x.default for name, x in cls.fields.items() if x.init and name not in SKIPPED}
    settings = {name: MADE.get(name, x) for name, x in defaults.items()}
    called = call_parameters(cls)
    arguments, dimensions = filled(called, {})
    loss_names = [x for x in settings if x not in arguments]

    def run(**named: Any) -> Any:
        loss = cls(**{name: named.pop(name) for name in loss_names if name in named})
        return loss(*[named[name] for name in arguments if name in named])

    both = {**{name: settings[name] for name in loss_names}, **arguments}
    return Target(run, both, dimensions, tuple(x.name for x in called if x.default is None))


SHARES = torch.tensor([0.0, 0.5, 1.0, 0.25])
Z, LABELS = torch.randn(4, 3, generator=torch.Generator().manual_seed(5)), torch.arange(4) % 2


def target(run: Callable[..., Any], dimensions: str = "", **arguments: Any) -> Target:
    """A callable with valid arguments, and the dimensions of some: ``"rows: n d, labels: n"``."""
    return Target(run, arguments, dict(x.split(": ") for x in dimensions.split(", ") if x))


def sampler(name: str, **arguments: Any) -> Target:
    return target(lambda **named: list(getattr(cz.data, name)(**named)), **arguments, seed=0, rank_weights=None)


def labelled(make: Callable[..., Any], **settings: Any) -> Target:
    return target(
        lambda rows, labels, **named: make(**named)(rows, labels),
        "rows: n d, labels: n",
        rows=Z,
        labels=LABELS,
        **settings,
    )


def _queue(rows: Any, labels: Any, enqueue_mask: Any, **settings: Any) -> Any:
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


def by_hand() -> dict[str, Target]:
    rows = {"queries": Z, "gallery": None, "labels": LABELS, "gallery_labels": None}
    linear, data, metrics = nn.Linear(3, 2), cz.data, cz.metrics
    options = dict.fromkeys(("ring", "prefer_native"), False)
    return {
        "CrossBatchMemory": labelled(cz.CrossBatchMemory, loss=cz.SupCon(), size=8, embedding_size=3),
        "DistributedLoss": labelled(
            cz.DistributedLoss, loss=cz.SupCon(), miner=None, grad_reduction="mean", **options
        ),
        "DistributedMiner": labelled(data.DistributedMiner, miner=lambda rows, labels: (labels, labels, labels)),
        "explain": target(
            lambda rows, labels, loss_fn, **named: cz.explain(loss_fn, rows, labels, **named), "rows: n d, labels: n",
            rows=Z, labels=LABELS, loss_fn=cz.SupCon(), world_size=2, device="cpu", dtype=torch.float32,
        ),
        "WeightedSum": labelled(cz.WeightedSum, losses=[cz.SupCon(), cz.Triplet()], weights=None),
        "Matryoshka": labelled(cz.Matryoshka, loss=cz.SupCon(), dims=[1, 3]),
        "MemoryQueue": target(
            _queue, "rows: n d, labels: n, enqueue_mask: n",
            size=8, embedding_size=3, dtype=None, rows=Z, labels=LABELS, enqueue_mask=None,
        ),
        "RetrievalMetrics": target(
            _metrics, "queries: n d, labels: n",
            metrics="map", ties="pessimistic", normalize=True, queries=Z, labels=LABELS,
        ),
        "GlobalBatchSampler": sampler("GlobalBatchSampler", num_samples=8, batch_size=4, shuffle=True),
        "MPerClassBatchSampler": sampler(
            "MPerClassBatchSampler", labels=LABELS, m=2, classes_per_batch=2, singletons="raise"
        ),
        "NoDuplicatesBatchSampler": target(
            lambda column, **named: list(data.NoDuplicatesBatchSampler(column, **named)),
            column=LABELS, batch_size=2, seed=0, rank_weights=None,
        ),
        "HardNegativeBatchSampler": sampler(
            "HardNegativeBatchSampler", neighbours=torch.tensor([[1], [0], [3], [2]]), batch_size=2, group_size=2
        ),
        "TokenBatchSampler": sampler("TokenBatchSampler", lengths=LABELS + 1, chunk_tokens=9, chunks_per_batch=2),
        "OneDatasetBatchSampler": sampler(
            "OneDatasetBatchSampler",
            samplers=[data.GlobalBatchSampler(4, batch_size=2)], sizes=[4], temperature=2.0, exhausted="last",
        ),
        "GradCache": target(lambda x, **named: cz.GradCache(**named)(x), model=linear, chunk_size=2, x=Z),
        "cached_step": target(cz.cached_step, model=linear, chunks=[Z[:2], Z[2:]], loss_fn=lambda z: z.sum()),
        "MomentumEncoder": target(
            lambda updated, **named: cz.MomentumEncoder(**named).update(updated),
            encoder=linear, momentum=0.9, buffers="own", updated=linear,
        ),
        "average_gradients": target(cz.average_gradients, module=linear),
        "parameter_groups": target(
            lambda module, **named: cz.parameter_groups(module, **named), module=linear, weight_decay=0.1
        ),
        "one_step": labelled(_in_one_step, module=cz.CrossBatchMemory(cz.SupCon(), 8, 3)),
        "LearnableTemperature": target(
            lambda **named: cz.LearnableTemperature(**named)(), initial=0.07, max_scale=100.0
        ),
        "CollateEmptyBatches": target(
            lambda **named: data.CollateEmptyBatches(**named)([]),
            example=(Z[0], 1), collate_fn=torch.utils.data.default_collate,
        ),
        "ApproximateIndex": target(metrics.ApproximateIndex, factory="Flat", parameters=""),
        "evaluate": of_function(metrics.evaluate, rows),
        "recall_at_k": of_function(metrics.recall_at_k, rows | {"k": 1}),
        "cross_modal_recall": of_function(
            metrics.cross_modal_recall, {"first": Z, "second": Z.flip(0), "k": [1], "labels": None}
        ),
        "paired_bootstrap": of_function(
            metrics.paired_bootstrap,
            {"first": SHARES, "second": SHARES, "confidence": 0.9, "resamples": 9, "seed": 0},
        ),
        "top_k": of_function(metrics.top_k, {"queries": Z, "gallery": None, "k": 1, "excluded": None}),
        "mine_hard_negatives": of_function(
            data.mine_hard_negatives, {"queries": Z, "corpus": Z.flip(0), "positives": torch.arange(4), "num_negatives": 1}
        ),
        "global_sample_ids": of_function(cz.engine.global_sample_ids, {"n": 4, "views": 1}),
        "token_chunks": of_function(data.token_chunks, {"lengths": LABELS + 1, "chunk_tokens": 9}),
        "World": target(cz.World.of, process_group=None),
    }  # fmt: skip


def _names() -> dict[str, Callable[[], Target]]:
    found: dict[str, Callable[[], Target]] = {}
    hand = by_hand()
    left_out = {"ONE_PROCESS", "ClassLoss", "CommunicationError", "BaseBatchSampler", "Monitor", "Neighbors", "Difference",
                "RowLoss", "use_implementation", "keep_freed_memory", "__version__",
                 "plain_formulas", "memory_budget"}  # fmt: skip
    rooms = (cz, cz.collectives, cz.data, cz.engine, cz.metrics)
    public = {name: getattr(room, name) for room in rooms for name in room.__all__}
    for name, x in public.items():
        if inspect.ismodule(x):
            continue
        if name in hand:
            found[name] = functools.partial(hand.__getitem__, name)
        elif name in left_out:
            continue
        elif isinstance(x, type) and issubclass(x, Loss):
            found[name] = functools.partial(of_loss, x)
        else:
            found[name] = functools.partial(of_function, x)
    return found


TARGETS = _names()
"""Every public callable but base classes, context managers, and what only they or faiss would be tested by."""


def base(target: Target) -> dict[str, Any]:
    return {name: x for name, x in target.arguments.items() if name not in target.optional or name == "labels"}


@st.composite
def calls(draw: st.DrawFn, target: Target) -> dict[str, Any]:
    arguments = base(target)
    for name in draw(st.lists(st.sampled_from(sorted(target.arguments)), min_size=1, max_size=2, unique=True)):
        arguments[name] = draw(nonsense())
    return arguments


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
    frames = [frame for frame, _ in _walk(error)]
    last = list(_walk(error))[-1]
    if not any(x.f_code.co_filename.startswith(PACKAGE) for x in frames):
        return True  # a call that Python refuses before it begins
    frame, line = last
    return frame.f_code.co_filename.startswith(PACKAGE) and (
        "raise" in linecache.getline(frame.f_code.co_filename, line)
        or ("argument" in str(error)[:60] and "()" in str(error))
    )


def _is_of_the_caller(error: Exception) -> bool:
    """Whether a callable that was passed as an argument raised it: the wrapper's errors are those of the wrapped."""
    refused = "forward()" in str(error)  # the module's signature
    files = [frame.f_code.co_filename for frame, _ in _walk(error)]
    return (
        refused or files[-1] == __file__ or any(x.endswith(("modules/linear.py", "_utils/collate.py")) for x in files)
    )


def _walk(error: BaseException) -> Any:
    found = error.__traceback__
    while found is not None:
        yield found.tb_frame, found.tb_lineno
        found = found.tb_next


def _described(error: Exception) -> str:
    places = [
        f"{Path(x.f_code.co_filename).relative_to(PACKAGE)}:{line}"
        for x, line in _walk(error)
        if x.f_code.co_filename.startswith(PACKAGE)
    ]
    return f"{type(error).__name__} at {places[-1] if places else '?'}: {' '.join(str(error).split())[:140]}"


def _mismatch(target: Target, arguments: Mapping[str, Any]) -> str | None:
    """Which tensors of a call that returned do not fit to each other, by the names of their dimensions."""
    sizes: dict[str, tuple[str, int]] = {}
    for name, dimensions in target.dimensions.items():
        x, names = arguments.get(name), dimensions.split()
        if not isinstance(x, Tensor) or len(names) != x.ndim:
            continue
        for dimension, size in zip(names, x.shape, strict=True):
            other, known = sizes.setdefault(dimension, (name, size))
            if size != known and dimension in ("n", "d"):
                return f"{name} {list(x.shape)} beside {other}, where {dimension} is {known}"
    return None


EXAMPLES = {} if os.environ.get("HYPOTHESIS_PROFILE") == "long" else {"max_examples": 4, "derandomize": True}


def test_every_loss_is_called() -> None:
    classes = {name: x for name in cz.__all__ if isinstance(x := getattr(cz, name), type)}
    losses = {name for name, x in classes.items() if issubclass(x, cz.RowLoss)}
    assert losses - {"RowLoss"} <= TARGETS.keys()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_arguments_before_nonsense_are_valid(name: str) -> None:
    target = TARGETS[name]()
    target.run(**base(target))


@pytest.mark.parametrize("name", sorted(TARGETS))
@settings(**EXAMPLES, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_nonsense_is_answered_in_words(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]()
    assert internal_error(target, data.draw(calls(target))) is None


def test_an_internal_error_is_noticed() -> None:
    target = Target(lambda x: cz.World.of(cz.World()).shards(x), {"x": 1}, {})
    assert (internal_error(target, {"x": object()}) or "").startswith("TypeError at ranks/world.py")


def test_a_silent_broadcast_is_noticed() -> None:
    target = Target(lambda rows, labels: rows + labels[:, None], {}, {"rows": "n d", "labels": "n"})
    found = internal_error(target, {"rows": torch.ones(4, 3), "labels": torch.ones(1)})
    assert found is not None
    assert found.startswith("silent broadcast")
