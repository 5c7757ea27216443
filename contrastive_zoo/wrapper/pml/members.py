"""The losses inside of pytorch-metric-learning's MultipleLosses."""

from typing import Any

from pytorch_metric_learning import losses, miners  # noqa: F401 - the example uses both


def members(loss: Any) -> list[tuple[Any, Any, float]]:
    """Return each loss of a MultipleLosses, its own miner (None if it has none) and its weight.

    Examples:
        >>> members(losses.MultipleLosses([losses.NTXentLoss()], [miners.HDCMiner()], weights=[0.5]))
        [(NTXentLoss(...), HDCMiner(...), 0.5)]
    """
    keys = list(loss.losses) if loss.is_dict else range(len(loss.losses))
    own_miners = dict(loss.miners.items() if loss.is_dict else enumerate(loss.miners)) if loss.miners else {}
    return [(loss.losses[key], own_miners.get(key), loss.weights[key]) for key in keys]
