"""Shapes of a call: what the annotations of ``inputs`` say of each argument, and what is wrong with those that came."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.ranks.row_checks import described, labels_problem

_KINDS: tuple[tuple[Any, str], ...] = ((Float, "floating-point"), (Int, "integer"), (Bool, "bool"))
_NAMES = re.compile(r"[A-Za-z]\w*( [A-Za-z]\w*)*")


class Shape(NamedTuple):
    """A shape that an argument may have."""

    dims: tuple[str, ...]  # names of the dimensions; arguments agree in the size of those that share a name
    kind: str  # of its numbers: floating-point, integer (bools, too), bool, real

    def fits(self, x: Tensor) -> bool:
        has_kind = x.is_floating_point() if self.kind == "floating-point" else not x.is_complex()
        has_kind = has_kind and not (self.kind in ("integer", "bool") and x.is_floating_point())
        return x.ndim == len(self.dims) and has_kind and (self.kind != "bool" or x.dtype == torch.bool)

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


ROWS = shapes_of(Float[Tensor, "n d"])


def shapes_problem(arguments: Mapping[str, Tensor | None], shapes: Mapping[str, Shapes]) -> str | None:
    """Return which argument has another shape than it may have beside those before it, in words; None if none has."""
    first: dict[str, tuple[str, Tensor, Any]] = {}  # by dimension: the argument that brought it, and its size
    for name, x in arguments.items():
        if x is None or not (allowed := shapes.get(name)):
            continue
        samples = allowed[0].dims[0]
        owner = next(key for key, of_key in shapes.items() if of_key and of_key[0].dims[0] == samples)
        if owner != name and arguments.get(owner) is None:
            return f"{name} came without {owner}. Leave it out."
        are_labels = allowed == (Shape((samples,), "integer"),)
        if are_labels and (problem := labels_problem(name, x, first[samples][2] if samples in first else None)):
            return problem
        shape = next((shape for shape in allowed if shape.fits(x)), None)
        if shape is None:
            return f"{name} must be {' or '.join(map(str, allowed))}, got {described(x)}."
        sizes: list[tuple[str, Any]] = [*zip(shape.dims, x.shape, strict=True)]
        if shape.kind == "floating-point" and x.ndim > 1:
            sizes.append((f"dtype of {shape.dims[-1]}", x.dtype))
        for dim, size in sizes:
            other, y, of_other = first.setdefault(dim, (name, x, size))
            if size == of_other:
                continue
            got = f"got {other} {described(y)} and {name} {described(x)}."
            if dim != shape.dims[0]:
                return f"{name} must be {shape} with the {dim.partition(' ')[0]} of {other}, {got}"
            may_be_negatives = [x.dims[0] != dim and x.dims[-1] == shape.dims[-1] for x in shapes.get("negatives", ())]
            same = "Pass the same samples, in the same order, in both."
            fix = f"Pass further {name} as negatives." if name != "negatives" and any(may_be_negatives) else same
            return f"row i of {name} belongs to row i of {other}, {got} {fix}"
    return None


def candidates_problem(name: str, x: Tensor, *, at_least: int) -> str | None:
    """Return that each sample has too few candidates, of [n, k, d], in words, or None."""
    return None if x.shape[1] >= at_least else f"{name} are [n, k, d] with k >= {at_least}, got {described(x)}."
