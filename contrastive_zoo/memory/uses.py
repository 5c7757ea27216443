"""What a loss compares rows with besides the batch: how a memory serves it."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.loss_base.checks import instance_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.row_loss import RowLoss

Takes = Literal["panels", "own negatives", "references", "negatives"]


def takes_of(loss: Any) -> Takes:
    """What a loss compares rows with besides the batch."""
    if problem := instance_problem(loss):
        raise ValueError(f"CrossBatchMemory: {problem}")
    if not callable(loss):
        raise ValueError(f"CrossBatchMemory: a loss can be called, got {type(loss).__name__}, which cannot.")
    if isinstance(loss, LabelledLoss) or (isinstance(loss, RowLoss) and type(loss).forward is RowLoss.forward):
        return "panels"
    parameters = _parameters(loss)
    needed = [name for name, x in parameters.items() if x.default is x.empty and name != "negatives"]
    if "negatives" in parameters and len(needed) == 2:
        return "own negatives" if isinstance(loss, Loss) else "negatives"
    if not isinstance(loss, Loss) and {"indices_tuple", "ref_emb", "ref_labels"} <= parameters.keys():
        return "references"
    raise ValueError(
        f"CrossBatchMemory: {name_of(loss)} compares a batch with itself only. Pass SupCon, SINCERE, NCA, TupletMargin, "
        "SupSigmoid, a RowLoss, InfoNCE, a loss that takes ref_emb and ref_labels (pytorch-metric-learning's pair and "
        "triplet losses), or a function of (queries, keys, negatives)."
    )


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    function = getattr(type(loss), "function", None) if isinstance(loss, Loss) else None
    try:
        return inspect.signature(function or (loss.forward if isinstance(loss, nn.Module) else loss)).parameters
    except ValueError:  # a built-in
        return {}


def name_of(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
