"""Any contrastive or metric-learning loss, the same function on W processes as on one.

loss_fn = contrastive_zoo.DistributedLoss(contrastive_zoo.NTXent(temperature=0.1))
loss = loss_fn(view1, view2)      # my rows; value and gradients are those of all ranks' rows
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ALONE": "world",
    "DistributedLoss": "distributed",
    "InfoNCE": "losses.info_nce",
    "LearnableTemperature": "losses.base",
    "NTXent": "losses.nt_xent",
    "RowLoss": "losses.row_loss",
    "SupCon": "losses.sup_con",
    "World": "world",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "average_gradients": "averaging",
    "broadcast": "collectives",
    "dense": "engine.evaluation",
    "gather": "collectives",
    "info_nce": "losses.info_nce",
    "nt_xent": "losses.nt_xent",
    "pair_masks": "masks",
    "recall_at_k": "evaluation",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "replicated": "collectives",
    "sample_ids": "masks",
    "scatter": "collectives",
    "sup_con": "losses.sup_con",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from contrastive_zoo.averaging import average_gradients as average_gradients
    from contrastive_zoo.collectives import all_gather as all_gather
    from contrastive_zoo.collectives import all_reduce as all_reduce
    from contrastive_zoo.collectives import broadcast as broadcast
    from contrastive_zoo.collectives import gather as gather
    from contrastive_zoo.collectives import reduce as reduce
    from contrastive_zoo.collectives import reduce_scatter as reduce_scatter
    from contrastive_zoo.collectives import replicated as replicated
    from contrastive_zoo.collectives import scatter as scatter
    from contrastive_zoo.distributed import DistributedLoss as DistributedLoss
    from contrastive_zoo.engine.evaluation import dense as dense
    from contrastive_zoo.evaluation import recall_at_k as recall_at_k
    from contrastive_zoo.losses.base import LearnableTemperature as LearnableTemperature
    from contrastive_zoo.losses.info_nce import InfoNCE as InfoNCE
    from contrastive_zoo.losses.info_nce import info_nce as info_nce
    from contrastive_zoo.losses.nt_xent import NTXent as NTXent
    from contrastive_zoo.losses.nt_xent import nt_xent as nt_xent
    from contrastive_zoo.losses.row_loss import RowLoss as RowLoss
    from contrastive_zoo.losses.sup_con import SupCon as SupCon
    from contrastive_zoo.losses.sup_con import sup_con as sup_con
    from contrastive_zoo.masks import pair_masks as pair_masks
    from contrastive_zoo.masks import sample_ids as sample_ids
    from contrastive_zoo.world import ALONE as ALONE
    from contrastive_zoo.world import World as World


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
