"""Arithmetic for complex arrays, and masks of labelled rows."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""float64, complex128, int64 or bool."""

Settings = Mapping[str, Any]
"""Settings and parameters of a loss, by name."""

Formula = Callable[..., Any]


def unit(rows: Array, settings: Settings) -> Array:
    """Return rows of length 1, unless the settings say otherwise. No conjugates: np.linalg.norm would take them."""
    return rows / np.sqrt((rows * rows).sum(-1, keepdims=True)) if settings.get("normalize", True) else rows


def relu(x: Array) -> Array:
    return np.where(x.real > 0, x, 0)


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x))."""
    return relu(x) + np.log(1 + np.exp(np.where(x.real > 0, -x, x)))


def log_sum_exp(x: Array, where: Array) -> Array:
    """Return the logarithm of the sum of exp over each row's chosen elements; −inf for none."""
    peak = np.where(where, x.real, -np.inf).max(1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0)
    total = np.where(where, np.exp(np.where(where, x - peak, 0)), 0).sum(1)
    return np.log(np.where(total == 0, 1, total)) + peak[:, 0] + np.where(total == 0, -np.inf, 0)


def every(rows: Array, columns: Array) -> Array:
    return np.ones((len(rows), len(columns)), dtype=bool)


def others(rows: Array) -> Array:
    return ~np.eye(len(rows), dtype=bool)


def same_class(labels: Array) -> tuple[Any, Any]:
    """Return masks of the positives and of the negatives of each row."""
    same = labels[:, None] == labels
    return same & others(labels), ~same


def mean(x: Array, valid: Any, settings: Settings | None = None) -> Any:
    """Return the mean, or the sum if the settings say so, of the valid elements; 0 without any."""
    total = np.where(valid, x, 0).sum()
    return total if (settings or {}).get("reduction") == "sum" else total / max(int(valid.sum()), 1)


def mean_of_rows(x: Array, settings: Settings) -> Any:
    return mean(x, np.ones(len(x), dtype=bool), settings)


def squared_distances(rows: Array, columns: Array) -> Array:
    return ((rows[:, None] - columns) ** 2).sum(-1)


def distances(z: Array, metric: str) -> Array:
    """Return the dissimilarity of each two unit rows; 0 of a row to itself, where a root has no derivative."""
    if metric == "similarity":
        return -z @ z.T
    squared = squared_distances(z, z)
    return squared if metric == "squared distance" else np.sqrt(squared + np.eye(len(z))) * others(z)
