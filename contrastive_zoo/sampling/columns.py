"""Columns of a dataset as integer codes."""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_zoo.row_checks import described, tensor_problem

Column: TypeAlias = "Tensor | NDArray[np.generic] | Sequence[Hashable]"
"""One value per sample: a tensor, an array or a sequence, of integers or strings."""


def columns_problem(columns: Sequence[Column]) -> str | None:
    """Return why these are no columns, in words; None if they are.

    Examples:
        >>> columns_problem([np.zeros((3, 2))])
        'labels and columns have one value per sample, [n], got shape [3, 2].'
    """
    for column in columns:
        if not isinstance(column, (Tensor, np.ndarray, Sequence)) or isinstance(column, (str, bytes)):
            return f"labels and columns are tensors, arrays or lists, got {described(column)}."
        if isinstance(column, Tensor) and (problem := tensor_problem("labels and columns", column)):
            return problem
        if not isinstance(column, (Tensor, np.ndarray)) and not all(isinstance(x, Hashable) for x in column):
            return f"labels and columns hold numbers, words or other hashable values, got {described(column)}."
    shapes = (list(column.shape) for column in columns if isinstance(column, (Tensor, np.ndarray)))
    bad = next((shape for shape in shapes if len(shape) != 1), None)
    return None if bad is None else f"labels and columns have one value per sample, [n], got shape {bad}."


def codes(columns: Sequence[Column]) -> tuple[list[NDArray[np.int64]], list[Hashable]]:
    """Return the columns with equal values as equal integers, 0, 1, … in order of appearance, and the distinct values.

    Examples:
        >>> codes([["a", "b", "a"], np.array(["c", "b", "b"])])
        ([array([0, 1, 0]), array([2, 1, 1])], ['a', 'b', 'c'])
    """
    known: dict[Hashable, int] = {}
    found = []
    for column in columns:
        values = column.tolist() if isinstance(column, (Tensor, np.ndarray)) else column
        found.append(np.fromiter((known.setdefault(value, len(known)) for value in values), np.int64, len(values)))
    return found, list(known)
