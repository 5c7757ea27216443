"""This library's loss in place of a third-party loss that is the same function."""

from typing import Any

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_summary import without_ddp


def native_and_replaced(loss: Any, miner: Any) -> tuple[Any, Any, Any]:
    """Return this library's loss, no miner, and the third-party loss that it replaces if it is the same function.

    Otherwise the loss and the miner as they are, and None.

    Examples:
        >>> native_and_replaced("any loss", "any miner")
        ('any loss', 'any miner', None)
    """
    if isinstance(without_ddp(loss), Loss):
        return loss, miner, None
    # imported here: pytorch-metric-learning is an optional dependency
    from contrastive_zoo.adapters.pml_native import native_and_original

    try:
        native, replaced = native_and_original(loss, miner)
    except ValueError:  # no loss of this library is the same function
        return loss, miner, None
    return native, None, replaced
