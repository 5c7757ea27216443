"""What a rank does in a call: its collectives, its precision, the random numbers that it draws."""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Not recorded: operations between two ranks, which the others do not call
_NOT_RECORDED = {"wait_tensor", "send", "recv_", "recv_any_source_"}
# Collectives whose second argument is sent; of all others it is the first
_OUTPUT_FIRST = {"_allgather_base_", "alltoall_base_", "allgather_", "_reduce_scatter_base_"}


class Message(NamedTuple):
    """One call of a collective, by the dispatcher's name."""

    name: str
    size: int | None  # number of elements that a rank sends, if it must be equal on all ranks
    dtype: str

    @property
    def is_of_floats(self) -> bool:
        return self.dtype not in ("int64", "")  # which are counts

    def __str__(self) -> str:
        return f"{self.name} of {'its own size' if self.size is None else self.size} {self.dtype}"


def message_of(name: str, tensors: Sequence[Tensor], *, uneven: bool) -> Message:
    dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors}
    return Message(name, None if uneven else sum(x.numel() for x in tensors), "/".join(sorted(dtypes)))


class Messages(TorchDispatchMode):
    """Records collectives, and counts draws; with ``same_draws`` all ranks draw the same random numbers."""

    def __init__(self, *, same_draws: bool = False) -> None:
        super().__init__()
        # a rank that is a thread records its messages by itself: torch's dispatcher does not see them
        self.sent: list[Message] = getattr(threading.current_thread(), "sent", [])
        self.sent.clear()
        self.same_draws, self.draws = same_draws, 0
        self.precision = torch.float64  # the narrowest dtype to which an operation rounded wider numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "_opname", ""), kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional") and name not in _NOT_RECORDED:
            tensors = [x for x in tree_leaves(args[1 if name in _OUTPUT_FIRST else 0]) if isinstance(x, Tensor)]
            uneven = name == "alltoall_base_" and any(isinstance(x, (list, tuple)) and len(x) for x in args[3:5])
            self.sent.append(message_of(name, tensors, uneven=uneven))
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        self.draws += is_draw
        if is_draw and self.same_draws:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.draws)
                return func(*args, **{key: None if key == "generator" else x for key, x in kwargs.items()})
        result = func(*args, **kwargs)
        # zeros_like(x) and x.new_zeros read no numbers of x, as draws do not; a single number is a count or a setting
        if not (is_draw or name.startswith("new_") or name.endswith("_like")):
            finest = min([torch.finfo(x.dtype).eps for x in _floats((args, kwargs)) if x.numel() > 1], default=1.0)
            rounded = [x.dtype for x in _floats(result) if torch.finfo(x.dtype).eps > finest]
            self.precision = max([self.precision, *rounded], key=lambda x: torch.finfo(x).eps)
        return result


def _floats(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def replaced(home: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Context manager: a function of a module or class is one that gets the original as its first argument."""
    original = getattr(home, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return patch.object(home, name, call)


def allow_repeated_samples(loss: Any) -> None:
    """Switch off the check that ranks hold different embeddings, because drawn batches repeat samples."""
    if hasattr(loss, "check_distinct"):
        loss.check_distinct = False
