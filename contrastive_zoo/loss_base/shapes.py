"""Shapes of a call: what the annotations of ``inputs`` say of each argument, and what is wrong with those that came."""

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.ranks.row_checks import BATCH_IN_BATCH, described, labels_problem, tensor_problem
from contrastive_zoo.ranks.suggestions import did_you_mean

_KINDS: tuple[tuple[Any, str], ...] = ((Float, "floating-point"), (Int, "integer"), (Bool, "bool"))
_NAMES = re.compile(r"[A-Za-z]\w*( [A-Za-z]\w*)*")


class Shape(NamedTuple):
    """A shape that an argument may have."""

    dims: tuple[str, ...]  # names of the dimensions; arguments agree in the size of those that share a name
    kind: str  # of its numbers: floating-point, integer (bools, too), bool, real

    def fits(self, x: Tensor) -> bool:
        if x.ndim != len(self.dims):
            return False
        if self.kind == "floating-point":
            return x.is_floating_point()
        if self.kind == "bool":
            return x.dtype == torch.bool
        return not x.is_complex() and (self.kind == "real" or not x.is_floating_point())

    def __str__(self) -> str:
        return f"{self.kind} [{', '.join(self.dims)}]"


Shapes = tuple[Shape, ...]


def shapes_of(annotation: Any) -> Shapes:
    """Return the shapes that an annotation of jaxtyping allows; none if it says more than names of dimensions."""
    options = [x for x in (annotation, *get_args(annotation)) if hasattr(x, "dim_str")]
    if not all(_NAMES.fullmatch(x.dim_str.strip()) for x in options):
        return ()
    kinds = [next((word for kind, word in _KINDS if kind.dtypes == x.dtypes), "real") for x in options]
    return tuple(Shape(tuple(x.dim_str.split()), kind) for x, kind in zip(options, kinds, strict=True))


_First = dict[str, tuple[str, Tensor, int]]  # by dimension: the argument that brought it, and its size

_SAME = "Pass the same samples, in the same order, in both."

ROWS = shapes_of(Float[Tensor, "n d"])


def shapes_problem(arguments: Mapping[str, Tensor | None], shapes: Mapping[str, Shapes]) -> str | None:
    """Return which argument has another shape than it may have beside those before it, in words; None if none has."""
    first: _First = {}
    widths: dict[str, tuple[str, Tensor]] = {}  # by last dimension of embeddings: the argument that brought it
    for name, x in arguments.items():
        if x is None or not (allowed := shapes.get(name)):
            continue
        samples = allowed[0].dims[0]
        if samples not in first:
            owner = next(name for name, of in shapes.items() if of and of[0].dims[0] == samples)  # which counts them
            if owner != name and arguments.get(owner) is None:
                return f"{name} came without {owner}. Leave it out."
        shape = allowed[0]
        for shape in allowed:
            if shape.fits(x):
                break
        else:
            return _labels_problem(name, x, allowed, first) or (
                f"{name} must be {' or '.join(map(str, allowed))}, got {described(x)}.{_dimension_fix(name, x, allowed)}"
            )
        for dim, size in zip(shape.dims, x.shape, strict=True):
            if first.setdefault(dim, (name, x, size))[2] != size:
                further = any(of.dims[0] != dim and of.dims[-1] == shape.dims[-1] for of in shapes.get("negatives", ()))
                fix = f"Pass further {name} as negatives." if further and name != "negatives" else _SAME
                return _labels_problem(name, x, allowed, first) or _size_problem(name, x, shape, dim, first[dim], fix)
        if shape.kind == "floating-point" and x.ndim > 1:
            other, y = widths.setdefault(shape.dims[-1], (name, x))
            if x.dtype != y.dtype:
                return f"{name} must have the dtype of {other}, got {other} {described(y)} and {name} {described(x)}."
    return None


def _dimension_fix(name: str, x: Tensor, allowed: Shapes) -> str:
    """Return the fix for floats, for one sample without its dimension, and for one dimension too many, or ""."""
    dims = [len(shape.dims) for shape in allowed]
    if allowed[0].kind == "integer" and x.ndim == dims[-1] and x.is_floating_point():
        return f" Use {name}.long() if they are whole numbers."
    if allowed[0].kind != "floating-point" or not x.is_floating_point():
        return ""
    if x.ndim == dims[0] - 1:
        variable = name if name.isidentifier() else "x"
        return f" One sample is [1, …]: pass {variable}.unsqueeze(0), or squeeze(1) in place of squeeze()."
    return f" {BATCH_IN_BATCH}" if x.ndim == dims[-1] + 1 and x.shape[0] == 1 else ""


def _labels_problem(name: str, x: Tensor, allowed: Shapes, first: _First) -> str | None:
    (samples, *more), kind = allowed[0]
    if more or kind != "integer" or (len(allowed) > 1 and (name != "labels" or x.ndim != 1)):
        return None
    return labels_problem(name, x, first[samples][2] if samples in first else None)


def _size_problem(name: str, x: Tensor, shape: Shape, dim: str, first: tuple[str, Tensor, int], fix: str) -> str:
    other, y, _ = first
    got = f"got {other} {described(y)} and {name} {described(x)}."
    if dim != shape.dims[0]:
        return f"{name} must be {shape} with the {dim} of {other}, {got}"
    return f"row i of {name} belongs to row i of {other}, {got} {fix}"


class CallForm(NamedTuple):
    """The arguments that a loss's :meth:`Loss.inputs` takes."""

    signature: inspect.Signature  # without ``self``
    optional: frozenset[str]  # names of those that may be None
    views: str  # the name of any number of them by position, empty if there is none
    others: str  # the name of any number of them by name, empty if there is none
    shapes: Mapping[str, Shapes]  # by name, those that each may have


@functools.cache
def call_form(kind: Any) -> CallForm:
    taken = list(inspect.signature(kind.inputs).parameters.values())
    if not isinstance(inspect.getattr_static(kind, "inputs"), staticmethod):
        taken = taken[1:]
    optional = frozenset(x.name for x in taken if x.default is None)
    views, others = ("".join(x.name for x in taken if x.kind is y) for y in (_VIEWS, _OTHERS))
    return CallForm(inspect.Signature(taken), optional, views, others, {x.name: shapes_of(x.annotation) for x in taken})


@functools.cache
def whole_arguments(kind: Any) -> frozenset[str]:
    """Return the arguments whose last dimension holds no features of the trained model, such as a teacher's embeddings.

    Annotations name it otherwise than that of the first embeddings, or than the loss's ``embedding_dims``.
    """
    shapes: dict[str, Shapes] = {}
    for base in reversed(kind.__mro__):  # an override without annotations takes what it overrides
        if "inputs" in vars(base):
            shapes |= {name: allowed for name, allowed in call_form(base).shapes.items() if allowed}
    options = (shape for allowed in shapes.values() for shape in allowed)
    first = next((x.dims[-1] for x in options if len(x.dims) > 1 and x.kind in ("floating-point", "real")), "")
    features = kind.embedding_dims or (first,)
    return frozenset(name for name, allowed in shapes.items() if all(x.dims[-1] not in features for x in allowed))


_VIEWS, _OTHERS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


Form = tuple[torch.Size, torch.dtype] | None
"""The shape and the dtype of an argument; None of None."""


@functools.lru_cache(maxsize=1024)
def _bound(kind: Any, count: int, keywords: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return the names of a call's arguments, by position and by keyword, as checks read them, each with its index."""
    form, total = call_form(kind), count + len(keywords)
    known = form.signature.parameters
    if not form.others and (unknown := {*keywords} - known.keys()):
        name = min(unknown)
        hint = did_you_mean(name, known.keys() - {form.views})
        if form.views and not hint:
            hint = f" Pass {form.views} by position: loss(view1, view2)."
        raise TypeError(f"{kind.__name__}: the call has no argument {name!r}.{hint}")
    try:
        names = form.signature.bind(*range(count), **dict(zip(keywords, range(count, total), strict=True))).arguments
    except TypeError as error:
        raise TypeError(f"{kind.__name__}: {error}") from None
    views = {f"view {index}": x for index, x in enumerate(names.pop(form.views, ()))}
    others = names.pop(form.others, {})
    return tuple({**names, **others, **views}.items())


@functools.lru_cache(maxsize=1024)
def _fit(kind: Any, names: tuple[tuple[str, int], ...], forms: tuple[Form, ...]) -> bool:
    """Return whether tensors of these forms are right; the batches of a training have few, and a check takes a while."""
    like = (None if of is None else torch.empty(of[0], dtype=of[1], device="meta") for of in forms)
    return _shapes_problem(kind, dict(zip(dict(names), like, strict=True))) is None


def _shapes_problem(kind: Any, arguments: Mapping[str, Tensor | None]) -> str | None:
    form = call_form(kind)
    of_views = {name: form.shapes[form.views] for name in arguments if form.views and name.startswith("view ")}
    return shapes_problem(arguments, {**of_views, **form.shapes})


def arguments_problem(kind: Any, args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Return which argument is no tensor, or of another shape, in words; None is allowed where it is the default."""
    names, values = _bound(kind, len(args), tuple(named)), (*args, *named.values())
    forms: list[Form] = []
    for name, index in names:
        x = values[index]
        if x is None and name in call_form(kind).optional:
            forms.append(None)
        elif (problem := tensor_problem(name, x)) is not None:
            return problem
        else:
            forms.append((x.shape, x.dtype))
    if _fit(kind, names, tuple(forms)):
        return None
    return _shapes_problem(kind, {name: values[index] for name, index in names})


def together_problem(**arguments: Tensor | None) -> str | None:
    """Return that some of these arguments came without the others, in words, or None."""
    passed = [name for name, x in arguments.items() if x is not None]
    if len(passed) in (0, len(arguments)):
        return None
    return f"{' and '.join(arguments)} belong together: pass all or none, got {', '.join(passed)}."


def candidates_problem(name: str, x: Tensor, *, at_least: int) -> str | None:
    """Return that each sample has too few candidates, of [n, k, d], in words, or None."""
    return None if x.shape[1] >= at_least else f"{name} are [n, k, d] with k >= {at_least}, got {described(x)}."
