"""How a memory reaches a loss: as candidates, as negatives or as reference embeddings."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from contrastive_zoo.loss_base.checks import instance_problem
from contrastive_zoo.loss_base.loss import Loss, call_form
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_summary import loss_name

MemoryInput = Literal["candidates", "sharded negatives", "references", "negatives"]
"""The loss compares the anchors with the memory as candidates; takes each rank's shard of it as ``negatives``; takes it as
``ref_emb`` and ``ref_labels``; or takes all of it as ``negatives``."""


def memory_input(loss: Any) -> MemoryInput:
    """Return how the loss takes a memory.

    Raises:
        ValueError: it is no instance, cannot be called, or takes none.
    """
    if problem := instance_problem(loss):
        raise ValueError(f"CrossBatchMemory: {problem}")
    if not callable(loss):
        raise ValueError(f"CrossBatchMemory: a loss can be called, got {type(loss).__name__}, which cannot.")
    is_own = isinstance(loss, Loss) and loss.is_plain
    if is_own and isinstance(loss, AnchorLoss) and _is_sum_of_blocks(type(loss)):
        return "candidates"
    parameters = _parameters(loss)
    required = [name for name, x in parameters.items() if x.default is x.empty and name != "negatives"]
    if "negatives" in parameters and len(required) == 2:
        return "sharded negatives" if is_own else "negatives"
    if not is_own and {"indices_tuple", "ref_emb", "ref_labels"} <= parameters.keys():
        return "references"
    raise ValueError(
        f"CrossBatchMemory: {loss_name(loss)} compares a batch with itself only. Pass SupCon, SINCERE, NCA, TupletMargin, "
        "SupSigmoid, a RowLoss, InfoNCE, a loss that takes ref_emb and ref_labels (pytorch-metric-learning's pair and "
        "triplet losses), or a function of (queries, keys, negatives)."
    )


def _is_sum_of_blocks(kind: type[AnchorLoss]) -> bool:
    """Return whether ``block_loss`` is the whole loss: no subclass of the class that defines it has another ``compute``."""
    computing, blocks = (next(x for x in kind.__mro__ if name in vars(x)) for name in ("compute", "block_loss"))
    return issubclass(blocks, computing)


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    if isinstance(loss, Loss) and type(loss).forward is Loss.forward:
        return call_form(type(loss)).signature.parameters  # type: ignore[arg-type]  # mypy takes a class for its instance
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except ValueError:  # a built-in function has no signature
        return {}
