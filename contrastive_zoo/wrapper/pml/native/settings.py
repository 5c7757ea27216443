"""Distances, reducers and numbers of pytorch-metric-learning's losses as settings of this library's losses."""

from numbers import Real
from typing import Any

from contrastive_zoo.wrapper.pml.meaning import metric_of, reducer_of, reduction_of, spelled

Settings = dict[str, Any]
"""Keyword arguments of this library's constructors."""


class NoExactTranslation(Exception):
    """Says why a loss has no exact translation."""


def normalizes(distance: Any) -> bool:
    """Return whether the distance divides embeddings by their 2-norm.

    Raises:
        NoExactTranslation: it divides by another norm.
    """
    if distance.normalize_embeddings and distance.p != 2:
        raise NoExactTranslation(f"embeddings are divided by their {distance.p}-norm.")
    return distance.normalize_embeddings


def similarity_settings(loss: Any) -> Settings:
    """Return the settings of a loss of cosines or dot products.

    Raises:
        NoExactTranslation: the loss uses another distance.
    """
    distance = loss.distance
    if metric_of(distance) != "similarity":
        raise NoExactTranslation(f"it compares by {spelled(distance)}, this library's by cosine or dot product.")
    return {"normalize": normalizes(distance)}


def require_cosine(loss: Any) -> None:
    """Check that the loss compares by cosine similarity.

    Raises:
        NoExactTranslation: it does not.
    """
    if not similarity_settings(loss)["normalize"]:
        raise NoExactTranslation("its embeddings are not normalised.")


def euclidean_settings(loss: Any, power: int = 1) -> Settings:
    """Return the settings of a loss of Euclidean distances, or of squared ones (power 2).

    Raises:
        NoExactTranslation: the loss uses another distance.
    """
    distance = loss.distance
    squared = " squared" if power == 2 else ""
    if metric_of(distance) != f"{squared} distance".strip():
        raise NoExactTranslation(f"it compares by {spelled(distance)}, this library's by{squared} Euclidean distance.")
    return {"normalize": normalizes(distance)}


def metric_settings(distance: Any) -> Settings:
    """Return the settings of a loss that takes any of three metrics.

    Raises:
        NoExactTranslation: the distance is none of them.
    """
    metric = metric_of(distance)
    if metric is None:
        raise NoExactTranslation(f"it compares by {spelled(distance)}, which is no metric of this library.")
    return {"metric": metric, "normalize": normalizes(distance)}


def require_same_distance(loss: Any, miner: Any) -> None:
    """Check that the miner compares as the loss does.

    Raises:
        NoExactTranslation: it does not.
    """
    if metric_settings(miner.distance) != metric_settings(loss.distance):
        raise NoExactTranslation(
            f"the miner compares by {spelled(miner.distance)}, the loss by {spelled(loss.distance)}."
        )


def reduction_settings(loss: Any, **options: Settings) -> Settings:
    """Return the option for the loss's reducer: ``mean``, ``nonzero`` (the mean of losses above 0), ``sum``, ``divisor``.

    Raises:
        NoExactTranslation: there is no option for its reducer.
    """
    parts = [reducer_of(loss.reducer, x) for x in loss.sub_loss_names()]
    kinds = {reduction_of(x) for x in parts}
    if len(kinds) > 1:
        raise NoExactTranslation(f"its parts are reduced differently, by {', '.join(type(x).__name__ for x in parts)}.")
    (kind,) = kinds
    if kind not in options:
        raise NoExactTranslation(f"{type(parts[0]).__name__} has no option here.")
    return options[kind]


MEAN_OR_SUM: dict[str, Settings] = {"mean": {}, "sum": {"reduction": "sum"}}
NONZERO_OR_SUM: dict[str, Settings] = {"nonzero": {"average": "nonzero"}, "sum": {"reduction": "sum"}}
AVERAGES: dict[str, Settings] = {**NONZERO_OR_SUM, "mean": {"average": "all"}}


def number_settings(loss: Any, *same: str, **renamed: str) -> Settings:
    """Return attributes that are plain numbers, under this library's names.

    ``same`` have one name in both libraries; ``renamed`` are this library's name = the other library's.

    Raises:
        NoExactTranslation: an attribute is not a number, such as a parameter.
    """
    names = dict(zip(same, same, strict=True)) | renamed
    values = {name: getattr(loss, attribute) for name, attribute in names.items()}
    for name, x in values.items():
        if not isinstance(x, Real):
            raise NoExactTranslation(f"its {names[name]} is {type(x).__name__}, not a number.")
    return {name: float(x) for name, x in values.items()}


def require_positive(x: float, name: str) -> float:
    """Return x.

    Raises:
        NoExactTranslation: x is 0 or less.
    """
    if not x > 0:
        raise NoExactTranslation(f"{name} is {x}, and not positive.")
    return x
