"""What settings of pytorch-metric-learning mean: numbers, distances, reducers and miners."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from pytorch_metric_learning import distances, miners, reducers

from contrastive_zoo.losses.triplet import Mining

Settings = dict[str, Any]  # keyword arguments of this library's constructors
Reader = Callable[[Any], Settings]

SOFTPLUS_THRESHOLD = 20  # above it torch's softplus is the identity (``threshold`` of ``torch.nn.functional.softplus``)


class NoExactTranslation(Exception):
    """Says why a loss has no exact translation."""


def require(condition: bool, reason: str) -> None:
    """Refuse a translation for this reason unless the condition holds."""
    if not condition:
        raise NoExactTranslation(reason)


def numbers(*same: str, **renamed: str) -> Reader:
    """Read numbers: ``same`` have one name in both libraries, ``renamed`` are theirs by our names."""
    names = dict(zip(same, same, strict=True)) | renamed

    def read(loss: Any) -> Settings:
        values = {name: getattr(loss, attribute) for name, attribute in names.items()}
        for name, x in values.items():
            require(isinstance(x, Real), f"its {names[name]} is {type(x).__name__}, not a number.")
        return {name: float(x) for name, x in values.items()}

    return read


def inverse(**renamed: str) -> Reader:
    """Read numbers that this library has the inverse of."""

    def read(loss: Any) -> Settings:
        values = numbers(**renamed)(loss)
        for name, x in values.items():
            require(x > 0, f"{renamed[name]} is {x}, and not positive.")
        return {name: 1 / x for name, x in values.items()}

    return read


def _metric(distance: Any) -> str | None:
    """Return which of this library's metrics a distance is; None if it is none of them."""
    if type(distance) is distances.LpDistance and distance.p == 2 and distance.power in (1, 2):
        return "distance" if distance.power == 1 else "squared distance"
    is_similarity = type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity)
    return "similarity" if is_similarity and distance.power == 1 else None


def _spelled(distance: Any) -> str:
    settings = {name: getattr(distance, name, None) for name in ("p", "power")}
    return f"{type(distance).__name__}({', '.join(f'{name}={x}' for name, x in settings.items())})"


def _normalize(distance: Any, is_ours: bool, ours: str) -> Settings:
    require(is_ours, f"it compares by {_spelled(distance)}, this library's by {ours}.")
    normalize = distance.normalize_embeddings
    require(not normalize or distance.p == 2, f"embeddings are divided by their {distance.p}-norm.")
    return {"normalize": normalize}


def _compared_by(metric: str, ours: str) -> Reader:
    return lambda loss: _normalize(loss.distance, _metric(loss.distance) == metric, ours)


similarity = _compared_by("similarity", "cosine or dot product")
euclidean = _compared_by("distance", "Euclidean distance")
squared_euclidean = _compared_by("squared distance", "squared Euclidean distance")


def plain_ratio(loss: Any) -> Settings:
    return _normalize(loss.distance, loss.distance.power == 1, "the plain ratio")


def any_metric(loss: Any) -> Settings:
    metric = _metric(loss.distance)
    return {"metric": metric} | _normalize(loss.distance, metric is not None, "one of its metrics")


def of_unit_rows(read: Reader) -> Reader:
    """Read the distance of a loss that normalises its embeddings, which this library's always does."""

    def read_and_require(loss: Any) -> Settings:
        require(read(loss)["normalize"], "its embeddings are not normalised.")
        return {}

    return read_and_require


_REDUCTIONS = {reducers.DivisorReducer: "divisor", reducers.MeanReducer: "mean", reducers.SumReducer: "sum"}


def _reduction_of(reducer: Any) -> str | None:
    """Return how a reducer computes one number, or None without an option here; "nonzero" is the mean of losses above 0."""
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return "nonzero" if reducer.low == 0 and reducer.high is None else None
    return _REDUCTIONS.get(type(reducer))


def _reducer_of(reducer: Any, sub_loss: str) -> Any:
    if type(reducer) is not reducers.MultipleReducers:
        return reducer
    return dict(reducer.reducers).get(sub_loss, reducer.default_reducer)


MEAN: dict[str, Settings] = {"mean": {}}
DIVISOR: dict[str, Settings] = {"divisor": {}}
MEAN_OR_SUM: dict[str, Settings] = {"mean": {}, "sum": {"reduction": "sum"}}
NONZERO: dict[str, Settings] = {"nonzero": {}, "sum": {"reduction": "sum"}}
NONZERO_OR_SUM: dict[str, Settings] = {**NONZERO, "nonzero": {"average": "nonzero"}}
AVERAGES: dict[str, Settings] = {**NONZERO_OR_SUM, "mean": {"average": "all"}}


def reduction(loss: Any, options: Mapping[str, Settings]) -> Settings:
    """Return the option for the loss's reducer, of ``options`` by the name of its reduction."""
    parts = [_reducer_of(loss.reducer, x) for x in loss.sub_loss_names()]
    kinds = {_reduction_of(x) for x in parts}
    names = [type(x).__name__ for x in parts]
    require(len(kinds) == 1, f"its parts are reduced differently, by {', '.join(names)}.")
    kind = kinds.pop() or ""
    require(kind in options, f"{names[0]} has no option here.")
    return options[kind]


def thresholds_by_class(loss: Any) -> Settings:
    _require_all_triplets(loss)
    num_classes = len(loss.beta) if len(loss.beta) > 1 else None
    return {"num_classes": num_classes, "learn_beta": loss.learn_beta, "nu": float(loss.nu) if loss.learn_beta else 0.0}


def _require_all_triplets(loss: Any) -> None:
    require(loss.triplets_per_anchor == "all", f"it draws {loss.triplets_per_anchor} triplets an anchor.")


def triplets(loss: Any) -> Settings:
    require(not loss.swap, "swap compares positives with negatives.")
    settings = any_metric(loss) | {"soft": bool(loss.smooth_loss)}
    largest = {"distance": 2, "squared distance": 4, "similarity": 2}[settings["metric"]]
    is_below = settings["normalize"] and loss.margin + largest <= SOFTPLUS_THRESHOLD
    reason = f"its softplus is linear above {SOFTPLUS_THRESHOLD}, which distances may exceed."
    require(not loss.smooth_loss or is_below, reason)
    return settings


def mining(loss: Any, miner: Any, zeros_count: bool) -> Mining:
    """Return the ``mining`` equal to the miner; triplets of its larger margin have loss 0, which may not count."""
    if miner is None:
        _require_all_triplets(loss)
        return "all"
    _require_same_distance(loss, miner)
    if type(miner) is miners.BatchHardMiner and miner.allowed_pos_range is None and miner.allowed_neg_range is None:
        return "hard"
    is_option = type(miner) is miners.TripletMarginMiner and miner.type_of_triplets in ("semihard", "all")
    require(is_option, f"{type(miner).__name__} has no option here with these settings.")
    semi_hard = miner.type_of_triplets == "semihard"
    require(not semi_hard or loss.margin > 0, "semi-hard negatives lie within a positive margin.")
    same_margin = miner.margin == loss.margin and (semi_hard or not zeros_count)
    reason = f"the miner's margin of {miner.margin} leaves other triplets than the loss's margin of {loss.margin}."
    require(same_margin or (miner.margin > loss.margin and not zeros_count), reason)
    return "semi-hard" if semi_hard else "all"


def epsilon(loss: Any, miner: Any) -> Settings:
    require(type(miner) is miners.MultiSimilarityMiner, f"{type(miner).__name__} has no option here.")
    _require_same_distance(loss, miner)
    return numbers("epsilon")(miner)


def _require_same_distance(loss: Any, miner: Any) -> None:
    reason = f"the miner compares by {_spelled(miner.distance)}, the loss by {_spelled(loss.distance)}."
    require(any_metric(miner) == any_metric(loss), reason)
