"""Distributed wrappers around and inside of losses and miners: two of them would gather twice, and return a wrong value."""

from typing import Any

from torch import nn

_LIBRARY = "pytorch_metric_learning"
_LOSSES = {("contrastive_zoo", "DistributedLoss"), (_LIBRARY, "DistributedLossWrapper")}
_MINERS = {("contrastive_zoo", "DistributedMiner"), (_LIBRARY, "DistributedMinerWrapper")}
_ATTRIBUTES = {"loss": {(_LIBRARY, "DistributedLossWrapper")}, "miner": _MINERS}
"""Outermost wrappers that are taken off, by the name of the attribute that holds the wrapped object."""


def unwrapped_miner(caller: str, miner: Any, *, process_group: Any = None) -> Any:
    """Return the miner inside of a DistributedMiner or of pytorch-metric-learning's wrapper; any other miner unchanged."""
    own_group = getattr(miner, "process_group", None) if _kind(miner) in _MINERS else None
    if own_group is not None and own_group is not process_group:
        raise ValueError(
            f"{caller}: the DistributedMiner has a process group of its own, with other rows than this loss. Pass the bare "
            "miner, or give both the same process_group."
        )
    return unwrapped(caller, "miner", miner)


def unwrapped(caller: str, role: str, x: Any) -> Any:
    """Return a loss or a miner, as ``role`` says, without its outermost wrapper; refuse wrappers inside of it."""
    if isinstance(x, type):
        raise ValueError(
            f"{caller}: a {role} is an instance, got the class {x.__name__}. Pass an instance, {x.__name__}(...)."
        )
    if _kind(x) in _ATTRIBUTES[role]:
        x = getattr(x, role)
    for path, part in x.named_modules() if isinstance(x, nn.Module) else ():
        kind = _kind(part)
        if kind not in _LOSSES | _MINERS or (part is x and kind[0] == "contrastive_zoo"):  # the caller refuses it
            continue
        library = "" if kind[0] == "contrastive_zoo" else "pytorch-metric-learning's "
        raise ValueError(
            f"{caller}: {f'{role}.{path}'.rstrip('.')} is {library}{kind[1]}, which gathers all ranks' rows. {caller} "
            "gathers them, too: each row would count once for every rank, and the value would be wrong. Pass the bare "
            f"{'loss' if kind in _LOSSES else 'miner'} there; {caller}, outermost, is enough."
        )
    return x


def _kind(x: Any) -> tuple[str, str]:
    """Return package and name of the wrapper class that x is an instance of; empty strings if it is none."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(x).__mro__)
    return next((kind for kind in kinds if kind in _LOSSES | _MINERS), ("", ""))
