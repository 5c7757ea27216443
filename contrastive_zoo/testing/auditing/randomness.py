"""Random numbers of one process that are those of the ranks: each rank's share of a batch is drawn from its state."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class ShardedDraws(TorchDispatchMode):
    """Draw what belongs to samples, as the masks of dropout, for the samples of each rank from the state of that rank.

    A draw belongs to samples if one of its dimensions is that of the batch, or the first is a multiple. The ranks' states
    go with that of torch: where a checkpoint or a cache of gradients sets an earlier one again, theirs are set again, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        self.rows: list[Tensor] = []  # of each rank, the indices of its samples in the batch
        self.lengths: dict[int, tuple[int, ...]] = {}  # of each rank's tokens where they differ, by their padded length
        self.is_ambiguous = False  # whether several dimensions of a draw may be that of the samples
        self._states_at: dict[bytes, list[Tensor]] = {}  # the ranks' states at a state of torch

    def begin_step(self) -> None:
        self._states_at.clear()

    def assign(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)
        self._states_at[_present()] = self.states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        if not is_draw or not self.states or not self.rows or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.states = self._states_at.get(_present(), self.states)
        result = func(*args, **kwargs)
        after = torch.get_rng_state()
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.ndim]
        states = []
        for rank, state in enumerate(self.states):
            torch.set_rng_state(state)
            if tensors and self._batch_dimension(tensors[0].shape) >= 0:
                self._draw(func, args, kwargs, tensors, self._region(rank, tensors[0].shape))
            else:  # a number of the whole batch: that of rank 0
                drawn = func(*tree_map(_copy, args), **tree_map(_copy, kwargs))
                for x, y in zip(tensors if rank == 0 else [], tree_leaves(drawn), strict=False):
                    x.copy_(y)
            states.append(torch.get_rng_state())
        torch.set_rng_state(after)
        self.assign(states)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], region: tuple[Any, ...]) -> None:
        """Overwrite a rank's region of what was drawn with what that rank draws."""
        shape = tensors[0].shape
        part = tensors[0][region]

        def of_rank(x: Any) -> Any:
            if isinstance(x, Tensor):
                return _in_order(x[region], x) if x.shape == shape else x
            return list(part.shape) if isinstance(x, list | tuple) and list(x) == list(shape) else x

        # sizes are sequences, which a tree would take apart
        drawn = func(*map(of_rank, args), **{key: of_rank(x) for key, x in kwargs.items()})
        for x, y in zip(tensors, (z for z in tree_leaves(drawn) if isinstance(z, Tensor)), strict=False):
            if x.shape == shape:
                x[region] = y

    def _region(self, rank: int, shape: torch.Size) -> tuple[Any, ...]:
        """Return the indices of a rank's samples, and for each further dimension what is no padding of their tokens."""
        batch, total = self._batch_dimension(shape), sum(map(len, self.rows))
        each = shape[batch] // total  # elements for each sample
        inner = torch.arange(each)
        if longest := next((n for n in self.lengths if each % n == 0), 0):
            inner = inner.view(longest, -1)[: self.lengths[longest][rank]].flatten()
        samples = (self.rows[rank][:, None] * each + inner).flatten()
        others = [slice(self.lengths[n][rank] if n in self.lengths else n) for n in shape]
        return *others[:batch], samples, *others[batch + 1 :]

    def _batch_dimension(self, shape: torch.Size) -> int:
        """Return the dimension of the samples: one of their number, or the first, if that is a multiple; else -1."""
        total = sum(map(len, self.rows))
        exact = [i for i, n in enumerate(shape) if n == total]
        is_multiple = total > 0 and shape[0] > 0 and shape[0] % total == 0
        self.is_ambiguous |= len(exact) > 1 or (is_multiple and exact[:1] not in ([], [0]))
        return exact[0] if exact else 0 if is_multiple else -1


def _in_order(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor whose elements lie in memory in the order of another one, in which random numbers are drawn."""
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda i: (-strides[i], i))
    inverse = [order.index(i) for i in range(like.ndim)]
    return x.permute(order).contiguous().permute(inverse)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _present() -> bytes:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
