"""What a rank does in a call: its collectives, the precision of its operations, and the random numbers that it draws."""

from typing import Any, NamedTuple

import torch
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

    @property
    def is_of_floats(self) -> bool:
        """Whether it sends embeddings or statistics, not int64 counts."""
        return self.dtype not in ("int64", "")

    def __str__(self) -> str:
        return f"{self.name} of {'its own size' if self.size is None else self.size} {self.dtype}"


class Messages(TorchDispatchMode):
    """Records the collectives called inside the context, by any function; it slows every operation down."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.precision = torch.float64  # the narrowest dtype to which floating numbers were converted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = getattr(func, "_opname", "")
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor" and name not in _PAIRED:
            self.sent.append(_message(name, args))
        result = func(*args, **(kwargs or {}))
        if name == "_to_copy" and args[0].is_floating_point() and result.is_floating_point() and result.numel() > 1:
            self.precision = max(self.precision, result.dtype, key=lambda x: torch.finfo(x).eps)
        return result


class Draws(TorchDispatchMode):
    """Counts the operations that draw random numbers; with ``same`` they draw the same ones on every rank."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.same, self.count = same, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.count += 1
        if not self.same:
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(self.count)
        try:
            return func(*args, **{name: None if name == "generator" else x for name, x in kwargs.items()})
        finally:
            torch.set_rng_state(state)


def _message(name: str, args: Any) -> Message:
    tensors = [x for x in tree_leaves(args[1 if name in _OUTPUT_FIRST else 0]) if isinstance(x, Tensor)]
    uneven = name == "alltoall_base_" and any(isinstance(x, (list, tuple)) and len(x) for x in args[3:5])
    size = None if uneven else sum(x.numel() for x in tensors)
    dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors}
    return Message(name, size, "/".join(sorted(dtypes)))
