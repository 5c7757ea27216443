"""A recorder of the collectives that a rank calls: names, order, number of elements and dtypes."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAIRED = {"send", "recv_", "recv_any_source_"}
"""Operations between two ranks, which are not recorded: the other ranks do not call them."""
_OUTPUT_FIRST = {"_allgather_base_", "alltoall_base_", "allgather_", "_reduce_scatter_base_"}
"""Collectives whose second argument is sent; of all others it is the first."""


class Message(NamedTuple):
    """One call of a collective, by the dispatcher's name."""

    name: str
    size: int | None  # number of elements that a rank sends, if it must be equal on all ranks
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} of {'its own size' if self.size is None else self.size} {self.dtype}"


class Messages(TorchDispatchMode):
    """Records all collectives called inside the context, by any function; it slows every operation down."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    def names_of_floats(self, count: int | None = None) -> frozenset[str]:
        """Return the names of the first ``count`` collectives of embeddings or statistics, without int64 counts."""
        return frozenset(message.name for message in self.sent[:count] if message.dtype not in ("int64", ""))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = getattr(func, "_opname", "")
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor" and name not in _PAIRED:
            self.sent.append(_message(name, args))
        return func(*args, **(kwargs or {}))


def _message(name: str, args: Any) -> Message:
    tensors = [x for x in tree_leaves(args[1 if name in _OUTPUT_FIRST else 0]) if isinstance(x, Tensor)]
    uneven = name == "alltoall_base_" and any(isinstance(x, (list, tuple)) and len(x) for x in args[3:5])
    size = None if uneven else sum(x.numel() for x in tensors)
    dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors}
    return Message(name, size, "/".join(sorted(dtypes)))
